//! Responses written as `ModelInferResponse` and `ModelStreamInferResponse`, ready for the network.
//!
//! Every length is known before the first byte is written, so there is one allocation; large tensors are not copied
//! but follow as pieces of their own. Output data is always in `raw_output_contents`, one entry an output.

use bytes::{BufMut, BytesMut};
use smallvec::SmallVec;
use trireme_proto::inference::{
    InferParameter, ModelInferResponse, ModelStreamInferResponse, infer_parameter::ParameterChoice,
};
use trireme_types::{Error, InferResponse, OutputTensor, ParameterValue, Result};

use crate::grpc::message::{Framed, MAX_MESSAGE_LEN, PREFIX_LEN, prefix};
use crate::grpc::wire::varint_len;

/// Tensors up to this size are copied into the head of the message; a frame of its own costs more.
const MAX_COPIED_LEN: usize = 16 * 1024;

const FINAL_RESPONSE: &str = "triton_final_response";

/// What a response says of itself.
#[derive(Clone, Copy, Debug)]
pub(in crate::grpc) struct Tags<'a> {
    pub(in crate::grpc) model: &'a str,
    pub(in crate::grpc) version: &'a str,
    /// `triton_final_response`, on streams only.
    pub(in crate::grpc) final_response: Option<bool>,
}

/// Message `ModelInferResponse`.
///
/// # Errors
/// `INVALID_ARG` if the message would be longer than gRPC allows.
pub(in crate::grpc) fn response(tags: Tags<'_>, reply: InferResponse) -> Result<Framed> {
    let len = response_len(tags, &reply);
    let mut pieces = Pieces::new(len, len, &reply)?;
    pieces.put_response(tags, reply);
    Ok(pieces.finish())
}

/// Message `ModelStreamInferResponse` with a response.
///
/// # Errors
/// As [`response`].
pub(in crate::grpc) fn stream_response(tags: Tags<'_>, reply: InferResponse) -> Result<Framed> {
    let len = response_len(tags, &reply);
    let mut pieces = Pieces::new(1 + varint_len(len as u64) + len, len, &reply)?;
    pieces.put_len(2, len);
    pieces.put_response(tags, reply);
    Ok(pieces.finish())
}

/// Message `ModelStreamInferResponse` with the error of one request.
///
/// # Errors
/// As [`response`].
pub(in crate::grpc) fn stream_error(message: &str, id: &str, final_response: Option<bool>) -> Result<Framed> {
    let parameter = |value| InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(value)) };
    Framed::of(&ModelStreamInferResponse {
        error_message: message.to_owned(),
        infer_response: Some(ModelInferResponse {
            id: id.to_owned(),
            parameters: final_response
                .map(|last| (FINAL_RESPONSE.to_owned(), parameter(last)))
                .into_iter()
                .collect(),
            ..Default::default()
        }),
    })
}

fn response_len(tags: Tags<'_>, reply: &InferResponse) -> usize {
    let parameters: usize =
        reply.parameters.iter().map(|(name, value)| field_len(entry_len(name, value))).sum();
    let last = tags
        .final_response
        .map_or(0, |last| field_len(entry_len(FINAL_RESPONSE, &ParameterValue::Bool(last))));
    let outputs: usize = reply.outputs.iter().map(|output| field_len(output_len(output))).sum();
    let data: usize = reply.outputs.iter().map(|output| field_len(output.data.len())).sum();
    text_len(tags.model) + text_len(tags.version) + text_len(&reply.id) + parameters + last + outputs + data
}

/// Bytes of a length-delimited field, its key included; every field number here is below 16.
fn field_len(len: usize) -> usize {
    1 + varint_len(len as u64) + len
}

fn text_len(text: &str) -> usize {
    if text.is_empty() { 0 } else { field_len(text.len()) }
}

fn entry_len(name: &str, value: &ParameterValue) -> usize {
    text_len(name) + field_len(value_len(value))
}

fn value_len(value: &ParameterValue) -> usize {
    match value {
        ParameterValue::Bool(_) => 2,
        ParameterValue::Int(value) => 1 + varint_len(value.cast_unsigned()),
        ParameterValue::Uint(value) => 1 + varint_len(*value),
        ParameterValue::Double(_) => 9,
        ParameterValue::String(text) => field_len(text.len()),
    }
}

