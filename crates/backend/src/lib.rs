//! The contract between the server and an execution engine.
//!
//! A [`Backend`] opens a model file, an [`OpenModel`] says what it found there and becomes a [`Model`], and a
//! [`ModelInstance`] runs batches on one OS thread at a time. Backends never see sockets, protocols, schedulers
//! or the configuration file: what they need of it stands in [`ModelContext`].

#![forbid(unsafe_code)]

mod batch;
mod caller;
mod context;
pub mod padding;
pub mod ragged;
mod tensors;

use std::fmt;
use std::sync::Arc;

pub use batch::{Batch, BatchRequest, BatchTimes};
pub use caller::ModelCaller;
pub use context::{BackendSettings, InstanceContext, InstanceKind, ModelContext, ModelFiles, ModelTensors};
pub use tensors::{BatchRows, engine_shape, wire_shape};
use trireme_types::{MemoryUsage, ModelReport, Result};

/// An execution engine, by the name that `backend:` in a configuration gives.
///
/// Constructing one must be cheap and cannot fail: libraries are looked for when the first model is opened.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Triton's name of the backend, as `onnxruntime`.
    fn name(&self) -> &str;

    /// Model file looked for in a version directory when the configuration names none; `None` if the backend needs
    /// no file.
    fn default_model_filename(&self) -> Option<&str>;

    /// Instances of a `KIND_CPU` group whose configuration gives no count.
    fn default_cpu_instance_count(&self) -> usize {
        1
    }

    /// Whether executions keep cores of the CPU busy, so that more instances than cores gain nothing.
    fn computes_on_cpu(&self) -> bool {
        false
    }

    /// Opens the model file of one version.
    ///
    /// # Errors
    /// The engine is absent, or the file is missing, damaged or of a kind that the engine cannot run. The message
    /// becomes the model's reason in the repository index.
    fn open(&self, context: &ModelContext) -> Result<Box<dyn OpenModel>>;

    /// Version and origin of the engine for the start-up log; `None` when it was not needed yet or is built in.
    fn describe(&self) -> Option<String> {
        None
    }
}

/// A model file that has been read but does not serve yet.
pub trait OpenModel: Send {
    /// What the file says of its tensors, for completing and checking the configuration; `None` if the engine
    /// cannot tell.
    fn report(&self) -> Result<Option<ModelReport>>;

    /// Makes the model ready for instances. `tensors` is the completed configuration's promise.
    ///
    /// # Errors
    /// The promise cannot be kept with this file.
    fn load(self: Box<Self>, tensors: ModelTensors) -> Result<Arc<dyn Model>>;
}

/// One loaded version of a model, shared by its instances.
pub trait Model: Send + Sync {
    /// Makes one instance. Called once per configured instance, before the model is ready.
    fn instance(&self, context: &InstanceContext) -> Result<Box<dyn ModelInstance>>;

    /// Memory held by the model, for the statistics extension.
    fn memory_usage(&self) -> Vec<MemoryUsage> {
        Vec::new()
    }
}

/// Something that runs one batch at a time.
pub trait ModelInstance: Send {
    /// Runs a batch and answers each request in it through [`BatchRequest::answer`] or a responder taken with
    /// [`BatchRequest::take_responder`].
    ///
    /// # Errors
    /// An error answers every request of the batch that has no answer yet.
    fn execute(&mut self, batch: &mut Batch) -> Result<()>;

    /// Whether the instance can run at all; a crashed worker process says no.
    fn is_ready(&self) -> bool {
        true
    }
}
