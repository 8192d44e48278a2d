//! Tensors of the engine: made over bytes of ours, filled with strings, and read back.

use std::ffi::{c_char, c_void};

use bytes::Bytes;
use ort_sys::OrtValue;
use trireme_types::{DataType, Error, HostBuffer, Result, Shape, TensorBuffer};

use crate::api::{Failure, Outcome, TensorTypeInfo, Value, ort};
use crate::element;
use crate::runtime::Runtime;

/// Outputs of at least this many bytes are handed on in the engine's memory; smaller ones are copied, which costs
/// less than keeping the engine's memory busy.
const HAND_ON: usize = 64 * 1024;

/// Whether the engine may read these bytes in place: elements are aligned, and every boolean is 0 or 1.
pub(crate) fn is_readable_in_place(bytes: &[u8], data_type: DataType) -> bool {
    match data_type {
        DataType::Bool => bytes.iter().fold(0, |all, byte| all | byte) <= 1,
        DataType::Bytes => false,
        _ => data_type.byte_size().is_some_and(|size| bytes.as_ptr().addr().is_multiple_of(size)),
    }
}

/// Copies elements to where the engine may read them: any byte but 0 is a true boolean.
pub(crate) fn copy_elements(from: &[u8], to: &mut [u8], data_type: DataType) {
    if data_type == DataType::Bool {
        for (to, from) in to.iter_mut().zip(from) {
            *to = u8::from(*from != 0);
        }
    } else if let Some(to) = to.get_mut(..from.len()) {
        to.copy_from_slice(from);
    }
}

/// A tensor over memory that is not copied.
///
/// # Safety
/// `data` is valid for reads of `len` bytes as long as the value is used, and for writes if the engine is to write
/// there; elements are aligned.
pub(crate) unsafe fn over(
    runtime: &Runtime,
    data: *mut u8,
    len: usize,
    shape: &[i64],
    data_type: DataType,
) -> Outcome<Value> {
    Value::create(runtime.api, |out| {
        // SAFETY: memory by the caller; the shape is read during the call; `out` takes the handle. The library
        // checks that `len` is enough for the shape.
        unsafe {
            ort!(
                runtime.api,
                CreateTensorWithDataAsOrtValue,
                runtime.memory(),
                data.cast::<c_void>(),
                len,
                shape.as_ptr(),
                shape.len(),
                element::raw(data_type),
                out,
            )
        }
    })
}

/// A tensor of strings, copied out of wire bytes: each element has its length in front, 4 bytes little-endian.
/// `parts` are the bytes of several requests in order.
///
/// # Errors
/// INVALID_ARG: the bytes do not hold as many strings as the shape has elements.
pub(crate) fn strings<'a>(
    runtime: &Runtime,
    input: &str,
    parts: impl Iterator<Item = &'a [u8]> + Clone,
    shape: &Shape,
) -> Result<Value> {
    let wrong = |what: &str| Error::invalid_arg(format!("input '{input}' with shape {shape} {what}"));
    let count = shape.element_count().map_err(|error| wrong(&format!("has no such tensor: {error}")))?;
    // Before memory is taken: every string has at least its length.
    let most = parts.clone().map(<[u8]>::len).sum::<usize>() / 4;
    if most < count {
        return Err(wrong(&format!("has at most {most} strings, expected {count}")));
    }
    let value = Value::create(runtime.api, |out| {
        // SAFETY: allocator and shape live through the call; `out` takes the handle.
        unsafe {
            ort!(
                runtime.api,
                CreateTensorAsOrtValue,
                runtime.allocator(),
                shape.as_ptr(),
                shape.len(),
                element::raw(DataType::Bytes),
                out,
            )
        }
    })?;
    let mut index = 0;
    for mut rest in parts {
        while !rest.is_empty() {
            let (length, tail) =
                rest.split_first_chunk::<4>().ok_or_else(|| wrong("ends within a length"))?;
            let length = u32::from_le_bytes(*length) as usize;
            let (text, tail) = tail.split_at_checked(length).ok_or_else(|| wrong("ends within a string"))?;
            if index == count {
                return Err(wrong(&format!("has more than {count} strings")));
            }
            set_string(runtime, &value, index, text)?;
            index += 1;
            rest = tail;
        }
    }
    if index != count {
        return Err(wrong(&format!("has {index} strings, expected {count}")));
    }
    Ok(value)
}

fn set_string(runtime: &Runtime, value: &Value, index: usize, text: &[u8]) -> Outcome<()> {
    let mut buffer: *mut c_char = std::ptr::null_mut();
    // SAFETY: the value is a string tensor of ours with more than `index` elements.
    unsafe {
        ort!(
            runtime.api,
            GetResizedStringTensorElementBuffer,
            value.as_ptr(),
            index,
            text.len(),
            &raw mut buffer
        )
    }?;
    if !buffer.is_null() {
        // SAFETY: the library has made room for `text.len()` bytes there, and it is not the memory of `text`.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast::<u8>(), text.len()) };
    }
    Ok(())
}

