//! The body of a generate request: which members are inputs, and what shape they have.

use std::time::Instant;

use trireme_core::ModelVersion;
use trireme_types::{Error, InferInput, InferRequest, Result, Shape, TensorSpec};

use crate::http::infer::{Place, custom_value, read_data};
use crate::json::{Kind, Reader};

/// Members of an object that are taken as parameters.
const MAX_PARAMETERS: usize = 10_000;

/// Reads the body of a request for a model.
///
/// # Errors
/// `INVALID_ARG`: no JSON object, a value that does not fit its input or is no parameter.
pub(super) fn read(
    model: &ModelVersion,
    body: &[u8],
    limit: usize,
    received: Instant,
) -> Result<InferRequest> {
    let mut request = InferRequest::received_at(received);
    let mut reader = Reader::new(body);
    if reader.kind()? != Kind::Object {
        return Err(Error::invalid_arg(
            "the body of a generate request must be a JSON object whose members are inputs and parameters",
        ));
    }
    members(&mut reader, model, &mut request, limit, true)?;
    reader.finish()?;
    Ok(request)
}

fn members(
    reader: &mut Reader<'_>,
    model: &ModelVersion,
    request: &mut InferRequest,
    limit: usize,
    is_top: bool,
) -> Result<()> {
    reader.object(|reader, key| {
        let spec = model.inputs().iter().find(|spec| *spec.name == *key);
        if is_top && key == "parameters" && reader.kind()? == Kind::Object {
            if spec.is_some() {
                return Err(Error::invalid_arg(
                    "Keyword 'parameters' for nested schema also given as input tensor name",
                ));
            }
            return members(reader, model, request, limit, false);
        }
        if is_top && key == "id" && reader.kind()? == Kind::String {
            let start = reader.offset();
            request.id = reader.string()?.into_owned();
            reader.rewind(start);
        }
        let Some(spec) = spec else {
            let value = custom_value(reader, &key)?;
            if request.parameters.len() >= MAX_PARAMETERS {
                return Err(Error::invalid_arg(format!(
                    "a request may have {MAX_PARAMETERS} parameters at most"
                )));
            }
            // Of a repeated member the first counts, as everywhere in a body.
            if request.parameters.get(&key).is_none() {
                request.parameters.insert(key, value);
            }
            return Ok(());
        };
        if request.input(&key).is_some() {
            return reader.skip_value();
        }
        let index = request.inputs.len();
        let place = Place { index, name: &key, max_bytes: limit };
        let is_batching = model.max_batch_size() > 0;
        let (shape, data) = if reader.kind()? == Kind::Array {
            let start = reader.offset();
            let mut count = 0;
            reader.array(|reader, _| {
                count += 1;
                match reader.kind()? {
                    Kind::Array | Kind::Object => Err(no_shape(&key)),
                    _ => reader.skip_value(),
                }
            })?;
            reader.rewind(start);
            let shape = shape_of(spec, is_batching, count).ok_or_else(|| no_shape(&key))?;
            let data = read_data(reader, spec.data_type, &shape, place)?;
            (shape, data)
        } else {
            // A value that stands alone is an array of one.
            reader.skip_space();
            let start = reader.offset();
            reader.skip_value()?;
            let text = [b"[", reader.since(start), b"]"].concat();
            let shape = shape_of(spec, is_batching, 1).ok_or_else(|| no_shape(&key))?;
            let data = read_data(&mut Reader::new(&text), spec.data_type, &shape, place)?;
            (shape, data)
        };
        request.inputs.push(InferInput { name: spec.name.clone(), data_type: spec.data_type, shape, data });
        Ok(())
    })
}

/// The shape that `count` elements have: fixed dimensions are kept, the innermost open one takes the rest and the
/// other open ones are 1, the batch dimension among them. `None` if the elements do not divide so.
fn shape_of(spec: &TensorSpec, is_batching: bool, count: usize) -> Option<Shape> {
    let dims: Vec<i64> = is_batching.then_some(-1).into_iter().chain(spec.dims.iter().copied()).collect();
    let mut left = i64::try_from(count).ok()?;
    for dim in dims.iter().filter(|dim| **dim > 0) {
        if left % dim != 0 {
            return None;
        }
        left /= dim;
    }
    let mut shape = dims;
    for dim in shape.iter_mut().rev().filter(|dim| **dim < 0) {
        *dim = std::mem::replace(&mut left, 1);
    }
    (left == 1).then(|| shape.into_iter().collect())
}

#[cold]
fn no_shape(input: &str) -> Error {
    Error::invalid_arg(format!(
        "The schema can not convert input '{input}' to tensor with proper shape: a value, or a flat array whose length \
         fits the model's dimensions, is expected"
    ))
}

#[cfg(test)]
mod tests {
    use trireme_types::{DataType, ParameterValue};

    use super::*;

    fn spec(dims: &[i64]) -> TensorSpec {
        TensorSpec::new("X", DataType::Int32, Shape::new(dims))
    }

    #[test]
    fn elements_are_spread_over_the_dimensions() {
        for (dims, batching, count, expected) in [
            (&[16][..], true, 16, Some(&[1, 16][..])),
            (&[16], true, 48, Some(&[3, 16])),
            (&[16], true, 15, None),
            (&[16], false, 16, Some(&[16])),
            (&[16], false, 32, None),
            (&[-1], true, 5, Some(&[1, 5])),
            (&[-1, 2, -1], false, 6, Some(&[1, 2, 3])),
            (&[1], true, 1, Some(&[1, 1])),
            (&[-1], false, 0, Some(&[0])),
            (&[], false, 1, Some(&[])),
        ] {
            let shape = shape_of(&spec(dims), batching, count);
            assert_eq!(shape.as_deref(), expected, "{dims:?} {batching} {count}");
        }
    }

    #[test]
    fn parameters_keep_their_kind() {
        let mut reader = Reader::new(b"\"hello\"");
        let value = custom_value(&mut reader, "p").ok();
        assert_eq!(value, Some(ParameterValue::String("hello".into())));
    }
}
