//! Which requests may share a batch: those of equal [`Kind`].
//!
//! A kind holds what a backend cannot join: the dimensions that the model leaves open (inputs with
//! `allow_ragged_batch` excepted, and the batch dimension), which optional inputs are there, and the contents of shape
//! tensors. Of a model that pads, it holds the class of the lengths in place of the lengths. A model whose shapes are all fixed and whose inputs are all required has one kind, and working it out costs
//! nothing.

use std::sync::Arc;

use smallvec::SmallVec;
use trireme_backend::padding::PaddingPlan;
use trireme_config::ModelSpec;
use trireme_types::{InferInput, InferRequest, Result};

/// What requests of one batch have in common. Kinds of different models do not compare.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Kind(SmallVec<[i64; 6]>);

/// How to work out the kind of a model's requests.
#[derive(Clone, Debug)]
pub(crate) struct KindRule {
    inputs: Vec<InputRule>,
    padding: Option<PaddingPlan>,
}

/// One input in which requests may differ.
#[derive(Clone, Debug)]
struct InputRule {
    name: Arc<str>,
    optional: bool,
    /// The batch dimension is in front of its shape.
    batching: bool,
    part: Part,
}

/// What counts of an input.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// Only whether it is there.
    Presence,
    Dimensions,
    /// Its dimensions without the one that is padded, which is that many without the batch dimension.
    Padded(usize),
    /// All of it.
    Contents,
}

#[cfg(test)]
impl Kind {
    /// A kind for tests that need several.
    pub(crate) fn of_words(words: &[i64]) -> Self {
        Self(SmallVec::from_slice(words))
    }
}

impl KindRule {
    pub(crate) fn new(spec: &ModelSpec) -> Self {
        // A plan that cannot be read has failed the load.
        let padding = padding_of(spec).ok().flatten();
        let mask = padding.as_ref().and_then(PaddingPlan::mask);
        let axis = |name: &str| padding.as_ref().and_then(|plan| plan.axis(name));
        // The mask is as long as the inputs and in every request in the end.
        let inputs = spec.inputs.iter().filter(|input| Some(&*input.name) != mask);
        let rules = inputs.map(|input| InputRule {
            name: Arc::clone(&input.name),
            optional: input.optional,
            batching: spec.max_batch_size > 0 && !input.shape_tensor,
            part: match input {
                _ if input.shape_tensor => Part::Contents,
                _ if input.ragged || input.dims.is_fixed() => Part::Presence,
                _ => axis(&input.name).map_or(Part::Dimensions, Part::Padded),
            },
        });
        let inputs = rules.filter(|rule| rule.optional || !matches!(rule.part, Part::Presence)).collect();
        Self { inputs, padding }
    }

    /// The kind of a request that has been checked against the model.
    pub(crate) fn of(&self, request: &InferRequest) -> Kind {
        let mut kind = Kind::default();
        // Each rule adds words from which its own can be told apart from the next, so equal words are equal parts.
        for rule in &self.inputs {
            let input = request.input(&rule.name);
            if rule.optional {
                kind.0.push(i64::from(input.is_some()));
            }
            let Some(input) = input else { continue };
            let dims = input.shape.get(usize::from(rule.batching)..).unwrap_or_default();
            match rule.part {
                Part::Presence => {}
                Part::Dimensions => kind.0.extend_from_slice(dims),
                Part::Padded(axis) => {
                    kind.0.extend(dims.iter().enumerate().filter(|(i, _)| *i != axis).map(|(_, dim)| *dim));
                }
                Part::Contents => push_contents(&mut kind.0, input),
            }
        }
        kind.0.extend(self.padding.as_ref().map(|plan| plan.class(request)));
        kind
    }
}

/// How the model's parameters say that requests are padded.
///
/// # Errors
/// INVALID_ARG: parameters that do not fit the model.
pub(crate) fn padding_of(spec: &ModelSpec) -> Result<Option<PaddingPlan>> {
    PaddingPlan::read(&spec.parameters, spec.max_batch_size, &spec.inputs, &spec.outputs)
}

/// Shape and bytes of an input, with their lengths.
fn push_contents(words: &mut SmallVec<[i64; 6]>, input: &InferInput) {
    let bytes = input.data.as_slice();
    words.extend([input.shape.len(), bytes.len()].map(|n| i64::try_from(n).unwrap_or(i64::MAX)));
    words.extend_from_slice(&input.shape);
    words.extend(bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        for (to, from) in word.iter_mut().zip(chunk) {
            *to = *from;
        }
        i64::from_le_bytes(word)
    }));
}

#[cfg(test)]
mod tests {
    use trireme_types::{DataType, Shape};

    use super::*;

    fn rule(inputs: &str) -> KindRule {
        let text = format!("name: 'm' max_batch_size: 8 {inputs}");
        let config = trireme_config::parse_pbtxt(text.as_bytes(), "c").unwrap().config;
        KindRule::new(&ModelSpec::from_config(&config).unwrap())
    }

