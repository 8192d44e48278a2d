//! A `ModelInferRequest` as slices of its own bytes.
//!
//! Only what the conversion needs is found; strings, shapes and parameters are checked, tensors are not touched.

use smallvec::SmallVec;
use trireme_types::Shape;

use crate::grpc::wire::{self, Field, Fields, Malformed, Value};

/// Most inputs, outputs, parameters or raw tensors of one request; far above any model, low enough that looking for
/// duplicates stays cheap.
const MAX_ENTRIES: usize = 4096;
/// Most dimensions of one input.
const MAX_DIMENSIONS: usize = 1024;

/// Parameters by name in the order they came; a later one of the same name counts.
pub type WireParameters<'a> = SmallVec<[(&'a str, WireParameter<'a>); 4]>;

/// Message `ModelInferRequest`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WireRequest<'a> {
    pub model_name: &'a str,
    pub model_version: &'a str,
    pub id: &'a str,
    pub parameters: WireParameters<'a>,
    pub inputs: SmallVec<[WireInput<'a>; 2]>,
    pub outputs: SmallVec<[WireOutput<'a>; 2]>,
    /// `raw_input_contents`
    pub raw: SmallVec<[&'a [u8]; 2]>,
}

/// Message `InferInputTensor`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WireInput<'a> {
    pub name: &'a str,
    pub datatype: &'a str,
    pub shape: Shape,
    pub parameters: WireParameters<'a>,
    /// Encoded `contents`; protobuf allows a message in several parts. Empty if there are none.
    pub contents: SmallVec<[&'a [u8]; 1]>,
}

/// Message `InferRequestedOutputTensor`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WireOutput<'a> {
    pub name: &'a str,
    pub parameters: WireParameters<'a>,
}

/// Message `InferParameter`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum WireParameter<'a> {
    /// No choice of the oneof, or one of a later version of the protocol.
    #[default]
    Unset,
    Bool(bool),
    Int(i64),
    Text(&'a str),
    Double(f64),
    Uint(u64),
}

impl<'a> WireRequest<'a> {
    /// Finds the fields of an encoded request.
    ///
    /// # Errors
    /// The bytes are not a `ModelInferRequest`, or it has more parts than any request can need.
    pub fn parse(message: &'a [u8]) -> Result<Self, Malformed> {
        let mut request = Self::default();
        let mut fields = Fields::of(message);
        while let Some(field) = fields.next()? {
            match field.number {
                1 => request.model_name = field.text()?,
                2 => request.model_version = field.text()?,
                3 => request.id = field.text()?,
                4 => push_parameter(&mut request.parameters, field)?,
                5 => push(&mut request.inputs, parse_input(field.bytes()?)?, "inputs")?,
                6 => push(&mut request.outputs, parse_output(field.bytes()?)?, "outputs")?,
                7 => push(&mut request.raw, field.bytes()?, "raw_input_contents")?,
                _ => {}
            }
        }
        Ok(request)
    }
}

fn parse_input(message: &[u8]) -> Result<WireInput<'_>, Malformed> {
    let mut input = WireInput::default();
    let mut fields = Fields::of(message);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => input.name = field.text()?,
            2 => input.datatype = field.text()?,
            3 => push_dimensions(&mut input.shape, field)?,
            4 => push_parameter(&mut input.parameters, field)?,
            5 => push(&mut input.contents, field.bytes()?, "parts of contents")?,
            _ => {}
        }
    }
    Ok(input)
}

fn parse_output(message: &[u8]) -> Result<WireOutput<'_>, Malformed> {
    let mut output = WireOutput::default();
    let mut fields = Fields::of(message);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => output.name = field.text()?,
            2 => push_parameter(&mut output.parameters, field)?,
            _ => {}
        }
    }
    Ok(output)
}

fn push_dimensions(shape: &mut Shape, field: Field<'_>) -> Result<(), Malformed> {
    let mut push = |dimension: u64| {
        if shape.len() == MAX_DIMENSIONS {
            return Err(Malformed::TooMany { what: "dimensions in a shape", limit: MAX_DIMENSIONS });
        }
        shape.push(dimension.cast_signed());
        Ok(())
    };
    match field.value {
        Value::Varint(dimension) => push(dimension),
        Value::Bytes(mut packed) => {
            while !packed.is_empty() {
                push(wire::varint(&mut packed)?)?;
            }
            Ok(())
        }
        _ => Err(Malformed::WireType(field.number)),
    }
}

fn push_parameter<'a>(parameters: &mut WireParameters<'a>, entry: Field<'a>) -> Result<(), Malformed> {
    let mut name = "";
    let mut value = WireParameter::Unset;
    let mut fields = Fields::of(entry.bytes()?);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => name = field.text()?,
            2 => value = parse_parameter(field.bytes()?)?,
            _ => {}
        }
    }
    push(parameters, (name, value), "parameters")
}

