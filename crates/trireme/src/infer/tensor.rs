//! Tensors in the form of the binary tensor extension, and their elements as JSON.
//!
//! Bytes are little-endian in C order; each element of a `BYTES` tensor has its length in front. In JSON, numbers are
//! exact to the data type, and NaN and the infinities are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, both
//! ways. Source: KServe v2 "Tensor Data", Triton's binary tensor extension.

use std::fmt::Write as _;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use half::{bf16, f16};
use serde_json::Value;
use trireme_types::{DataType, Shape};

/// Largest tensor that is sent or taken, in bytes: the protocol counts bodies in 31 bits.
pub(super) const MAX_BYTES: usize = (2 << 30) - 1;

/// A tensor with its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) data_type: DataType,
    pub(super) shape: Shape,
    pub(super) bytes: Vec<u8>,
}

/// Strings with their lengths in front.
pub(super) fn join_strings<'a>(strings: impl Iterator<Item = &'a [u8]>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for string in strings {
        let length = u32::try_from(string.len()).context("a string is longer than 4 GiB")?;
        bytes.extend(length.to_le_bytes());
        bytes.extend_from_slice(string);
        ensure!(bytes.len() <= MAX_BYTES, "its strings are more than the {MAX_BYTES} bytes of a request");
    }
    Ok(bytes)
}

/// The elements of a `BYTES` tensor.
///
/// # Errors
/// A length points behind the end.
pub(super) fn split_strings(mut bytes: &[u8]) -> Result<Vec<&[u8]>> {
    let mut strings = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<4>() {
        let length = usize::try_from(u32::from_le_bytes(*length))?;
        let Some((string, rest)) = rest.split_at_checked(length) else {
            bail!("a string of {length} bytes is announced, and {} are left", rest.len())
        };
        strings.push(string);
        bytes = rest;
    }
    ensure!(bytes.is_empty(), "{} bytes follow the last string", bytes.len());
    Ok(strings)
}

/// Checks that bytes are those of a tensor of this shape.
///
/// # Errors
/// Too few or too many bytes or strings, with both numbers.
pub(super) fn check(data_type: DataType, shape: &Shape, bytes: &[u8]) -> Result<()> {
    let count = shape.element_count().with_context(|| format!("the shape {shape} is no tensor's"))?;
    match shape.byte_size(data_type)? {
        Some(size) => {
            ensure!(bytes.len() == size, "{data_type} {shape} takes {size} bytes, got {}", bytes.len());
        }
        None => {
            let strings = split_strings(bytes)?.len();
            ensure!(strings == count, "{data_type} {shape} has {count} elements, got {strings}");
        }
    }
    Ok(())
}

/// Shape and bytes of nested JSON arrays.
///
/// # Errors
/// The arrays are ragged, or an element does not fit the data type.
pub(super) fn of_json(value: &Value, data_type: DataType) -> Result<(Shape, Vec<u8>)> {
    let mut shape = Shape::default();
    let mut inner = value;
    while let Value::Array(items) = inner {
        shape.push(i64::try_from(items.len())?);
        match items.first() {
            Some(first) => inner = first,
            None => break,
        }
    }
    let mut bytes = Vec::new();
    push_nested(value, &shape, data_type, &mut bytes)?;
    Ok((shape, bytes))
}

fn push_nested(value: &Value, shape: &[i64], data_type: DataType, bytes: &mut Vec<u8>) -> Result<()> {
    match (value, shape.split_first()) {
        (Value::Array(items), Some((length, rest))) => {
            ensure!(
                i64::try_from(items.len()) == Ok(*length),
                "its arrays are ragged: one has {length} elements, another {}",
                items.len()
            );
            items.iter().try_for_each(|item| push_nested(item, rest, data_type, bytes))
        }
        (Value::Array(_), None) => bail!("its arrays are ragged: some are nested deeper than others"),
        (_, Some(_)) => bail!("its arrays are ragged: some elements are arrays and others are not"),
        (scalar, None) => push_scalar(scalar, data_type, bytes),
    }
}

