//! States from request to request, and their values before the first.

use trireme_proto::inference::model_config::SchedulingChoice;
use trireme_types::Code;

use super::*;

fn states(text: &str, has_batch: bool, outputs: &[TensorSpec], dir: &Path) -> Result<States> {
    let text = format!("name: 'm' backend: 'b' sequence_batching {{ {text} }}");
    let config = trireme_config::parse_pbtxt(text.as_bytes(), "c").expect("a configuration").config;
    let Some(SchedulingChoice::SequenceBatching(batching)) = config.scheduling_choice else {
        panic!("sequence batching was asked for");
    };
    States::new(&Arc::from("m"), &batching, has_batch, outputs, dir)
}

fn state(dims: &str, more: &str) -> String {
    format!("state {{ input_name: 'I' output_name: 'O' data_type: TYPE_INT32 dims: [ {dims} ] {more} }}")
}

fn here() -> &'static Path {
    Path::new("nowhere")
}

fn response(shape: &[i64], values: &[i32]) -> InferResponse {
    let mut response = InferResponse::default();
    response.outputs.push(OutputTensor {
        name: "O".into(),
        data_type: DataType::Int32,
        shape: Shape::new(shape),
        data: values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into(),
    });
    response
}

fn values(input: &InferInput) -> (Vec<i64>, Vec<i32>) {
    let words = input.data.as_slice().chunks_exact(4).map(|word| word.try_into().expect("four bytes"));
    (input.shape.to_vec(), words.map(i32::from_le_bytes).collect())
}

#[test]
fn a_state_begins_as_zeros_comes_back_and_may_grow() {
    let states = states(&state("-1, 2", ""), true, &[], here()).expect("a state");
    let memory = Memory::default();
    assert_eq!(values(&states.of(&memory, true)[0]), (vec![1, 1, 2], vec![0, 0]));
    let mut answer = response(&[1, 2, 2], &[1, 2, 3, 4]);
    states.keep(&memory, &mut answer, true, |_| true).expect("it fits");
    assert!(answer.outputs.is_empty(), "clients did not ask for it in the configuration");
    assert_eq!(values(&states.of(&memory, false)[0]), (vec![1, 2, 2], vec![1, 2, 3, 4]));
    assert_eq!(memory.outcome().expect("not cancelled").as_slice(), [3, 1, 2, 2]);
    assert_eq!(values(&states.of(&memory, true)[0]), (vec![1, 1, 2], vec![0, 0]), "START begins anew");
}

#[test]
fn an_output_that_is_also_a_state_is_given_to_who_asks() {
    let listed = states(&state("1", ""), false, &[], here()).expect("a state").outputs();
    let states = states(&state("1", ""), false, &listed, here()).expect("a state");
    let memory = Memory::default();
    states.of(&memory, true);
    for wanted in [true, false] {
        let mut answer = response(&[1], &[5]);
        states.keep(&memory, &mut answer, false, |_| wanted).expect("it fits");
        assert_eq!(answer.outputs.len(), usize::from(wanted));
    }
    assert_eq!(values(&states.of(&memory, false)[0]), (vec![1], vec![5]));
}

#[test]
fn an_answer_without_the_state_or_with_a_wrong_one_leaves_it_as_it_was() {
    let states = states(&state("2", ""), true, &[], here()).expect("a state");
    let memory = Memory::default();
    states.of(&memory, true);
    states.keep(&memory, &mut response(&[1, 2], &[8, 9]), false, |_| true).expect("it fits");
    states.keep(&memory, &mut InferResponse::default(), false, |_| true).expect("nothing to keep");
    let error =
        states.keep(&memory, &mut response(&[1, 3], &[1, 2, 3]), false, |_| true).expect_err("too long");
    assert_eq!(error.code(), Code::Internal);
    assert!(error.message().contains("INT32 of shape [1,3], expected INT32 of shape [1,2]"), "{error}");
    assert_eq!(values(&states.of(&memory, false)[0]).1, [8, 9]);
}

#[test]
fn initial_values_come_from_the_models_folder() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().join(FOLDER);
    fs_err::create_dir(&folder).expect("a folder");
    fs_err::write(folder.join("two"), [1, 0, 0, 0, 2, 0, 0, 0, 99]).expect("a file");
    let initial = |dims: &str, data: &str| {
        let more = format!("initial_state {{ name: 'i' data_type: TYPE_INT32 dims: [ {dims} ] {data} }}");
        states(&state("-1", &more), true, &[], dir.path())
    };
    let given = initial("2", "data_file: 'two'").expect("a value");
    assert_eq!(values(&given.of(&Memory::default(), true)[0]), (vec![1, 2], vec![1, 2]));
    let given = initial("3", "zero_data: true").expect("a value");
    assert_eq!(values(&given.of(&Memory::default(), true)[0]), (vec![1, 3], vec![0, 0, 0]));
    for (dims, data, message) in [
        (
            "3",
            "data_file: 'two'",
            "initial_state setting expects 12 bytes, but the data provided from two only has 9",
        ),
        ("2", "data_file: '../two'", "not in the model's folder"),
        ("2", "data_file: 'none'", "cannot read the initial value of state input 'I'"),
        ("-1", "zero_data: true", "contains variable dimensions"),
        ("2, 2", "zero_data: true", "2 != 1"),
        ("4611686018427387904", "zero_data: true", "takes more than"),
        ("2", "", "to have state_data set"),
    ] {
        let error = initial(dims, data).expect_err(message);
        assert!(error.message().contains(message), "{error}");
    }
}

#[test]
fn states_that_cannot_be_kept_are_refused() {
    for (text, message) in [
        ("state { output_name: 'O' data_type: TYPE_INT32 dims: 1 }".to_owned(), "both an input_name and"),
        (state("0", ""), "dims must be integers >= 1"),
        (state("1", "use_growable_memory: true"), "'use_same_buffer_for_input_output'"),
        (format!("{} {}", state("1", ""), state("1", "")), "that of another state"),
        (
            state("1", "initial_state { name: 'i' data_type: TYPE_FP32 dims: 1 zero_data: true }"),
            "does not match the state data type",
        ),
        (
            state("1", "initial_state { data_type: TYPE_INT32 dims: 1 zero_data: true }"),
            "Field 'name' must be set",
        ),
    ] {
        let error = states(&text, true, &[], here()).expect_err(message);
        assert!(error.message().contains(message), "{error}");
    }
}

#[test]
fn a_cancellation_is_told_once() {
    let memory = Memory::default();
    memory.begin();
    memory.cancel();
    assert!(memory.is_running());
    assert_eq!((memory.outcome(), memory.is_running()), (None, false));
    assert!(memory.outcome().is_some());
}
