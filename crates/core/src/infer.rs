//! Checks a request against the model it is for and brings it into the form that schedulers and backends rely on.
//!
//! After [`normalize`] every input is one the model knows, given once, of the promised data type and shape, with
//! exactly the bytes that its shape takes; every required input is there; `batch_size` is set.
//! The wording is Triton's (`InferenceRequest::Normalize`), since clients and tests match on it.

use std::fmt::Write as _;

use trireme_backend::padding::PaddingPlan;
use trireme_types::{
    CorrelationId, DataType, Error, InferInput, InferRequest, Result, Shape, ShapeError, TensorBuffer,
    TensorSpec,
};

/// Name under which a raw binary request carries its only input until the model is known to have just one.
pub const RAW_INPUT_NAME: &str = "raw_input";

const BATCH_NOTE: &str = " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to \
    be prepended to each input shape. If you want to specify the full shape including the batch dim in your input \
    dims config, try setting max_batch_size to zero. See the model configuration docs for more info on \
    max_batch_size.";

/// The model's side of the check.
pub(crate) struct Expectation<'a> {
    pub(crate) model: &'a str,
    pub(crate) max_batch_size: usize,
    pub(crate) inputs: &'a [TensorSpec],
    pub(crate) outputs: &'a [TensorSpec],
    pub(crate) padding: Option<&'a PaddingPlan>,
    /// A correlation id may be a string.
    pub(crate) text_ids: bool,
}

/// Checks and completes a request.
///
/// # Errors
/// `INVALID_ARG` with Triton's wording, most of them prefixed with the request id.
pub(crate) fn normalize(request: &mut InferRequest, expect: &Expectation<'_>) -> Result<()> {
    for (i, input) in request.inputs.iter().enumerate() {
        if request.inputs[..i].iter().any(|earlier| earlier.name == input.name) {
            let duplicate = Error::invalid_arg(format!("input '{}' already exists in request", input.name));
            return Err(duplicate.prefixed(IdPrefix(&request.id)));
        }
    }
    check_input_count(request, expect).map_err(|error| error.prefixed(IdPrefix(&request.id)))?;
    let model = expect.model;
    for input in &request.inputs {
        if !expect.inputs.iter().any(|spec| *spec.name == *input.name) {
            return Err(Error::invalid_arg(format!(
                "unexpected inference input '{}' for model '{model}'{}",
                input.name,
                known("inputs", expect.inputs)
            )));
        }
    }
    for output in &request.outputs {
        if !expect.outputs.iter().any(|spec| *spec.name == *output.name) {
            return Err(Error::invalid_arg(format!(
                "unexpected inference output '{}' for model '{model}'{}",
                output.name,
                known("outputs", expect.outputs)
            )));
        }
    }
    check(request, expect).map_err(|error| error.prefixed(IdPrefix(&request.id)))
}

fn check_input_count(request: &InferRequest, expect: &Expectation<'_>) -> Result<()> {
    let required = expect.inputs.iter().filter(|spec| !spec.optional).count();
    let fits = (required..=expect.inputs.len()).contains(&request.inputs.len());
    if fits { Ok(()) } else { Err(wrong_inputs(request, expect, required)) }
}

fn check(request: &mut InferRequest, expect: &Expectation<'_>) -> Result<()> {
    let model = expect.model;
    let required = expect.inputs.iter().filter(|spec| !spec.optional).count();
    if expect.inputs.iter().any(|spec| !spec.optional && request.input(&spec.name).is_none()) {
        return Err(wrong_inputs(request, expect, required));
    }
    if let CorrelationId::Text(id) = &request.sequence.id
        && !expect.text_ids
    {
        return Err(Error::invalid_arg(format!(
            "correlation ID in request is not an unsigned int, got the string '{id}'; model '{model}' has no \
             sequence batching with a control input for string ids"
        )));
    }

    let batching = expect.max_batch_size > 0;
    let mut batch_size = None;
    for input in &request.inputs {
        let Some(spec) = expect.inputs.iter().find(|spec| *spec.name == *input.name) else { continue };
        check_shape(input, spec, batching, model)?;
        if batching && !spec.shape_tensor {
            let rows = input.shape.first().copied().unwrap_or_default();
            if *batch_size.get_or_insert(rows) != rows {
                return Err(Error::invalid_arg(format!(
                    "input '{}' batch size does not match other inputs for '{model}'",
                    input.name
                )));
            }
        }
        check_bytes(input, model)?;
    }
    if let Some(rows) = batch_size {
        let rows = usize::try_from(rows).unwrap_or(usize::MAX);
        if rows > expect.max_batch_size {
            return Err(Error::invalid_arg(format!(
                "inference request batch-size must be <= {} for '{model}'",
                expect.max_batch_size
            )));
        }
        request.batch_size = rows;
    } else {
        request.batch_size = 1;
    }
    expect.padding.map_or(Ok(()), |plan| plan.check(request))
}