/// The elements of JSON arrays however they are nested, as answers may give them.
///
/// # Errors
/// An element does not fit the data type.
pub(super) fn of_json_elements(value: &Value, data_type: DataType, bytes: &mut Vec<u8>) -> Result<()> {
    match value {
        Value::Array(items) => items.iter().try_for_each(|item| of_json_elements(item, data_type, bytes)),
        scalar => push_scalar(scalar, data_type, bytes),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "FP32 is the nearest number, and what is too large is refused"
)]
fn push_scalar(value: &Value, data_type: DataType, bytes: &mut Vec<u8>) -> Result<()> {
    let misfit = || anyhow!("{value} is no {data_type}");
    let unsigned = |max: u64| value.as_u64().filter(|n| *n <= max).ok_or_else(misfit);
    let signed = |min: i64, max: i64| value.as_i64().filter(|n| (min..=max).contains(n)).ok_or_else(misfit);
    // The first bytes of the little-endian form are the narrower number.
    let mut push = |number: [u8; 8]| bytes.extend(number.iter().take(data_type.byte_size().unwrap_or(0)));
    match data_type {
        DataType::Bool => push(u64::from(boolean(value).ok_or_else(misfit)?).to_le_bytes()),
        DataType::Uint8 => push(unsigned(u8::MAX.into())?.to_le_bytes()),
        DataType::Uint16 => push(unsigned(u16::MAX.into())?.to_le_bytes()),
        DataType::Uint32 => push(unsigned(u32::MAX.into())?.to_le_bytes()),
        DataType::Uint64 => push(unsigned(u64::MAX)?.to_le_bytes()),
        DataType::Int8 => push(signed(i8::MIN.into(), i8::MAX.into())?.to_le_bytes()),
        DataType::Int16 => push(signed(i16::MIN.into(), i16::MAX.into())?.to_le_bytes()),
        DataType::Int32 => push(signed(i32::MIN.into(), i32::MAX.into())?.to_le_bytes()),
        DataType::Int64 => push(signed(i64::MIN, i64::MAX)?.to_le_bytes()),
        DataType::Fp16 | DataType::Bf16 | DataType::Fp32 | DataType::Fp64 => {
            let number = float(value).ok_or_else(misfit)?;
            let (narrow, is_finite) = match data_type {
                DataType::Fp16 => {
                    let half = f16::from_f64(number);
                    (half.to_le_bytes().to_vec(), half.is_finite())
                }
                DataType::Bf16 => {
                    let half = bf16::from_f64(number);
                    (half.to_le_bytes().to_vec(), half.is_finite())
                }
                DataType::Fp32 => ((number as f32).to_le_bytes().to_vec(), (number as f32).is_finite()),
                _ => (number.to_le_bytes().to_vec(), number.is_finite()),
            };
            ensure!(is_finite || !number.is_finite(), "{value} is too large for {data_type}");
            bytes.extend(narrow);
        }
        DataType::Bytes => {
            let text = value
                .as_str()
                .with_context(|| format!("{value} is no string, and BYTES elements are; put it in quotes"))?;
            bytes.extend(u32::try_from(text.len())?.to_le_bytes());
            bytes.extend_from_slice(text.as_bytes());
        }
    }
    ensure!(bytes.len() <= MAX_BYTES, "it is larger than the {MAX_BYTES} bytes of a request");
    Ok(())
}

fn boolean(value: &Value) -> Option<bool> {
    match value.as_u64() {
        Some(0) => Some(false),
        Some(1) => Some(true),
        _ => value.as_bool(),
    }
}

fn float(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some("NaN") => Some(f64::NAN),
        Some("Infinity") => Some(f64::INFINITY),
        Some("-Infinity") => Some(f64::NEG_INFINITY),
        Some(_) => None,
        None => value.as_f64(),
    }
}

impl Tensor {
    /// Each element as JSON. The bytes must be checked before.
    ///
    /// # Errors
    /// The lengths of strings are damaged.
    pub(super) fn elements(&self) -> Result<Vec<String>> {
        match self.data_type.byte_size() {
            Some(size) => {
                Ok(self.bytes.chunks_exact(size).map(|e| element_text(self.data_type, e)).collect())
            }
            None => split_strings(&self.bytes)?.into_iter().map(string_text).collect(),
        }
    }
}

/// A string as JSON; bytes that are not UTF-8 become `\ufffd`.
fn string_text(string: &[u8]) -> Result<String> {
    Ok(serde_json::to_string(&String::from_utf8_lossy(string))?)
}

fn element_text(data_type: DataType, element: &[u8]) -> String {
    let mut wide = [0; 8];
    for (to, from) in wide.iter_mut().zip(element) {
        *to = *from;
    }
    let [a, b, c, d, ..] = wide;
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _infallible = match data_type {
        DataType::Bool => write!(text, "{}", a != 0),
        DataType::Uint8 | DataType::Uint16 | DataType::Uint32 | DataType::Uint64 => {
            write!(text, "{}", u64::from_le_bytes(wide))
        }
        DataType::Int8 => write!(text, "{}", i8::from_le_bytes([a])),
        DataType::Int16 => write!(text, "{}", i16::from_le_bytes([a, b])),
        DataType::Int32 => write!(text, "{}", i32::from_le_bytes([a, b, c, d])),
        DataType::Int64 => write!(text, "{}", i64::from_le_bytes(wide)),
        DataType::Fp16 => write_float(&mut text, f16::from_le_bytes([a, b]).to_f32()),
        DataType::Bf16 => write_float(&mut text, bf16::from_le_bytes([a, b]).to_f32()),
        DataType::Fp32 => write_float(&mut text, f32::from_le_bytes([a, b, c, d])),
        DataType::Fp64 => write_float(&mut text, f64::from_le_bytes(wide)),
        DataType::Bytes => Ok(()),
    };
    text
}

