//! The JSON of an inference request, read in one walk.
//!
//! The data of an input is read into its tensor at once if `datatype` and `shape` came before it, as all known clients
//! send it; otherwise the walk comes back to it at the end of the input. Members that nobody knows are skipped.

use std::borrow::Cow;

use smallvec::SmallVec;
use trireme_types::{
    CorrelationId, DataType, Error, ParameterValue, Parameters, Result, Sequence, Shape, TensorBuffer,
};

use super::data::{self, Place};
use crate::json::{Kind, Reader};

/// Inputs, outputs and parameters that a request may list: far above any model, low enough to compare each with each.
const MAX_LISTED: usize = 4096;

/// Dimensions that a shape may have.
const MAX_RANK: usize = 64;

/// Everything that the JSON of a request says.
#[derive(Debug, Default)]
pub struct InferHead<'a> {
    /// Empty if the request has none.
    pub id: Cow<'a, str>,
    pub inputs: SmallVec<[HeadInput<'a>; 2]>,
    pub outputs: SmallVec<[HeadOutput<'a>; 2]>,
    pub sequence: Sequence,
    pub priority: u64,
    pub timeout_us: u64,
    /// Outputs that are not listed come back as binary data.
    pub binary_data_output: bool,
    /// Parameters without a meaning to the server.
    pub parameters: Parameters,
}

/// One member of `inputs`.
#[derive(Debug)]
pub struct HeadInput<'a> {
    pub name: Cow<'a, str>,
    pub data_type: DataType,
    pub shape: Shape,
    pub source: Source<'a>,
}

/// Where the bytes of an input are.
#[derive(Debug)]
pub enum Source<'a> {
    /// In the JSON itself; here they are.
    Json(TensorBuffer),
    /// Behind the JSON: so many bytes, in the order of `inputs`.
    Binary(u64),
    /// In a registered region of shared memory.
    SharedMemory(SharedMemory<'a>),
}

/// Part of a shared memory region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedMemory<'a> {
    pub region: Cow<'a, str>,
    pub offset: u64,
    pub byte_size: u64,
}

/// One member of `outputs`.
#[derive(Debug, Default)]
pub struct HeadOutput<'a> {
    pub name: Cow<'a, str>,
    /// Comes back as binary data rather than JSON.
    pub binary_data: bool,
    /// How many classes to answer with instead of the values; 0 for the values.
    pub classification: u64,
    pub shared_memory: Option<SharedMemory<'a>>,
}

/// Reads the JSON of an inference request.
///
/// `max_tensor_bytes` limits each tensor that is written in JSON (`--http-max-input-size`).
///
/// # Errors
/// `INVALID_ARG` with the place in the text; never anything worse, whatever the bytes are.
pub fn parse_infer_head(text: &[u8], max_tensor_bytes: usize) -> Result<InferHead<'_>> {
    let mut reader = Reader::new(text);
    let mut head = InferHead::default();
    let mut seen = Seen::default();
    if reader.kind()? != Kind::Object {
        reader.skip_value()?;
        reader.finish()?;
        return Err(absent("inputs", &"inputs", &reader));
    }
    reader.object(|reader, key| match &*key {
        "id" if !seen.id => {
            seen.id = true;
            head.id = string(reader, "id", &"id")?;
            Ok(())
        }
        "inputs" if !seen.inputs => {
            seen.inputs = true;
            require(reader, Kind::Array, "inputs", &"inputs")?;
            reader.array(|reader, index| {
                let input = input(reader, Place { index, name: "", max_bytes: max_tensor_bytes })?;
                head.inputs.push(input);
                limit("inputs", head.inputs.len())
            })
        }
        "outputs" if !seen.outputs => {
            seen.outputs = true;
            require(reader, Kind::Array, "outputs", &"outputs")?;
            reader.array(|reader, index| {
                head.outputs.push(output(reader, index)?);
                limit("outputs", head.outputs.len())
            })
        }
        "parameters" if !seen.parameters => {
            seen.parameters = true;
            parameters(reader, &mut head)
        }
        _ => reader.skip_value(),
    })?;
    reader.finish()?;
    if seen.inputs { Ok(head) } else { Err(absent("inputs", &"inputs", &reader)) }
}

/// Members that were there; of a repeated one the first counts.
#[derive(Default)]
struct Seen {
    id: bool,
    inputs: bool,
    outputs: bool,
    parameters: bool,
}

/// What is known of an input before its end.
#[derive(Default)]
struct Draft<'a> {
    name: Option<Cow<'a, str>>,
    data_type: Option<std::result::Result<DataType, ()>>,
    shape: Option<Shape>,
    data: Option<TensorBuffer>,
    /// Offset of `data` that came too early to be read.
    early_data: Option<usize>,
    parameters: Option<InputParameters<'a>>,
}

