//! A response as JSON, with the outputs that were asked for as binary data behind it.
//!
//! FP32 is printed as the shortest text that reads back as the same FP32 (`0.1`), where Triton prints the double next
//! to it (`0.10000000149011612`): half the bytes, the same tensor. FP16 and BF16 are printed as the FP32 of the same
//! value; Triton refuses them. Large tensors leave as the buffers they are in.

use bytes::Bytes;
use half::{bf16, f16};
use smallvec::{SmallVec, smallvec};
use trireme_types::{DataType, Error, InferResponse, OutputTensor, ParameterValue, Result, TensorBuffer};

use crate::json::Writer;

/// Binary data up to this size is copied behind the JSON, so that the answer is one piece.
const COPY_LIMIT: usize = 16 << 10;

/// What leaves as the body of an answer.
#[derive(Debug)]
pub struct EncodedResponse {
    /// The JSON first, then binary data, in pieces that are not copied together.
    pub pieces: SmallVec<[Bytes; 3]>,
    /// Length of the JSON, if binary data follows it.
    pub header_length: Option<usize>,
}

/// Where the data of an output goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Into the JSON.
    Json,
    /// Behind the JSON.
    Binary,
    /// Nowhere: it is in shared memory already.
    Memory,
}

/// Writes a response. `form` tells where the data of each output goes.
///
/// # Errors
/// `INTERNAL` if the bytes of an output do not fit its shape.
pub fn encode(
    model_name: &str,
    model_version: &str,
    response: InferResponse,
    form: impl Fn(&str) -> Form,
) -> Result<EncodedResponse> {
    let mut json = Writer::with_capacity(estimate(model_name, &response, &form));
    json.raw(b"{");
    if !response.id.is_empty() {
        json.raw(b"\"id\":");
        json.string(&response.id);
        json.raw(b",");
    }
    json.raw(b"\"model_name\":");
    json.string(model_name);
    json.raw(b",\"model_version\":\"");
    json.raw(model_version);
    json.raw(b"\",");
    if !response.parameters.is_empty() {
        json.raw(b"\"parameters\":{");
        for (name, value) in response.parameters.iter() {
            json.string(name);
            json.raw(b":");
            parameter(&mut json, value);
            json.raw(b",");
        }
        json.drop_comma();
        json.raw(b"},");
    }
    json.raw(b"\"outputs\":[");
    let mut blobs: SmallVec<[TensorBuffer; 2]> = SmallVec::new();
    for output in response.outputs {
        head(&mut json, &output);
        match form(&output.name) {
            Form::Binary => {
                json.raw(b",\"parameters\":{\"binary_data_size\":");
                json.integer(output.data.len());
                json.raw(b"}");
                if !output.data.is_empty() {
                    blobs.push(output.data);
                }
            }
            Form::Json => {
                json.raw(b",\"data\":[");
                data(&mut json, &output)?;
                json.raw(b"]");
            }
            Form::Memory => {}
        }
        json.raw(b"},");
    }
    json.drop_comma();
    json.raw(b"]}");

    let header_length = (!blobs.is_empty()).then_some(json.len());
    let total: usize = blobs.iter().map(TensorBuffer::len).sum();
    if total <= COPY_LIMIT {
        blobs.iter().for_each(|blob| json.raw(blob.as_slice()));
        return Ok(EncodedResponse { pieces: smallvec![Bytes::from(json.into_bytes())], header_length });
    }
    let mut pieces = smallvec![Bytes::from(json.into_bytes())];
    pieces.extend(blobs.into_iter().map(TensorBuffer::into_bytes));
    Ok(EncodedResponse { pieces, header_length })
}

