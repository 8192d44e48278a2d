//! One registered region: its bounds, its bytes, and since when nobody has used it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use trireme_shm::{CudaError, DeviceMemory, Mapping, ObjectError, SharedObject};
use trireme_types::{Error, Result, TensorBuffer};

use super::{MemoryKind, RegionPlace, RegionStatus, Share};

/// Tensors of at least this many bytes are read in place; a smaller one is copied in less time than it takes to watch.
const IN_PLACE: usize = 64 << 10;

/// Bytes of a region that are read where they lie.
struct InPlace {
    mapping: Arc<Mapping>,
    range: Range<usize>,
    /// Keeps its share of the limits.
    _region: Arc<Region>,
}

impl AsRef<[u8]> for InPlace {
    fn as_ref(&self) -> &[u8] {
        self.mapping.as_slice().get(self.range.clone()).unwrap_or_default()
    }
}

/// The memory behind a region.
#[derive(Debug)]
pub(super) enum Memory {
    /// The region begins at `offset` of the object.
    System {
        object: Arc<SharedObject>,
        key: String,
        offset: u64,
    },
    Cuda {
        memory: DeviceMemory,
        device_id: i64,
    },
}

/// A region that is registered, or still used after it was unregistered.
#[derive(Debug)]
pub(super) struct Region {
    name: Arc<str>,
    memory: Memory,
    share: Share,
    /// The whole region, once a tensor of it was read in place.
    mapping: Mutex<Option<Arc<Mapping>>>,
    /// Milliseconds from the server's begin to the last use.
    used: AtomicU64,
}

impl Region {
    pub(super) fn new(name: Arc<str>, memory: Memory, share: Share, began: Instant) -> Self {
        let region = Self { name, memory, share, mapping: Mutex::default(), used: AtomicU64::new(0) };
        region.use_now(began);
        region
    }

    pub(super) fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(super) fn byte_size(&self) -> u64 {
        self.share.bytes
    }

    pub(super) fn kind(&self) -> MemoryKind {
        match self.memory {
            Memory::System { .. } => MemoryKind::System,
            Memory::Cuda { .. } => MemoryKind::Cuda,
        }
    }

    pub(super) fn status(&self) -> RegionStatus {
        let place = match &self.memory {
            Memory::System { key, offset, .. } => RegionPlace::System { key: key.clone(), offset: *offset },
            Memory::Cuda { device_id, .. } => RegionPlace::Cuda { device_id: *device_id },
        };
        RegionStatus { name: self.name.to_string(), byte_size: self.byte_size(), place }
    }

    pub(super) fn use_now(&self, began: Instant) {
        self.used.store(since(began), Ordering::Relaxed);
    }

    pub(super) fn idle_for(&self, began: Instant) -> Duration {
        Duration::from_millis(since(began).saturating_sub(self.used.load(Ordering::Relaxed)))
    }

    /// Whether nobody but the server can reach the memory. Of a GPU's memory that cannot be told.
    pub(super) fn is_abandoned(&self) -> bool {
        match &self.memory {
            Memory::System { object, .. } => object.is_abandoned(),
            Memory::Cuda { .. } => false,
        }
    }

    /// Checks that bytes are inside the region; returns how many as a length.
    ///
    /// # Errors
    /// `INVALID_ARG` with Triton's words. No bytes at all are outside as well.
    pub(super) fn check(&self, offset: u64, byte_size: u64) -> Result<usize> {
        let name = &self.name;
        if offset > self.byte_size() {
            return Err(Error::invalid_arg(format!(
                "Invalid offset for shared memory region: '{name}': the offset is {offset}, the region has {} bytes",
                self.byte_size()
            )));
        }
        let Some(end) = offset.checked_add(byte_size) else {
            return Err(Error::invalid_arg(format!(
                "Integer overflow detected: byte_size ({byte_size}) + offset ({offset}) exceeds maximum value ({}) for \
                 region '{name}'",
                u64::MAX
            )));
        };
        match usize::try_from(byte_size) {
            Ok(len) if len > 0 && end <= self.byte_size() => Ok(len),
            _ => Err(Error::invalid_arg(format!(
                "Invalid offset + byte size for shared memory region: '{name}': offset {offset} + byte size {byte_size} \
                 must name at least one byte of the {} that the region has",
                self.byte_size()
            ))),
        }
    }

