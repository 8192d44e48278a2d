//! Regions of memory that clients share with the server: registered by name, then named in requests.
//!
//! A region is reference-counted: requests that use it keep it, whatever is unregistered meanwhile. A client may change
//! the bytes of a region, or make the object behind it smaller, at any time: what is used of it is checked against
//! what is there at that moment, and what was checked is a copy that nobody can change.
//!
//! Limits count what is registered and what is still used after it was unregistered. Regions whose object nobody else
//! can reach any more, because their owner has died or has cleaned up without a word, are let go: at once when a limit
//! is reached, otherwise when they have not been used for a while.

mod placement;
mod region;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use trireme_shm::{CudaDriver, IPC_HANDLE_LEN, SharedObject};
use trireme_types::{Code, Error, Result, TensorBuffer};

pub use self::placement::Placements;
use self::region::{Memory, Region};

/// Prefix of the objects through which Triton's python backend talks to its own processes.
const RESERVED_PREFIX: &str = "triton_python_backend_shm_region_";

/// The driver of CUDA, where nothing else is said.
const CUDA_DRIVER: &str = "libcuda.so.1";

/// How long an abandoned region must have been idle before it is let go without need.
const IDLE: Duration = Duration::from_secs(60);

/// Least time between two looks at all regions without need.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);

/// Who may share how much.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedMemorySettings {
    /// `--allow-client-shm`
    pub allowed: bool,
    /// Regions at a time.
    pub max_regions: usize,
    /// Bytes of all regions together.
    pub max_bytes: u64,
    /// The CUDA driver to open instead of the system's.
    pub cuda_driver: Option<PathBuf>,
}

impl Default for SharedMemorySettings {
    fn default() -> Self {
        Self { allowed: false, max_regions: 4096, max_bytes: u64::MAX, cuda_driver: None }
    }
}

/// Which memory a region is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemoryKind {
    System,
    Cuda,
}

impl MemoryKind {
    /// As Triton writes it inside a sentence.
    const fn word(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Cuda => "cuda",
        }
    }

    const fn title(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Cuda => "CUDA",
        }
    }
}

/// A registered region as the status calls list it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionStatus {
    pub name: String,
    pub byte_size: u64,
    pub place: RegionPlace,
}

/// Where a region is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegionPlace {
    /// Name of the POSIX object and where the region begins in it, in bytes.
    System { key: String, offset: u64 },
    /// Number of the GPU.
    Cuda { device_id: i64 },
}

/// The registered regions of a server.
pub struct SharedMemory {
    settings: SharedMemorySettings,
    regions: RwLock<BTreeMap<Arc<str>, Arc<Region>>>,
    usage: Arc<Usage>,
    /// Objects that regions have open, so that each is open once, however many regions it has.
    objects: Mutex<HashMap<(u64, u64), Weak<SharedObject>>>,
    cuda: OnceLock<std::result::Result<Arc<CudaDriver>, String>>,
    swept: Mutex<Instant>,
    began: Instant,
}

/// What regions take, also those that are unregistered and still used.
#[derive(Debug, Default)]
struct Usage {
    regions: AtomicUsize,
    bytes: AtomicU64,
}

/// A region's share of the limits, given back when it is dropped.
#[derive(Debug)]
struct Share {
    usage: Arc<Usage>,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.usage.regions.fetch_sub(1, Ordering::AcqRel);
        self.usage.bytes.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

impl SharedMemory {
    pub(crate) fn new(settings: SharedMemorySettings) -> Self {
        let now = Instant::now();
        Self {
            settings,
            regions: RwLock::default(),
            usage: Arc::default(),
            objects: Mutex::default(),
            cuda: OnceLock::new(),
            swept: Mutex::new(now),
            began: now,
        }
    }

