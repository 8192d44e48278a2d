//! Tensors that came as `InferTensorContents`: numbers of the wire turned into the bytes of a tensor.
//!
//! FP32, FP64 and BOOL in one packed field stay a slice of the message; the others take one pass. Values that their
//! data type cannot hold are refused, where Triton keeps their low bytes.

use bytes::Bytes;
use trireme_types::{DataType, Error, Result, TensorBuffer};

use super::malformed;
use super::request::WireInput;
use crate::grpc::wire::{self, Field, Fields, Malformed, Value};

/// Name of a field of `InferTensorContents` and the data type that Triton's messages give it.
fn field_names(number: u32) -> Option<(&'static str, DataType)> {
    Some(match number {
        1 => ("bool_contents", DataType::Bool),
        2 => ("int_contents", DataType::Int32),
        3 => ("int64_contents", DataType::Int64),
        4 => ("uint_contents", DataType::Uint32),
        5 => ("uint64_contents", DataType::Uint64),
        6 => ("fp32_contents", DataType::Fp32),
        7 => ("fp64_contents", DataType::Fp64),
        8 => ("bytes_contents", DataType::Bytes),
        _ => return None,
    })
}

/// The field that carries a data type; FP16 and BF16 have none and travel raw.
fn field_for(data_type: DataType) -> Option<u32> {
    Some(match data_type {
        DataType::Bool => 1,
        DataType::Int8 | DataType::Int16 | DataType::Int32 => 2,
        DataType::Int64 => 3,
        DataType::Uint8 | DataType::Uint16 | DataType::Uint32 => 4,
        DataType::Uint64 => 5,
        DataType::Fp32 => 6,
        DataType::Fp64 => 7,
        DataType::Bytes => 8,
        DataType::Fp16 | DataType::Bf16 => return None,
    })
}

/// The tensor in the typed contents of an input. `message` holds the input.
///
/// # Errors
/// `INVALID_ARG` for contents of another data type, for values out of range and for bytes that are not protobuf.
pub(super) fn tensor(
    message: &Bytes,
    input: &WireInput<'_>,
    data_type: DataType,
    model: &str,
) -> Result<TensorBuffer> {
    let place = Place { input: input.name, model, data_type };
    let wanted = field_for(data_type);
    if let [contents] = input.contents.as_slice()
        && let Some(slice) = only_field(contents, wanted, data_type).map_err(malformed)?
    {
        return Ok(message.slice_ref(slice).into());
    }
    let mut data = Vec::new();
    for contents in &input.contents {
        let mut fields = Fields::of(contents);
        while let Some(field) = fields.next().map_err(malformed)? {
            let Some((_, found)) = field_names(field.number) else { continue };
            if Some(field.number) == wanted {
                append(&mut data, field, &place)?;
            } else if !matches!(field.value, Value::Bytes([])) || field.number == 8 {
                return Err(Error::invalid_arg(format!(
                    "unexpected explicit tensor data for input tensor '{}' for model '{model}' of type '{found}', \
                     expected datatype '{data_type}'",
                    input.name
                )));
            }
        }
    }
    Ok(data.into())
}

/// The packed field of contents that have no other field, if its bytes are those of the tensor.
fn only_field(contents: &[u8], wanted: Option<u32>, data_type: DataType) -> Result<Option<&[u8]>, Malformed> {
    let mut fields = Fields::of(contents);
    let (first, second) = (fields.next()?, fields.next()?);
    let (Some(Field { number, value: Value::Bytes(packed) }), None) = (first, second) else {
        return Ok(None);
    };
    let as_it_is = match data_type {
        DataType::Fp32 => packed.len().is_multiple_of(4),
        DataType::Fp64 => packed.len().is_multiple_of(8),
        DataType::Bool => packed.iter().all(|&byte| byte <= 1),
        _ => false,
    };
    Ok((as_it_is && Some(number) == wanted).then_some(packed))
}

/// Where a value stands, for messages.
struct Place<'a> {
    input: &'a str,
    model: &'a str,
    data_type: DataType,
}

