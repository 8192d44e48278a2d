//! Where tensor bytes live. Today: host memory, owned or a slice of something that stays alive.

use std::fmt;

use bytes::Bytes;

/// Read-only bytes of one tensor, row-major and little-endian; cloning and slicing copy nothing.
///
/// A slice of a request body stays a slice of that body until a backend needs it elsewhere. Alignment is whatever
/// the sender made it: a backend that needs aligned elements checks and copies.
#[derive(Clone, Default)]
pub struct TensorBuffer(Bytes);

impl TensorBuffer {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }

    /// The same bytes as a cheap handle for the network.
    pub fn into_bytes(self) -> Bytes {
        self.0
    }

    /// A handle on part of the bytes.
    ///
    /// # Panics
    /// If the range is outside the buffer; callers slice by sizes that they have checked.
    pub fn slice(&self, range: std::ops::Range<usize>) -> Self {
        Self(self.0.slice(range))
    }
}

impl fmt::Debug for TensorBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorBuffer({} bytes)", self.0.len())
    }
}

impl From<Bytes> for TensorBuffer {
    fn from(bytes: Bytes) -> Self {
        Self(bytes)
    }
}

impl From<Vec<u8>> for TensorBuffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Bytes::from(bytes))
    }
}

impl From<HostBuffer> for TensorBuffer {
    fn from(buffer: HostBuffer) -> Self {
        Self(Bytes::from_owner(buffer))
    }
}

/// Writable host memory for one tensor, zeroed and aligned to 8 bytes, so that every element type may be written
/// in place.
pub struct HostBuffer {
    words: Vec<u64>,
    len: usize,
}

impl HostBuffer {
    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        Self { words: vec![0; len.div_ceil(8)], len }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn as_slice(&self) -> &[u8] {
        bytemuck::cast_slice::<u64, u8>(&self.words).get(..self.len).unwrap_or_default()
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut::<u64, u8>(&mut self.words).get_mut(..self.len).unwrap_or_default()
    }
}

impl AsRef<[u8]> for HostBuffer {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuffer({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_buffer_is_aligned_and_exact() {
        for len in [0, 1, 7, 8, 9, 4096] {
            let mut buffer = HostBuffer::zeroed(len);
            assert_eq!(buffer.as_mut_slice().len(), len);
            assert_eq!(buffer.as_slice().as_ptr().align_offset(8), 0);
            buffer.as_mut_slice().fill(7);
            let tensor = TensorBuffer::from(buffer);
            assert_eq!(tensor.as_slice(), vec![7; len]);
        }
    }
}