#[derive(Default)]
struct InputParameters<'a> {
    binary_data_size: Option<u64>,
    region: Option<Cow<'a, str>>,
    offset: Option<u64>,
    byte_size: Option<u64>,
}

fn input<'a>(reader: &mut Reader<'a>, place: Place<'_>) -> Result<HeadInput<'a>> {
    let index = place.index;
    let mut draft = Draft::default();
    if reader.kind()? == Kind::Object {
        reader.object(|reader, key| match &*key {
            "name" if draft.name.is_none() => {
                draft.name = Some(string(reader, "name", &format_args!("inputs[{index}].name"))?);
                Ok(())
            }
            "datatype" if draft.data_type.is_none() => {
                let name = string(reader, "datatype", &format_args!("inputs[{index}].datatype"))?;
                draft.data_type = Some(name.parse().map_err(|_| ()));
                Ok(())
            }
            "shape" if draft.shape.is_none() => {
                draft.shape = Some(shape(reader, index)?);
                Ok(())
            }
            "data" if draft.data.is_none() && draft.early_data.is_none() => {
                match (&draft.data_type, &draft.shape) {
                    (Some(Ok(data_type)), Some(shape)) => {
                        let name = draft.name.as_deref().unwrap_or_default();
                        draft.data = Some(data::read(reader, *data_type, shape, Place { name, ..place })?);
                        Ok(())
                    }
                    _ => {
                        draft.early_data = Some(reader.offset());
                        reader.skip_value()
                    }
                }
            }
            "parameters" if draft.parameters.is_none() => {
                draft.parameters = Some(input_parameters(reader, index)?);
                Ok(())
            }
            _ => reader.skip_value(),
        })?;
    } else {
        reader.skip_value()?;
    }
    finish_input(reader, draft, place)
}

/// Checks that an input is whole. The order of the checks is Triton's.
fn finish_input<'a>(reader: &mut Reader<'a>, draft: Draft<'a>, place: Place<'_>) -> Result<HeadInput<'a>> {
    let index = place.index;
    let given = draft.parameters.unwrap_or_default();
    let has_data = draft.data.is_some() || draft.early_data.is_some();
    if u8::from(has_data) + u8::from(given.binary_data_size.is_some()) + u8::from(given.region.is_some()) != 1
    {
        return Err(sources(has_data, given.binary_data_size.is_some(), given.region.is_some()));
    }
    let lost = |member: &str| absent(member, &format_args!("inputs[{index}].{member}"), reader);
    let name = draft.name.ok_or_else(|| lost("name"))?;
    let shape = draft.shape.ok_or_else(|| lost("shape"))?;
    let data_type = draft.data_type.ok_or_else(|| lost("datatype"))?;
    let data_type =
        data_type.map_err(|()| Error::invalid_arg(format!("invalid datatype for input {name}")))?;
    let place = Place { name: &name, ..place };
    let source = match (draft.data, draft.early_data, given.region, given.binary_data_size) {
        (Some(data), ..) => Source::Json(data),
        (None, Some(offset), ..) => {
            let end = reader.offset();
            reader.rewind(offset);
            let data = data::read(reader, data_type, &shape, place)?;
            reader.rewind(end);
            Source::Json(data)
        }
        (None, None, Some(region), _) => Source::SharedMemory(SharedMemory {
            region,
            offset: given.offset.unwrap_or_default(),
            byte_size: given.byte_size.unwrap_or_default(),
        }),
        (None, None, None, size) => Source::Binary(size.unwrap_or_default()),
    };
    Ok(HeadInput { name, data_type, shape, source })
}

#[cold]
fn sources(data: bool, binary: bool, region: bool) -> Error {
    let mut set = String::new();
    for (given, name) in
        [(data, " 'data'"), (binary, " 'binary_data_size'"), (region, " 'shared_memory_region'")]
    {
        if given {
            set.push_str(name);
        }
    }
    let but = if set.is_empty() { "no field is set".to_owned() } else { format!("set{set}") };
    Error::invalid_arg(format!(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', \
         'shared_memory_region' in 'parameters'. But {but}"
    ))
}

fn shape(reader: &mut Reader<'_>, input: usize) -> Result<Shape> {
    let mut dims = Shape::default();
    require(reader, Kind::Array, "shape", &format_args!("inputs[{input}].shape"))?;
    reader.array(|reader, index| {
        let dim = unsigned(reader, "parse 'shape'", &format_args!("inputs[{input}].shape[{index}]"))?;
        let dim = i64::try_from(dim).map_err(|_| {
            Error::invalid_arg(format!(
                "Unable to parse 'shape': {dim} at inputs[{input}].shape[{index}] is too large"
            ))
        })?;
        dims.push(dim);
        if dims.len() <= MAX_RANK {
            return Ok(());
        }
        Err(Error::invalid_arg(format!("inputs[{input}].shape has more than {MAX_RANK} dimensions")))
    })?;
    Ok(dims)
}

