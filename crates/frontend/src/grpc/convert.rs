//! Between the messages of the inference RPCs and the requests and responses of the server: the only place.
//!
//! Tensors are not copied on the way in (a request's inputs are slices of its message) and at most once on the way
//! out. Whatever the bytes are, converting them ends in a request or in an error that names what is wrong.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use smallvec::SmallVec;
use trireme_types::{
    CorrelationId, DataType, Error, InferInput, InferRequest, ParameterValue, RequestedOutput, Result,
    TensorBuffer, TensorSpec,
};

mod contents;
mod memory;
mod request;
mod response;

pub use self::memory::MemorySlice;
pub use self::request::{WireInput, WireOutput, WireParameter, WireParameters, WireRequest};
pub(super) use self::response::{Tags, response, stream_error, stream_response};
pub use super::wire::Malformed;

/// What of a model a request is converted for.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    pub model: &'a str,
    pub inputs: &'a [TensorSpec],
    pub outputs: &'a [TensorSpec],
}

/// An output to be classified and into how many classes.
pub type Classification = (Arc<str>, usize);

/// A request and what the way back must know of it.
#[derive(Clone, Debug)]
pub struct InferCall {
    pub request: InferRequest,
    pub classifications: SmallVec<[Classification; 1]>,
    /// Inputs whose data is in shared memory, by their place in the request; the request has none for them.
    pub memory_inputs: SmallVec<[(usize, MemorySlice); 1]>,
    /// Outputs that are to be put into shared memory.
    pub memory_outputs: SmallVec<[(Arc<str>, MemorySlice); 1]>,
    /// `triton_enable_empty_final_response`
    pub empty_final_response: bool,
}

/// Error for bytes that are not a request.
pub fn malformed(reason: Malformed) -> Error {
    Error::invalid_arg(format!("the message cannot be read as a ModelInferRequest: {reason}"))
}

/// Turns a request into the server's words. `message` is what `wire` was parsed from; `forwarded` are headers that
/// become parameters.
///
/// # Errors
/// `INVALID_ARG` with Triton's wording for what is wrong with the message itself; what is wrong for the model is
/// found by the server.
pub fn request(
    message: &Bytes,
    wire: &WireRequest<'_>,
    target: Target<'_>,
    forwarded: &[(String, String)],
    received: Instant,
) -> Result<InferCall> {
    let mut call = InferCall {
        request: InferRequest { id: wire.id.to_owned(), ..InferRequest::received_at(received) },
        classifications: SmallVec::new(),
        memory_inputs: SmallVec::new(),
        memory_outputs: SmallVec::new(),
        empty_final_response: false,
    };
    for &(name, value) in &wire.parameters {
        request_parameter(name, value, &mut call)?;
    }

    let mut raw = wire.raw.iter();
    for (index, input) in wire.inputs.iter().enumerate() {
        let slice = memory::slice(input.name, &input.parameters)?;
        if slice.is_some() && !input.contents.is_empty() {
            return Err(Error::invalid_arg(format!(
                "unexpected 'content' provided when using shared memory for input tensor '{}' for model '{}'",
                input.name, target.model
            )));
        }
        let data_type = data_type(input, target, wire.id)?;
        let data = match slice {
            Some(slice) => {
                call.memory_inputs.push((index, slice));
                TensorBuffer::default()
            }
            None => input_data(message, input, data_type, &mut raw, wire, target)?,
        };
        call.request.inputs.push(InferInput {
            name: interned(target.inputs, input.name),
            data_type,
            shape: input.shape.clone(),
            data,
        });
    }
    if raw.next().is_some() {
        return Err(Error::invalid_arg(format!(
            "expected one entry in raw_input_contents for each of the {} input(s) of the request for model '{}', got \
             {}",
            wire.inputs.len() - call.memory_inputs.len(),
            target.model,
            wire.raw.len()
        )));
    }

    for output in &wire.outputs {
        let name = interned(target.outputs, output.name);
        let classes = classification(output)?;
        match (memory::slice(output.name, &output.parameters)?, classes) {
            (Some(_), Some(_)) => {
                return Err(Error::invalid_arg(
                    "Output can't set both 'shared_memory_region' and 'classification'",
                ));
            }
            (Some(slice), None) => call.memory_outputs.push((Arc::clone(&name), slice)),
            (None, Some(classes)) => call.classifications.push((Arc::clone(&name), classes)),
            (None, None) => {}
        }
        call.request.outputs.push(RequestedOutput { name });
    }
    for (name, value) in forwarded {
        call.request.parameters.insert(name.as_str(), ParameterValue::String(value.clone()));
    }
    Ok(call)
}

/// The model's copy of a name, so that known names cost no allocation.
fn interned(specs: &[TensorSpec], name: &str) -> Arc<str> {
    specs
        .iter()
        .find(|spec| &*spec.name == name)
        .map_or_else(|| Arc::from(name), |spec| Arc::clone(&spec.name))
}

