//! The functions of the CUDA driver's C interface that are needed, found by name in the library.
//!
//! *Invariant:* the table is complete or there is no [`Driver`]; the library stays open as long as the table lives.
#![expect(unsafe_code, reason = "calls of the C interface")]

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::fmt;

use libloading::Library;

use super::{CudaError, IPC_HANDLE_LEN};

/// `CUipcMemHandle`, which the driver takes by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct IpcHandle(pub(super) [u8; IPC_HANDLE_LEN]);

/// `CUdevice`
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(super) struct Device(c_int);

/// `CUcontext`, a handle that only the driver looks into.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(super) struct Context(*mut c_void);

// SAFETY: the driver's interface takes a context on any thread; nothing here looks behind the pointer.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks what it needs to.
unsafe impl Sync for Context {}

/// `CUdeviceptr`, an address that only the driver may use.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(super) struct DevicePointer(u64);

impl DevicePointer {
    /// The address `offset` bytes further on.
    pub(super) fn after(self, offset: usize) -> Option<Self> {
        self.0.checked_add(u64::try_from(offset).ok()?).map(Self)
    }
}

/// `CUresult`; 0 is success.
type Status = c_int;

/// Declares the table, and how it is filled from a library. A function may have an older name.
macro_rules! functions {
    ($($field:ident: $names:expr => fn($($argument:ty),*);)*) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        impl Functions {
            fn find(library: &Library) -> Result<Self, String> {
                Ok(Self {
                    $($field: {
                        let names: &[&str] = $names;
                        // SAFETY: the names are those of the driver's public interface, and the types are written
                        // from its header `cuda.h`; both have been stable since CUDA 11.
                        let found = names.iter().find_map(|name| unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> Status>(*name).ok()
                        });
                        *found.ok_or_else(|| format!("has no function {}", names.join(" or ")))?
                    },)*
                })
            }
        }
    };
}

functions! {
    init: &["cuInit"] => fn(c_uint);
    error_string: &["cuGetErrorString"] => fn(Status, *mut *const c_char);
    device_count: &["cuDeviceGetCount"] => fn(*mut c_int);
    device: &["cuDeviceGet"] => fn(*mut Device, c_int);
    retain: &["cuDevicePrimaryCtxRetain"] => fn(*mut Context, Device);
    release: &["cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease"] => fn(Device);
    push: &["cuCtxPushCurrent_v2"] => fn(Context);
    pop: &["cuCtxPopCurrent_v2"] => fn(*mut Context);
    open_handle: &["cuIpcOpenMemHandle_v2", "cuIpcOpenMemHandle"] => fn(*mut DevicePointer, IpcHandle, c_uint);
    close_handle: &["cuIpcCloseMemHandle"] => fn(DevicePointer);
    address_range: &["cuMemGetAddressRange_v2"] => fn(*mut DevicePointer, *mut usize, DevicePointer);
    to_host: &["cuMemcpyDtoH_v2"] => fn(*mut c_void, DevicePointer, usize);
    synchronize: &["cuCtxSynchronize"] => fn();
    to_device: &["cuMemcpyHtoD_v2"] => fn(DevicePointer, *const c_void, usize);
}

/// The open library and its functions.
pub(super) struct Driver {
    functions: Functions,
    /// Last, so that it is closed after the functions are gone.
    _library: Library,
}

impl Driver {
    pub(super) fn open(path: &OsStr) -> Result<Self, CudaError> {
        // SAFETY: opening a library runs its initialisers; the operator names the library or lets the system find
        // the machine's CUDA driver, and trusts it with the process either way.
        let library = unsafe { Library::new(path) }.map_err(|error| {
            CudaError::NoDriver(format!("the CUDA driver '{}' cannot be opened: {error}", path.display()))
        })?;
        let functions = Functions::find(&library).map_err(|lack| {
            CudaError::NoDriver(format!("the CUDA driver '{}' {lack}; it is too old", path.display()))
        })?;
        Ok(Self { functions, _library: library })
    }

    pub(super) fn init(&self) -> Result<(), CudaError> {
        // SAFETY: takes a number that must be 0.
        self.checked("cuInit", unsafe { (self.functions.init)(0) })
    }

