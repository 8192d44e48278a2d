//! The `python` backend: runs models written for Triton's python backend, each instance in a process of its own.
//!
//! A worker is an ordinary Python with numpy that is sent its program over the socket to the server ([`worker`],
//! `python/worker.py`). Small messages go over that socket ([`channel`], [`message`]), tensors through memory that
//! both sides map ([`region`]). [`supervisor`] starts a worker again when it ends, and [`instance`] runs batches.

mod call;
mod channel;
mod instance;
mod interpreter;
mod launch;
mod message;
mod promise;
mod region;
mod report;
mod supervisor;
mod worker;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use trireme_backend::{
    Backend, InstanceContext, InstanceKind, Model, ModelCaller, ModelContext, ModelInstance, ModelTensors,
    OpenModel,
};
use trireme_types::{Error, ModelReport, Result};

use crate::instance::Instance;
use crate::interpreter::Environments;
use crate::launch::Launch;
use crate::promise::Promise;
use crate::supervisor::{Setup, Supervisor};
use crate::worker::Worker;

/// Parameter of a model: milliseconds that an execution may take before its worker is ended.
const EXECUTION_LIMIT: &str = "EXECUTION_TIMEOUT_MS";
/// Setting of the backend: seconds that `finalize` may take.
const STOP_LIMIT: &str = "stub-timeout-seconds";
const DEFAULT_STOP_LIMIT: u64 = 30;

/// Triton's backend for models in Python.
#[derive(Default)]
pub struct PythonBackend {
    environments: Environments,
}

impl fmt::Debug for PythonBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PythonBackend")
    }
}

impl Backend for PythonBackend {
    fn name(&self) -> &str {
        "python"
    }

    fn default_model_filename(&self) -> Option<&str> {
        Some("model.py")
    }

    fn open(&self, context: &ModelContext) -> Result<Box<dyn OpenModel>> {
        let path = &context.files.model_path;
        if !path.is_file() {
            return Err(Error::unavailable(format!(
                "unable to find '{}' for model '{}'",
                path.display(),
                context.name
            )));
        }
        let limit = limit(context)?;
        let stop_limit = stop_limit(context)?;
        let interpreter = self.environments.find(context)?;
        let launch = Launch::new(interpreter, context.threads);
        let absolute = |path: &std::path::Path| {
            std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()).to_string_lossy().into_owned()
        };
        let open = json!({
            "op": "open",
            "model_path": absolute(path),
            "model_dir": absolute(&context.files.model_dir),
            "config": &*context.config_json,
            "complete": true,
        });
        let started = Worker::start(&launch, &context.name)?;
        let worker = Spare(Some(Arc::clone(&started)));
        let completed = started.request(&open)?;
        let report = match &completed {
            Value::Null => None,
            config => Some(report::read(config)?),
        };
        let config = match completed {
            Value::Null => context.config_json.to_string(),
            config => config.to_string(),
        };
        Ok(Box::new(Opened {
            report,
            open,
            launch,
            limit,
            stop_limit,
            config,
            decoupled: context.decoupled,
            model: Arc::clone(&context.name),
            caller: context.caller.clone(),
            args: json!({
                "model_name": &*context.name,
                "model_version": context.version.to_string(),
                "model_repository": absolute(&context.files.model_dir),
            }),
            version_dir: absolute(&context.files.version_dir),
            worker: Mutex::new(Some(worker)),
        }))
    }
}

fn limit(context: &ModelContext) -> Result<Option<Duration>> {
    let Some(text) = context.parameter(EXECUTION_LIMIT) else { return Ok(None) };
    match text.parse() {
        Ok(0) => Ok(None),
        Ok(limit) => Ok(Some(Duration::from_millis(limit))),
        Err(_) => Err(Error::invalid_arg(format!(
            "parameter {EXECUTION_LIMIT} of model '{}' is '{text}', expected a number of milliseconds",
            context.name
        ))),
    }
}

fn stop_limit(context: &ModelContext) -> Result<Duration> {
    let Some(text) = context.settings.get(STOP_LIMIT) else {
        return Ok(Duration::from_secs(DEFAULT_STOP_LIMIT));
    };
    text.parse().map(Duration::from_secs).map_err(|_| {
        Error::invalid_arg(format!(
            "the backend setting '{STOP_LIMIT}' is '{text}', expected a number of seconds"
        ))
    })
}

/// A worker that has opened the model and serves no instance yet.
struct Spare(Option<Arc<Worker>>);

impl Drop for Spare {
    fn drop(&mut self) {
        if let Some(worker) = self.0.take() {
            worker.abandon();
        }
    }
}

struct Opened {
    report: Option<ModelReport>,
    open: Value,
    launch: Launch,
    limit: Option<Duration>,
    stop_limit: Duration,
    config: String,
    decoupled: bool,
    model: Arc<str>,
    caller: Option<Arc<dyn ModelCaller>>,
    args: Value,
    version_dir: String,
    worker: Mutex<Option<Spare>>,
}

impl OpenModel for Opened {
    fn report(&self) -> Result<Option<ModelReport>> {
        Ok(self.report.clone())
    }

    fn load(mut self: Box<Self>, tensors: ModelTensors) -> Result<Arc<dyn Model>> {
        if let Some(decoupled) = self.report.as_ref().and_then(|report| report.decoupled) {
            self.decoupled = self.decoupled || decoupled;
        }
        if !tensors.batch_inputs.is_empty() || !tensors.batch_outputs.is_empty() {
            return Err(Error::unsupported(
                "batch_input and batch_output are for engines that get a batch as one tensor; a python model gets each \
                 request's own tensors",
            ));
        }
        let promise = Arc::new(Promise {
            model: Arc::clone(&self.model),
            tensors,
            decoupled: self.decoupled,
            caller: self.caller.clone(),
        });
        if let Value::Object(open) = &mut self.open {
            open.insert("complete".to_owned(), false.into());
        }
        Ok(Arc::new(Loaded { opened: *self, promise }))
    }
}

struct Loaded {
    opened: Opened,
    promise: Arc<Promise>,
}

impl Model for Loaded {
    fn instance(&self, context: &InstanceContext) -> Result<Box<dyn ModelInstance>> {
        let opened = &self.opened;
        let kind = match context.kind {
            InstanceKind::Cpu => "CPU",
            InstanceKind::Gpu => "GPU",
            InstanceKind::Model => "MODEL",
        };
        let mut args = opened.args.clone();
        if let Value::Object(args) = &mut args {
            args.insert("model_config".to_owned(), opened.config.as_str().into());
            args.insert("model_instance_kind".to_owned(), kind.into());
            args.insert("model_instance_device_id".to_owned(), context.device_id.to_string().into());
            args.insert("model_instance_name".to_owned(), context.name.as_str().into());
        }
        let setup = Setup {
            name: context.name.clone(),
            launch: opened.launch.clone(),
            open: opened.open.clone(),
            initialize: json!({
                "op": "initialize",
                "args": args,
                "decoupled": opened.decoupled,
                "version_dir": opened.version_dir,
            }),
            promise: Arc::clone(&self.promise),
            stop_limit: opened.stop_limit,
        };
        let spare = opened.worker.lock().take().and_then(|mut spare| spare.0.take());
        let worker = spare.filter(|worker| worker.ended().is_none());
        if let Some(worker) = &worker {
            worker.rename(&context.name);
        }
        Ok(Box::new(Instance {
            name: context.name.clone(),
            supervisor: Supervisor::new(setup, worker)?,
            promise: Arc::clone(&self.promise),
            limit: opened.limit,
            next: 0,
        }))
    }
}
