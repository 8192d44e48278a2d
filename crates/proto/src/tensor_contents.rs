//! `inference.InferTensorContents`: tensor values as typed number lists, with a codec for large lists.
//!
//! prost's derived decoder takes one value at a time, about 2 ns each, which for an image of 150,528 FP32
//! values is longer than many models run. Here a packed list of fixed-width numbers is converted in one
//! pass over each contiguous piece of the buffer, and a packed list of varints in a loop over memory that
//! is already there. The encoded form is the same as prost's, byte for byte.
//!
//! Invariant: a length read from the wire is compared with the bytes that are there before any memory is
//! taken for it.

mod varint;

use bytes::{Buf, BufMut, Bytes};
use prost::encoding::{self, DecodeContext, WireType};
use prost::{DecodeError, Message};

const MESSAGE: &str = "InferTensorContents";

const BOOL: u32 = 1;
const INT: u32 = 2;
const INT64: u32 = 3;
const UINT: u32 = 4;
const UINT64: u32 = 5;
const FP32: u32 = 6;
const FP64: u32 = 7;
const BYTES: u32 = 8;

/// The values of one tensor in row-major order, in the one list that matches the tensor's datatype.
///
/// The other lists are empty. A tensor sent as raw bytes has no `InferTensorContents` at all.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct InferTensorContents {
    /// Values of a BOOL tensor.
    pub bool_contents: Vec<bool>,
    /// Values of an INT8, INT16 or INT32 tensor.
    pub int_contents: Vec<i32>,
    /// Values of an INT64 tensor.
    pub int64_contents: Vec<i64>,
    /// Values of a UINT8, UINT16 or UINT32 tensor.
    pub uint_contents: Vec<u32>,
    /// Values of a UINT64 tensor.
    pub uint64_contents: Vec<u64>,
    /// Values of an FP32 tensor.
    pub fp32_contents: Vec<f32>,
    /// Values of an FP64 tensor.
    pub fp64_contents: Vec<f64>,
    /// Elements of a BYTES tensor.
    pub bytes_contents: Vec<Bytes>,
}

impl Message for InferTensorContents {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        encoding::bool::encode_packed(BOOL, &self.bool_contents, buf);
        encoding::int32::encode_packed(INT, &self.int_contents, buf);
        encoding::int64::encode_packed(INT64, &self.int64_contents, buf);
        encoding::uint32::encode_packed(UINT, &self.uint_contents, buf);
        encoding::uint64::encode_packed(UINT64, &self.uint64_contents, buf);
        encode_fixed(FP32, &self.fp32_contents, f32::to_le_bytes, buf);
        encode_fixed(FP64, &self.fp64_contents, f64::to_le_bytes, buf);
        encoding::bytes::encode_repeated(BYTES, &self.bytes_contents, buf);
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        ctx: DecodeContext,
    ) -> Result<(), DecodeError> {
        let packed = wire_type == WireType::LengthDelimited;
        let (field, merged) = match tag {
            BOOL if packed => {
                ("bool_contents", merge_varints(&mut self.bool_contents, |value| value != 0, buf))
            }
            BOOL => (
                "bool_contents",
                encoding::bool::merge_repeated(wire_type, &mut self.bool_contents, buf, ctx),
            ),
            INT if packed => ("int_contents", merge_varints(&mut self.int_contents, low_i32, buf)),
            INT => {
                ("int_contents", encoding::int32::merge_repeated(wire_type, &mut self.int_contents, buf, ctx))
            }
            INT64 if packed => {
                ("int64_contents", merge_varints(&mut self.int64_contents, u64::cast_signed, buf))
            }
            INT64 => (
                "int64_contents",
                encoding::int64::merge_repeated(wire_type, &mut self.int64_contents, buf, ctx),
            ),
            UINT if packed => ("uint_contents", merge_varints(&mut self.uint_contents, low_u32, buf)),
            UINT => (
                "uint_contents",
                encoding::uint32::merge_repeated(wire_type, &mut self.uint_contents, buf, ctx),
            ),
            UINT64 if packed => {
                ("uint64_contents", merge_varints(&mut self.uint64_contents, |value| value, buf))
            }
            UINT64 => (
                "uint64_contents",
                encoding::uint64::merge_repeated(wire_type, &mut self.uint64_contents, buf, ctx),
            ),
            FP32 if packed => {
                ("fp32_contents", merge_fixed(&mut self.fp32_contents, f32::from_le_bytes, buf))
            }
            FP32 => (
                "fp32_contents",
                encoding::float::merge_repeated(wire_type, &mut self.fp32_contents, buf, ctx),
            ),
            FP64 if packed => {
                ("fp64_contents", merge_fixed(&mut self.fp64_contents, f64::from_le_bytes, buf))
            }
            FP64 => (
                "fp64_contents",
                encoding::double::merge_repeated(wire_type, &mut self.fp64_contents, buf, ctx),
            ),
            BYTES => (
                "bytes_contents",
                encoding::bytes::merge_repeated(wire_type, &mut self.bytes_contents, buf, ctx),
            ),
            _ => return encoding::skip_field(wire_type, tag, buf, ctx),
        };
        merged.map_err(|mut error| {
            error.push(MESSAGE, field);
            error
        })
    }

    fn encoded_len(&self) -> usize {
        encoding::bool::encoded_len_packed(BOOL, &self.bool_contents)
            + encoding::int32::encoded_len_packed(INT, &self.int_contents)
            + encoding::int64::encoded_len_packed(INT64, &self.int64_contents)
            + encoding::uint32::encoded_len_packed(UINT, &self.uint_contents)
            + encoding::uint64::encoded_len_packed(UINT64, &self.uint64_contents)
            + encoding::float::encoded_len_packed(FP32, &self.fp32_contents)
            + encoding::double::encoded_len_packed(FP64, &self.fp64_contents)
            + encoding::bytes::encoded_len_repeated(BYTES, &self.bytes_contents)
    }

    fn clear(&mut self) {
        self.bool_contents.clear();
        self.int_contents.clear();
        self.int64_contents.clear();
        self.uint_contents.clear();
        self.uint64_contents.clear();
        self.fp32_contents.clear();
        self.fp64_contents.clear();
        self.bytes_contents.clear();
    }
}