    pub(super) fn device_count(&self) -> Result<c_int, CudaError> {
        let mut count = 0;
        // SAFETY: writes one number.
        self.checked("cuDeviceGetCount", unsafe { (self.functions.device_count)(&raw mut count) })?;
        Ok(count)
    }

    pub(super) fn device(&self, number: c_int) -> Result<Device, CudaError> {
        let mut device = Device(0);
        // SAFETY: writes one number.
        self.checked("cuDeviceGet", unsafe { (self.functions.device)(&raw mut device, number) })?;
        Ok(device)
    }

    pub(super) fn retain(&self, device: Device) -> Result<Context, CudaError> {
        let mut context = Context(std::ptr::null_mut());
        // SAFETY: writes one handle; the device is the driver's.
        self.checked("cuDevicePrimaryCtxRetain", unsafe {
            (self.functions.retain)(&raw mut context, device)
        })?;
        Ok(context)
    }

    pub(super) fn release(&self, device: Device) -> Result<(), CudaError> {
        // SAFETY: the device is the driver's; each release follows one retain.
        self.checked("cuDevicePrimaryCtxRelease", unsafe { (self.functions.release)(device) })
    }

    pub(super) fn push(&self, context: Context) -> Result<(), CudaError> {
        // SAFETY: the context is retained.
        self.checked("cuCtxPushCurrent", unsafe { (self.functions.push)(context) })
    }

    pub(super) fn pop(&self) -> Result<(), CudaError> {
        let mut context = Context(std::ptr::null_mut());
        // SAFETY: writes one handle; each pop follows one push on the same thread.
        self.checked("cuCtxPopCurrent", unsafe { (self.functions.pop)(&raw mut context) })
    }

    /// Opens a handle in the current context.
    pub(super) fn open_handle(&self, handle: IpcHandle, flags: c_uint) -> Result<DevicePointer, CudaError> {
        let mut pointer = DevicePointer(0);
        // SAFETY: writes one address; the handle is 64 bytes by value, and the driver refuses bytes that are none.
        let status = unsafe { (self.functions.open_handle)(&raw mut pointer, handle, flags) };
        self.checked("cuIpcOpenMemHandle", status)?;
        Ok(pointer)
    }

    pub(super) fn close_handle(&self, pointer: DevicePointer) -> Result<(), CudaError> {
        // SAFETY: the address came from `open_handle` and is closed once.
        self.checked("cuIpcCloseMemHandle", unsafe { (self.functions.close_handle)(pointer) })
    }

    /// Bytes from the address to the end of its allocation.
    pub(super) fn size_of(&self, pointer: DevicePointer) -> Result<usize, CudaError> {
        let (mut base, mut size) = (DevicePointer(0), 0);
        // SAFETY: writes an address and a number; the address is open.
        let status = unsafe { (self.functions.address_range)(&raw mut base, &raw mut size, pointer) };
        self.checked("cuMemGetAddressRange", status)?;
        let before = pointer.0.saturating_sub(base.0);
        Ok(size.saturating_sub(usize::try_from(before).unwrap_or(usize::MAX)))
    }

    pub(super) fn to_host(&self, to: &mut [u8], from: DevicePointer) -> Result<(), CudaError> {
        // SAFETY: `to` is writable for its length, and the caller has checked that so much is open behind `from`.
        let status = unsafe { (self.functions.to_host)(to.as_mut_ptr().cast(), from, to.len()) };
        self.checked("cuMemcpyDtoH", status)
    }

    pub(super) fn to_device(&self, to: DevicePointer, from: &[u8]) -> Result<(), CudaError> {
        // SAFETY: `from` is readable for its length, and the caller has checked that so much is open behind `to`.
        let status = unsafe { (self.functions.to_device)(to, from.as_ptr().cast(), from.len()) };
        self.checked("cuMemcpyHtoD", status)
    }

    /// Waits until everything that was begun in the current context is done. A copy to the device may return before.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: takes nothing.
        self.checked("cuCtxSynchronize", unsafe { (self.functions.synchronize)() })
    }

    fn checked(&self, function: &'static str, status: Status) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: writes one pointer, to a text of the library or null.
        unsafe { (self.functions.error_string)(status, &raw mut text) };
        let text = if text.is_null() {
            "unknown error".to_owned()
        } else {
            // SAFETY: the driver's texts end with a zero and live as long as the library.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(CudaError::Call { function, code: status, text })
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Driver")
    }
}