/// Bytes that will be written as JSON, roughly: enough that the buffer seldom grows.
fn estimate(model_name: &str, response: &InferResponse, form: &impl Fn(&str) -> Form) -> usize {
    let outputs = response.outputs.iter().map(|output| {
        let text = match output.data_type {
            _ if form(&output.name) != Form::Json => output.data.len().min(COPY_LIMIT),
            DataType::Bytes => output.data.len() + output.data.len() / 8,
            DataType::Bool => output.data.len() * 6,
            DataType::Uint8 | DataType::Int8 => output.data.len() * 4,
            _ => output.data.len() * 3,
        };
        text + output.name.len() + 128
    });
    96 + model_name.len() + response.id.len() + 64 * response.parameters.len() + outputs.sum::<usize>()
}

/// Writes the value of a parameter.
pub(crate) fn parameter(json: &mut Writer, value: &ParameterValue) {
    match value {
        ParameterValue::Bool(value) => json.boolean(*value),
        ParameterValue::Int(value) => json.integer(*value),
        ParameterValue::Uint(value) => json.integer(*value),
        ParameterValue::Double(value) => json.f64(*value),
        ParameterValue::String(value) => json.string(value),
    }
}

fn head(json: &mut Writer, output: &OutputTensor) {
    json.raw(b"{\"name\":");
    json.string(output.name.as_bytes());
    json.raw(b",\"datatype\":\"");
    json.raw(output.data_type.wire_name());
    json.raw(b"\",\"shape\":[");
    for dim in &*output.shape {
        json.integer(*dim);
        json.raw(b",");
    }
    json.drop_comma();
    json.raw(b"]");
}

/// Writes the elements of an output, with commas between them.
///
/// # Errors
/// `INTERNAL` if the bytes do not fit the shape.
pub(crate) fn data(json: &mut Writer, output: &OutputTensor) -> Result<()> {
    match output.data_type {
        DataType::Bool => elements(json, output, |json, [byte]: [u8; 1]| json.boolean(byte != 0)),
        DataType::Uint8 => elements(json, output, |json, bytes| json.integer(u8::from_le_bytes(bytes))),
        DataType::Uint16 => elements(json, output, |json, bytes| json.integer(u16::from_le_bytes(bytes))),
        DataType::Uint32 => elements(json, output, |json, bytes| json.integer(u32::from_le_bytes(bytes))),
        DataType::Uint64 => elements(json, output, |json, bytes| json.integer(u64::from_le_bytes(bytes))),
        DataType::Int8 => elements(json, output, |json, bytes| json.integer(i8::from_le_bytes(bytes))),
        DataType::Int16 => elements(json, output, |json, bytes| json.integer(i16::from_le_bytes(bytes))),
        DataType::Int32 => elements(json, output, |json, bytes| json.integer(i32::from_le_bytes(bytes))),
        DataType::Int64 => elements(json, output, |json, bytes| json.integer(i64::from_le_bytes(bytes))),
        DataType::Fp16 => elements(json, output, |json, bytes| json.f32(f16::from_le_bytes(bytes).to_f32())),
        DataType::Bf16 => elements(json, output, |json, bytes| json.f32(bf16::from_le_bytes(bytes).to_f32())),
        DataType::Fp32 => elements(json, output, |json, bytes| json.f32(f32::from_le_bytes(bytes))),
        DataType::Fp64 => elements(json, output, |json, bytes| json.f64(f64::from_le_bytes(bytes))),
        DataType::Bytes => strings(json, output),
    }
}

fn elements<const SIZE: usize>(
    json: &mut Writer,
    output: &OutputTensor,
    mut write: impl FnMut(&mut Writer, [u8; SIZE]),
) -> Result<()> {
    if output.shape.byte_size(output.data_type) != Ok(Some(output.data.len())) {
        return Err(misfit(output));
    }
    let (elements, _) = output.data.as_slice().as_chunks::<SIZE>();
    for element in elements {
        write(json, *element);
        json.raw(b",");
    }
    json.drop_comma();
    Ok(())
}

