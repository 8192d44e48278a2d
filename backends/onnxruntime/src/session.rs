//! A model in the engine: made once from its file, and what it says of its inputs and outputs.

use std::ffi::{CString, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ort_sys::{ExecutionMode, GraphOptimizationLevel, ONNXType, OrtSession, OrtTypeInfo};
use trireme_backend::ModelContext;
use trireme_types::{DataType, Error, MemoryUsage, ModelReport, ReportedTensor, Result, Shape};

use crate::api::{
    INVALID_PROTOBUF, KeyValues, Options, Outcome, RunOptions, SessionAllocator, SessionHandle, TypeInfo,
    ort, text,
};
use crate::element::Element;
use crate::model_file;
use crate::runtime::Runtime;
use crate::settings::{Accelerator, GraphLevel, SessionSettings};

/// A tensor as the model describes it.
#[derive(Clone, Debug)]
pub(crate) struct TensorInfo {
    pub(crate) name: String,
    pub(crate) c_name: CString,
    pub(crate) data_type: DataType,
    /// `None`: the model does not even say how many dimensions there are.
    pub(crate) shape: Option<Shape>,
    /// Names of the open dimensions, one for each dimension; empty for fixed and unnamed ones.
    pub(crate) symbols: Vec<String>,
    /// Inputs only: an initializer stands in when it is not given.
    pub(crate) optional: bool,
}

/// An input or output that the protocol cannot carry.
#[derive(Clone, Debug)]
pub(crate) struct Unsupported {
    pub(crate) name: String,
    /// What it is instead, as `a sequence`.
    pub(crate) what: String,
}

/// A loaded model; running it needs no more than a shared reference.
pub(crate) struct Session {
    pub(crate) runtime: &'static Runtime,
    pub(crate) handle: SessionHandle,
    pub(crate) inputs: Vec<TensorInfo>,
    pub(crate) outputs: Vec<TensorInfo>,
    /// Outputs that exist but cannot be served.
    pub(crate) unsupported: Vec<Unsupported>,
    run_entries: Vec<(String, String)>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("inputs", &self.inputs)
            .field("outputs", &self.outputs)
            .finish_non_exhaustive()
    }
}

impl Session {
    /// Reads the model file and prepares it to run.
    ///
    /// # Errors
    /// UNAVAILABLE if there is no file, INVALID_ARG for settings, INTERNAL for what the engine refuses, UNSUPPORTED
    /// for inputs that the protocol cannot carry.
    pub(crate) fn open(runtime: &'static Runtime, context: &ModelContext) -> Result<Self> {
        let settings = SessionSettings::read(context)?;
        let file = model_file::locate(context)?;
        let options = options(runtime, context, &settings)?;
        let path = c_path(&file)?;
        let handle = SessionHandle::create(runtime.api, |out| {
            // SAFETY: environment, path and options live through the call; `out` takes the handle.
            unsafe { ort!(runtime.api, CreateSession, runtime.env(), path.as_ptr(), options.as_ptr(), out) }
        })
        .map_err(|failure| {
            let told = model_file::explain(&file).filter(|told| {
                // Something else than the file may be at fault: then its size says nothing.
                failure.code == INVALID_PROTOBUF || !told.contains("may have been cut short")
            });
            let engine = format!("this is ONNX Runtime {}", runtime.version);
            Error::internal(format!("{}; {}", failure.text(), told.unwrap_or(engine)))
        })?;
        let mut session = Self {
            runtime,
            handle,
            inputs: Vec::new(),
            outputs: Vec::new(),
            unsupported: Vec::new(),
            run_entries: settings.run_entries,
        };
        session.describe(&context.name)?;
        Ok(session)
    }