    /// Registers `byte_size` bytes at `offset` of the POSIX object `key`. Any offset will do.
    ///
    /// # Errors
    /// `UNSUPPORTED` without `--allow-client-shm`, `ALREADY_EXISTS` for a name that is taken, `INVALID_ARG` for an
    /// object that is not there or is smaller, `UNAVAILABLE` where a limit is reached.
    pub fn register_system(&self, name: &str, key: &str, offset: u64, byte_size: u64) -> Result<()> {
        self.check_allowed()?;
        self.sweep(false);
        self.check_free(name)?;
        let plain = key.trim_start_matches('/');
        if plain.starts_with(RESERVED_PREFIX) {
            return Err(Error::invalid_arg(format!(
                "cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved prefix \
                 '{RESERVED_PREFIX}'"
            )));
        }
        if plain.is_empty() {
            return Err(Error::invalid_arg(format!(
                "cannot register shared memory region '{name}' - invalid shm key '{key}'"
            )));
        }
        let object = self.object(key)?;
        let size = object.size().map_err(|error| cannot_open(key, &error))?;
        let end = offset.checked_add(byte_size);
        if byte_size == 0 || end.is_none_or(|end| end > size) {
            return Err(Error::invalid_arg(format!(
                "failed to register shared memory region '{name}': invalid args: offset {offset} and byte_size \
                 {byte_size} must name at least one byte inside '{key}', which has {size}"
            )));
        }
        let share = self.share(name, byte_size)?;
        self.insert(name, Memory::System { object, key: key.to_owned(), offset }, share)
    }

    /// Registers memory of a GPU by the handle that its owner has made for other processes.
    ///
    /// # Errors
    /// As [`SharedMemory::register_system`]; `INVALID_ARG` also where the machine has no CUDA driver or the driver does
    /// not take the handle.
    pub fn register_cuda(
        &self,
        name: &str,
        handle: &[u8; IPC_HANDLE_LEN],
        device_id: i64,
        byte_size: u64,
    ) -> Result<()> {
        self.check_allowed()?;
        self.sweep(false);
        self.check_free(name)?;
        let failed = |reason: &dyn fmt::Display| {
            Error::invalid_arg(format!("failed to register CUDA shared memory region '{name}': {reason}"))
        };
        let driver = self.cuda().map_err(|reason| {
            Error::invalid_arg(format!(
                "failed to register CUDA shared memory region: '{name}', GPUs not supported: {reason}"
            ))
        })?;
        let size = usize::try_from(byte_size).ok().filter(|&size| size > 0);
        let size = size.ok_or_else(|| failed(&format_args!("invalid args: byte_size {byte_size}")))?;
        let share = self.share(name, byte_size)?;
        let memory = driver.memory(handle, device_id, size).map_err(|error| failed(&error))?;
        self.insert(name, Memory::Cuda { memory, device_id }, share)
    }

    /// Forgets a region of that kind. Requests that use it go on; a name that is not registered is no error.
    ///
    /// # Errors
    /// `UNSUPPORTED` without `--allow-client-shm`.
    pub fn unregister(&self, kind: MemoryKind, name: &str) -> Result<()> {
        self.check_allowed()?;
        let removed = {
            let mut regions = self.regions.write();
            let matches = regions.get(name).is_some_and(|region| region.kind() == kind);
            if matches { regions.remove(name) } else { None }
        };
        // The memory is let go outside the lock.
        drop(removed);
        Ok(())
    }

    /// Forgets all regions of that kind.
    ///
    /// # Errors
    /// As [`SharedMemory::unregister`].
    pub fn unregister_all(&self, kind: MemoryKind) -> Result<()> {
        self.check_allowed()?;
        self.remove(|region| region.kind() == kind);
        Ok(())
    }

    /// The region of that name, or all of that kind for the empty name.
    ///
    /// # Errors
    /// `NOT_FOUND` for a name that is not registered, or is of the other kind.
    pub fn status(&self, kind: MemoryKind, name: &str) -> Result<Vec<RegionStatus>> {
        self.sweep(false);
        let regions = self.regions.read();
        if name.is_empty() {
            return Ok(regions
                .values()
                .filter(|region| region.kind() == kind)
                .map(|region| region.status())
                .collect());
        }
        match regions.get(name) {
            None => Err(Error::not_found(format!(
                "Unable to find {} shared memory region: '{name}'",
                kind.word()
            ))),
            Some(region) if region.kind() != kind => Err(Error::not_found(format!(
                "The region named '{name}' is registered as {} shared memory, not {} shared memory",
                region.kind().title(),
                kind.title()
            ))),
            Some(region) => Ok(vec![region.status()]),
        }
    }

