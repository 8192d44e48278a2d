//! The `data` of an input: JSON numbers, booleans or strings, straight into the bytes of a tensor.
//!
//! Flat and nested arrays are alike: as in Triton only the number of elements counts, so a ragged array with the
//! right total passes. Numbers must fit their datatype:
//!
//! - Integers are written without fraction or exponent: `1.0` is refused for INT32, as by Triton, since a client that
//!   sends it has most likely the wrong datatype. Out of range is refused (Triton wraps around).
//! - FP16, BF16, FP32 and FP64 take the nearest value; `NaN`, `Infinity` and `-Infinity` are taken as written, while a
//!   number that is too large is refused (Triton makes it infinite; it does not take FP16 and BF16 at all).
//! - BOOL takes `true` and `false` only. BYTES takes strings.
//!
//! Memory is taken after the shape was checked against the length of the text.

use half::{bf16, f16};
use trireme_types::{DataType, Error, HostBuffer, Result, Shape, ShapeError, TensorBuffer};

use crate::json::{Decimal, Reader, excerpt};

/// Which input is read, for messages and limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    /// Position in `inputs`.
    pub(crate) index: usize,
    pub(crate) name: &'a str,
    /// `--http-max-input-size`.
    pub(crate) max_bytes: usize,
}

/// Reads the array at the reader's place as a tensor of that type and shape.
///
/// # Errors
/// `INVALID_ARG`, naming the input, the element (`inputs[0].data[3]`, counted without nesting) and the offset.
pub(crate) fn read(
    reader: &mut Reader<'_>,
    data_type: DataType,
    shape: &Shape,
    place: Place<'_>,
) -> Result<TensorBuffer> {
    if !reader.take(b'[') {
        return Err(refuse(reader, place, None, "attempt to access JSON non-array as array"));
    }
    reader.rewind(reader.offset() - 1);
    let count = shape.element_count().map_err(|error| bad_shape(shape, place, error))?;
    // An element takes a character and a comma at least.
    if count > reader.remaining() {
        return Err(wrong_count(reader, place, shape, count, "fewer"));
    }
    match data_type {
        DataType::Bool => fixed::<bool, 1>(reader, shape, count, place),
        DataType::Uint8 => fixed::<u8, 1>(reader, shape, count, place),
        DataType::Uint16 => fixed::<u16, 2>(reader, shape, count, place),
        DataType::Uint32 => fixed::<u32, 4>(reader, shape, count, place),
        DataType::Uint64 => fixed::<u64, 8>(reader, shape, count, place),
        DataType::Int8 => fixed::<i8, 1>(reader, shape, count, place),
        DataType::Int16 => fixed::<i16, 2>(reader, shape, count, place),
        DataType::Int32 => fixed::<i32, 4>(reader, shape, count, place),
        DataType::Int64 => fixed::<i64, 8>(reader, shape, count, place),
        DataType::Fp16 => fixed::<f16, 2>(reader, shape, count, place),
        DataType::Bf16 => fixed::<bf16, 2>(reader, shape, count, place),
        DataType::Fp32 => fixed::<f32, 4>(reader, shape, count, place),
        DataType::Fp64 => fixed::<f64, 8>(reader, shape, count, place),
        DataType::Bytes => strings(reader, shape, count, place),
    }
}