fn output_len(output: &OutputTensor) -> usize {
    let shape = if output.shape.is_empty() { 0 } else { field_len(shape_len(output)) };
    text_len(&output.name) + text_len(output.data_type.wire_name()) + shape
}

fn shape_len(output: &OutputTensor) -> usize {
    output.shape.iter().map(|dim| varint_len(dim.cast_unsigned())).sum()
}

/// A message while it is written: `open` takes what is copied and becomes a piece when a large tensor follows.
struct Pieces {
    done: SmallVec<[bytes::Bytes; 2]>,
    open: BytesMut,
}

impl Pieces {
    /// `len` is the whole message, `inner` the response in it.
    fn new(len: usize, inner: usize, reply: &InferResponse) -> Result<Self> {
        if len > MAX_MESSAGE_LEN {
            return Err(Error::invalid_arg(format!(
                "Response has byte size {inner} which exceeds gRPC's byte size limit {MAX_MESSAGE_LEN}."
            )));
        }
        let apart: usize =
            reply.outputs.iter().map(|o| o.data.len()).filter(|&len| len > MAX_COPIED_LEN).sum();
        let mut open = BytesMut::with_capacity(PREFIX_LEN + len - apart);
        open.put_slice(&prefix(false, len));
        Ok(Self { done: SmallVec::new(), open })
    }

    fn put_response(&mut self, tags: Tags<'_>, reply: InferResponse) {
        self.put_text(1, tags.model);
        self.put_text(2, tags.version);
        self.put_text(3, &reply.id);
        for (name, value) in reply.parameters.iter() {
            self.put_entry(name, value);
        }
        if let Some(last) = tags.final_response {
            self.put_entry(FINAL_RESPONSE, &ParameterValue::Bool(last));
        }
        for output in &reply.outputs {
            self.put_len(5, output_len(output));
            self.put_text(1, &output.name);
            self.put_text(2, output.data_type.wire_name());
            if !output.shape.is_empty() {
                self.put_len(3, shape_len(output));
                for dim in output.shape.iter() {
                    self.put_varint(dim.cast_unsigned());
                }
            }
        }
        for output in reply.outputs {
            self.put_len(6, output.data.len());
            if output.data.len() <= MAX_COPIED_LEN {
                self.open.put_slice(output.data.as_slice());
            } else {
                self.done.push(self.open.split().freeze());
                self.done.push(output.data.into_bytes());
            }
        }
    }

    fn finish(mut self) -> Framed {
        if !self.open.is_empty() {
            self.done.push(self.open.freeze());
        }
        Framed::from_pieces(self.done)
    }

    fn put_entry(&mut self, name: &str, value: &ParameterValue) {
        self.put_len(4, entry_len(name, value));
        self.put_text(1, name);
        self.put_len(2, value_len(value));
        match value {
            ParameterValue::Bool(value) => self.open.put_slice(&[0x08, u8::from(*value)]),
            ParameterValue::Int(value) => {
                self.open.put_u8(0x10);
                self.put_varint(value.cast_unsigned());
            }
            ParameterValue::String(text) => {
                self.put_len(3, text.len());
                self.open.put_slice(text.as_bytes());
            }
            ParameterValue::Double(value) => {
                self.open.put_u8(0x21);
                self.open.put_f64_le(*value);
            }
            ParameterValue::Uint(value) => {
                self.open.put_u8(0x28);
                self.put_varint(*value);
            }
        }
    }

    fn put_text(&mut self, number: u8, text: &str) {
        if !text.is_empty() {
            self.put_len(number, text.len());
            self.open.put_slice(text.as_bytes());
        }
    }

    /// Key and length of a length-delimited field.
    fn put_len(&mut self, number: u8, len: usize) {
        self.open.put_u8(number << 3 | 2);
        self.put_varint(len as u64);
    }

