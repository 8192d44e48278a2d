//! What a backend is told about a model.

use std::path::PathBuf;
use std::sync::Arc;

use trireme_types::{DataType, TensorSpec};

use crate::caller::ModelCaller;
use crate::padding::PaddingPlan;
use crate::ragged::{BatchInput, BatchOutput};

/// Settings given with `--backend-config`, those without a backend's name included.
#[derive(Clone, Debug, Default)]
pub struct BackendSettings(Vec<(String, String)>);

impl BackendSettings {
    pub fn new(settings: Vec<(String, String)>) -> Self {
        Self(settings)
    }

    /// The last value given for a key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().rev().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(k, v)| (k.as_str(), v.as_str()))
    }
}

/// Where the files of one version are.
#[derive(Clone, Debug, Default)]
pub struct ModelFiles {
    /// `<repository>/<model>`
    pub model_dir: PathBuf,
    /// `<repository>/<model>/<version>`
    pub version_dir: PathBuf,
    /// The model file in the version directory; it may not exist. Empty for backends without a file.
    pub model_path: PathBuf,
}

/// A model version as its backend is asked to open it, before the configuration is complete.
#[derive(Clone, Debug, Default)]
pub struct ModelContext {
    pub name: Arc<str>,
    pub version: i64,
    pub files: ModelFiles,
    /// `parameters` of the configuration.
    pub parameters: Vec<(String, String)>,
    /// Settings of the command line for this backend.
    pub settings: BackendSettings,
    /// `optimization.graph.level`, if set.
    pub graph_level: Option<i32>,
    /// `model_operations.op_library_filename`.
    pub op_libraries: Vec<String>,
    /// `optimization.execution_accelerators`: names of GPU and CPU accelerators with their parameters.
    pub accelerators: Vec<(String, Vec<(String, String)>)>,
    /// `model_transaction_policy.decoupled`
    pub decoupled: bool,
    /// Threads that one execution may use, the calling one included: the model's share of the thread budget.
    pub threads: usize,
    /// Runs requests for other models; `None` where there are none, as when a model is opened in a test.
    pub caller: Option<Arc<dyn ModelCaller>>,
    /// The configuration as JSON, as the `/config` endpoint would serve it at this point.
    pub config_json: Arc<str>,
}

impl ModelContext {
    /// Value of a configuration parameter.
    pub fn parameter(&self, key: &str) -> Option<&str> {
        self.parameters.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }
}

/// The promise of the completed configuration.
#[derive(Clone, Debug, Default)]
pub struct ModelTensors {
    /// 0: no batch dimension. Otherwise every tensor has one in front of its `dims`.
    pub max_batch_size: usize,
    pub inputs: Vec<TensorSpec>,
    pub outputs: Vec<TensorSpec>,
    /// Inputs that the server adds to requests itself (sequence controls, states), with their engine-side types.
    pub injected: Vec<(Arc<str>, DataType)>,
    /// Outputs that every response must have whatever the client asked for; the server takes them out again.
    /// One of them may also be in `outputs`.
    pub states: Vec<TensorSpec>,
    /// Inputs of the model that a backend makes from the batch itself; see [`crate::ragged`].
    pub batch_inputs: Vec<BatchInput>,
    /// Outputs that go back in pieces of an input's shapes.
    pub batch_outputs: Vec<BatchOutput>,
    /// How requests of different lengths are made one length. The server does that around the backend, which sees
    /// padded batches.
    pub padding: Option<Arc<PaddingPlan>>,
}

impl ModelTensors {
    pub fn input(&self, name: &str) -> Option<&TensorSpec> {
        self.inputs.iter().find(|t| &*t.name == name)
    }

    pub fn output(&self, name: &str) -> Option<&TensorSpec> {
        self.outputs.iter().find(|t| &*t.name == name)
    }
}

/// Device kind of an instance group after `KIND_AUTO` has been decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InstanceKind {
    #[default]
    Cpu,
    Gpu,
    /// The model places itself.
    Model,
}

/// Which instance is being made.
#[derive(Clone, Debug, Default)]
pub struct InstanceContext {
    /// `<group name>_<index>`
    pub name: String,
    pub kind: InstanceKind,
    /// GPU number; 0 otherwise.
    pub device_id: i32,
    /// `profile` of the instance group (TensorRT optimisation profiles).
    pub profiles: Vec<String>,
}