    /// Bytes of a region, as the data of an input. With `in_place`, large tensors are not copied; the request must then be
    /// answered through `placements`, and its model must bear that bytes change while it reads them
    /// ([`ModelVersion::bears_changes`](crate::ModelVersion::bears_changes)).
    ///
    /// # Errors
    /// `NOT_FOUND` for a name that is not registered; `INVALID_ARG` for bytes outside the region, or that its owner has
    /// taken away.
    pub fn input(
        &self,
        placements: &mut Placements,
        name: &str,
        offset: u64,
        byte_size: u64,
        in_place: bool,
    ) -> Result<TensorBuffer> {
        let region = self.find(name)?;
        let len = region.check(offset, byte_size)?;
        region.use_now(self.began);
        if in_place && let Some((data, mapping)) = region.in_place(offset, len)? {
            placements.watch(region, mapping);
            return Ok(data);
        }
        region.read(offset, len)
    }

    /// A place for an output, to be added to `placements`.
    ///
    /// # Errors
    /// As [`SharedMemory::input`].
    pub fn place(
        &self,
        placements: &mut Placements,
        output: &Arc<str>,
        name: &str,
        offset: u64,
        byte_size: u64,
    ) -> Result<()> {
        let region = self.find(name)?;
        let len = region.check(offset, byte_size)?;
        region.use_now(self.began);
        placements.push(Arc::clone(output), region, offset, len);
        Ok(())
    }

    /// The gauges of the metrics page.
    pub(crate) fn write_metrics(&self, page: &mut String) {
        if !self.settings.allowed {
            return;
        }
        self.sweep(false);
        let mut totals = [(MemoryKind::System, 0, 0_u64), (MemoryKind::Cuda, 0, 0_u64)];
        for region in self.regions.read().values() {
            for (kind, count, bytes) in &mut totals {
                if region.kind() == *kind {
                    *count += 1;
                    *bytes = bytes.saturating_add(region.byte_size());
                }
            }
        }
        let families = [
            ("trireme_shared_memory_regions", "Number of registered shared memory regions"),
            ("trireme_shared_memory_bytes", "Bytes of all registered shared memory regions"),
        ];
        for (family, (name, help)) in families.into_iter().enumerate() {
            let _infallible = writeln!(page, "# HELP {name} {help}\n# TYPE {name} gauge");
            for (kind, count, bytes) in totals {
                let value = if family == 0 { count } else { bytes };
                let _infallible = writeln!(page, "{name}{{kind=\"{}\"}} {value}", kind.word());
            }
        }
    }

    fn check_allowed(&self) -> Result<()> {
        if self.settings.allowed {
            return Ok(());
        }
        Err(Error::unsupported(
            "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.",
        ))
    }

    fn check_free(&self, name: &str) -> Result<()> {
        if name.is_empty() {
            return Err(Error::invalid_arg("a shared memory region needs a name"));
        }
        if self.regions.read().contains_key(name) { Err(taken(name)) } else { Ok(()) }
    }

    fn find(&self, name: &str) -> Result<Arc<Region>> {
        self.regions
            .read()
            .get(name)
            .cloned()
            .ok_or_else(|| Error::not_found(format!("Unable to find shared memory region: '{name}'")))
    }

    /// The object of that name, once opened for all its regions.
    fn object(&self, key: &str) -> Result<Arc<SharedObject>> {
        let opened = SharedObject::open(key).map_err(|error| cannot_open(key, &error))?;
        let mut objects = self.objects.lock();
        if let Some(object) = objects.get(&opened.id()).and_then(Weak::upgrade) {
            return Ok(object);
        }
        objects.retain(|_, object| object.strong_count() > 0);
        let object = Arc::new(opened);
        objects.insert(object.id(), Arc::downgrade(&object));
        Ok(object)
    }