/// Shape of a value that the engine made.
pub(crate) fn shape_of(value: &Value) -> Outcome<Shape> {
    let api = value.api;
    let pointer: *const OrtValue = value.as_ptr();
    let info = TensorTypeInfo::create(api, |out| {
        // SAFETY: the value is alive; `out` takes the handle.
        unsafe { ort!(api, GetTensorTypeAndShape, pointer, out) }
    })?;
    let mut rank = 0_usize;
    // SAFETY: the info is alive.
    unsafe { ort!(api, GetDimensionsCount, info.as_ptr(), &raw mut rank) }?;
    let mut shape: Shape = std::iter::repeat_n(0, rank).collect();
    // SAFETY: `shape` has room for `rank` numbers.
    unsafe { ort!(api, GetDimensions, info.as_ptr(), shape.as_mut_ptr(), rank) }?;
    Ok(shape)
}

/// A value in the engine's memory as bytes of ours.
struct Owned {
    value: Value,
    len: usize,
    data: *const u8,
    /// Weights may lie in memory of the session.
    _session: std::sync::Arc<crate::session::Session>,
}

// SAFETY: the memory is read only, and the value that owns it may be released on any thread.
unsafe impl Send for Owned {}
// SAFETY: as for Send.
unsafe impl Sync for Owned {}

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        debug_assert!(!self.value.as_ptr().is_null());
        // SAFETY: `data` is valid for `len` bytes as long as `value` lives, and nobody writes there any more.
        unsafe { std::slice::from_raw_parts(self.data, self.len) }
    }
}

/// The bytes of a fixed-size tensor that the engine made. `ours` are the address ranges of the inputs: an output
/// that is an input passed through lies in memory that ends with the request, and is copied.
pub(crate) fn read(
    session: &std::sync::Arc<crate::session::Session>,
    value: Value,
    shape: &Shape,
    data_type: DataType,
    ours: &[(usize, usize)],
) -> Outcome<TensorBuffer> {
    let api = value.api;
    let size = shape.byte_size(data_type).ok().flatten().ok_or_else(|| Failure {
        code: 1,
        message: format!("an output has the shape {shape}, which no tensor in memory has"),
    })?;
    if size == 0 {
        return Ok(TensorBuffer::default());
    }
    let mut data: *mut c_void = std::ptr::null_mut();
    // SAFETY: the value is alive and a tensor.
    unsafe { ort!(api, GetTensorMutableData, value.as_ptr(), &raw mut data) }?;
    if data.is_null() {
        return Err(Failure { code: 1, message: "an output has no memory".to_owned() });
    }
    let data = data.cast::<u8>().cast_const();
    let start = data.addr();
    let is_ours = ours.iter().any(|&(from, len)| start < from.saturating_add(len) && from < start + size);
    if size >= HAND_ON && !is_ours {
        let owned = Owned { value, len: size, data, _session: session.clone() };
        return Ok(Bytes::from_owner(owned).into());
    }
    let mut copy = HostBuffer::zeroed(size);
    // SAFETY: the tensor has `size` bytes at `data`, by its type and shape, and the value is alive.
    copy.as_mut_slice().copy_from_slice(unsafe { std::slice::from_raw_parts(data, size) });
    Ok(copy.into())
}

/// Strings of a tensor, one after the other, with the place where each begins and the last ends.
pub(crate) struct Strings {
    text: Vec<u8>,
    starts: Vec<usize>,
}

impl Strings {
    pub(crate) fn read(value: &Value, shape: &Shape) -> Outcome<Self> {
        let api = value.api;
        let pointer: *const OrtValue = value.as_ptr();
        let count = shape.element_count().map_err(|error| Failure { code: 1, message: error.to_string() })?;
        if count == 0 {
            return Ok(Self { text: Vec::new(), starts: vec![0] });
        }
        let mut len = 0_usize;
        // SAFETY: the value is alive and a tensor of strings.
        unsafe { ort!(api, GetStringTensorDataLength, pointer, &raw mut len) }?;
        let mut text = vec![0_u8; len];
        let mut starts = vec![0_usize; count];
        // SAFETY: `text` has room for all bytes and `starts` for every string's place.
        unsafe {
            ort!(
                api,
                GetStringTensorContent,
                pointer,
                text.as_mut_ptr().cast::<c_void>(),
                len,
                starts.as_mut_ptr(),
                count,
            )
        }?;
        starts.push(len);
        Ok(Self { text, starts })
    }

    /// Wire bytes of the elements in a range.
    pub(crate) fn encode(&self, elements: std::ops::Range<usize>) -> Outcome<TensorBuffer> {
        let mut wire = Vec::new();
        for bounds in self.starts.get(elements.start..=elements.end).unwrap_or_default().windows(2) {
            let &[from, to] = bounds else { continue };
            let text = self.text.get(from..to).unwrap_or_default();
            let length = u32::try_from(text.len()).map_err(|_| Failure {
                code: 1,
                message: format!(
                    "a string of an output has {} bytes, more than the protocol can carry",
                    text.len()
                ),
            })?;
            wire.extend_from_slice(&length.to_le_bytes());
            wire.extend_from_slice(text);
        }
        Ok(wire.into())
    }
}