fn check_shape(input: &InferInput, spec: &TensorSpec, batching: bool, model: &str) -> Result<()> {
    if input.data_type != spec.data_type {
        return Err(Error::invalid_arg(format!(
            "inference input '{}' data-type is '{}', but model '{model}' expects '{}'",
            input.name, input.data_type, spec.data_type
        )));
    }
    if batching && input.shape.is_empty() && !spec.shape_tensor {
        return Err(Error::invalid_arg(format!(
            "input '{}' has no shape but model requires batch dimension for '{model}'",
            input.name
        )));
    }
    if input.shape.iter().any(|&dim| dim < 0) {
        return Err(Error::invalid_arg(format!(
            "All input dimensions should be specified for input '{}' for model '{model}', got {}",
            input.name, input.shape
        )));
    }
    let fits = match input.shape.split_first() {
        Some((rows, dims)) if batching && !spec.shape_tensor => *rows >= 1 && spec.dims.accepts(dims),
        _ => spec.dims.accepts(&input.shape),
    };
    if fits {
        return Ok(());
    }
    let want = if batching { Shape::with_leading(-1, &spec.dims) } else { spec.dims.clone() };
    let zero_rows = batching && input.shape.first() == Some(&0);
    let note = match (batching, zero_rows) {
        (_, true) => " The batch dimension must be at least 1.",
        (true, false) => BATCH_NOTE,
        (false, false) => "",
    };
    Err(Error::invalid_arg(format!(
        "unexpected shape for input '{}' for model '{model}'. Expected {want}, got {}.{note}",
        input.name, input.shape
    )))
}

/// The bytes are as many as the shape takes; BYTES elements are whole and as many as the shape says.
fn check_bytes(input: &InferInput, model: &str) -> Result<()> {
    let size = input.shape.byte_size(input.data_type).map_err(|error| {
        let what = match error {
            ShapeError::Negative => "has a negative dimension",
            ShapeError::Overflow => "takes more bytes than can be addressed",
        };
        Error::invalid_arg(format!(
            "shape {} of input '{}' for model '{model}' {what}",
            input.shape, input.name
        ))
    })?;
    match size {
        Some(size) if size != input.data.len() => Err(Error::invalid_arg(format!(
            "input byte size mismatch for input '{}' for model '{model}'. Expected {size}, got {}",
            input.name,
            input.data.len()
        ))),
        Some(_) => Ok(()),
        None => check_strings(input, model),
    }
}

fn check_strings(input: &InferInput, model: &str) -> Result<()> {
    let expected = input.shape.element_count().map_err(|_| {
        Error::invalid_arg(format!(
            "shape {} of input '{}' for model '{model}' is too large",
            input.shape, input.name
        ))
    })?;
    let (name, mut rest, mut found) = (&input.name, input.data.as_slice(), 0_usize);
    while !rest.is_empty() {
        if found == expected {
            let total = found + count_strings(rest);
            return Err(Error::invalid_arg(format!(
                "unexpected number of string elements {total} for inference input '{name}' for model '{model}', \
                 expecting {expected}"
            )));
        }
        let Some((length, tail)) = rest.split_first_chunk::<4>() else {
            return Err(Error::invalid_arg(format!(
                "incomplete string length indicator for inference input '{name}' for model '{model}', expecting 4 \
                 bytes but only {} bytes available. Please make sure the string length indicator is in one buffer.",
                rest.len()
            )));
        };
        let length = u32::from_le_bytes(*length) as usize;
        let Some(tail) = tail.get(length..) else {
            return Err(Error::invalid_arg(format!(
                "incomplete string data for inference input '{name}' for model '{model}': element {found} declares \
                 {length} bytes but {} remain",
                tail.len()
            )));
        };
        rest = tail;
        found += 1;
    }
    if found != expected {
        return Err(Error::invalid_arg(format!(
            "expected {expected} string elements for inference input '{name}' for model '{model}', got {found}"
        )));
    }
    Ok(())
}

/// Whole or broken elements in the rest of a BYTES tensor.
fn count_strings(mut rest: &[u8]) -> usize {
    let mut found = 0;
    while !rest.is_empty() {
        found += 1;
        let Some((length, tail)) = rest.split_first_chunk::<4>() else { break };
        let Some(tail) = tail.get(u32::from_le_bytes(*length) as usize..) else { break };
        rest = tail;
    }
    found
}