    fn request(inputs: &[(&str, &[i64])]) -> InferRequest {
        let mut request = InferRequest::new();
        for (name, shape) in inputs {
            request.inputs.push(InferInput {
                name: Arc::from(*name),
                data_type: DataType::Int32,
                shape: Shape::new(shape),
                data: vec![0; 4].into(),
            });
        }
        request
    }

    #[test]
    fn a_model_of_fixed_shapes_has_one_kind() {
        let rule = rule(
            "input { name: 'A' data_type: TYPE_INT32 dims: [ 2 ] } input { name: 'B' data_type: TYPE_INT32
            dims: [ 2, 3 ] }",
        );
        let kind = rule.of(&request(&[("A", &[1, 2]), ("B", &[1, 2, 3])]));
        assert_eq!(kind, Kind::default());
        assert!(!kind.0.spilled());
        assert_eq!(kind, rule.of(&request(&[("B", &[4, 2, 3]), ("A", &[4, 2])])));
    }

    #[test]
    fn open_dimensions_part_and_rows_do_not() {
        let rule = rule(
            "input { name: 'A' data_type: TYPE_INT32 dims: [ -1, 2 ] } input { name: 'B' data_type:
            TYPE_INT32 dims: [ -1 ] }",
        );
        let kind = |rows, a, b| rule.of(&request(&[("A", &[rows, a, 2]), ("B", &[rows, b])]));
        assert_eq!(kind(1, 5, 6), kind(3, 5, 6));
        assert_ne!(kind(1, 5, 6), kind(1, 6, 5));
        assert_ne!(kind(1, 5, 6), kind(1, 5, 7));
        assert_eq!(rule.of(&request(&[("B", &[1, 6]), ("A", &[1, 5, 2])])), kind(1, 5, 6));
    }

    #[test]
    fn ragged_inputs_part_nothing() {
        let rule = rule("input { name: 'A' data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }");
        assert_eq!(rule.of(&request(&[("A", &[1, 5])])), rule.of(&request(&[("A", &[1, 9])])));
    }

    #[test]
    fn requests_with_and_without_an_optional_input_stay_apart() {
        let rule = rule("input { name: 'A' data_type: TYPE_INT32 dims: [ 2 ] } input { name: 'B' data_type: TYPE_INT32
            dims: [ 2 ] optional: true } input { name: 'C' data_type: TYPE_INT32 dims: [ -1 ] optional: true }");
        let kinds = [
            rule.of(&request(&[("A", &[1, 2])])),
            rule.of(&request(&[("A", &[1, 2]), ("B", &[1, 2])])),
            rule.of(&request(&[("A", &[1, 2]), ("C", &[1, 1])])),
            rule.of(&request(&[("A", &[1, 2]), ("B", &[1, 2]), ("C", &[1, 1])])),
            rule.of(&request(&[("A", &[1, 2]), ("B", &[1, 2]), ("C", &[1, 0])])),
        ];
        for (i, a) in kinds.iter().enumerate() {
            for (j, b) in kinds.iter().enumerate() {
                assert_eq!(a == b, i == j, "{i} {j}");
            }
        }
    }

    #[test]
    fn padded_lengths_share_a_kind_by_class() {
        let inputs = "input { name: 'A' data_type: TYPE_INT32 dims: [ -1, -1 ] }
            input { name: 'M' data_type: TYPE_INT32 dims: [ -1 ] }
            parameters { key: 'padding.inputs' value { string_value: 'A:0' } }
            parameters { key: 'padding.mask' value { string_value: 'M' } }
            parameters { key: 'padding.outputs' value { string_value: '' } }";
        let plain = rule(inputs);
        let of = |rule: &KindRule, length, width| rule.of(&request(&[("A", &[1, length, width])]));
        assert_eq!(of(&plain, 3, 2), of(&plain, 7, 2));
        assert_ne!(of(&plain, 3, 2), of(&plain, 3, 4));
        assert_eq!(of(&plain, 3, 2), plain.of(&request(&[("A", &[2, 5, 2]), ("M", &[2, 5])])));
        let buckets = "parameters { key: 'padding.buckets' value { string_value: '4,8' } }";
        let bucketed = rule(&format!("{inputs} {buckets}"));
        assert_eq!(of(&bucketed, 3, 2), of(&bucketed, 4, 2));
        assert_ne!(of(&bucketed, 4, 2), of(&bucketed, 5, 2));
        assert_ne!(of(&bucketed, 9, 2), of(&bucketed, 10, 2));
    }

    #[test]
    fn shape_tensors_part_by_their_contents() {
        let rule = rule("input { name: 'S' data_type: TYPE_INT32 dims: [ 1 ] is_shape_tensor: true }");
        let with = |value: u8| {
            let mut request = request(&[("S", &[1])]);
            request.inputs[0].data = vec![value, 0, 0, 0].into();
            rule.of(&request)
        };
        assert_eq!(with(3), with(3));
        assert_ne!(with(3), with(4));
    }
}