    fn describe(&mut self, model: &str) -> Result<()> {
        for tensor in self.tensors(Side::Input)? {
            match tensor {
                Ok(info) => self.inputs.push(info),
                Err(Unsupported { name, what }) => {
                    return Err(Error::unsupported(format!(
                        "input '{name}' of model '{model}' is {what}, which no client can send; expected a tensor of \
                         {}",
                        supported_types()
                    )));
                }
            }
        }
        // An initializer that cannot be sent keeps its value.
        self.inputs.extend(self.tensors(Side::Initializer)?.into_iter().flatten());
        for tensor in self.tensors(Side::Output)? {
            match tensor {
                Ok(info) => self.outputs.push(info),
                Err(unsupported) => {
                    tracing::warn!(
                        "output '{}' of model '{model}' is {}, which the protocol cannot carry; it is left out",
                        unsupported.name,
                        unsupported.what
                    );
                    self.unsupported.push(unsupported);
                }
            }
        }
        if self.outputs.is_empty() {
            return Err(Error::unsupported(format!(
                "model '{model}' has no output that can be served: {}",
                self.unsupported_outputs()
            )));
        }
        Ok(())
    }

    fn unsupported_outputs(&self) -> String {
        let told = self.unsupported.iter().map(|output| format!("'{}' is {}", output.name, output.what));
        told.collect::<Vec<_>>().join(", ")
    }

    fn tensors(&self, side: Side) -> Outcome<Vec<Result<TensorInfo, Unsupported>>> {
        let api = self.runtime.api;
        let session = self.handle.as_ptr();
        let mut count = 0_usize;
        // SAFETY: the session is alive and `count` lives through the call.
        unsafe {
            match side {
                Side::Input => ort!(api, SessionGetInputCount, session, &raw mut count),
                Side::Output => ort!(api, SessionGetOutputCount, session, &raw mut count),
                Side::Initializer => {
                    ort!(api, SessionGetOverridableInitializerCount, session, &raw mut count)
                }
            }
        }?;
        (0..count).map(|index| self.tensor(side, index)).collect()
    }

    fn tensor(&self, side: Side, index: usize) -> Outcome<Result<TensorInfo, Unsupported>> {
        let name = self.name(side, index)?;
        let api = self.runtime.api;
        let session: *const OrtSession = self.handle.as_ptr();
        let info = TypeInfo::create(api, |out| {
            // SAFETY: the session is alive, `index` is below the count, `out` takes the handle.
            unsafe {
                match side {
                    Side::Input => ort!(api, SessionGetInputTypeInfo, session, index, out),
                    Side::Output => ort!(api, SessionGetOutputTypeInfo, session, index, out),
                    Side::Initializer => {
                        ort!(api, SessionGetOverridableInitializerTypeInfo, session, index, out)
                    }
                }
            }
        })?;
        let described = describe_type(&info)?;
        Ok(match described {
            Ok((data_type, shape, symbols)) => match CString::new(name.as_str()) {
                Ok(c_name) => Ok(TensorInfo {
                    c_name,
                    name,
                    data_type,
                    shape,
                    symbols,
                    optional: matches!(side, Side::Initializer),
                }),
                // The name came as a C string; only a lossy conversion could have put a NUL in, and it does not.
                Err(_) => Err(Unsupported { name, what: "named with a NUL".to_owned() }),
            },
            Err(what) => Err(Unsupported { name, what }),
        })
    }

    fn name(&self, side: Side, index: usize) -> Outcome<String> {
        let api = self.runtime.api;
        let session: *const OrtSession = self.handle.as_ptr();
        let allocator = self.runtime.allocator();
        let mut name: *mut c_char = std::ptr::null_mut();
        // SAFETY: session and allocator are alive, `index` is below the count, `name` lives through the call.
        unsafe {
            match side {
                Side::Input => ort!(api, SessionGetInputName, session, index, allocator, &raw mut name),
                Side::Output => ort!(api, SessionGetOutputName, session, index, allocator, &raw mut name),
                Side::Initializer => {
                    ort!(api, SessionGetOverridableInitializerName, session, index, allocator, &raw mut name)
                }
            }
        }?;
        // SAFETY: the library made the string with that allocator, for us.
        Ok(unsafe { self.runtime.take_string(name) })
    }