fn append(data: &mut Vec<u8>, field: Field<'_>, place: &Place<'_>) -> Result<()> {
    let wrong_type = || malformed(Malformed::WireType(field.number));
    match (place.data_type, field.value) {
        (DataType::Bytes, Value::Bytes(element)) => {
            let len = u32::try_from(element.len()).map_err(|_| {
                Error::invalid_arg(format!("an element of input '{}' is longer than 4 GiB", place.input))
            })?;
            data.extend_from_slice(&len.to_le_bytes());
            data.extend_from_slice(element);
            Ok(())
        }
        (DataType::Fp32, Value::Fixed32(bits)) => {
            data.extend_from_slice(&bits.to_le_bytes());
            Ok(())
        }
        (DataType::Fp64, Value::Fixed64(bits)) => {
            data.extend_from_slice(&bits.to_le_bytes());
            Ok(())
        }
        (DataType::Fp32, Value::Bytes(packed)) if packed.len().is_multiple_of(4) => {
            data.extend_from_slice(packed);
            Ok(())
        }
        (DataType::Fp64, Value::Bytes(packed)) if packed.len().is_multiple_of(8) => {
            data.extend_from_slice(packed);
            Ok(())
        }
        (DataType::Fp32 | DataType::Fp64, Value::Bytes(_)) => Err(malformed(Malformed::Truncated)),
        (DataType::Bytes | DataType::Fp32 | DataType::Fp64, _) => Err(wrong_type()),
        (_, Value::Varint(value)) => append_integer(data, value, place),
        (data_type, Value::Bytes(mut packed)) => {
            let count = packed.iter().filter(|&byte| byte & 0x80 == 0).count();
            data.reserve(count.saturating_mul(data_type.byte_size().unwrap_or(1)));
            while !packed.is_empty() {
                append_integer(data, wire::varint(&mut packed).map_err(malformed)?, place)?;
            }
            Ok(())
        }
        _ => Err(wrong_type()),
    }
}

/// Appends one varint in the size of the data type.
fn append_integer(data: &mut Vec<u8>, value: u64, place: &Place<'_>) -> Result<()> {
    // The wire type of `int_contents` and `uint_contents` has 32 bits; protobuf drops the rest of a longer varint.
    #[expect(clippy::cast_possible_truncation, reason = "protobuf reads a 32-bit field so")]
    let (signed, unsigned) = (value as i32, value as u32);
    match place.data_type {
        DataType::Bool => data.push(u8::from(value != 0)),
        DataType::Int8 => data.extend(fit::<i8, _>(data.len(), signed, place)?.to_le_bytes()),
        DataType::Int16 => data.extend(fit::<i16, _>(data.len() / 2, signed, place)?.to_le_bytes()),
        DataType::Int32 => data.extend(signed.to_le_bytes()),
        DataType::Uint8 => data.push(fit::<u8, _>(data.len(), unsigned, place)?),
        DataType::Uint16 => data.extend(fit::<u16, _>(data.len() / 2, unsigned, place)?.to_le_bytes()),
        DataType::Uint32 => data.extend(unsigned.to_le_bytes()),
        _ => data.extend(value.to_le_bytes()),
    }
    Ok(())
}

