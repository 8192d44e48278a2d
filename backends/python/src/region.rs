//! Memory without a name that server and worker both map.
//!
//! *Invariant:* a region is sealed against shrinking before it is mapped, so that reading it never faults whatever
//! the other side does, and whoever made a region does not write to it again before the other side has given it
//! back.

#![allow(unsafe_code, reason = "maps shared memory; every block says why it is sound")]

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use memmap2::{MmapMut, MmapOptions, MmapRaw};
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use trireme_types::TensorBuffer;

/// Smallest region, and what sizes of large ones are rounded to.
const PAGE: usize = 64 * 1024;
/// From here on sizes are rounded to pages and no longer doubled.
const LARGE: usize = 16 * 1024 * 1024;
/// Regions without a user that are kept for the next batch.
const SPARE_REGIONS: usize = 4;
const SPARE_BYTES: usize = 64 * 1024 * 1024;

/// A region that the server made and writes inputs to.
pub(crate) struct Region {
    pub(crate) number: u64,
    memory: MmapMut,
}

impl Region {
    /// A region of at least `size` bytes and the descriptor to send with it.
    fn new(number: u64, size: usize) -> io::Result<(Self, OwnedFd)> {
        let size = match size {
            0..PAGE => PAGE,
            PAGE..LARGE => size.next_power_of_two(),
            _ => size.checked_next_multiple_of(PAGE).ok_or(io::ErrorKind::OutOfMemory)?,
        };
        let fd = memfd_create("trireme-python", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, u64::try_from(size).map_err(io::Error::other)?)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        // SAFETY: the region cannot shrink, and its other user, the worker, is given it to read; the server writes
        // to it only while no request uses it.
        let memory = unsafe { MmapOptions::new().len(size).map_mut(&fd)? };
        Ok((Self { number, memory }, fd))
    }

    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }
}

/// Regions for inputs. They grow with the batches; few that are not in use are kept.
#[derive(Default)]
pub(crate) struct InputRegions {
    next: u64,
    free: Vec<Region>,
    /// With the worker, who gives them back by number.
    lent: HashMap<u64, Region>,
    /// Numbers of regions that the worker may forget.
    pub(crate) gone: Vec<u64>,
}

impl InputRegions {
    /// A region that no request uses, with its descriptor if the worker does not know it yet.
    pub(crate) fn take(&mut self, size: usize) -> io::Result<(Region, Option<OwnedFd>)> {
        let fitting = (self.free.iter().enumerate())
            .filter(|(_, region)| region.len() >= size && region.len() / 4 <= size.max(PAGE))
            .min_by_key(|(_, region)| region.len());
        if let Some((place, _)) = fitting {
            return Ok((self.free.swap_remove(place), None));
        }
        self.next += 1;
        let (region, fd) = Region::new(self.next, size)?;
        Ok((region, Some(fd)))
    }

    pub(crate) fn lend(&mut self, region: Region) {
        self.lent.insert(region.number, region);
    }

    /// The worker has no array on these regions any more.
    pub(crate) fn give_back(&mut self, numbers: &[u64]) {
        self.free.extend(numbers.iter().filter_map(|number| self.lent.remove(number)));
        while self.free.len() > 1
            && (self.free.len() > SPARE_REGIONS
                || self.free.iter().map(Region::len).sum::<usize>() > SPARE_BYTES)
        {
            self.gone.push(self.free.remove(0).number);
        }
    }
}

/// A region that the worker made and writes outputs to, mapped to be read.
struct Foreign {
    memory: MmapRaw,
}

impl Foreign {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping lives as long as `self`, cannot shrink, and is written by nobody while the server has
        // not given it back. A worker that breaks this promise can change bytes of its own answers only: they are
        // plain bytes, and nothing here relies on reading the same twice.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.memory.len()) }
    }
}

/// Regions of outputs that are known, and those that nobody reads any more.
#[derive(Clone, Default)]
pub(crate) struct OutputRegions(Arc<Mutex<Outputs>>);