    /// The model's tensors, for completing a configuration.
    pub(crate) fn report(&self) -> ModelReport {
        let reported = |info: &TensorInfo| ReportedTensor {
            name: info.name.clone(),
            data_type: info.data_type,
            shape: info.shape.clone().unwrap_or_else(|| Shape::new(&[-1])),
            optional: info.optional,
        };
        let required = || self.inputs.iter().filter(|info| !info.optional);
        let open = |info: &TensorInfo| info.shape.as_ref().is_some_and(|shape| shape.first() == Some(&-1));
        ModelReport {
            inputs: self.inputs.iter().map(reported).collect(),
            outputs: self.outputs.iter().map(reported).collect(),
            batch_dimension: required().chain(&self.outputs).all(open),
            ..ModelReport::default()
        }
    }

    /// Options for the runs of one instance.
    pub(crate) fn run_options(&self) -> Result<RunOptions> {
        let api = self.runtime.api;
        // SAFETY: `out` takes the handle.
        let options = RunOptions::create(api, |out| unsafe { ort!(api, CreateRunOptions, out) })?;
        for (key, value) in &self.run_entries {
            let (key, value) = (c_text(key)?, c_text(value)?);
            // SAFETY: options and strings live through the call.
            unsafe { ort!(api, AddRunConfigEntry, options.as_ptr(), key.as_ptr(), value.as_ptr()) }?;
        }
        Ok(options)
    }

    /// Bytes that the session's arena holds: weights and working memory. Nothing if the library cannot tell.
    pub(crate) fn memory_usage(&self) -> Vec<MemoryUsage> {
        match self.arena_bytes() {
            Ok(Some(byte_size)) if byte_size > 0 => vec![MemoryUsage { kind: "CPU", id: 0, byte_size }],
            _ => Vec::new(),
        }
    }

    fn arena_bytes(&self) -> Outcome<Option<u64>> {
        let api = self.runtime.api;
        // Statistics of allocators came with level 23.
        if api.level() < 23 {
            return Ok(None);
        }
        let session: *const OrtSession = self.handle.as_ptr();
        let allocator = SessionAllocator::create(api, |out| {
            // SAFETY: session and memory description are alive; `out` takes the handle.
            unsafe { ort!(api, CreateAllocator, session, self.runtime.memory(), out) }
        })?;
        let values = KeyValues::create(api, |out| {
            // SAFETY: the allocator is alive; the function is there at this level; `out` takes the handle.
            unsafe { ort!(api, AllocatorGetStats, allocator.as_ptr(), out) }
        })?;
        // SAFETY: the pairs are alive; the value belongs to them and is copied.
        let total =
            unsafe { text(((*api.table()).GetKeyValue)(values.as_ptr(), c"TotalAllocated".as_ptr())) };
        Ok(total.parse().ok())
    }
}

#[derive(Clone, Copy)]
enum Side {
    Input,
    Output,
    Initializer,
}

type Described = Result<(DataType, Option<Shape>, Vec<String>), String>;