fn strings(json: &mut Writer, output: &OutputTensor) -> Result<()> {
    let mut rest = output.data.as_slice();
    let mut count = 0;
    while let Some((length, tail)) = rest.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        let (text, tail) = tail.split_at_checked(length).ok_or_else(|| misfit(output))?;
        json.string(text);
        json.raw(b",");
        rest = tail;
        count += 1;
    }
    if !rest.is_empty() || output.shape.element_count() != Ok(count) {
        return Err(misfit(output));
    }
    json.drop_comma();
    Ok(())
}

#[cold]
fn misfit(output: &OutputTensor) -> Error {
    Error::internal(format!(
        "output tensor shape does not match size of output for '{}': {} bytes for {} {}",
        output.name,
        output.data.len(),
        output.data_type,
        output.shape
    ))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use trireme_types::{Parameters, Shape};

    use super::*;

    fn output(name: &str, data_type: DataType, dims: &[i64], data: Vec<u8>) -> OutputTensor {
        OutputTensor { name: Arc::from(name), data_type, shape: Shape::new(dims), data: data.into() }
    }

    fn response(outputs: Vec<OutputTensor>) -> InferResponse {
        InferResponse { outputs: outputs.into(), ..InferResponse::default() }
    }

    fn text(outputs: Vec<OutputTensor>) -> Result<String> {
        let encoded = encode("m", "1", response(outputs), |_| Form::Json)?;
        assert_eq!(encoded.header_length, None);
        let [json] = &encoded.pieces[..] else { panic!("one piece") };
        Ok(String::from_utf8_lossy(json).into_owned())
    }

    fn data_of(data_type: DataType, dims: &[i64], data: Vec<u8>) -> String {
        let json = text(vec![output("Y", data_type, dims, data)]).expect("a response");
        let start = json.find("\"data\":").expect("data") + 7;
        json[start..json.len() - 3].to_owned()
    }

    #[test]
    fn writes_as_triton_does() {
        let mut parameters = Parameters::default();
        parameters.insert("s", ParameterValue::String("x\"".into()));
        parameters.insert("i", ParameterValue::Int(-1));
        parameters.insert("b", ParameterValue::Bool(false));
        parameters.insert("d", ParameterValue::Double(1.5));
        let outputs = vec![output("Y", DataType::Int32, &[1, 2], vec![1, 0, 0, 0, 255, 255, 255, 255])];
        let response = InferResponse { id: "7".into(), outputs: outputs.into(), parameters };
        let encoded = encode("simple", "1", response, |_| Form::Json).expect("a response");
        assert_eq!(
            encoded.pieces[0],
            "{\"id\":\"7\",\"model_name\":\"simple\",\"model_version\":\"1\",\"parameters\":{\"s\":\"x\\\"\",\"i\":-1,\
             \"b\":false,\"d\":1.5},\"outputs\":[{\"name\":\"Y\",\"datatype\":\"INT32\",\"shape\":[1,2],\
             \"data\":[1,-1]}]}"
        );
    }

    #[test]
    fn writes_every_datatype() {
        let le = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        for (data_type, bytes, want) in [
            (DataType::Bool, vec![1, 0], "[true,false]"),
            (DataType::Uint8, vec![0, 255], "[0,255]"),
            (DataType::Int8, vec![128, 127], "[-128,127]"),
            (DataType::Uint16, vec![0, 0, 255, 255], "[0,65535]"),
            (DataType::Int16, vec![0, 128, 255, 127], "[-32768,32767]"),
            (DataType::Uint64, [[255; 8], [0; 8]].concat(), "[18446744073709551615,0]"),
            (DataType::Int64, [i64::MIN.to_le_bytes(), [0; 8]].concat(), "[-9223372036854775808,0]"),
            (DataType::Fp16, vec![0, 0x3e, 0, 0x7c], "[1.5,Infinity]"),
            (DataType::Bf16, vec![0x80, 0x3f, 0, 0x40], "[1.0,2.0]"),
            (DataType::Fp32, le(&[0.1, -0.0]), "[0.1,-0.0]"),
            (DataType::Fp32, le(&[f32::NAN, f32::NEG_INFINITY]), "[NaN,-Infinity]"),
            (DataType::Fp64, [0.1_f64.to_le_bytes(), 1e300_f64.to_le_bytes()].concat(), "[0.1,1e+300]"),
            (DataType::Bytes, b"\x02\0\0\0h\"\x03\0\0\0a\0b".to_vec(), "[\"h\\\"\",\"a\\u0000b\"]"),
        ] {
            assert_eq!(data_of(data_type, &[2], bytes), want, "{data_type}");
        }
        assert_eq!(data_of(DataType::Fp32, &[0, 4], vec![]), "[]");
    }

    #[test]
    fn small_binary_data_is_one_piece_and_large_is_not_copied() {
        let outputs = |n: usize| {
            vec![
                output("A", DataType::Uint8, &[i64::try_from(n).expect("small")], vec![7; n]),
                output("B", DataType::Uint8, &[1], vec![9]),
                output("C", DataType::Uint8, &[0], vec![]),
            ]
        };
        let encoded =
            encode(
                "m",
                "1",
                response(outputs(3)),
                |name| if name == "B" { Form::Json } else { Form::Binary },
            )
            .expect("a response");
        let [piece] = &encoded.pieces[..] else { panic!("one piece") };
        let head = encoded.header_length.expect("binary data");
        let json = std::str::from_utf8(&piece[..head]).expect("text");
        assert_eq!(
            json,
            "{\"model_name\":\"m\",\"model_version\":\"1\",\"outputs\":[{\"name\":\"A\",\"datatype\":\"UINT8\",\
             \"shape\":[3],\"parameters\":{\"binary_data_size\":3}},{\"name\":\"B\",\"datatype\":\"UINT8\",\
             \"shape\":[1],\"data\":[9]},{\"name\":\"C\",\"datatype\":\"UINT8\",\"shape\":[0],\
             \"parameters\":{\"binary_data_size\":0}}]}"
        );
        assert_eq!(piece[head..], [7; 3]);

        let large = outputs(100_000);
        let place = large[0].data.as_slice().as_ptr();
        let encoded = encode("m", "1", response(large), |_| Form::Binary).expect("a response");
        assert_eq!(encoded.pieces.len(), 3);
        assert_eq!(encoded.pieces[1].as_ptr(), place);
        assert_eq!(encoded.header_length, Some(encoded.pieces[0].len()));

        let none =
            encode("m", "1", response(vec![output("C", DataType::Fp32, &[0], vec![])]), |_| Form::Binary);
        assert_eq!(none.expect("a response").header_length, None);
    }

    #[test]
    fn an_output_in_memory_has_no_data_here() {
        let outputs = vec![output("Y", DataType::Fp32, &[1, 16], vec![])];
        let encoded = encode("m", "1", response(outputs), |_| Form::Memory).expect("a response");
        let json = "{\"model_name\":\"m\",\"model_version\":\"1\",\"outputs\":[{\"name\":\"Y\",\"datatype\":\"FP32\",\
                    \"shape\":[1,16]}]}";
        assert_eq!((&encoded.pieces[0][..], encoded.header_length), (json.as_bytes(), None));
    }

    #[test]
    fn an_output_that_does_not_fit_is_an_error() {
        for broken in [
            output("Y", DataType::Fp32, &[2], vec![0; 7]),
            output("Y", DataType::Bytes, &[1], vec![255, 0, 0, 0, b'h', b'i']),
            output("Y", DataType::Bytes, &[2], vec![0; 4]),
            output("Y", DataType::Bytes, &[1], vec![0, 0]),
        ] {
            let error = text(vec![broken]).expect_err("a misfit");
            assert!(error.message().starts_with("output tensor shape does not match size of output for 'Y'"));
        }
    }
}