/// The shortest number that is read back as the same one.
fn write_float<F: std::fmt::Debug + Into<f64> + Copy>(text: &mut String, number: F) -> std::fmt::Result {
    let wide: f64 = number.into();
    if wide.is_nan() {
        text.write_str("\"NaN\"")
    } else if wide.is_infinite() {
        text.write_str(if wide > 0.0 { "\"Infinity\"" } else { "\"-Infinity\"" })
    } else {
        write!(text, "{number:?}")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn there_and_back(data_type: DataType, value: &Value) -> Vec<String> {
        let (shape, bytes) = of_json(value, data_type).expect("fits");
        check(data_type, &shape, &bytes).expect("a whole tensor");
        Tensor { name: "x".to_owned(), data_type, shape, bytes }.elements().expect("whole")
    }

    #[test]
    fn elements_survive_a_round_trip() {
        use DataType::{Bf16, Bool, Bytes, Fp16, Fp32, Fp64, Int8, Int16, Int32, Int64, Uint8, Uint64};
        for (data_type, value, wanted) in [
            (Bool, json!([true, 0]), vec!["true", "false"]),
            (Uint8, json!([255]), vec!["255"]),
            (Uint64, json!([u64::MAX]), vec!["18446744073709551615"]),
            (Int8, json!([-128]), vec!["-128"]),
            (Int16, json!([-2]), vec!["-2"]),
            (Int32, json!([i32::MIN]), vec!["-2147483648"]),
            (Int64, json!([i64::MIN]), vec!["-9223372036854775808"]),
            (Fp16, json!([0.5, 65504]), vec!["0.5", "65504.0"]),
            (Bf16, json!([1.5]), vec!["1.5"]),
            (Fp32, json!([0.1, 1e30, "NaN", "-Infinity"]), vec!["0.1", "1e30", "\"NaN\"", "\"-Infinity\""]),
            (Fp64, json!([[0.1], [-0.0]]), vec!["0.1", "-0.0"]),
            (Bytes, json!(["", "é\"\n"]), vec!["\"\"", "\"é\\\"\\n\""]),
        ] {
            assert_eq!(there_and_back(data_type, &value), wanted, "{data_type}");
        }
    }

    #[test]
    fn shapes_come_from_the_nesting() {
        let shape = |value: Value| of_json(&value, DataType::Int64).map(|(shape, _)| shape.to_vec());
        assert_eq!(shape(json!(5)).expect("a scalar"), [0_i64; 0]);
        assert_eq!(shape(json!([[1, 2, 3], [4, 5, 6]])).expect("a matrix"), [2, 3]);
        assert_eq!(shape(json!([])).expect("empty"), [0]);
        for ragged in [json!([[1], [2, 3]]), json!([1, [2]]), json!([[1], 2]), json!([[1], [[2]]])] {
            let error = shape(ragged.clone()).expect_err("ragged").to_string();
            assert!(error.contains("ragged"), "{ragged}: {error}");
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        for (data_type, value, reason) in [
            (DataType::Uint8, json!([256]), "256 is no UINT8"),
            (DataType::Int32, json!([1.5]), "1.5 is no INT32"),
            (DataType::Fp16, json!([1e6]), "too large for FP16"),
            (DataType::Fp32, json!([1e39]), "too large for FP32"),
            (DataType::Fp32, json!(["one"]), "\"one\" is no FP32"),
            (DataType::Bytes, json!([1]), "put it in quotes"),
            (DataType::Bool, json!([2]), "2 is no BOOL"),
        ] {
            let error = of_json(&value, data_type).expect_err(reason).to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn strings_are_split_with_care() {
        let joined = join_strings([&b"ab"[..], b"", b"c"].into_iter()).expect("short");
        assert_eq!(split_strings(&joined).expect("whole"), [&b"ab"[..], b"", b"c"]);
        split_strings(&joined[..joined.len() - 1]).expect_err("cut off");
        split_strings(b"\xff\xff\xff\xff").expect_err("a length without a string");
        split_strings(b"\0\0").expect_err("half a length");
    }
}