fn input_parameters<'a>(reader: &mut Reader<'a>, index: usize) -> Result<InputParameters<'a>> {
    let mut given = InputParameters::default();
    if reader.kind()? != Kind::Object {
        reader.skip_value()?;
        return Ok(given);
    }
    reader.object(|reader, key| {
        let path = format_args!("inputs[{index}].parameters.{key}");
        match &*key {
            "binary_data_size" if given.binary_data_size.is_none() => {
                given.binary_data_size = Some(unsigned(reader, "parse 'binary_data_size'", &path)?);
            }
            "shared_memory_region" if given.region.is_none() => {
                given.region = Some(string(reader, "shared_memory_region", &path)?);
            }
            "shared_memory_offset" if given.offset.is_none() => {
                given.offset = Some(unsigned(reader, "parse 'shared_memory_offset'", &path)?);
            }
            "shared_memory_byte_size" if given.byte_size.is_none() => {
                given.byte_size = Some(unsigned(reader, "parse 'shared_memory_byte_size'", &path)?);
            }
            _ => reader.skip_value()?,
        }
        Ok(())
    })?;
    Ok(given)
}

fn output<'a>(reader: &mut Reader<'a>, index: usize) -> Result<HeadOutput<'a>> {
    let (mut name, mut parameters_seen) = (None, false);
    let mut binary_data = None;
    let mut output = HeadOutput::default();
    let mut shared = InputParameters::default();
    require(reader, Kind::Object, "outputs", &format_args!("outputs[{index}]"))?;
    reader.object(|reader, key| match &*key {
        "name" if name.is_none() => {
            name = Some(string(reader, "name", &format_args!("outputs[{index}].name"))?);
            Ok(())
        }
        "parameters" if !parameters_seen && reader.kind()? == Kind::Object => {
            parameters_seen = true;
            reader.object(|reader, key| {
                let path = format_args!("outputs[{index}].parameters.{key}");
                match &*key {
                    "binary_data" if binary_data.is_none() => {
                        binary_data = Some(boolean(reader, "binary_data", &path)?);
                    }
                    "classification" => {
                        output.classification = unsigned(reader, "set 'classification'", &path)?;
                    }
                    "shared_memory_region" if shared.region.is_none() => {
                        shared.region = Some(string(reader, "shared_memory_region", &path)?);
                    }
                    "shared_memory_offset" => {
                        shared.offset = Some(unsigned(reader, "parse 'shared_memory_offset'", &path)?);
                    }
                    "shared_memory_byte_size" => {
                        shared.byte_size = Some(unsigned(reader, "parse 'shared_memory_byte_size'", &path)?);
                    }
                    _ => reader.skip_value()?,
                }
                Ok(())
            })
        }
        _ => reader.skip_value(),
    })?;
    output.name = name.ok_or_else(|| absent("name", &format_args!("outputs[{index}].name"), reader))?;
    output.binary_data = binary_data.unwrap_or(false);
    if let Some(region) = shared.region {
        let both = |other: &str| format!("Output can't set both 'shared_memory_region' and '{other}'");
        if output.classification > 0 {
            return Err(Error::invalid_arg(both("classification")));
        }
        if output.binary_data {
            return Err(Error::invalid_arg(both("binary_data")));
        }
        output.shared_memory = Some(SharedMemory {
            region,
            offset: shared.offset.unwrap_or_default(),
            byte_size: shared.byte_size.unwrap_or_default(),
        });
    }
    Ok(output)
}

/// The request's own parameters: those with a meaning to the server, and the rest for the backend.
fn parameters(reader: &mut Reader<'_>, head: &mut InferHead<'_>) -> Result<()> {
    if reader.kind()? != Kind::Object {
        return Err(Error::invalid_arg(format!(
            "failed to get request params.: attempt to get members for non-object at byte {}",
            reader.offset()
        )));
    }
    let mut sequence = Sequence::default();
    reader.object(|reader, key| {
        let path = format_args!("parameters.{key}");
        match &*key {
            "sequence_id" => sequence.id = correlation_id(reader)?,
            "sequence_start" => sequence.start = boolean(reader, "sequence_start", &path)?,
            "sequence_end" => sequence.end = boolean(reader, "sequence_end", &path)?,
            "priority" => head.priority = unsigned(reader, "parse 'priority'", &path)?,
            "timeout" => head.timeout_us = unsigned(reader, "parse 'timeout'", &path)?,
            "binary_data_output" => head.binary_data_output = boolean(reader, "binary_data_output", &path)?,
            _ => {
                let value = custom_parameter(reader, &key)?;
                if head.parameters.get(&key).is_none() {
                    head.parameters.insert(key, value);
                    limit("parameters", head.parameters.len())?;
                }
            }
        }
        Ok(())
    })?;
    if sequence.id != CorrelationId::None {
        head.sequence = sequence;
    }
    Ok(())
}