/// Why a value cannot be an element.
enum Mismatch {
    /// Another kind of JSON value: Triton's words for it.
    Kind(&'static str),
    /// A number of the right kind outside the type's limits.
    Range(&'static str),
    Syntax(Error),
}

impl From<Error> for Mismatch {
    fn from(error: Error) -> Self {
        Self::Syntax(error)
    }
}

/// A datatype of fixed size that JSON can carry.
trait Element<const SIZE: usize>: Sized {
    fn read(reader: &mut Reader<'_>) -> std::result::Result<Self, Mismatch>;

    fn to_bytes(self) -> [u8; SIZE];
}

fn fixed<T: Element<SIZE>, const SIZE: usize>(
    reader: &mut Reader<'_>,
    shape: &Shape,
    count: usize,
    place: Place<'_>,
) -> Result<TensorBuffer> {
    let size = count.checked_mul(SIZE).filter(|&size| size <= place.max_bytes);
    let Some(size) = size else { return Err(too_large(count, SIZE, place)) };
    let mut buffer = HostBuffer::zeroed(size);
    let (slots, _) = buffer.as_mut_slice().as_chunks_mut::<SIZE>();
    let mut slots = slots.iter_mut();
    let mut index = 0_usize;
    reader.flat_array(|reader| {
        let start = reader.offset();
        let value = match T::read(reader) {
            Ok(value) => value,
            Err(mismatch) => return Err(explain(reader, place, index, start, mismatch)),
        };
        let Some(slot) = slots.next() else { return Err(wrong_count(reader, place, shape, count, "more")) };
        *slot = value.to_bytes();
        index += 1;
        Ok(())
    })?;
    if index < count {
        return Err(wrong_count(reader, place, shape, count, "fewer"));
    }
    Ok(buffer.into())
}

fn strings(reader: &mut Reader<'_>, shape: &Shape, count: usize, place: Place<'_>) -> Result<TensorBuffer> {
    let mut bytes = Vec::with_capacity(count.saturating_mul(8).min(reader.remaining()));
    let mut index = 0_usize;
    reader.flat_array(|reader| {
        if index == count {
            return Err(wrong_count(reader, place, shape, count, "more"));
        }
        let start = bytes.len();
        bytes.extend_from_slice(&[0; 4]);
        let at = reader.offset();
        if reader.take(b'"') {
            reader.rewind(at);
            reader.string_into(&mut bytes)?;
        } else {
            let what = "Unable to parse JSON bytes array: attempt to access JSON non-string as string";
            return Err(located(reader, place, Some(index), at, what));
        }
        let length = u32::try_from(bytes.len() - start - 4).ok();
        let prefix = bytes.get_mut(start..).and_then(<[u8]>::first_chunk_mut::<4>);
        if let (Some(length), Some(prefix)) = (length, prefix) {
            *prefix = length.to_le_bytes();
        }
        if bytes.len() > place.max_bytes {
            return Err(too_large(bytes.len(), 1, place));
        }
        index += 1;
        Ok(())
    })?;
    if index < count {
        return Err(wrong_count(reader, place, shape, count, "fewer"));
    }
    Ok(bytes.into())
}

macro_rules! integer_element {
    ($($type:ty, $wrong:literal, $limits:literal;)*) => {$(
        impl Element<{ size_of::<$type>() }> for $type {
            #[inline]
            fn read(reader: &mut Reader<'_>) -> std::result::Result<Self, Mismatch> {
                let number = number(reader, $wrong)?;
                if !number.integral {
                    return Err(Mismatch::Kind($wrong));
                }
                let value = number.magnitude().and_then(|magnitude| {
                    let magnitude = i128::from(magnitude);
                    Self::try_from(if number.negative { -magnitude } else { magnitude }).ok()
                });
                value.ok_or(Mismatch::Range($limits))
            }

            #[inline]
            fn to_bytes(self) -> [u8; size_of::<$type>()] {
                self.to_le_bytes()
            }
        }
    )*};
}

integer_element! {
    u8, "attempt to access JSON non-unsigned-integer as unsigned-integer", "UINT8, 0 to 255";
    u16, "attempt to access JSON non-unsigned-integer as unsigned-integer", "UINT16, 0 to 65535";
    u32, "attempt to access JSON non-unsigned-integer as unsigned-integer", "UINT32, 0 to 4294967295";
    u64, "attempt to access JSON non-unsigned-integer as unsigned-integer", "UINT64, 0 to 18446744073709551615";
    i8, "attempt to access JSON non-signed-integer as signed-integer", "INT8, -128 to 127";
    i16, "attempt to access JSON non-signed-integer as signed-integer", "INT16, -32768 to 32767";
    i32, "attempt to access JSON non-signed-integer as signed-integer", "INT32, -2147483648 to 2147483647";
    i64, "attempt to access JSON non-signed-integer as signed-integer",
        "INT64, -9223372036854775808 to 9223372036854775807";
}

macro_rules! float_element {
    ($($type:ty, $convert:expr, $limits:literal;)*) => {$(
        impl Element<{ size_of::<$type>() }> for $type {
            #[inline]
            fn read(reader: &mut Reader<'_>) -> std::result::Result<Self, Mismatch> {
                let number = number(reader, "attempt to access JSON non-number as double")?;
                let value: Self = $convert(number);
                if value.is_infinite() && number.word.is_none() {
                    return Err(Mismatch::Range($limits));
                }
                Ok(value)
            }

            #[inline]
            fn to_bytes(self) -> [u8; size_of::<$type>()] {
                self.to_le_bytes()
            }
        }
    )*};
}

float_element! {
    f16, |number: Decimal<'_>| f16::from_f64(number.to_f64()), "FP16, -65504 to 65504";
    bf16, |number: Decimal<'_>| bf16::from_f64(number.to_f64()), "BF16, -3.3895314e38 to 3.3895314e38";
    f32, Decimal::to_f32, "FP32, -3.4028235e38 to 3.4028235e38";
    f64, Decimal::to_f64, "FP64, -1.7976931348623157e308 to 1.7976931348623157e308";
}

impl Element<1> for bool {
    #[inline]
    fn read(reader: &mut Reader<'_>) -> std::result::Result<Self, Mismatch> {
        reader.boolean().map_err(|_| Mismatch::Kind("attempt to access JSON non-boolean as boolean"))
    }

    #[inline]
    fn to_bytes(self) -> [u8; 1] {
        [u8::from(self)]
    }
}

#[inline]
fn number<'a>(reader: &mut Reader<'a>, wrong: &'static str) -> std::result::Result<Decimal<'a>, Mismatch> {
    match reader.first() {
        Some(b'0'..=b'9' | b'-' | b'N' | b'I') => Ok(reader.decimal()?),
        _ => Err(Mismatch::Kind(wrong)),
    }
}

#[cold]
fn explain(
    reader: &mut Reader<'_>,
    place: Place<'_>,
    index: usize,
    start: usize,
    mismatch: Mismatch,
) -> Error {
    reader.rewind(start);
    match mismatch {
        Mismatch::Kind(_) if reader.kind().is_err() => reader.syntax("Invalid value."),
        Mismatch::Kind(what) => {
            located(reader, place, Some(index), start, &format!("Unable to parse 'data': {what}"))
        }
        Mismatch::Range(limits) => {
            reader.skip_space();
            let (value, byte) = (excerpt(reader.rest()), reader.offset());
            let (input, name) = (place.index, place.name);
            Error::invalid_arg(format!(
                "Unable to parse 'data': {value} is out of range for {limits}, at inputs[{input}].data[{index}] of \
                 input '{name}', byte {byte}"
            ))
        }
        Mismatch::Syntax(error) => error,
    }
}

#[cold]
fn refuse(reader: &mut Reader<'_>, place: Place<'_>, index: Option<usize>, what: &str) -> Error {
    let at = reader.offset();
    located(reader, place, index, at, &format!("Unable to parse 'data': {what}"))
}

/// A message with the element it is about.
#[cold]
fn located(
    reader: &mut Reader<'_>,
    place: Place<'_>,
    index: Option<usize>,
    offset: usize,
    what: &str,
) -> Error {
    reader.rewind(offset);
    reader.skip_space();
    let (input, name, byte) = (place.index, place.name, reader.offset());
    let value = excerpt(reader.rest());
    let element = index.map(|index| format!("[{index}]")).unwrap_or_default();
    Error::invalid_arg(format!(
        "{what}, got {value} at inputs[{input}].data{element} of input '{name}', byte {byte}"
    ))
}

#[cold]
fn wrong_count(reader: &Reader<'_>, place: Place<'_>, shape: &Shape, count: usize, found: &str) -> Error {
    Error::invalid_arg(format!(
        "Unable to parse 'data': Shape does not match true shape of 'data' field: input '{}' of shape {shape} takes \
         {count} elements, inputs[{}].data has {found}, byte {}",
        place.name,
        place.index,
        reader.offset()
    ))
}

#[cold]
fn too_large(count: usize, size: usize, place: Place<'_>) -> Error {
    Error::invalid_arg(format!(
        "JSON input '{}' has a byte_size ({} bytes) that exceeds the maximum allowed value of {} bytes. Use \
         --http-max-input-size to increase the limit.",
        place.name,
        count.saturating_mul(size),
        place.max_bytes
    ))
}

#[cold]
pub(crate) fn bad_shape(shape: &Shape, place: Place<'_>, error: ShapeError) -> Error {
    let name = place.name;
    Error::invalid_arg(match error {
        ShapeError::Negative => {
            format!("invalid shape for input '{name}': shape {shape} contains one or more invalid dimensions")
        }
        ShapeError::Overflow => format!(
            "invalid shape for input '{name}': shape {shape} causes total element count to exceed maximum size of {}",
            i64::MAX
        ),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(data_type: DataType, dims: &[i64], text: &str) -> Result<Vec<u8>> {
        let place = Place { index: 0, name: "X", max_bytes: 1 << 20 };
        let mut reader = Reader::new(text.as_bytes());
        let tensor = read(&mut reader, data_type, &Shape::new(dims), place)?;
        reader.finish()?;
        Ok(tensor.as_slice().to_vec())
    }

    #[test]
    fn takes_every_datatype() {
        let bytes = |parts: &[&[u8]]| parts.concat();
        for (data_type, text, want) in [
            (DataType::Bool, "[true,false]", vec![1, 0]),
            (DataType::Uint8, "[0,255]", vec![0, 255]),
            (DataType::Uint16, "[0, 65535]", vec![0, 0, 255, 255]),
            (DataType::Uint32, "[0,4294967295]", vec![0, 0, 0, 0, 255, 255, 255, 255]),
            (
                DataType::Uint64,
                "[9007199254740993,18446744073709551615]",
                bytes(&[&9_007_199_254_740_993_u64.to_le_bytes(), &u64::MAX.to_le_bytes()]),
            ),
            (DataType::Int8, "[-128,127]", vec![128, 127]),
            (DataType::Int16, "[-32768,32767]", vec![0, 128, 255, 127]),
            (DataType::Int32, "[-2147483648,-0]", vec![0, 0, 0, 128, 0, 0, 0, 0]),
            (
                DataType::Int64,
                "[-9223372036854775808,9223372036854775807]",
                bytes(&[&i64::MIN.to_le_bytes(), &i64::MAX.to_le_bytes()]),
            ),
            (
                DataType::Fp16,
                "[1.5,65504]",
                bytes(&[&f16::from_f32(1.5).to_le_bytes(), &f16::MAX.to_le_bytes()]),
            ),
            (DataType::Bf16, "[1.0,3.14]", vec![0x80, 0x3f, 0x49, 0x40]),
            (DataType::Fp32, "[1, -0.1e0]", bytes(&[&1_f32.to_le_bytes(), &(-0.1_f32).to_le_bytes()])),
            (
                DataType::Fp32,
                "[NaN,-Infinity]",
                bytes(&[&f32::NAN.to_le_bytes(), &f32::NEG_INFINITY.to_le_bytes()]),
            ),
            (DataType::Fp64, "[1e300,0.1]", bytes(&[&1e300_f64.to_le_bytes(), &0.1_f64.to_le_bytes()])),
            (DataType::Bytes, r#"["hi", ""]"#, bytes(&[&[2, 0, 0, 0], b"hi", &[0, 0, 0, 0]])),
            (
                DataType::Bytes,
                r#"[["a\u0000b"],["\ud83d\ude00"]]"#,
                bytes(&[&[3, 0, 0, 0], b"a\0b", &[4, 0, 0, 0], "😀".as_bytes()]),
            ),
        ] {
            assert_eq!(parse(data_type, &[2], text), Ok(want), "{data_type} {text}");
        }
    }

    #[test]
    fn refuses_what_does_not_fit_with_place_and_limit() {
        for (data_type, text, says) in [
            (
                DataType::Int8,
                "[1,300]",
                "300 is out of range for INT8, -128 to 127, at inputs[0].data[1] of input 'X', byte 3",
            ),
            (DataType::Uint8, "[1, -1]", "-1 is out of range for UINT8, 0 to 255"),
            (DataType::Uint64, "[1,18446744073709551616]", "out of range for UINT64"),
            (
                DataType::Int32,
                "[1.5,1]",
                "non-signed-integer as signed-integer, got 1.5 at inputs[0].data[0]",
            ),
            (DataType::Int32, "[1.0,1]", "non-signed-integer as signed-integer, got 1.0"),
            (DataType::Int32, "[1e2,1]", "non-signed-integer"),
            (
                DataType::Fp32,
                r#"["1",2]"#,
                r#"attempt to access JSON non-number as double, got "1" at inputs[0].data[0]"#,
            ),
            (DataType::Fp32, "[1,null]", "attempt to access JSON non-number as double, got null"),
            (DataType::Fp32, "[1,true]", "attempt to access JSON non-number as double, got true"),
            (DataType::Fp32, "[1e400,1]", "1e400 is out of range for FP32"),
            (DataType::Fp32, "[1e39,1]", "out of range for FP32"),
            (DataType::Fp16, "[65520,1]", "out of range for FP16"),
            (DataType::Bf16, "[3.4e38,1]", "out of range for BF16"),
            (DataType::Fp64, "[1,-1e309]", "out of range for FP64"),
            (DataType::Bool, "[1,true]", "attempt to access JSON non-boolean as boolean, got 1"),
            (DataType::Bytes, r#"[{"b64":"aGk="},""]"#, "attempt to access JSON non-string as string"),
            (DataType::Fp32, "5", "attempt to access JSON non-array as array, got 5 at inputs[0].data of"),
            (DataType::Fp32, "null", "attempt to access JSON non-array as array"),
            (DataType::Fp32, "[1]", "Shape does not match true shape of 'data' field"),
            (DataType::Fp32, "[[1,2],[3]]", "has more"),
            (DataType::Bytes, r#"["a"]"#, "has fewer"),
            (DataType::Bytes, r#"["a","b","c"]"#, "has more"),
            (DataType::Fp32, "[1,]", "Invalid value. at 3"),
            (DataType::Fp32, "[1,x]", "Invalid value. at 3"),
            (DataType::Bool, "[tru,true]", "attempt to access JSON non-boolean as boolean, got tru"),
        ] {
            let error = parse(data_type, &[2], text).expect_err(text);
            assert!(error.message().contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn takes_no_memory_that_the_text_does_not_cover() {
        let error = parse(DataType::Fp64, &[1 << 40, 1 << 20], "[1]").expect_err("a huge shape");
        assert!(error.message().contains("Shape does not match"), "{error}");
        let error = parse(DataType::Fp64, &[1 << 40, 1 << 40], "[1]").expect_err("more than 63 bits");
        assert!(error.message().contains("causes total element count to exceed"), "{error}");
        let many = format!("[{}0]", "0,".repeat(299_999));
        let error = parse(DataType::Fp64, &[300_000], &many).expect_err("above the limit");
        assert!(error.message().contains("--http-max-input-size"), "{error}");
    }

    #[test]
    fn nesting_does_not_matter_but_empty_dimensions_do() {
        assert_eq!(parse(DataType::Uint8, &[2, 2], "[[1,2],[3,4]]"), Ok(vec![1, 2, 3, 4]));
        assert_eq!(parse(DataType::Uint8, &[], "[7]"), Ok(vec![7]));
        assert_eq!(parse(DataType::Uint8, &[0, 4], "[]"), Ok(vec![]));
        assert_eq!(parse(DataType::Bytes, &[0], "[[]]"), Ok(vec![]));
    }

    proptest! {
        #[test]
        fn integers_read_back(values: Vec<i64>) {
            let text = serde_json::to_string(&values).expect("numbers");
            let want: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let count = i64::try_from(values.len()).expect("few");
            prop_assert_eq!(parse(DataType::Int64, &[count], &text), Ok(want));
        }

        #[test]
        fn arbitrary_text_never_panics(text in "[\\[\\]0-9eE.,+\\-\"ntrufalsNI ]{0,40}") {
            for data_type in DataType::ALL {
                let _ = parse(data_type, &[2], &text);
            }
        }
    }
}
