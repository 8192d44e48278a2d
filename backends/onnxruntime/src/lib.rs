//! The `onnxruntime` backend: runs ONNX models with the ONNX Runtime library, loaded when the first model is opened.
//!
//! Nothing is linked at build time. [`library`] finds and opens the library, [`runtime`] holds its environment for
//! the life of the process, [`session`] is a model file read once and shared by all instances, [`promise`] checks
//! the configuration against it, and [`run`] executes batches. All `unsafe` stands where the C interface is called:
//! handles are made, released and given their thread guarantees in [`api`] alone.

// The wrapper of a foreign interface.
#![allow(unsafe_code, reason = "calls the C API of ONNX Runtime; every block says why it is sound")]

mod api;
mod element;
mod library;
mod model_file;
mod promise;
mod run;
mod runtime;
mod session;
mod settings;
mod value;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use trireme_backend::{
    Backend, BackendSettings, InstanceContext, InstanceKind, Model, ModelContext, ModelInstance,
    ModelTensors, OpenModel,
};
use trireme_types::{Error, MemoryUsage, ModelReport, Result};

use crate::promise::Plan;
use crate::run::Instance;
use crate::runtime::Runtime;
use crate::session::Session;

/// Key in the backend's settings that names the library.
const LIBRARY_PATH: &str = "library-path";

/// Triton's backend for ONNX models.
#[derive(Default)]
pub struct OnnxRuntimeBackend {
    library: Option<PathBuf>,
    /// Set when the first model is opened.
    runtime: OnceLock<Result<&'static Runtime>>,
}

impl OnnxRuntimeBackend {
    /// `library` is the ONNX Runtime library, or a directory that holds it; `None` looks for one. The backend
    /// setting `library-path` goes first.
    pub fn new(library: Option<PathBuf>) -> Self {
        Self { library, runtime: OnceLock::new() }
    }

    fn runtime(&self, settings: &BackendSettings) -> Result<&'static Runtime> {
        let open = || {
            let path = settings.get(LIBRARY_PATH).map(Path::new).or(self.library.as_deref());
            Runtime::open(path, settings)
        };
        self.runtime.get_or_init(open).clone()
    }
}

impl fmt::Debug for OnnxRuntimeBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnnxRuntimeBackend").field("library", &self.library).finish_non_exhaustive()
    }
}

impl Backend for OnnxRuntimeBackend {
    fn name(&self) -> &str {
        "onnxruntime"
    }

    fn default_model_filename(&self) -> Option<&str> {
        Some("model.onnx")
    }

    fn default_cpu_instance_count(&self) -> usize {
        2
    }

    fn computes_on_cpu(&self) -> bool {
        true
    }

    fn open(&self, context: &ModelContext) -> Result<Box<dyn OpenModel>> {
        let runtime = self.runtime(&context.settings)?;
        let session = Session::open(runtime, context)?;
        Ok(Box::new(Opened { model: context.name.clone(), session: Arc::new(session) }))
    }

    fn describe(&self) -> Option<String> {
        let runtime = self.runtime.get()?.as_ref().ok()?;
        Some(format!("ONNX Runtime {} from '{}'", runtime.version, runtime.path.display()))
    }
}

struct Opened {
    model: Arc<str>,
    session: Arc<Session>,
}

impl OpenModel for Opened {
    fn report(&self) -> Result<Option<ModelReport>> {
        Ok(Some(self.session.report()))
    }

    fn load(self: Box<Self>, tensors: ModelTensors) -> Result<Arc<dyn Model>> {
        let plan = Plan::new(&self.model, &self.session, &tensors)?;
        Ok(Arc::new(Loaded { session: self.session, plan: Arc::new(plan) }))
    }
}

struct Loaded {
    session: Arc<Session>,
    plan: Arc<Plan>,
}

impl Model for Loaded {
    fn instance(&self, context: &InstanceContext) -> Result<Box<dyn ModelInstance>> {
        if context.kind == InstanceKind::Gpu {
            return Err(Error::unsupported(format!(
                "instance '{}' of model '{}' has kind KIND_GPU, but the backend 'onnxruntime' runs on the CPU; use \
                 KIND_CPU or KIND_AUTO",
                context.name, self.plan.model
            )));
        }
        Ok(Box::new(Instance::new(self.session.clone(), self.plan.clone())?))
    }

    fn memory_usage(&self) -> Vec<MemoryUsage> {
        self.session.memory_usage()
    }
}