fn fit<T: TryFrom<V>, V: Copy + std::fmt::Display>(index: usize, value: V, place: &Place<'_>) -> Result<T> {
    T::try_from(value).map_err(|_| {
        let limits = match place.data_type {
            DataType::Int8 => "-128 to 127",
            DataType::Int16 => "-32768 to 32767",
            DataType::Uint8 => "0 to 255",
            _ => "0 to 65535",
        };
        Error::invalid_arg(format!(
            "value {value} at index {index} of input '{}' for model '{}' does not fit {}, expected {limits}",
            place.input, place.model, place.data_type
        ))
    })
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use trireme_proto::inference::InferTensorContents;

    use super::*;

    fn convert(data_type: DataType, parts: &[InferTensorContents]) -> Result<Vec<u8>> {
        let encoded: Vec<_> = parts.iter().map(|part| part.encode_to_vec()).collect();
        let message = Bytes::from(encoded.concat());
        let mut input = WireInput { name: "IN", ..Default::default() };
        let mut start = 0;
        for part in &encoded {
            input.contents.push(&message[start..start + part.len()]);
            start += part.len();
        }
        tensor(&message, &input, data_type, "m").map(|buffer| buffer.as_slice().to_vec())
    }

    fn contents() -> InferTensorContents {
        InferTensorContents::default()
    }

    #[test]
    fn every_data_type_in_its_field() {
        let ints = |values: &[i32]| InferTensorContents { int_contents: values.to_vec(), ..contents() };
        let uints = |values: &[u32]| InferTensorContents { uint_contents: values.to_vec(), ..contents() };
        let table = [
            (
                DataType::Bool,
                InferTensorContents { bool_contents: vec![true, false], ..contents() },
                vec![1, 0],
            ),
            (DataType::Int8, ints(&[-1, 127]), vec![0xff, 0x7f]),
            (DataType::Int16, ints(&[-1, 300]), vec![0xff, 0xff, 0x2c, 0x01]),
            (DataType::Int32, ints(&[-1]), vec![0xff; 4]),
            (
                DataType::Int64,
                InferTensorContents { int64_contents: vec![-1, 1 << 40], ..contents() },
                [[0xff; 8], (1_i64 << 40).to_le_bytes()].concat(),
            ),
            (DataType::Uint8, uints(&[1, 255]), vec![1, 255]),
            (DataType::Uint16, uints(&[65535]), vec![0xff, 0xff]),
            (DataType::Uint32, uints(&[u32::MAX]), vec![0xff; 4]),
            (
                DataType::Uint64,
                InferTensorContents { uint64_contents: vec![u64::MAX], ..contents() },
                vec![0xff; 8],
            ),
            (
                DataType::Fp32,
                InferTensorContents { fp32_contents: vec![1.5, 2.0], ..contents() },
                [1.5_f32.to_le_bytes(), 2.0_f32.to_le_bytes()].concat(),
            ),
            (
                DataType::Fp64,
                InferTensorContents { fp64_contents: vec![1.5], ..contents() },
                1.5_f64.to_le_bytes().to_vec(),
            ),
            (
                DataType::Bytes,
                InferTensorContents {
                    bytes_contents: vec![b"a".as_slice().into(), Bytes::new(), b"\0\xff".as_slice().into()],
                    ..contents()
                },
                b"\x01\0\0\0a\0\0\0\0\x02\0\0\0\0\xff".to_vec(),
            ),
        ];
        for (data_type, sent, expected) in table {
            assert_eq!(
                convert(data_type, std::slice::from_ref(&sent)).expect("converts"),
                expected,
                "{data_type}"
            );
            let twice = convert(data_type, &[sent.clone(), sent]).expect("converts");
            assert_eq!(twice, [expected.as_slice(), &expected].concat(), "{data_type} in two parts");
            assert!(convert(data_type, &[contents()]).expect("empty contents").is_empty());
        }
    }

    #[test]
    fn unpacked_fields_are_read_too() {
        for (data_type, message, expected) in [
            (DataType::Int8, &[0x10, 1, 0x10, 2][..], vec![1, 2]),
            (DataType::Bool, &[0x08, 1, 0x08, 0], vec![1, 0]),
            (DataType::Bool, &[0x0a, 2, 1, 7], vec![1, 1]),
            (DataType::Fp32, &[0x35, 0, 0, 128, 63], 1.0_f32.to_le_bytes().to_vec()),
        ] {
            let bytes = Bytes::copy_from_slice(message);
            let input = WireInput { contents: smallvec::smallvec![&bytes[..]], ..Default::default() };
            let buffer = tensor(&bytes, &input, data_type, "m").expect("converts");
            assert_eq!(buffer.as_slice(), expected, "{data_type}");
        }
    }

    #[test]
    fn floats_stay_where_they_are() {
        let sent = InferTensorContents { fp32_contents: vec![1.0; 100], ..contents() };
        let message = Bytes::from(sent.encode_to_vec());
        let input = WireInput { contents: smallvec::smallvec![&message[..]], ..Default::default() };
        let buffer = tensor(&message, &input, DataType::Fp32, "m").expect("converts");
        assert!(message.as_ptr_range().contains(&buffer.as_slice().as_ptr()));
    }

    #[test]
    fn other_types_and_values_out_of_range_are_refused() {
        let ints = |values: &[i32]| InferTensorContents { int_contents: values.to_vec(), ..contents() };
        let uints = |values: &[u32]| InferTensorContents { uint_contents: values.to_vec(), ..contents() };
        let floats = InferTensorContents { fp32_contents: vec![1.0], ..contents() };
        let texts = InferTensorContents { bytes_contents: vec![Bytes::new()], ..contents() };
        let unexpected = "unexpected explicit tensor data for input tensor 'IN' for model 'm' of type ";
        let table = [
            (DataType::Fp32, ints(&[1]), format!("{unexpected}'INT32', expected datatype 'FP32'")),
            (DataType::Fp16, floats.clone(), format!("{unexpected}'FP32', expected datatype 'FP16'")),
            (DataType::Bf16, floats, format!("{unexpected}'FP32', expected datatype 'BF16'")),
            (DataType::Int32, uints(&[1]), format!("{unexpected}'UINT32', expected datatype 'INT32'")),
            (DataType::Int32, texts, format!("{unexpected}'BYTES', expected datatype 'INT32'")),
            (
                DataType::Int8,
                ints(&[1, 128]),
                "value 128 at index 1 of input 'IN' for model 'm' does not fit INT8, expected -128 to 127".into(),
            ),
            (
                DataType::Int16,
                ints(&[0, 0, -32769]),
                "value -32769 at index 2 of input 'IN' for model 'm' does not fit INT16, expected -32768 to 32767"
                    .into(),
            ),
            (
                DataType::Uint8,
                uints(&[256]),
                "value 256 at index 0 of input 'IN' for model 'm' does not fit UINT8, expected 0 to 255".into(),
            ),
            (
                DataType::Uint16,
                uints(&[65536]),
                "value 65536 at index 0 of input 'IN' for model 'm' does not fit UINT16, expected 0 to 65535".into(),
            ),
        ];
        for (data_type, sent, expected) in table {
            assert_eq!(convert(data_type, &[sent]).expect_err("refused").message(), expected);
        }
    }
}