#[expect(clippy::cast_possible_truncation, reason = "protocol buffers keep the low 32 bits of an int32")]
fn low_i32(value: u64) -> i32 {
    value as i32
}

#[expect(clippy::cast_possible_truncation, reason = "protocol buffers keep the low 32 bits of a uint32")]
fn low_u32(value: u64) -> u32 {
    value as u32
}

#[cold]
fn malformed(description: String) -> DecodeError {
    #[expect(deprecated, reason = "prost 0.14 offers no other way to report an error of one's own")]
    DecodeError::new(description)
}

/// Reads the length of a packed list and checks that so many bytes are there.
fn packed_len(buf: &mut impl Buf) -> Result<usize, DecodeError> {
    let len = encoding::decode_varint(buf)?;
    let there = buf.remaining();
    match usize::try_from(len) {
        Ok(len) if len <= there => Ok(len),
        _ => Err(malformed(format!("a packed list says it is {len} bytes long, but {there} bytes are left"))),
    }
}

/// Appends a packed list of numbers of `N` bytes each.
fn merge_fixed<T, const N: usize>(
    values: &mut Vec<T>,
    from_le_bytes: impl Fn([u8; N]) -> T,
    buf: &mut impl Buf,
) -> Result<(), DecodeError> {
    let mut left = packed_len(buf)?;
    if !left.is_multiple_of(N) {
        return Err(malformed(format!(
            "a packed list of {N}-byte numbers is {left} bytes long, which is not a multiple of {N}"
        )));
    }
    values.reserve(left / N);
    while left > 0 {
        let chunk = buf.chunk();
        let (numbers, _) = chunk.get(..left).unwrap_or(chunk).as_chunks::<N>();
        let taken = if numbers.is_empty() {
            // This number lies across the seam of two pieces of the buffer.
            let mut bytes = [0; N];
            buf.copy_to_slice(&mut bytes);
            values.push(from_le_bytes(bytes));
            N
        } else {
            values.extend(numbers.iter().map(|bytes| from_le_bytes(*bytes)));
            let taken = numbers.len() * N;
            buf.advance(taken);
            taken
        };
        left -= taken;
    }
    Ok(())
}

/// Appends a packed list of varints, each turned into a value by `convert`.
fn merge_varints<T: Copy + Default>(
    values: &mut Vec<T>,
    convert: impl Fn(u64) -> T,
    buf: &mut impl Buf,
) -> Result<(), DecodeError> {
    let len = packed_len(buf)?;
    if let Some(list) = buf.chunk().get(..len) {
        varint::decode_list(values, convert, list)?;
        buf.advance(len);
        Ok(())
    } else {
        // The list lies across pieces of the buffer: put them together first.
        let list = buf.copy_to_bytes(len);
        varint::decode_list(values, convert, &list)
    }
}

/// Writes a packed list of numbers of `N` bytes each, in blocks instead of value by value.
fn encode_fixed<T: Copy, const N: usize>(
    tag: u32,
    values: &[T],
    to_le_bytes: impl Fn(T) -> [u8; N],
    buf: &mut impl BufMut,
) {
    const BLOCK: usize = 512;

    if values.is_empty() {
        return;
    }
    encoding::encode_key(tag, WireType::LengthDelimited, buf);
    encoding::encode_varint((values.len() * N) as u64, buf);
    let mut block = [[0; N]; BLOCK];
    for values in values.chunks(BLOCK) {
        for (bytes, value) in block.iter_mut().zip(values) {
            *bytes = to_le_bytes(*value);
        }
        let filled = block.get(..values.len()).unwrap_or(&block);
        buf.put_slice(filled.as_flattened());
    }
}

#[cfg(test)]
mod tests;
