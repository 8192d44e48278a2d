//! An answer as it is kept: the outputs in one buffer of their own, without the id of the request.
//!
//! Outputs of a model may be slices of something much larger, the request's body for instance, so keeping them as
//! they are would hold memory that nobody counted. They are copied once when they are kept; a hit copies nothing.

use smallvec::SmallVec;
use trireme_types::{HostBuffer, InferResponse, OutputTensor, ParameterValue, Parameters, TensorBuffer};

/// What the allocator adds to one allocation, at most.
pub(super) const ALLOCATION: usize = 16;
/// Tensors start at multiples of this, so that any element type can be read in place.
const ALIGNMENT: usize = 8;

/// A successful answer that is not the answer of one request only.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    outputs: Box<[OutputTensor]>,
    parameters: Parameters,
}

impl Answer {
    /// Of outputs whose memory belongs to nothing else.
    pub(super) fn new(outputs: Vec<OutputTensor>, parameters: Parameters) -> Self {
        Self { outputs: outputs.into(), parameters }
    }

    /// Keeps a copy. `None` if the tensors are too large to be addressed together.
    pub(super) fn keep(response: &InferResponse) -> Option<Self> {
        let mut buffer = HostBuffer::zeroed(tensor_bytes(response)?);
        let mut start = 0;
        let mut places: SmallVec<[std::ops::Range<usize>; 4]> = SmallVec::new();
        for output in &response.outputs {
            let end = start + output.data.len();
            if let Some(place) = buffer.as_mut_slice().get_mut(start..end) {
                place.copy_from_slice(output.data.as_slice());
            }
            places.push(start..end);
            start = end.next_multiple_of(ALIGNMENT);
        }
        let data = TensorBuffer::from(buffer);
        let outputs = response.outputs.iter().zip(places).map(|(output, place)| OutputTensor {
            name: output.name.clone(),
            data_type: output.data_type,
            shape: output.shape.clone(),
            data: data.slice(place),
        });
        Some(Self { outputs: outputs.collect(), parameters: response.parameters.clone() })
    }

    /// The answer for a request. Tensors are shared with the cache.
    pub(super) fn for_request(&self, id: String) -> InferResponse {
        InferResponse {
            id,
            outputs: self.outputs.iter().cloned().collect(),
            parameters: self.parameters.clone(),
        }
    }
}

/// Bytes of memory that a response takes once it is kept; `None` if they cannot be counted.
pub(super) fn kept_bytes(response: &InferResponse) -> Option<usize> {
    let mut bytes = tensor_bytes(response)?.checked_add(size_of::<Answer>() + 4 * ALLOCATION)?;
    for output in &response.outputs {
        let spilled = size_of_val::<[i64]>(&output.shape);
        let name = output.name.len() + ALLOCATION;
        bytes = bytes.checked_add(size_of::<OutputTensor>() + spilled + name + ALLOCATION)?;
    }
    for (name, value) in response.parameters.iter() {
        let text = if let ParameterValue::String(text) = value { text.len() + ALLOCATION } else { 0 };
        let entry = size_of::<(String, ParameterValue)>() + name.len() + ALLOCATION;
        bytes = bytes.checked_add(entry)?.checked_add(text)?;
    }
    Some(bytes)
}

/// Bytes of the one buffer for all tensors.
fn tensor_bytes(response: &InferResponse) -> Option<usize> {
    response.outputs.iter().try_fold(0_usize, |sum, output| {
        sum.checked_add(output.data.len())?.checked_next_multiple_of(ALIGNMENT)
    })
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use trireme_types::{DataType, Shape};

    use super::*;

    /// A response of UINT8 outputs that are slices of one larger body.
    pub(crate) fn response(outputs: &[&[u8]]) -> InferResponse {
        let body = TensorBuffer::from(outputs.concat());
        let mut start = 0;
        let outputs = outputs.iter().enumerate().map(|(i, data)| {
            let place = start..start + data.len();
            start = place.end;
            OutputTensor {
                name: Arc::from(format!("OUTPUT{i}")),
                data_type: DataType::Uint8,
                shape: Shape::new(&[i64::try_from(data.len()).expect("small")]),
                data: body.slice(place),
            }
        });
        let outputs = outputs.collect();
        let mut parameters = Parameters::default();
        parameters.insert("p", ParameterValue::String("v".into()));
        InferResponse { id: "of the first request".into(), outputs, parameters }
    }

    #[test]
    fn gives_back_what_was_kept_under_another_id() {
        let original = response(&[b"abc", b"", b"0123456789"]);
        let kept = Answer::keep(&original).expect("small");
        let again = kept.for_request("b".into());
        assert_eq!(again.id, "b");
        assert_eq!(again.parameters, original.parameters);
        assert_eq!(again.outputs.len(), 3);
        for (got, want) in again.outputs.iter().zip(&original.outputs) {
            assert_eq!((&got.name, got.data_type, &got.shape), (&want.name, want.data_type, &want.shape));
            assert_eq!(got.data.as_slice(), want.data.as_slice());
            assert_eq!(got.data.as_slice().as_ptr().align_offset(ALIGNMENT), 0);
        }
    }

    #[test]
    fn holds_nothing_of_the_body_that_the_outputs_came_from() {
        let original = response(&[b"abc"]);
        let kept = Answer::keep(&original).expect("small");
        let again = kept.for_request(String::new());
        assert_ne!(again.outputs[0].data.as_slice().as_ptr(), original.outputs[0].data.as_slice().as_ptr());
        let twice = kept.for_request(String::new());
        let (first, second) = (&again.outputs[0].data, &twice.outputs[0].data);
        assert_eq!(first.as_slice().as_ptr(), second.as_slice().as_ptr(), "a hit copies nothing");
    }

    #[test]
    fn counts_tensors_names_shapes_and_parameters() {
        let small = kept_bytes(&response(&[b"a"])).expect("small");
        assert_eq!(kept_bytes(&response(&[b"12345678"])), Some(small), "tensors are counted in whole words");
        assert_eq!(kept_bytes(&response(&[b"123456789"])), Some(small + 8));
        assert!(kept_bytes(&response(&[b"a", b""])).expect("small") > small + size_of::<OutputTensor>());
    }
}