    /// Bytes that [`Region::check`] has let pass, where they lie: their mapping can tell afterwards whether they were
    /// there. `None` if they are better copied.
    ///
    /// # Errors
    /// `INVALID_ARG` if the object has been made smaller.
    pub(super) fn in_place(
        self: &Arc<Self>,
        offset: u64,
        len: usize,
    ) -> Result<Option<(TensorBuffer, Arc<Mapping>)>> {
        let Memory::System { object, offset: base, .. } = &self.memory else { return Ok(None) };
        let (Ok(start), Ok(whole)) = (usize::try_from(offset), usize::try_from(self.byte_size())) else {
            return Ok(None);
        };
        if len < IN_PLACE {
            return Ok(None);
        }
        object.check(base.saturating_add(offset), len).map_err(|error| self.object_error(error))?;
        let mapping = {
            let mut mapping = self.mapping.lock();
            match &*mapping {
                Some(mapping) if !mapping.is_cut() => Arc::clone(mapping),
                // What cannot be mapped can still be copied.
                _ => match Mapping::new(object, *base, whole) {
                    Ok(new) => Arc::clone(mapping.insert(Arc::new(new))),
                    Err(_) => return Ok(None),
                },
            }
        };
        let range = start..start.saturating_add(len);
        let bytes = InPlace { mapping: Arc::clone(&mapping), range, _region: Arc::clone(self) };
        Ok(Some((TensorBuffer::from(Bytes::from_owner(bytes)), mapping)))
    }

    /// The error of a request that has read bytes that were not there.
    pub(super) fn cut(&self) -> Error {
        let size = match &self.memory {
            Memory::System { object, .. } => object.size().unwrap_or_default(),
            Memory::Cuda { .. } => 0,
        };
        self.object_error(ObjectError::Truncated { size })
    }

    /// A copy of bytes that [`Region::check`] has let pass.
    ///
    /// # Errors
    /// `INVALID_ARG` if the object has been made smaller, `INTERNAL` if the copy fails.
    pub(super) fn read(&self, offset: u64, len: usize) -> Result<TensorBuffer> {
        let bytes = match &self.memory {
            Memory::System { object, offset: base, .. } => {
                object.read(base.saturating_add(offset), len).map_err(|error| self.object_error(error))
            }
            Memory::Cuda { memory, .. } => {
                memory.read(device_offset(offset), len).map_err(|error| self.device_error(&error))
            }
        };
        bytes.map(TensorBuffer::from)
    }

    /// Copies bytes to where [`Region::check`] has let pass.
    ///
    /// # Errors
    /// As [`Region::read`].
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        match &self.memory {
            Memory::System { object, offset: base, .. } => {
                object.write(base.saturating_add(offset), bytes).map_err(|error| self.object_error(error))
            }
            Memory::Cuda { memory, .. } => {
                memory.write(device_offset(offset), bytes).map_err(|error| self.device_error(&error))
            }
        }
    }

    #[cold]
    fn object_error(&self, error: ObjectError) -> Error {
        let RegionPlace::System { key, offset } = self.status().place else {
            return Error::internal(error.to_string());
        };
        let name = &self.name;
        match error {
            ObjectError::Truncated { size } => Error::invalid_arg(format!(
                "shared memory region '{name}' needs {} bytes of '{key}', which has only {size} now: its owner has made \
                 it smaller since it was registered",
                offset.saturating_add(self.byte_size())
            )),
            other => {
                Error::internal(format!("shared memory region '{name}' ('{key}') cannot be used: {other}"))
            }
        }
    }

    #[cold]
    fn device_error(&self, error: &CudaError) -> Error {
        Error::internal(format!("CUDA shared memory region '{}' cannot be used: {error}", self.name))
    }
}

/// Offsets are inside the region, whose size is a length.
fn device_offset(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

fn since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX)
}
