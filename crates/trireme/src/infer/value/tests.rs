//! What was typed, and the tensors it comes to.

use super::*;

fn model() -> ModelMetadata {
    let input = |name: &str, data_type, shape: &[i64]| TensorMetadata {
        name: name.to_owned(),
        data_type,
        shape: Shape::new(shape),
    };
    ModelMetadata {
        name: "m".to_owned(),
        inputs: vec![
            input("image", DataType::Fp32, &[-1, 2, 2]),
            input("text", DataType::Bytes, &[-1, 1]),
            input("n", DataType::Int64, &[1]),
            input("a=b", DataType::Bool, &[-1, -1]),
        ],
        outputs: Vec::new(),
    }
}

fn made(given: &[&str], shapes: &[&str]) -> Result<Vec<Tensor>> {
    let owned = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    inputs(&model(), &owned(given), &owned(shapes))
}

fn one(given: &str, shapes: &[&str]) -> (Vec<i64>, Vec<String>) {
    let tensor = made(&[given], shapes).expect(given).remove(0);
    (tensor.shape.to_vec(), tensor.elements().expect("whole"))
}

fn refusal(given: &[&str], shapes: &[&str]) -> String {
    format!("{:#}", made(given, shapes).expect_err("must be refused"))
}

#[test]
fn json_takes_the_shape_of_the_model() {
    let four = ["1.0", "2.0", "3.0", "4.0"].map(str::to_owned).to_vec();
    for text in ["image=[1,2,3,4]", "image=[[1,2],[3,4]]", "image=[[[1,2],[3,4]]]"] {
        assert_eq!(one(text, &[]), (vec![1, 2, 2], four.clone()), "{text}");
    }
    assert_eq!(one("image=[1,2,3,4,5,6,7,8]", &[]).0, [2, 2, 2]);
    assert_eq!(one("image=[[1,2],[3,4]]", &["image=1,1,4"]).0, [1, 1, 4]);
    assert_eq!(one("n=5", &[]), (vec![1], vec!["5".to_owned()]));
    assert_eq!(one("a=b=[true,false]", &[]).0, [1, 2]);
}

#[test]
fn text_needs_no_quotes() {
    let hello = (vec![1, 1], vec!["\"hello = you\"".to_owned()]);
    assert_eq!(one("text=hello = you", &[]), hello);
    assert_eq!(one("text=\"hello = you\"", &[]), hello);
    assert_eq!(one("text=[\"a\",\"b\"]", &[]), (vec![2, 1], vec!["\"a\"".to_owned(), "\"b\"".to_owned()]));
    assert_eq!(one("text=42", &[]).1, ["\"42\""]);
    assert_eq!(one("text=\"zeros\"", &[]).1, ["\"zeros\""]);
}

#[test]
fn files_are_arrays_or_bytes() {
    let root = tempfile::tempdir().expect("a directory");
    let path = |name: &str| root.path().join(name).display().to_string();
    let numbers: Vec<u8> = [1_f32, 2.0, 3.0, 4.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    fs_err::write(path("raw"), &numbers).expect("can write");
    npy::write(Path::new(&path("a.npy")), DataType::Fp32, &[2, 2], &numbers).expect("can write");
    fs_err::copy(path("a.npy"), path("no_ending")).expect("can copy");
    for name in ["raw", "a.npy", "no_ending"] {
        assert_eq!(one(&format!("image=@{}", path(name)), &[]).0, [1, 2, 2], "{name}");
    }
    let (shape, elements) = one(&format!("text=@{}", path("raw")), &[]);
    assert_eq!((shape, elements.len()), (vec![1, 1], 1));

    let error = refusal(&[&format!("n=@{}", path("a.npy"))], &[]);
    assert!(
        error.contains("holds FP32, and the model takes INT64") && error.contains("astype('int64')"),
        "{error}"
    );
    npy::write(Path::new(&path("b.npy")), DataType::Fp32, &[4], &numbers).expect("can write");
    let error = refusal(&[&format!("image=@{}", path("b.npy"))], &[]);
    assert!(
        error.contains("got the shape [4], expected [-1,2,2]") && error.contains("--shape image"),
        "{error}"
    );
    fs_err::write(path("odd"), b"abc").expect("can write");
    assert!(
        refusal(&[&format!("image=@{}", path("odd"))], &[]).contains("has 3 bytes, and FP32 elements have 4")
    );
    assert!(refusal(&["image=@/nowhere.npy"], &[]).contains("/nowhere.npy"));
}

#[test]
fn says_what_was_expected() {
    for (given, shapes, reason) in [
        (&[][..], &[][..], "--input image=zeros"),
        (&["pixels=1"], &[], "has no input 'pixels'; its inputs are:"),
        (&["image"], &[], "--input expects NAME=VALUE, got 'image'"),
        (&["n=1", "n=2"], &[], "--input n is given twice"),
        (&["n=five"], &[], "expected @FILE, zeros, random or JSON"),
        (&["n=[1,2]"], &[], "got 2 elements, which do not fill [1]"),
        (&["n=1.5"], &[], "1.5 is no INT64"),
        (&["n=1"], &["n=2"], "INT64 [2] takes 16 bytes, got 8"),
        (&["n=1"], &["n=-1"], "--shape expects"),
        (&["n=1"], &["image=1,2,2"], "--shape image has no --input image"),
        (&["image=zeros"], &["image=1000000,1000000,2"], "larger than"),
    ] {
        let error = refusal(given, shapes);
        assert!(error.contains(reason), "no '{reason}' in '{error}'");
    }
}