/// Element type, shape and names of open dimensions of a tensor; what it is instead if it is none.
fn describe_type(info: &TypeInfo) -> Outcome<Described> {
    let api = info.api;
    let pointer: *const OrtTypeInfo = info.as_ptr();
    let mut kind = 0_i32;
    // SAFETY: the info is alive. The C enum is an int; it is read as a number because our enum may lack the value.
    unsafe { ort!(api, GetOnnxTypeFromTypeInfo, pointer, (&raw mut kind).cast::<ONNXType>()) }?;
    if kind != ONNXType::ONNX_TYPE_TENSOR as i32 {
        return Ok(Err(match kind {
            2 => {
                "a sequence (scikit-learn classifiers have one unless exported with zipmap=False)".to_owned()
            }
            3 => "a map (scikit-learn classifiers have one unless exported with zipmap=False)".to_owned(),
            4 => "an opaque value".to_owned(),
            5 => "a sparse tensor".to_owned(),
            6 => "an optional value".to_owned(),
            _ => format!("a value of ONNX type {kind}"),
        }));
    }
    let mut tensor = std::ptr::null();
    // SAFETY: the info is alive; what is given belongs to it.
    unsafe { ort!(api, CastTypeInfoToTensorInfo, pointer, &raw mut tensor) }?;
    let mut element = 0_i32;
    // SAFETY: `tensor` belongs to the living info; read as a number for the reason above.
    unsafe { ort!(api, GetTensorElementType, tensor, (&raw mut element).cast()) }?;
    let element = Element(element);
    let Some(data_type) = element.data_type() else {
        return Ok(Err(format!("a tensor of {}", element.name())));
    };
    // SAFETY: the function is there from level 24 on, and `tensor` belongs to the living info.
    let has_shape = api.level() < 24 || unsafe { ((*api.table()).TensorTypeAndShape_HasShape)(tensor) };
    if !has_shape {
        return Ok(Ok((data_type, None, Vec::new())));
    }
    let mut rank = 0_usize;
    // SAFETY: as above.
    unsafe { ort!(api, GetDimensionsCount, tensor, &raw mut rank) }?;
    let mut dims = vec![0_i64; rank];
    // SAFETY: `dims` has room for `rank` numbers.
    unsafe { ort!(api, GetDimensions, tensor, dims.as_mut_ptr(), rank) }?;
    let mut names: Vec<*const c_char> = vec![std::ptr::null(); rank];
    // SAFETY: `names` has room for `rank` pointers; the strings belong to the info and are copied.
    unsafe { ort!(api, GetSymbolicDimensions, tensor, names.as_mut_ptr(), rank) }?;
    // SAFETY: the library has written NUL-terminated strings or left null.
    let symbols = names.into_iter().map(|name| unsafe { text(name) }).collect();
    let shape = dims.into_iter().map(|dim| dim.max(-1)).collect();
    Ok(Ok((data_type, Some(shape), symbols)))
}

fn supported_types() -> String {
    DataType::ALL.map(DataType::wire_name).join(", ")
}

fn options(runtime: &Runtime, context: &ModelContext, settings: &SessionSettings) -> Result<Options> {
    let api = runtime.api;
    // SAFETY: `out` takes the handle.
    let options = Options::create(api, |out| unsafe { ort!(api, CreateSessionOptions, out) })?;
    let raw = options.as_ptr();
    let log_id = c_text(&context.name)?;
    let graph = match settings.graph {
        GraphLevel::Disabled => GraphOptimizationLevel::ORT_DISABLE_ALL,
        GraphLevel::Basic => GraphOptimizationLevel::ORT_ENABLE_BASIC,
        GraphLevel::Extended => GraphOptimizationLevel::ORT_ENABLE_EXTENDED,
        GraphLevel::All => GraphOptimizationLevel::ORT_ENABLE_ALL,
    };
    let mode = if settings.parallel { ExecutionMode::ORT_PARALLEL } else { ExecutionMode::ORT_SEQUENTIAL };
    // Information is worth its making only if somebody reads it: 1 is INFO, 2 is WARNING.
    let severity = if tracing::enabled!(target: "onnxruntime", tracing::Level::DEBUG) { 1 } else { 2 };
    // SAFETY: options and the name are alive through these calls, here and below.
    unsafe { ort!(api, SetSessionLogId, raw, log_id.as_ptr()) }?;
    // SAFETY: see above.
    unsafe { ort!(api, SetSessionLogSeverityLevel, raw, severity) }?;
    // SAFETY: see above.
    unsafe { ort!(api, SetSessionGraphOptimizationLevel, raw, graph) }?;
    // SAFETY: see above.
    unsafe { ort!(api, SetSessionExecutionMode, raw, mode) }?;
    if runtime.global_threads {
        // SAFETY: see above.
        unsafe { ort!(api, DisablePerSessionThreads, raw) }?;
    } else {
        // SAFETY: see above.
        unsafe { ort!(api, SetIntraOpNumThreads, raw, settings.intra_op) }?;
        // SAFETY: see above.
        unsafe { ort!(api, SetInterOpNumThreads, raw, settings.inter_op) }?;
    }
    // SAFETY: see above.
    unsafe {
        if settings.arena { ort!(api, EnableCpuMemArena, raw) } else { ort!(api, DisableCpuMemArena, raw) }
    }?;
    // The library itself turns patterns off where it runs in parallel.
    // SAFETY: see above.
    unsafe {
        if settings.memory_pattern {
            ort!(api, EnableMemPattern, raw)
        } else {
            ort!(api, DisableMemPattern, raw)
        }
    }?;
    for (key, value) in &settings.entries {
        let (c_key, c_value) = (c_text(key)?, c_text(value)?);
        // SAFETY: see above.
        unsafe { ort!(api, AddSessionConfigEntry, raw, c_key.as_ptr(), c_value.as_ptr()) }.map_err(
            |failure| {
                Error::invalid_arg(format!(
                    "parameter '{key}' of model '{}': {}",
                    context.name,
                    failure.text()
                ))
            },
        )?;
    }
    for library in &context.op_libraries {
        register_operators(&options, context, library)?;
    }
    for accelerator in &settings.accelerators {
        append_provider(runtime, &options, &context.name, accelerator)?;
    }
    Ok(options)
}