#[derive(Default)]
struct Outputs {
    known: HashMap<u64, Arc<Foreign>>,
    released: Vec<u64>,
}

impl OutputRegions {
    /// Maps a region that came from the worker.
    ///
    /// # Errors
    /// It is smaller than the worker says, or could become so.
    pub(crate) fn add(&self, number: u64, size: usize, fd: &OwnedFd) -> io::Result<()> {
        let seals = fcntl_get_seals(fd)?;
        let real = usize::try_from(fstat(fd)?.st_size).unwrap_or(0);
        if !seals.contains(SealFlags::SHRINK) || real < size || size == 0 {
            return Err(io::Error::other(format!(
                "a region of {real} bytes came as one of {size} bytes, or can be cut off"
            )));
        }
        let memory = MmapOptions::new().len(size).map_raw(fd)?;
        self.0.lock().known.insert(number, Arc::new(Foreign { memory }));
        Ok(())
    }

    /// The region's bytes; when the last slice of them is dropped it goes back to the worker. `None` if the worker
    /// never sent such a region.
    pub(crate) fn open(&self, number: u64) -> Option<TensorBuffer> {
        let region = Arc::clone(self.0.lock().known.get(&number)?);
        let reading = Reading { region, number, regions: Arc::clone(&self.0) };
        Some(TensorBuffer::from(bytes::Bytes::from_owner(reading)))
    }

    pub(crate) fn forget(&self, numbers: &[u64]) {
        let mut outputs = self.0.lock();
        for number in numbers {
            outputs.known.remove(number);
        }
    }

    /// Numbers of the regions that may be written again.
    pub(crate) fn take_released(&self) -> Vec<u64> {
        std::mem::take(&mut self.0.lock().released)
    }
}

impl fmt::Debug for OutputRegions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OutputRegions")
    }
}

/// A region while something refers to its bytes.
struct Reading {
    region: Arc<Foreign>,
    number: u64,
    regions: Arc<Mutex<Outputs>>,
}

impl AsRef<[u8]> for Reading {
    fn as_ref(&self) -> &[u8] {
        self.region.bytes()
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.regions.lock().released.push(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_regions_are_used_again_and_do_not_pile_up() {
        let mut regions = InputRegions::default();
        let (mut region, fd) = regions.take(100_000).expect("memory");
        assert!(fd.is_some() && region.len() >= 100_000);
        region.bytes_mut().fill(1);
        let number = region.number;
        regions.lend(region);
        regions.give_back(&[number, 77]);
        let (region, fd) = regions.take(100_000).expect("memory");
        assert!(fd.is_none(), "the worker knows it");
        assert_eq!(region.number, number);
        regions.lend(region);
        let mut numbers = vec![number];
        for _ in 0..10 {
            let (region, _) = regions.take(20 << 20).expect("memory");
            numbers.push(region.number);
            regions.lend(region);
        }
        regions.give_back(&numbers);
        assert!(regions.free.len() <= SPARE_REGIONS);
        assert!(regions.free.iter().map(Region::len).sum::<usize>() <= SPARE_BYTES);
        assert_eq!(regions.gone.len() + regions.free.len(), 11);
    }

    #[test]
    fn an_output_region_that_could_shrink_is_refused_and_a_dropped_one_goes_back() {
        let regions = OutputRegions::default();
        let open = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memory");
        ftruncate(&open, 4096).expect("memory");
        assert!(regions.add(1, 4096, &open).is_err(), "not sealed");
        let (_, fd) = Region::new(2, 4096).expect("memory");
        assert!(regions.add(2, PAGE + 1, &fd).is_err(), "too small");
        regions.add(2, PAGE, &fd).expect("a region");
        let buffer = regions.open(2).expect("known");
        let part = buffer.slice(10..20);
        drop(buffer);
        assert!(regions.take_released().is_empty(), "a slice still refers to it");
        drop(part);
        assert_eq!(regions.take_released(), [2]);
        assert!(regions.open(3).is_none());
    }
}