fn data_type(input: &WireInput<'_>, target: Target<'_>, id: &str) -> Result<DataType> {
    input.datatype.parse().map_err(|unknown| {
        let (name, model) = (input.name, target.model);
        let error = match target.inputs.iter().find(|spec| &*spec.name == name) {
            Some(spec) => Error::invalid_arg(format!(
                "inference input '{name}' data-type is '<invalid>', but model '{model}' expects '{}'",
                spec.data_type
            )),
            None => Error::invalid_arg(format!(
                "inference input '{name}' for model '{model}' has the data-type '{}': {unknown}",
                input.datatype
            )),
        };
        error.prefixed(format_args!("[request id: {}] ", if id.is_empty() { "<id_unknown>" } else { id }))
    })
}

/// The bytes of an input: its own contents, or the next entry of `raw_input_contents`.
fn input_data(
    message: &Bytes,
    input: &WireInput<'_>,
    data_type: DataType,
    raw: &mut std::slice::Iter<'_, &[u8]>,
    wire: &WireRequest<'_>,
    target: Target<'_>,
) -> Result<TensorBuffer> {
    let (name, model) = (input.name, target.model);
    if !input.contents.is_empty() {
        if !wire.raw.is_empty() {
            return Err(Error::invalid_arg(format!(
                "contents field must not be specified when using raw_input_contents for '{name}' for model '{model}'"
            )));
        }
        return contents::tensor(message, input, data_type, model);
    }
    match raw.next() {
        Some(bytes) => Ok(message.slice_ref(bytes).into()),
        // Clients cannot say "no elements" in typed contents, so an absent field is an empty tensor.
        None if wire.raw.is_empty() && input.shape.element_count() == Ok(0) => Ok(TensorBuffer::default()),
        None => Err(Error::invalid_arg(format!(
            "unable to find data for input tensor '{name}' for model '{model}' in request."
        ))),
    }
}

/// The number of classes that an output is to be turned into.
fn classification(output: &WireOutput<'_>) -> Result<Option<usize>> {
    let mut classes = None;
    for &(name, value) in output.parameters.iter().filter(|(name, _)| *name == "classification") {
        let WireParameter::Int(count) = value else { return Err(wrong_kind(name, "int64_param")) };
        let count = usize::try_from(count).ok().filter(|&count| count > 0);
        classes = Some(count.ok_or_else(|| {
            Error::invalid_arg("invalid value for 'classification' parameter, expected >= 0")
        })?);
    }
    Ok(classes)
}

fn request_parameter(name: &str, value: WireParameter<'_>, call: &mut InferCall) -> Result<()> {
    let request = &mut call.request;
    match name {
        "sequence_id" => {
            request.sequence.id = match value {
                WireParameter::Int(0) | WireParameter::Uint(0) | WireParameter::Text("") => {
                    CorrelationId::None
                }
                WireParameter::Int(id) => CorrelationId::Number(id.cast_unsigned()),
                WireParameter::Uint(id) => CorrelationId::Number(id),
                WireParameter::Text(id) => CorrelationId::Text(id.to_owned()),
                _ => return Err(wrong_kind(name, "int64_param or string_param")),
            };
        }
        "sequence_start" => request.sequence.start = boolean(name, value)?,
        "sequence_end" => request.sequence.end = boolean(name, value)?,
        "priority" => request.priority = unsigned(name, value, "int64_param or uint64_param")?,
        "timeout" => request.timeout_us = unsigned(name, value, "int64_param")?,
        "triton_enable_empty_final_response" => call.empty_final_response = boolean(name, value)?,
        _ if name.starts_with("triton_") => {
            return Err(Error::invalid_arg(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys \
                 starting with 'triton_' are allowed: triton_enable_empty_final_response",
            ));
        }
        _ => {
            let value = match value {
                WireParameter::Bool(value) => ParameterValue::Bool(value),
                WireParameter::Int(value) => ParameterValue::Int(value),
                WireParameter::Text(value) => ParameterValue::String(value.to_owned()),
                WireParameter::Double(value) => ParameterValue::Double(value),
                WireParameter::Uint(value) => {
                    i64::try_from(value).map_or(ParameterValue::Uint(value), ParameterValue::Int)
                }
                WireParameter::Unset => {
                    return Err(wrong_kind(name, "int64_param, bool_param, or string_param"));
                }
            };
            request.parameters.insert(name, value);
        }
    }
    Ok(())
}

fn boolean(name: &str, value: WireParameter<'_>) -> Result<bool> {
    match value {
        WireParameter::Bool(value) => Ok(value),
        _ => Err(wrong_kind(name, "bool_param")),
    }
}

fn unsigned(name: &str, value: WireParameter<'_>, kinds: &str) -> Result<u64> {
    match value {
        WireParameter::Uint(value) => Ok(value),
        WireParameter::Int(value) => u64::try_from(value)
            .map_err(|_| Error::invalid_arg(format!("invalid value for '{name}', expected value >= 0."))),
        _ => Err(wrong_kind(name, kinds)),
    }
}

fn wrong_kind(name: &str, kinds: &str) -> Error {
    Error::invalid_arg(format!("invalid value type for '{name}' parameter, expected {kinds}."))
}

#[cfg(test)]
mod tests;