/// Adds the operators of a library named by `op_library_filename`: a path, or a file beside the model.
fn register_operators(options: &Options, context: &ModelContext, library: &str) -> Result<()> {
    let directories = [&context.files.version_dir, &context.files.model_dir];
    let beside = directories.into_iter().map(|directory| directory.join(library)).find(|path| path.is_file());
    let path = beside.unwrap_or_else(|| PathBuf::from(library));
    let c_path = c_path(&path)?;
    // SAFETY: options and path live through the call; the library stays open as long as a session uses it.
    unsafe { ort!(options.api, RegisterCustomOpsLibrary_V2, options.as_ptr(), c_path.as_ptr()) }.map_err(
        |failure| {
            Error::unavailable(format!(
                "op_library_filename '{library}' of model '{}' cannot be used as '{}': {}",
                context.name,
                path.display(),
                failure.text()
            ))
        },
    )
}

fn append_provider(
    runtime: &Runtime,
    options: &Options,
    model: &str,
    accelerator: &Accelerator,
) -> Result<()> {
    let Accelerator { name, provider, short, options: settings } = accelerator;
    let available = runtime.providers()?;
    if !available.iter().any(|p| p == provider) {
        return Err(Error::unavailable(format!(
            "model '{model}' asks for the accelerator '{name}', but ONNX Runtime {} at '{}' has no {provider}, only \
             {}; install a build that has it, or remove the accelerator from the configuration",
            runtime.version,
            runtime.path.display(),
            available.join(", ")
        )));
    }
    let short = c_text(short)?;
    let strings = settings.iter().map(|(key, value)| Ok((c_text(key)?, c_text(value)?)));
    let strings: Vec<(CString, CString)> = strings.collect::<Result<_>>()?;
    let keys: Vec<_> = strings.iter().map(|(key, _)| key.as_ptr()).collect();
    let values: Vec<_> = strings.iter().map(|(_, value)| value.as_ptr()).collect();
    let raw = options.as_ptr();
    // SAFETY: all strings and both arrays, of `keys.len()` pointers each, live through the call.
    unsafe {
        ort!(
            runtime.api,
            SessionOptionsAppendExecutionProvider,
            raw,
            short.as_ptr(),
            keys.as_ptr(),
            values.as_ptr(),
            keys.len()
        )
    }
    .map_err(|failure| {
        Error::unavailable(format!(
            "the accelerator '{name}' asked for by model '{model}' cannot be added: {}",
            failure.text()
        ))
    })
}

fn c_text(text: &str) -> Result<CString> {
    CString::new(text)
        .map_err(|_| Error::invalid_arg(format!("'{}' holds a NUL character", text.replace('\0', "\\0"))))
}

fn c_path(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::invalid_arg(format!("the path '{}' holds a NUL character", path.display())))
}
