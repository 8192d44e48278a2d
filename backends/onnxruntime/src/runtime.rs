//! One opened library with its environment, shared by all models and kept until the process ends.
//!
//! Neither the library nor the environment is ever closed: threads of the library may outlive every session, and
//! the order of destructors at exit is not ours to choose.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use ort_sys::{OrtAllocator, OrtAllocatorType, OrtEnv, OrtLoggingLevel, OrtMemType, OrtMemoryInfo};
use parking_lot::Mutex;
use trireme_backend::BackendSettings;
use trireme_types::{Error, Result};

use crate::api::{Api, Threading, ort, text};
use crate::library::{self, Places};
use crate::settings;

/// The engine of this process.
pub(crate) struct Runtime {
    pub(crate) api: Api,
    /// Of the library, as `1.32.0`.
    pub(crate) version: String,
    pub(crate) path: PathBuf,
    /// Sessions use the pools of the environment instead of their own.
    pub(crate) global_threads: bool,
    env: NonNull<OrtEnv>,
    memory: NonNull<OrtMemoryInfo>,
    allocator: NonNull<OrtAllocator>,
    /// Held so that it stays open.
    _library: libloading::Library,
}

// SAFETY: the environment, the memory description and the default allocator may be used from any thread, and a
// `Runtime` is never dropped.
unsafe impl Send for Runtime {}
// SAFETY: as for Send.
unsafe impl Sync for Runtime {}

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runtime")
            .field("version", &self.version)
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// What has been opened in this process, by the file's path. An environment is made once for each library.
static RUNTIMES: Mutex<BTreeMap<PathBuf, &'static Runtime>> = Mutex::new(BTreeMap::new());

impl Runtime {
    /// Finds the library, opens it and makes its environment; the same library is opened once only.
    pub(crate) fn open(explicit: Option<&Path>, settings: &BackendSettings) -> Result<&'static Self> {
        let mut runtimes = RUNTIMES.lock();
        let opened = library::find(explicit, &Places::of_process())?;
        let key = fs_err::canonicalize(&opened.path).unwrap_or_else(|_| opened.path.clone());
        if let Some(runtime) = runtimes.get(&key) {
            return Ok(runtime);
        }
        let runtime: &'static Self = Box::leak(Box::new(Self::start(opened, settings)?));
        runtimes.insert(key, runtime);
        tracing::info!("ONNX Runtime {} from '{}'", runtime.version, runtime.path.display());
        Ok(runtime)
    }

    fn start(opened: library::Opened, settings: &BackendSettings) -> Result<Self> {
        let global = settings::GlobalThreads::read(settings)?;
        // SAFETY: the table came from the library, which the new value keeps open and which is leaked with it.
        let api = unsafe { Api::new(opened.table, opened.level) };
        let env = match &global {
            None => created(|out| {
                // SAFETY: the callback and the name live for ever; `out` takes the handle.
                unsafe {
                    ort!(
                        api,
                        CreateEnvWithCustomLogger,
                        log,
                        std::ptr::null_mut(),
                        OrtLoggingLevel::ORT_LOGGING_LEVEL_WARNING,
                        c"trireme".as_ptr(),
                        out,
                    )
                }
            })?,
            Some(global) => {
                let threading = global_pools(api, global)?;
                created(|out| {
                    // SAFETY: as above; the options are read during the call only.
                    unsafe {
                        ort!(
                            api,
                            CreateEnvWithCustomLoggerAndGlobalThreadPools,
                            log,
                            std::ptr::null_mut(),
                            OrtLoggingLevel::ORT_LOGGING_LEVEL_WARNING,
                            c"trireme".as_ptr(),
                            threading.as_ptr(),
                            out,
                        )
                    }
                })?
            }
        };
        // SAFETY: the environment has just been made.
        unsafe { ort!(api, DisableTelemetryEvents, env.as_ptr()) }?;
        let memory = created(|out| {
            // SAFETY: `out` takes the handle.
            unsafe {
                ort!(
                    api,
                    CreateCpuMemoryInfo,
                    OrtAllocatorType::OrtArenaAllocator,
                    OrtMemType::OrtMemTypeDefault,
                    out
                )
            }
        })?;
        // SAFETY: the library gives its own default allocator, which is not to be released.
        let allocator = created(|out| unsafe { ort!(api, GetAllocatorWithDefaultOptions, out) })?;
        Ok(Self {
            api,
            version: opened.version,
            path: opened.path,
            global_threads: global.is_some(),
            env,
            memory,
            allocator,
            _library: opened.library,
        })
    }

    pub(crate) fn env(&self) -> *mut OrtEnv {
        self.env.as_ptr()
    }

    /// Description of host memory.
    pub(crate) fn memory(&self) -> *const OrtMemoryInfo {
        self.memory.as_ptr()
    }

    /// The library's own allocator for host memory.
    pub(crate) fn allocator(&self) -> *mut OrtAllocator {
        self.allocator.as_ptr()
    }

    /// Names of the execution providers in this library, as `CPUExecutionProvider`.
    pub(crate) fn providers(&self) -> Result<Vec<String>> {
        let mut names: *mut *mut c_char = std::ptr::null_mut();
        let mut count = 0;
        // SAFETY: both places live through the call.
        unsafe { ort!(self.api, GetAvailableProviders, &raw mut names, &raw mut count) }?;
        let listed = (0..usize::try_from(count).unwrap_or(0)).map(|index| {
            // SAFETY: `names` holds `count` strings until they are released below.
            unsafe { text(*names.add(index)) }
        });
        let listed = listed.collect();
        // SAFETY: the list came from the call above and is not used again.
        unsafe { ort!(self.api, ReleaseAvailableProviders, names, count) }?;
        Ok(listed)
    }

    /// Takes a string that the library made with its default allocator.
    ///
    /// # Safety
    /// `string` is NUL-terminated, made by this library with [`Runtime::allocator`], and not used again.
    pub(crate) unsafe fn take_string(&self, string: *mut c_char) -> String {
        // SAFETY: by the caller.
        let owned = unsafe { text(string) };
        // SAFETY: by the caller; a failure to free leaves a few bytes behind and harms nobody.
        let _ = unsafe { ort!(self.api, AllocatorFree, self.allocator(), string.cast::<c_void>()) };
        owned
    }
}