fn wrong_inputs(request: &InferRequest, expect: &Expectation<'_>, required: usize) -> Error {
    let absent = |spec: &&TensorSpec| !spec.optional && request.input(&spec.name).is_none();
    let missing: Vec<&str> = expect.inputs.iter().filter(absent).map(|spec| &*spec.name).collect();
    let got: Vec<&str> = request.inputs.iter().map(|input| &*input.name).collect();
    let total = expect.inputs.len();
    let count = if required == total {
        format!("expected {total} inputs")
    } else {
        format!("expected number of inputs between {required} and {total}")
    };
    Error::invalid_arg(format!(
        "{count} but got {} inputs for model '{}'. Got input(s) {}, but missing required input(s) {}. Please provide \
         all required input(s).",
        got.len(),
        expect.model,
        quoted(&got),
        quoted(&missing)
    ))
}

fn quoted(names: &[&str]) -> String {
    let mut text = String::from("[");
    for (i, name) in names.iter().enumerate() {
        let comma = if i > 0 { "," } else { "" };
        let _infallible = write!(text, "{comma}'{name}'");
    }
    text.push(']');
    text
}

fn known(what: &str, specs: &[TensorSpec]) -> String {
    let names: Vec<&str> = specs.iter().map(|spec| &*spec.name).collect();
    format!(", the model's {what} are {}", quoted(&names))
}

/// `[request id: x] `, as Triton puts it in front of messages.
pub(crate) struct IdPrefix<'a>(pub(crate) &'a str);

impl std::fmt::Display for IdPrefix<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let id = if self.0.is_empty() { "<id_unknown>" } else { self.0 };
        write!(f, "[request id: {id}] ")
    }
}

/// Gives the only input of a raw binary request its name, data type and shape.
///
/// # Shapes
/// At most one open dimension is worked out from the number of bytes; a batch dimension of 1 is put in front for
/// models that have one. A BYTES input is one element and its length is put in front of the data.
///
/// # Errors
/// The model has no or several inputs, or the bytes do not fit its shape.
pub(crate) fn raw_input(body: TensorBuffer, expect: &Expectation<'_>) -> Result<InferInput> {
    let model = expect.model;
    let [spec] = expect.inputs else {
        return Err(Error::invalid_arg(format!(
            "Raw request must only have 1 input (found {}) to be deduced but got a raw body for model '{model}'; send \
             the inputs by name in a JSON head instead",
            expect.inputs.len()
        )));
    };
    let batch = (expect.max_batch_size > 0).then_some(1);
    if spec.data_type == DataType::Bytes {
        return raw_string(body, spec, batch, model);
    }
    let open = spec.dims.iter().filter(|&&dim| dim < 0).count();
    if open > 1 {
        return Err(Error::invalid_arg(format!(
            "The shape of Raw input '{}' can not be deduced because there are more than one variable-sized dimension in \
             {} of model '{model}'; send its shape in a JSON head instead",
            spec.name, spec.dims
        )));
    }
    let element = spec.data_type.byte_size().unwrap_or(1);
    let fixed: Shape = spec.dims.iter().map(|&dim| if dim < 0 { 1 } else { dim }).collect();
    let unit = fixed
        .element_count()
        .ok()
        .and_then(|n| n.checked_mul(element))
        .ok_or_else(|| Error::invalid_arg(format!("the shape of model '{model}' is too large")))?;
    if open == 1 && (unit == 0 || !body.len().is_multiple_of(unit)) {
        return Err(Error::invalid_arg(format!(
            "[request id: <id_unknown>] input byte size mismatch for input '{RAW_INPUT_NAME}' for model '{model}'. \
             Expected a multiple of {unit}, got {}",
            body.len()
        )));
    }
    let deduced = body.len().checked_div(unit).unwrap_or(0);
    let deduced = i64::try_from(deduced).unwrap_or(i64::MAX);
    let dims = spec.dims.iter().map(|&dim| if dim < 0 { deduced } else { dim });
    let shape = batch.into_iter().chain(dims).collect();
    Ok(InferInput { name: spec.name.clone(), data_type: spec.data_type, shape, data: body })
}

fn raw_string(body: TensorBuffer, spec: &TensorSpec, batch: Option<i64>, model: &str) -> Result<InferInput> {
    if !spec.dims.accepts(&[1]) {
        return Err(Error::invalid_arg(format!(
            "For BYTE datatype raw input '{}', the model '{model}' must have input shape [1], got {}",
            spec.name, spec.dims
        )));
    }
    let length = u32::try_from(body.len()).map_err(|_| {
        Error::invalid_arg(format!("a raw BYTES input of {} bytes is above 4 GiB", body.len()))
    })?;
    let mut data = Vec::with_capacity(body.len() + 4);
    data.extend_from_slice(&length.to_le_bytes());
    data.extend_from_slice(body.as_slice());
    let shape = batch.into_iter().chain([1]).collect();
    Ok(InferInput { name: spec.name.clone(), data_type: spec.data_type, shape, data: data.into() })
}

#[cfg(test)]
mod tests;
