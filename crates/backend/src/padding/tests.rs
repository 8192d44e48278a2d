//! Padding around a model that answers with what it sees, against rows padded one at a time.

use std::collections::BTreeMap;
use std::time::Instant;

use proptest::prelude::*;
use trireme_types::{InferInput, InferResponse, OutputTensor, Responder, ResponseSink, Shape, TensorSpec};

use super::*;
use crate::BatchRequest;

struct Nobody;

impl ResponseSink for Nobody {
    fn send(&mut self, _: Option<Result<InferResponse>>, _: bool) {}

    fn is_closed(&self) -> bool {
        false
    }
}

fn spec(name: &str, data_type: DataType, dims: &[i64]) -> TensorSpec {
    TensorSpec::new(name, data_type, Shape::new(dims))
}

fn read(
    parameters: &[(&str, &str)],
    inputs: &[TensorSpec],
    outputs: &[TensorSpec],
) -> Result<Option<PaddingPlan>> {
    let parameters: BTreeMap<String, String> =
        parameters.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    PaddingPlan::read(&parameters, 8, inputs, outputs)
}

/// Token ids with a mask, and an output of one number a token.
fn tokens(more: &[(&str, &str)]) -> PaddingPlan {
    let parameters = [&[("padding.inputs", "IDS"), ("padding.mask", "MASK")], more].concat();
    let inputs = [spec("IDS", DataType::Int32, &[-1]), spec("MASK", DataType::Uint8, &[-1])];
    let outputs = [spec("OUT", DataType::Int32, &[-1]), spec("POOLED", DataType::Int32, &[2])];
    read(&parameters, &inputs, &outputs).unwrap().unwrap()
}