    fn put_varint(&mut self, value: u64) {
        prost::encoding::encode_varint(value, &mut self.open);
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use trireme_proto::inference::model_infer_response::InferOutputTensor;
    use trireme_types::{DataType, Parameters, Shape, TensorBuffer};

    use super::*;

    fn reply(sizes: &[usize]) -> InferResponse {
        let mut parameters = Parameters::default();
        for (name, value) in [
            ("b", ParameterValue::Bool(false)),
            ("i", ParameterValue::Int(-1)),
            ("u", ParameterValue::Uint(u64::MAX)),
            ("d", ParameterValue::Double(1.5)),
            ("s", ParameterValue::String("text".into())),
            ("e", ParameterValue::String(String::new())),
        ] {
            parameters.insert(name, value);
        }
        let output = |(i, &size): (usize, &usize)| OutputTensor {
            name: format!("OUT{i}").into(),
            data_type: DataType::Uint8,
            shape: Shape::new(&[1, i64::try_from(size).expect("small")]),
            data: TensorBuffer::from(vec![u8::try_from(i).expect("small"); size]),
        };
        InferResponse { id: "id".into(), outputs: sizes.iter().enumerate().map(output).collect(), parameters }
    }

    fn expected(sizes: &[usize]) -> ModelInferResponse {
        let parameter = |choice| InferParameter { parameter_choice: Some(choice) };
        ModelInferResponse {
            model_name: "m".into(),
            model_version: "2".into(),
            id: "id".into(),
            parameters: [
                ("b", ParameterChoice::BoolParam(false)),
                ("i", ParameterChoice::Int64Param(-1)),
                ("u", ParameterChoice::Uint64Param(u64::MAX)),
                ("d", ParameterChoice::DoubleParam(1.5)),
                ("s", ParameterChoice::StringParam("text".into())),
                ("e", ParameterChoice::StringParam(String::new())),
            ]
            .map(|(name, choice)| (name.to_owned(), parameter(choice)))
            .into(),
            outputs: (0..)
                .zip(sizes)
                .map(|(i, &size)| InferOutputTensor {
                    name: format!("OUT{i}"),
                    datatype: "UINT8".into(),
                    shape: vec![1, i64::try_from(size).expect("small")],
                    ..Default::default()
                })
                .collect(),
            raw_output_contents: (0..).zip(sizes).map(|(i, &size)| vec![i; size].into()).collect(),
        }
    }

    fn joined(framed: Framed) -> Vec<u8> {
        let bytes = framed.into_pieces().concat();
        let (prefix, message) = bytes.split_at(PREFIX_LEN);
        assert_eq!(prefix, super::prefix(false, message.len()));
        message.to_vec()
    }

    const TAGS: Tags<'_> = Tags { model: "m", version: "2", final_response: None };

    #[test]
    fn prost_reads_what_was_written() {
        for sizes in [&[][..], &[0], &[3, 200], &[MAX_COPIED_LEN, 1], &[MAX_COPIED_LEN + 1, 5, 1 << 20]] {
            let bytes = joined(response(TAGS, reply(sizes)).expect("fits"));
            assert_eq!(ModelInferResponse::decode(&bytes[..]).expect("valid"), expected(sizes));

            for last in [false, true] {
                let tags = Tags { final_response: Some(last), ..TAGS };
                let bytes = joined(stream_response(tags, reply(sizes)).expect("fits"));
                let mut inner = expected(sizes);
                let choice = Some(ParameterChoice::BoolParam(last));
                inner.parameters.insert(FINAL_RESPONSE.into(), InferParameter { parameter_choice: choice });
                let expected =
                    ModelStreamInferResponse { error_message: String::new(), infer_response: Some(inner) };
                assert_eq!(ModelStreamInferResponse::decode(&bytes[..]).expect("valid"), expected);
            }
        }
    }

    #[test]
    fn large_tensors_are_not_copied() {
        let reply = reply(&[1 << 20, 10]);
        let address = reply.outputs[0].data.as_slice().as_ptr();
        let pieces = response(TAGS, reply).expect("fits").into_pieces();
        assert_eq!(pieces.len(), 3);
        assert_eq!(pieces[1].as_ptr(), address);
    }

    #[test]
    fn errors_name_their_request() {
        let bytes = joined(stream_error("no", "r1", None).expect("fits"));
        let message = ModelStreamInferResponse::decode(&bytes[..]).expect("valid");
        assert_eq!(message.error_message, "no");
        let inner = message.infer_response.expect("a response");
        assert_eq!(inner, ModelInferResponse { id: "r1".into(), ..Default::default() });
    }
}
