//! The C function table of ONNX Runtime, its statuses as errors, and its handles with their release functions.
//!
//! Every call goes through [`ort!`], which turns a status into a [`Failure`]. The table is read field by field
//! through a raw pointer: a library older than our headers has a shorter table, so a reference to the whole would
//! claim memory that is not there. Functions newer than [`MIN_LEVEL`] are called only after a look at the level.

use std::ffi::{CStr, c_char};
use std::ptr::NonNull;

use ort_sys::{OrtApi, OrtStatus, OrtStatusPtr};
use trireme_types::{Error, Result};

/// Oldest level of the C API that serves: the one of ONNX Runtime 1.17.
pub(crate) const MIN_LEVEL: u32 = 17;

/// The function table of a library that is never closed.
#[derive(Clone, Copy)]
pub(crate) struct Api {
    table: NonNull<OrtApi>,
    level: u32,
}

// SAFETY: the table is constant data in a library that stays open until the process ends, and its functions may be
// called from any thread.
unsafe impl Send for Api {}
// SAFETY: as for Send.
unsafe impl Sync for Api {}

/// What ONNX Runtime said went wrong.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    /// `OrtErrorCode`; a number, because newer libraries have codes that our headers lack.
    pub(crate) code: i32,
    pub(crate) message: String,
}

pub(crate) type Outcome<T> = Result<T, Failure>;

pub(crate) const INVALID_ARGUMENT: i32 = 2;
pub(crate) const INVALID_PROTOBUF: i32 = 7;

impl Failure {
    /// The text as Triton's backend words it.
    pub(crate) fn text(&self) -> String {
        format!("onnx runtime error {}: {}", self.code, self.message.trim_end())
    }

    pub(crate) fn internal(self) -> Error {
        Error::internal(self.text())
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        failure.internal()
    }
}

impl Api {
    /// # Safety
    /// `table` is what `GetApi(level)` of an open library gave, and the library is never closed.
    pub(crate) unsafe fn new(table: NonNull<OrtApi>, level: u32) -> Self {
        Self { table, level }
    }

    pub(crate) fn table(self) -> *const OrtApi {
        self.table.as_ptr()
    }

    /// Level of the C API that the table was asked for; functions above it are not there.
    pub(crate) fn level(self) -> u32 {
        self.level
    }

    /// Takes a status over, frees it, and says what it held.
    pub(crate) fn check(self, status: OrtStatusPtr) -> Outcome<()> {
        match NonNull::new(status.0) {
            None => Ok(()),
            Some(status) => Err(self.failure(status)),
        }
    }

    #[cold]
    fn failure(self, status: NonNull<OrtStatus>) -> Failure {
        type ErrorCode = unsafe extern "system" fn(*const OrtStatus) -> i32;
        let table = self.table();
        // SAFETY: `status` came from a call of this API and has not been freed. The code is read as a number: the
        // C enum is an int, and our Rust enum may lack the value.
        let code = unsafe {
            let function = (&raw const (*table).GetErrorCode).cast::<ErrorCode>().read();
            function(status.as_ptr())
        };
        // SAFETY: as above; the text is copied before the status is freed.
        let message = unsafe { text(((*table).GetErrorMessage)(status.as_ptr())) };
        // SAFETY: we own the status and do not use it again.
        unsafe { ((*table).ReleaseStatus)(status.as_ptr()) };
        Failure { code, message }
    }
}

/// A copy of a C string; empty for a null pointer.
///
/// # Safety
/// `text` is null or points to a NUL-terminated string.
pub(crate) unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: by the caller.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Calls a function of the table and turns its status into a result. Stands in an `unsafe` block.
macro_rules! ort {
    ($api:expr, $function:ident, $($argument:expr),* $(,)?) => {{
        let api: $crate::api::Api = $api;
        api.check(((*api.table()).$function)($($argument),*))
    }};
}
pub(crate) use ort;

/// Owners of C handles: made from the pointer that a create function gave, released when dropped.
macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident($raw:ty) by $release:ident;)*) => {$(
        $(#[$doc])*
        pub(crate) struct $name {
            pointer: NonNull<$raw>,
            pub(crate) api: Api,
        }

        impl $name {
            /// Takes the handle that `create` writes.
            pub(crate) fn create(api: Api, create: impl FnOnce(*mut *mut $raw) -> Outcome<()>) -> Outcome<Self> {
                let mut pointer = std::ptr::null_mut();
                create(&raw mut pointer)?;
                match NonNull::new(pointer) {
                    Some(pointer) => Ok(Self { pointer, api }),
                    None => Err(Failure {
                        code: 1,
                        message: concat!("the library made no ", stringify!($raw)).to_owned(),
                    }),
                }
            }

            pub(crate) fn as_ptr(&self) -> *mut $raw {
                self.pointer.as_ptr()
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                let release = self.api.table();
                // SAFETY: the handle came from the create function of this API, and nobody else releases it.
                unsafe { ((*release).$release)(self.pointer.as_ptr()) };
            }
        }
    )*};
}

handles! {
    /// Options of a session that is about to be made.
    Options(ort_sys::OrtSessionOptions) by ReleaseSessionOptions;
    /// Options of the global thread pools.
    Threading(ort_sys::OrtThreadingOptions) by ReleaseThreadingOptions;
    /// A loaded model.
    SessionHandle(ort_sys::OrtSession) by ReleaseSession;
    /// Options of a run.
    RunOptions(ort_sys::OrtRunOptions) by ReleaseRunOptions;
    /// Type of an input or output.
    TypeInfo(ort_sys::OrtTypeInfo) by ReleaseTypeInfo;
    /// Element type and shape of a value.
    TensorTypeInfo(ort_sys::OrtTensorTypeAndShapeInfo) by ReleaseTensorTypeAndShapeInfo;
    /// A tensor.
    Value(ort_sys::OrtValue) by ReleaseValue;
    /// An allocator of a session.
    SessionAllocator(ort_sys::OrtAllocator) by ReleaseAllocator;
    /// Names with values.
    KeyValues(ort_sys::OrtKeyValuePairs) by ReleaseKeyValuePairs;
}

// SAFETY: `OrtSession::Run` and the functions that read names and types may be called from any thread, several at
// a time; the last owner releases the session.
unsafe impl Send for SessionHandle {}
// SAFETY: as for Send.
unsafe impl Sync for SessionHandle {}
// SAFETY: run options are only read after they have been made, by one instance that moves between threads.
unsafe impl Send for RunOptions {}
// SAFETY: a value is plain memory with a shape and no tie to a thread; it is only read once a run has ended.
unsafe impl Send for Value {}
// SAFETY: as for Send.
unsafe impl Sync for Value {}