fn ints(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn input(name: &str, data_type: DataType, shape: &[i64], data: Vec<u8>) -> InferInput {
    InferInput { name: name.into(), data_type, shape: Shape::new(shape), data: data.into() }
}

/// `rows` rows of tokens of one length.
fn request(rows: &[&[i32]]) -> InferRequest {
    let mut request = InferRequest::new();
    let shape = [dim(rows.len()), dim(rows[0].len())];
    request.inputs.push(input("IDS", DataType::Int32, &shape, ints(&rows.concat())));
    request.batch_size = rows.len();
    request
}

fn dim(n: usize) -> i64 {
    i64::try_from(n).unwrap()
}

fn batch(requests: Vec<InferRequest>) -> Batch {
    let requests = requests.into_iter().map(|r| BatchRequest::new(r, Responder::new(Box::new(Nobody))));
    Batch::new(requests.collect(), Instant::now())
}

/// Answers with the named inputs as outputs.
struct Echo(&'static [(&'static str, &'static str)]);

impl Model for Echo {
    fn instance(&self, _: &InstanceContext) -> Result<Box<dyn ModelInstance>> {
        Ok(Box::new(Echo(self.0)))
    }
}

impl ModelInstance for Echo {
    fn execute(&mut self, batch: &mut Batch) -> Result<()> {
        for request in &mut batch.requests {
            let outputs = self.0.iter().filter_map(|(from, to)| {
                let input = request.request.input(from)?.clone();
                Some(OutputTensor {
                    name: (*to).into(),
                    data_type: input.data_type,
                    shape: input.shape,
                    data: input.data,
                })
            });
            let response = InferResponse { outputs: outputs.collect(), ..InferResponse::default() };
            request.answer(Ok(response));
        }
        Ok(())
    }
}

fn run(plan: PaddingPlan, echo: Echo, requests: Vec<InferRequest>) -> Vec<Result<InferResponse>> {
    let model = padded(Arc::new(echo), Arc::new(plan));
    let mut instance = model.instance(&InstanceContext::default()).unwrap();
    let mut batch = batch(requests);
    instance.execute(&mut batch).unwrap();
    assert!(instance.is_ready());
    batch.requests.into_iter().map(|request| request.into_parts().2).collect()
}

#[test]
fn short_rows_are_filled_and_the_mask_is_made() {
    let mut batch = batch(vec![request(&[&[1, 2, 3]]), request(&[&[4], &[5]])]);
    let padded = tokens(&[("padding.value", "-7")]).pad(&mut batch).unwrap();
    assert_eq!((padded.to, padded.from.as_slice()), (3, &[3, 1][..]));
    let seen = |request: usize, name: &str| {
        let input = batch.requests[request].request.input(name).unwrap();
        (input.shape.to_vec(), input.data.as_slice().to_vec())
    };
    assert_eq!(seen(0, "IDS"), (vec![1, 3], ints(&[1, 2, 3])));
    assert_eq!(seen(1, "IDS"), (vec![2, 3], ints(&[4, -7, -7, 5, -7, -7])));
    assert_eq!(seen(0, "MASK"), (vec![1, 3], vec![1, 1, 1]));
    assert_eq!(seen(1, "MASK"), (vec![2, 3], vec![1, 0, 0, 1, 0, 0]));
}

#[test]
fn a_clients_own_mask_is_kept() {
    let mut own = request(&[&[1, 2]]);
    own.inputs.push(input("MASK", DataType::Uint8, &[1, 2], vec![0, 1]));
    let mut batch = batch(vec![own, request(&[&[1, 2, 3]])]);
    tokens(&[]).pad(&mut batch).unwrap();
    let mask = batch.requests[0].request.input("MASK").unwrap();
    assert_eq!((&*mask.shape, mask.data.as_slice()), (&[1, 3][..], &[0, 1, 0][..]));
}

#[test]
fn what_is_long_enough_is_not_copied() {
    let long = request(&[&[1, 2, 3]]);
    let place = long.inputs[0].data.as_slice().as_ptr();
    let mut batch = batch(vec![long, request(&[&[1]])]);
    tokens(&[]).pad(&mut batch).unwrap();
    assert_eq!(batch.requests[0].request.inputs[0].data.as_slice().as_ptr(), place);
}

#[test]
fn buckets_round_up_and_longer_requests_keep_their_length() {
    let plan = tokens(&[("padding.buckets", "2, 4")]);
    for (length, to) in [(1_usize, 2_usize), (2, 2), (3, 4), (4, 4), (5, 5), (9, 9)] {
        let request = request(&[&vec![1; length]]);
        assert_eq!(plan.class(&request), dim(to));
        let mut batch = batch(vec![request]);
        assert_eq!(plan.pad(&mut batch).unwrap().to, to);
        assert_eq!(&*batch.requests[0].request.input("MASK").unwrap().shape, &[1, dim(to)]);
    }
}

#[test]
fn without_buckets_long_requests_do_not_share_with_short_ones() {
    let plan = tokens(&[]);
    let class = |length: usize| plan.class(&request(&[&vec![1; length]]));
    assert_eq!(class(1), class(1024));
    assert_ne!(class(1024), class(1025));
    assert_eq!(class(1025), class(2048));
    assert_ne!(class(2048), class(2049));
    // A row of many bytes is long as well, however few its steps are.
    let wide = read(&[("padding.inputs", "X")], &[spec("X", DataType::Uint8, &[-1, 1 << 20])], &[])
        .unwrap()
        .unwrap();
    let row = |length: usize| {
        let mut request = InferRequest::new();
        request.inputs.push(input("X", DataType::Uint8, &[1, dim(length), 1 << 20], vec![0; length << 20]));
        request
    };
    assert_ne!(wide.class(&row(1)), wide.class(&row(2)));
    assert_eq!(wide.class(&row(3)), wide.class(&row(4)));
}

#[test]
fn inputs_of_one_request_have_one_length() {
    let inputs = [spec("A", DataType::Int32, &[-1]), spec("B", DataType::Fp32, &[3, -1])];
    let plan = read(&[("padding.inputs", "A,B")], &inputs, &[]).unwrap().unwrap();
    let with = |a: i64, b: i64| {
        let mut request = InferRequest::new();
        let zeros = |n: i64| vec![0; usize::try_from(n * 4).unwrap()];
        request.inputs.push(input("A", DataType::Int32, &[1, a], zeros(a)));
        request.inputs.push(input("B", DataType::Fp32, &[1, 3, b], zeros(3 * b)));
        request
    };
    plan.check(&with(2, 2)).unwrap();
    let error = plan.check(&with(2, 3)).unwrap_err();
    assert!(error.message().contains("'A' has 2, and 'B' of shape [1,3,3] has 3"), "{error}");
    assert!(plan.pad(&mut batch(vec![with(2, 3)])).is_err());
}

#[test]
fn a_request_is_not_blown_up() {
    // No bytes at all, and a dimension that nothing backs.
    let inputs = [spec("X", DataType::Fp32, &[-1, -1])];
    let parameters = [("padding.inputs", "X:0"), ("padding.buckets", "32")];
    let plan = read(&parameters, &inputs, &[]).unwrap().unwrap();
    let mut hollow = InferRequest::new();
    hollow.inputs.push(input("X", DataType::Fp32, &[1, 0, 1 << 40], Vec::new()));
    let error = plan.check(&hollow).unwrap_err();
    assert!(error.message().contains("at most twice as large above 268435456 bytes"), "{error}");
    assert!(plan.pad(&mut batch(vec![hollow.clone()])).is_err());
    hollow.inputs[0].shape = Shape::new(&[1, 0, i64::MAX]);
    let error = plan.check(&hollow).unwrap_err();
    assert!(error.message().contains("more bytes than can be addressed"), "{error}");
    hollow.inputs[0].shape = Shape::new(&[1, 0, 4]);
    plan.check(&hollow).unwrap();
    assert_eq!(plan.pad(&mut batch(vec![hollow])).unwrap().to, 32);
}

#[test]
fn outputs_go_back_as_long_as_the_request() {
    let echo = Echo(&[("IDS", "OUT"), ("MASK", "POOLED")]);
    let replies = run(tokens(&[]), echo, vec![request(&[&[1, 2, 3]]), request(&[&[4], &[5]])]);
    let response = replies[1].as_ref().unwrap();
    let out = response.output("OUT").unwrap();
    assert_eq!((&*out.shape, out.data.as_slice()), (&[2, 1][..], &*ints(&[4, 5])));
    // An output of fixed dims is left as it is.
    assert_eq!(&*response.output("POOLED").unwrap().shape, &[2, 3]);
    let out = replies[0].as_ref().unwrap().output("OUT").unwrap();
    assert_eq!((&*out.shape, out.data.as_slice()), (&[1, 3][..], &*ints(&[1, 2, 3])));
}

#[test]
fn strings_are_cut_by_elements() {
    let plan = read(
        &[("padding.inputs", "IDS")],
        &[spec("IDS", DataType::Int32, &[-1])],
        &[spec("WORDS", DataType::Bytes, &[-1])],
    );
    let plan = plan.unwrap().unwrap();
    let words = |shape: &[i64], words: &[&str]| {
        let data: Vec<u8> = words
            .iter()
            .flat_map(|word| {
                [&u32::try_from(word.len()).unwrap().to_le_bytes()[..], word.as_bytes()].concat()
            })
            .collect();
        OutputTensor {
            name: "WORDS".into(),
            data_type: DataType::Bytes,
            shape: Shape::new(shape),
            data: data.into(),
        }
    };
    let cut = |rows: usize, output: OutputTensor| {
        let mut batch = batch(vec![request(&vec![&[1, 2][..]; rows]), request(&[&[1, 2, 3]])]);
        let padded = plan.pad(&mut batch).unwrap();
        let response = InferResponse { outputs: [output].into_iter().collect(), ..InferResponse::default() };
        batch.requests[0].answer(Ok(response));
        plan.cut(&mut batch, &padded);
        batch.requests.remove(0).into_parts().2
    };
    let one = cut(1, words(&[1, 3], &["a", "", "ccc"])).unwrap();
    assert_eq!(one.outputs[0].data.as_slice(), words(&[], &["a", ""]).data.as_slice());
    let two = cut(2, words(&[2, 3], &["a", "bb", "c", "dd", "e", ""])).unwrap();
    assert_eq!(&*two.outputs[0].shape, &[2, 2]);
    assert_eq!(two.outputs[0].data.as_slice(), words(&[], &["a", "bb", "dd", "e"]).data.as_slice());
    // Fewer strings than the shape says.
    assert!(cut(1, words(&[1, 3], &["a", "b"])).is_err());
}

#[test]
fn an_output_of_another_length_is_an_error() {
    let mut pooled = request(&[&[1, 2]]);
    pooled.inputs.push(input("OTHER", DataType::Int32, &[1, 5], ints(&[0; 5])));
    let replies = run(tokens(&[]), Echo(&[("OTHER", "OUT")]), vec![pooled]);
    let error = replies[0].as_ref().unwrap_err();
    assert!(
        error.message().contains("has the shape [1,5]") && error.message().contains("padding.outputs"),
        "{error}"
    );
    let replies =
        run(tokens(&[("padding.outputs", "")]), Echo(&[("OTHER", "OUT")]), vec![request(&[&[1, 2]])]);
    assert!(replies[0].is_ok());
}

#[test]
fn parameters_are_read_or_refused_with_what_would_do() {
    let mut ragged = spec("R", DataType::Int32, &[-1]);
    ragged.ragged = true;
    let mut maybe = spec("MAYBE", DataType::Int32, &[-1]);
    maybe.optional = true;
    let inputs = [
        spec("IDS", DataType::Uint8, &[-1]),
        spec("IMAGE", DataType::Fp16, &[3, -1, -1]),
        spec("FIXED", DataType::Fp32, &[4]),
        spec("WORDS", DataType::Bytes, &[-1]),
        spec("a:0", DataType::Bool, &[-1, 1]),
        ragged,
        maybe,
    ];
    let outputs = [spec("BOXES", DataType::Fp32, &[-1, -1]), spec("OUT", DataType::Fp32, &[-1])];
    let none = [("padding.outputs", "")];
    assert_eq!(read(&[("other", "1")], &inputs, &outputs), Ok(None));
    for (good, axes) in [
        (&[("padding.inputs", "IDS"), none[0]][..], &[("IDS", 0)][..]),
        (&[("padding.inputs", " IMAGE:2 , a:0 ,"), none[0]], &[("IMAGE", 2), ("a:0", 0)]),
        (&[("padding.inputs", "IMAGE:1"), ("padding.value", "-inf"), none[0]], &[("IMAGE", 1)]),
        (&[("padding.inputs", "a:0:0"), ("padding.value", "true"), none[0]], &[("a:0", 0)]),
        (
            &[("padding.inputs", "IDS,MAYBE"), ("padding.value.MAYBE", "-1"), none[0]],
            &[("IDS", 0), ("MAYBE", 0)],
        ),
        (
            &[("padding.inputs", "IDS"), ("padding.mask", "a:0"), ("padding.outputs", "OUT, BOXES:1")],
            &[("IDS", 0)],
        ),
    ] {
        let plan = read(good, &inputs, &outputs).unwrap().unwrap();
        for (name, axis) in axes {
            assert_eq!(plan.axis(name), Some(*axis), "{good:?}");
        }
        assert_eq!(plan.inputs.len(), axes.len());
    }
    for (bad, message) in [
        (&[("padding.bucket", "8")][..], "'padding.bucket' is none of those for padding: padding.inputs"),
        (&[("padding.value", "0")], "padding.inputs must name an input that every request has"),
        (&[("padding.inputs", "MAYBE")], "padding.inputs must name an input that every request has"),
        (
            &[("padding.inputs", "X")],
            "names the input 'X', and the model's inputs are 'IDS' [-1], 'IMAGE' [3,-1,-1]",
        ),
        (
            &[("padding.inputs", "IMAGE")],
            "several open dimensions; say which one follows the length, as 'IMAGE:1'",
        ),
        (
            &[("padding.inputs", "IMAGE:0")],
            "'IMAGE:0' means no open dimension of input 'IMAGE', whose dims are [3,-1,-1]",
        ),
        (&[("padding.inputs", "FIXED")], "'FIXED' means no open dimension"),
        (&[("padding.inputs", "WORDS")], "is of TYPE_STRING"),
        (&[("padding.inputs", "R")], "allow_ragged_batch"),
        (&[("padding.inputs", "IDS,IDS")], "is named twice"),
        (
            &[("padding.inputs", "IDS"), ("padding.value", "256")],
            "is '256', which is no element of input 'IDS' of TYPE_UINT8",
        ),
        (&[("padding.inputs", "IDS"), ("padding.value.A", "1")], "padding.value.A is about an input that"),
        (&[("padding.inputs", "IDS"), ("padding.mask", "IDS")], "the server makes the mask"),
        (&[("padding.inputs", "IDS"), ("padding.mask", "WORDS")], "a mask is of numbers or TYPE_BOOL"),
        (&[("padding.inputs", "IDS"), ("padding.mask", "IMAGE:1")], "a mask has one open dimension"),
        (
            &[("padding.inputs", "IDS"), ("padding.buckets", "8,8")],
            "'8' is not a length above the one before it",
        ),
        (&[("padding.inputs", "IDS"), ("padding.buckets", "0")], "write ascending lengths"),
        (&[("padding.inputs", "IDS"), ("padding.buckets", " ")], "names no length"),
        (&[("padding.inputs", "IDS")], "output 'BOXES' has the dims [-1,-1]"),
        (&[("padding.inputs", "IDS"), ("padding.outputs", "Z")], "names the output 'Z'"),
    ] {
        let error = read(bad, &inputs, &outputs).unwrap_err();
        assert!(error.message().contains(message), "{bad:?} gives '{error}'");
    }
    let zero =
        PaddingPlan::read(&[("padding.inputs".to_owned(), "IDS".to_owned())].into(), 0, &inputs, &outputs);
    assert!(zero.unwrap_err().message().contains("max_batch_size is 0"));
}

proptest! {
    #[test]
    fn what_comes_back_is_what_was_sent(
        requests in prop::collection::vec((1_usize..4, 0_usize..6, 1_usize..3), 1..6),
        axis in 0_usize..2,
        bucketed in any::<bool>(),
    ) {
        // `X` has the padded axis before or behind another open one.
        let name = format!("X:{axis}");
        let mut parameters =
            vec![("padding.inputs", name.as_str()), ("padding.outputs", name.as_str()), ("padding.value", "255")];
        if bucketed {
            parameters.push(("padding.buckets", "3,8"));
        }
        let specs = [spec("X", DataType::Uint8, &[-1, -1])];
        let plan = read(&parameters, &specs, &specs).unwrap().unwrap();
        let mut value = 0_u8;
        let requests: Vec<InferRequest> = requests.iter().map(|&(rows, length, width)| {
            let shape = if axis == 0 { [rows, length, width] } else { [rows, width, length] };
            let data: Vec<u8> = (0..rows * length * width).map(|_| { value = value.wrapping_add(1); value }).collect();
            let mut request = InferRequest::new();
            request.inputs.push(input("X", DataType::Uint8, &shape.map(dim), data));
            request.batch_size = rows;
            request
        }).collect();

        let mut filled = batch(requests.clone());
        let padded = plan.pad(&mut filled).unwrap();
        let longest = requests.iter().map(|r| r.inputs[0].shape[axis + 1]).max().unwrap();
        let to = if bucketed { if longest <= 3 { 3 } else { 8 } } else { longest };
        prop_assert_eq!(dim(padded.to), to);
        for (before, after) in requests.iter().zip(&filled.requests) {
            let (before, after) = (&before.inputs[0], &after.request.inputs[0]);
            let mut shape = before.shape.clone();
            shape[axis + 1] = to;
            prop_assert_eq!(&after.shape, &shape);
            let at = |tensor: &InferInput, [i, j, k]: [i64; 3]| {
                let inside = [i, j, k].iter().zip(tensor.shape.iter()).all(|(index, dim)| index < dim);
                let index = usize::try_from((i * tensor.shape[1] + j) * tensor.shape[2] + k).unwrap();
                inside.then(|| tensor.data.as_slice()[index])
            };
            for i in 0..shape[0] {
                for j in 0..shape[1] {
                    for k in 0..shape[2] {
                        let index = [i, j, k];
                        prop_assert_eq!(at(after, index), Some(at(before, index).unwrap_or(255)));
                    }
                }
            }
        }

        let replies = run(plan, Echo(&[("X", "X")]), requests.clone());
        for (request, reply) in requests.iter().zip(replies) {
            let reply = reply.unwrap();
            prop_assert_eq!(&reply.outputs[0].shape, &request.inputs[0].shape);
            prop_assert_eq!(reply.outputs[0].data.as_slice(), request.inputs[0].data.as_slice());
        }
    }
}