fn parse_parameter(message: &[u8]) -> Result<WireParameter<'_>, Malformed> {
    let mut parameter = WireParameter::Unset;
    let mut fields = Fields::of(message);
    while let Some(field) = fields.next()? {
        parameter = match field.number {
            1 => WireParameter::Bool(field.varint()? != 0),
            2 => WireParameter::Int(field.varint()?.cast_signed()),
            3 => WireParameter::Text(field.text()?),
            4 => WireParameter::Double(field.double()?),
            5 => WireParameter::Uint(field.varint()?),
            _ => parameter,
        };
    }
    Ok(parameter)
}

fn push<A: smallvec::Array>(
    entries: &mut SmallVec<A>,
    entry: A::Item,
    what: &'static str,
) -> Result<(), Malformed> {
    if entries.len() == MAX_ENTRIES {
        return Err(Malformed::TooMany { what, limit: MAX_ENTRIES });
    }
    entries.push(entry);
    Ok(())
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use trireme_proto::inference::{
        InferParameter, InferTensorContents, ModelInferRequest,
        infer_parameter::ParameterChoice,
        model_infer_request::{InferInputTensor, InferRequestedOutputTensor},
    };

    use super::*;

    #[test]
    fn finds_what_prost_wrote() {
        let parameter = |choice| InferParameter { parameter_choice: Some(choice) };
        let sent = ModelInferRequest {
            model_name: "m".into(),
            model_version: "3".into(),
            id: "\u{e4}".into(),
            parameters: [
                ("a".to_owned(), parameter(ParameterChoice::BoolParam(true))),
                ("b".to_owned(), parameter(ParameterChoice::Int64Param(-1))),
                ("c".to_owned(), parameter(ParameterChoice::StringParam("x".into()))),
                ("d".to_owned(), parameter(ParameterChoice::DoubleParam(1.5))),
                ("e".to_owned(), parameter(ParameterChoice::Uint64Param(u64::MAX))),
                ("f".to_owned(), InferParameter::default()),
            ]
            .into(),
            inputs: vec![
                InferInputTensor {
                    name: "IN".into(),
                    datatype: "INT32".into(),
                    shape: vec![-1, 16],
                    parameters: [("p".to_owned(), parameter(ParameterChoice::Int64Param(7)))].into(),
                    contents: Some(InferTensorContents { int_contents: vec![1], ..Default::default() }),
                },
                InferInputTensor::default(),
            ],
            outputs: vec![InferRequestedOutputTensor {
                name: "OUT".into(),
                parameters: [("classification".to_owned(), parameter(ParameterChoice::Int64Param(2)))].into(),
            }],
            raw_input_contents: vec![b"abc".as_slice().into(), b"".as_slice().into()],
        };
        let bytes = sent.encode_to_vec();
        let request = WireRequest::parse(&bytes).expect("well formed");
        assert_eq!((request.model_name, request.model_version, request.id), ("m", "3", "\u{e4}"));
        assert_eq!(
            request.parameters.as_slice(),
            [
                ("a", WireParameter::Bool(true)),
                ("b", WireParameter::Int(-1)),
                ("c", WireParameter::Text("x")),
                ("d", WireParameter::Double(1.5)),
                ("e", WireParameter::Uint(u64::MAX)),
                ("f", WireParameter::Unset),
            ]
        );
        assert_eq!(request.inputs.len(), 2);
        let input = &request.inputs[0];
        assert_eq!((input.name, input.datatype, &*input.shape), ("IN", "INT32", &[-1, 16][..]));
        assert_eq!(input.parameters.as_slice(), [("p", WireParameter::Int(7))]);
        assert_eq!(input.contents.as_slice(), [&[0x12, 1, 1][..]]);
        assert_eq!(request.inputs[1], WireInput::default());
        assert_eq!(request.outputs[0].name, "OUT");
        assert_eq!(request.outputs[0].parameters.as_slice(), [("classification", WireParameter::Int(2))]);
        assert_eq!(request.raw.as_slice(), [&b"abc"[..], b""]);
    }

    #[test]
    fn counts_are_bounded() {
        let many = vec![[0x2a, 0]; MAX_ENTRIES + 1].concat();
        let limit = MAX_ENTRIES;
        assert_eq!(WireRequest::parse(&many), Err(Malformed::TooMany { what: "inputs", limit }));
        assert_eq!(WireRequest::parse(&many[..2 * MAX_ENTRIES]).expect("fits").inputs.len(), MAX_ENTRIES);
        let input = InferInputTensor { shape: vec![1; MAX_DIMENSIONS + 1], ..Default::default() };
        let wide = ModelInferRequest { inputs: vec![input], ..Default::default() }.encode_to_vec();
        assert!(matches!(WireRequest::parse(&wide), Err(Malformed::TooMany { limit: MAX_DIMENSIONS, .. })));
    }
}
