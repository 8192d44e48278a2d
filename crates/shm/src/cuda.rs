//! Memory of GPUs that another process shares by a CUDA IPC handle.
//!
//! The driver (`libcuda.so.1`) is looked for when the first region is registered; nothing of CUDA is linked. Each call
//! makes the device's primary context current and puts back what was current before, so that it may come from any
//! thread.

mod driver;

use std::ffi::{OsStr, c_int, c_uint};
use std::fmt;
use std::sync::Arc;

use self::driver::{Context, Device, DevicePointer, Driver, IpcHandle};

/// Bytes of a `CUipcMemHandle`.
pub const IPC_HANDLE_LEN: usize = 64;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag that there is.
const LAZY_PEER_ACCESS: c_uint = 1;

/// Why the driver or one of its calls failed.
#[derive(Debug)]
pub enum CudaError {
    /// The library cannot be opened or lacks a function.
    NoDriver(String),
    /// The device's number is not one of this machine.
    NoDevice { asked: i64, count: i64 },
    /// The handle's memory is smaller than asked for.
    TooSmall { size: usize },
    /// There is no memory for a copy of so many bytes.
    NoMemory,
    /// A call of the driver failed.
    Call { function: &'static str, code: i32, text: String },
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDriver(why) => f.write_str(why),
            Self::NoDevice { asked, count } => {
                write!(f, "there is no device {asked}; this machine has {count}, counted from 0")
            }
            Self::TooSmall { size } => write!(f, "the memory of the handle has {size} bytes"),
            Self::NoMemory => f.write_str("there is no memory for a copy"),
            Self::Call { function, code, text } => write!(f, "{function} failed with {code} ({text})"),
        }
    }
}

/// The CUDA driver of this machine.
#[derive(Debug)]
pub struct CudaDriver(Driver);

impl CudaDriver {
    /// Opens and starts the driver.
    ///
    /// # Errors
    /// The library is not there, is too old, or finds no device.
    pub fn open(library: &OsStr) -> Result<Arc<Self>, CudaError> {
        let driver = Driver::open(library)?;
        driver.init()?;
        Ok(Arc::new(Self(driver)))
    }

    /// Opens memory that another process has shared.
    ///
    /// # Errors
    /// No such device, a handle that the driver does not take, memory with fewer than `len` bytes.
    pub fn memory(
        self: &Arc<Self>,
        handle: &[u8; IPC_HANDLE_LEN],
        device: i64,
        len: usize,
    ) -> Result<DeviceMemory, CudaError> {
        let count = self.0.device_count()?;
        let number = c_int::try_from(device)
            .ok()
            .filter(|number| (0..count).contains(number))
            .ok_or(CudaError::NoDevice { asked: device, count: i64::from(count) })?;
        let device = self.0.device(number)?;
        let context = PrimaryContext { driver: Arc::clone(self), device, context: self.0.retain(device)? };
        let pointer = {
            let _current = context.enter()?;
            self.0.open_handle(IpcHandle(*handle), LAZY_PEER_ACCESS)?
        };
        // From here on what was opened is closed again, also if it is too small.
        let memory = DeviceMemory { pointer, len, context };
        let size = {
            let _current = memory.context.enter()?;
            memory.context.driver.0.size_of(memory.pointer)?
        };
        if size < len { Err(CudaError::TooSmall { size }) } else { Ok(memory) }
    }
}

/// A device's primary context, held as long as memory of it is open.
#[derive(Debug)]
struct PrimaryContext {
    driver: Arc<CudaDriver>,
    device: Device,
    context: Context,
}

impl PrimaryContext {
    fn enter(&self) -> Result<Current<'_>, CudaError> {
        self.driver.0.push(self.context)?;
        Ok(Current(&self.driver))
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // A context that cannot be released goes with the process.
        let _ = self.driver.0.release(self.device);
    }
}

/// A context is current on this thread.
struct Current<'a>(&'a CudaDriver);

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let _ = self.0.0.pop();
    }
}

/// Memory of a GPU that another process has shared; closed when dropped.
#[derive(Debug)]
pub struct DeviceMemory {
    pointer: DevicePointer,
    len: usize,
    context: PrimaryContext,
}

impl DeviceMemory {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A copy of bytes, in host memory.
    ///
    /// # Errors
    /// `offset + len` is beyond the memory, or the driver's.
    pub fn read(&self, offset: usize, len: usize) -> Result<Vec<u8>, CudaError> {
        let from = self.place(offset, len)?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| CudaError::NoMemory)?;
        bytes.resize(len, 0);
        if len > 0 {
            let _current = self.context.enter()?;
            self.context.driver.0.to_host(&mut bytes, from)?;
        }
        Ok(bytes)
    }

    /// Copies bytes from host memory to the device.
    ///
    /// # Errors
    /// As [`DeviceMemory::read`].
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let to = self.place(offset, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let _current = self.context.enter()?;
        self.context.driver.0.to_device(to, bytes)?;
        // Another process will read it as soon as it hears that it is there.
        self.context.driver.0.synchronize()
    }

    fn place(&self, offset: usize, len: usize) -> Result<DevicePointer, CudaError> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        let pointer = inside.then(|| self.pointer.after(offset)).flatten();
        pointer.ok_or(CudaError::TooSmall { size: self.len })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Memory that cannot be closed goes with the process.
        if let Ok(_current) = self.context.enter() {
            let _ = self.context.driver.0.close_handle(self.pointer);
        }
    }
}