/// A pointer that a create function writes.
fn created<T>(create: impl FnOnce(*mut *mut T) -> crate::api::Outcome<()>) -> Result<NonNull<T>> {
    let mut pointer = std::ptr::null_mut();
    create(&raw mut pointer)?;
    NonNull::new(pointer).ok_or_else(|| Error::internal("ONNX Runtime gave no handle and no error"))
}

fn global_pools(api: Api, global: &settings::GlobalThreads) -> Result<Threading> {
    // SAFETY: `out` takes the handle.
    let options = Threading::create(api, |out| unsafe { ort!(api, CreateThreadingOptions, out) })?;
    // SAFETY: the options are alive and ours.
    unsafe { ort!(api, SetGlobalIntraOpNumThreads, options.as_ptr(), global.intra_op) }?;
    // SAFETY: as above.
    unsafe { ort!(api, SetGlobalInterOpNumThreads, options.as_ptr(), global.inter_op) }?;
    // SAFETY: as above.
    unsafe { ort!(api, SetGlobalSpinControl, options.as_ptr(), 0) }?;
    Ok(options)
}

/// Carries messages of the library into our log. What it calls information is detail to us.
unsafe extern "system" fn log(
    _: *mut c_void,
    severity: OrtLoggingLevel,
    _category: *const c_char,
    model: *const c_char,
    place: *const c_char,
    message: *const c_char,
) {
    // A panic in a subscriber must not unwind into C.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        let string = |pointer: *const c_char| {
            if pointer.is_null() {
                return std::borrow::Cow::Borrowed("");
            }
            // SAFETY: the library passes NUL-terminated strings that live through the call.
            unsafe { CStr::from_ptr(pointer) }.to_string_lossy()
        };
        let (model, place, message) = (string(model), string(place), string(message));
        match severity {
            OrtLoggingLevel::ORT_LOGGING_LEVEL_VERBOSE => {
                tracing::trace!(target: "onnxruntime", "{model}: {message} ({place})");
            }
            OrtLoggingLevel::ORT_LOGGING_LEVEL_INFO => {
                tracing::debug!(target: "onnxruntime", "{model}: {message} ({place})");
            }
            OrtLoggingLevel::ORT_LOGGING_LEVEL_WARNING => {
                tracing::warn!(target: "onnxruntime", "{model}: {message} ({place})");
            }
            OrtLoggingLevel::ORT_LOGGING_LEVEL_ERROR | OrtLoggingLevel::ORT_LOGGING_LEVEL_FATAL => {
                tracing::error!(target: "onnxruntime", "{model}: {message} ({place})");
            }
        }
    }));
}