    fn cuda(&self) -> std::result::Result<Arc<CudaDriver>, String> {
        let open = || {
            let named = self.settings.cuda_driver.as_deref().map(std::path::Path::as_os_str);
            CudaDriver::open(named.unwrap_or_else(|| CUDA_DRIVER.as_ref())).map_err(|error| error.to_string())
        };
        self.cuda.get_or_init(open).clone()
    }

    fn insert(&self, name: &str, memory: Memory, share: Share) -> Result<()> {
        let name: Arc<str> = Arc::from(name);
        let region = Arc::new(Region::new(Arc::clone(&name), memory, share, self.began));
        let mut regions = self.regions.write();
        if regions.contains_key(&name) {
            return Err(taken(&name));
        }
        regions.insert(name, region);
        Ok(())
    }

    /// Takes a region's part of the limits, after making room if there is none.
    fn share(&self, name: &str, bytes: u64) -> Result<Share> {
        self.try_share(bytes).or_else(|_| {
            self.sweep(true);
            self.try_share(bytes).map_err(|limit| {
                Error::new(
                    Code::Unavailable,
                    format!("cannot register shared memory region '{name}': {limit}"),
                )
            })
        })
    }

    fn try_share(&self, bytes: u64) -> std::result::Result<Share, String> {
        let (usage, SharedMemorySettings { max_regions, max_bytes, .. }) = (&self.usage, &self.settings);
        let taken = usage.regions.fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
            Some(count + 1).filter(|count| count <= max_regions)
        });
        if taken.is_err() {
            return Err(format!(
                "{max_regions} regions are registered or still used, as many as --shm-max-regions allows; unregister \
                 those that are not needed"
            ));
        }
        let added = usage.bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, |total| {
            total.checked_add(bytes).filter(|total| total <= max_bytes)
        });
        added.map(|_| Share { usage: Arc::clone(usage), bytes }).map_err(|total| {
            usage.regions.fetch_sub(1, Ordering::AcqRel);
            format!(
                "its {bytes} bytes and the {total} of other regions are more than the {max_bytes} that \
                 --shm-max-bytes allows"
            )
        })
    }

    /// Lets go of regions that nobody else can reach: all of them if room is needed, else those that have long been
    /// idle, and not too often.
    fn sweep(&self, need_room: bool) {
        if !need_room {
            let Some(mut swept) = self.swept.try_lock() else { return };
            if swept.elapsed() < SWEEP_INTERVAL {
                return;
            }
            *swept = Instant::now();
        }
        let idle = if need_room { Duration::ZERO } else { IDLE };
        self.remove(|region| region.idle_for(self.began) >= idle && region.is_abandoned());
    }

    /// Removes regions without holding the lock while they are looked at or let go.
    fn remove(&self, unwanted: impl Fn(&Region) -> bool) {
        let all: Vec<Arc<Region>> = self.regions.read().values().cloned().collect();
        for region in all.iter().filter(|region| unwanted(region)) {
            let mut regions = self.regions.write();
            // A region of the same name may have come in between.
            if regions.get(region.name()).is_some_and(|found| Arc::ptr_eq(found, region)) {
                regions.remove(region.name());
            }
        }
    }
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedMemory").field("settings", &self.settings).finish_non_exhaustive()
    }
}

fn taken(name: &str) -> Error {
    Error::new(Code::AlreadyExists, format!("shared memory region '{name}' already in manager"))
}

fn cannot_open(key: &str, error: &std::io::Error) -> Error {
    let advice = match error.kind() {
        std::io::ErrorKind::NotFound => {
            ": the server sees no object of that name in /dev/shm; if client and server run in different containers, \
             give them the same IPC namespace (--ipc=host, or --ipc=container:NAME)"
        }
        std::io::ErrorKind::PermissionDenied => {
            ": the server's user may not read and write it; create it with a mode that lets it"
        }
        _ => "",
    };
    Error::invalid_arg(format!("Unable to open shared memory region: '{key}'{advice} ({error})"))
}

#[cfg(test)]
mod tests;