fn correlation_id(reader: &mut Reader<'_>) -> Result<CorrelationId> {
    if reader.kind()? == Kind::String {
        let id = reader.string()?;
        return Ok(if id.is_empty() { CorrelationId::None } else { CorrelationId::Text(id.into_owned()) });
    }
    let id = unsigned(reader, "parse 'sequence_id'", &"parameters.sequence_id")?;
    Ok(if id == 0 { CorrelationId::None } else { CorrelationId::Number(id) })
}

fn custom_parameter(reader: &mut Reader<'_>, key: &str) -> Result<ParameterValue> {
    if key.starts_with("triton_") {
        return Err(Error::invalid_arg(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
        ));
    }
    custom_value(reader, key)
}

/// Reads the value of a parameter that has no meaning to the server.
///
/// # Errors
/// `INVALID_ARG` for anything but a string, a number or a boolean.
pub(crate) fn custom_value(reader: &mut Reader<'_>, key: &str) -> Result<ParameterValue> {
    match reader.kind()? {
        Kind::String => Ok(ParameterValue::String(reader.string()?.into_owned())),
        Kind::Bool => Ok(ParameterValue::Bool(reader.boolean()?)),
        Kind::Number => {
            let number = reader.decimal()?;
            let whole = number.magnitude().map(|magnitude| {
                let signed = i128::from(magnitude) * if number.negative { -1 } else { 1 };
                (i64::try_from(signed).ok(), (!number.negative).then_some(magnitude))
            });
            Ok(match whole {
                Some((Some(value), _)) => ParameterValue::Int(value),
                Some((None, Some(value))) => ParameterValue::Uint(value),
                _ => ParameterValue::Double(number.to_f64()),
            })
        }
        Kind::Object | Kind::Array | Kind::Null => Err(Error::invalid_arg(format!(
            "parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
        ))),
    }
}

fn require(reader: &mut Reader<'_>, kind: Kind, member: &str, path: &dyn std::fmt::Display) -> Result<()> {
    if reader.kind()? == kind {
        return Ok(());
    }
    let what = if kind == Kind::Array { "non-array as array" } else { "non-object as object" };
    Err(Error::invalid_arg(format!(
        "Unable to parse '{member}': attempt to access JSON {what} at {path}, byte {}",
        reader.offset()
    )))
}

fn string<'a>(reader: &mut Reader<'a>, member: &str, path: &dyn std::fmt::Display) -> Result<Cow<'a, str>> {
    if reader.kind()? == Kind::String {
        return reader.string();
    }
    Err(Error::invalid_arg(format!(
        "Unable to parse '{member}': attempt to access JSON non-string as string at {path}, byte {}",
        reader.offset()
    )))
}

fn boolean(reader: &mut Reader<'_>, member: &str, path: &dyn std::fmt::Display) -> Result<bool> {
    if reader.kind()? == Kind::Bool {
        return reader.boolean();
    }
    Err(Error::invalid_arg(format!(
        "Unable to parse '{member}': attempt to access JSON non-boolean as boolean at {path}, byte {}",
        reader.offset()
    )))
}

fn unsigned(reader: &mut Reader<'_>, what: &str, path: &dyn std::fmt::Display) -> Result<u64> {
    let kind = reader.kind()?;
    let at = reader.offset();
    if kind == Kind::Number {
        let number = reader.decimal()?;
        if let Some(value) = number.magnitude().filter(|&value| !number.negative || value == 0) {
            return Ok(value);
        }
    }
    Err(Error::invalid_arg(format!(
        "Unable to {what}: attempt to access JSON non-unsigned-integer as unsigned-integer at {path}, byte {at}"
    )))
}

fn limit(what: &str, count: usize) -> Result<()> {
    if count <= MAX_LISTED {
        return Ok(());
    }
    Err(Error::invalid_arg(format!("a request may list at most {MAX_LISTED} {what}")))
}

#[cold]
fn absent(member: &str, path: &dyn std::fmt::Display, reader: &Reader<'_>) -> Error {
    Error::invalid_arg(format!(
        "Unable to parse '{member}': attempt to access non-existing object member '{member}' at {path}, byte {}",
        reader.offset()
    ))
}

#[cfg(test)]
mod tests;
