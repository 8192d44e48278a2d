//! What is known of a model's tensors: as the configuration promises them, and as the model file reports them.

use std::sync::Arc;

use crate::{DataType, Shape};

/// Layout hint of an image input (`FORMAT_NHWC`, `FORMAT_NCHW`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TensorFormat {
    #[default]
    None,
    Nhwc,
    Nchw,
}

/// One input or output as the validated configuration promises it to clients.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    pub name: Arc<str>,
    pub data_type: DataType,
    /// Dimensions without the batch dimension; `-1` is open.
    pub dims: Shape,
    /// Shape that the engine sees instead of `dims`, without the batch dimension. Empty is a scalar.
    pub reshape: Option<Shape>,
    pub format: TensorFormat,
    /// Inputs only: a request may leave it out.
    pub optional: bool,
    /// Inputs only: requests in a batch may differ in shape (`allow_ragged_batch`).
    pub ragged: bool,
    pub shape_tensor: bool,
    /// Outputs only: file with one class label a line, relative to the model directory.
    pub label_filename: Option<String>,
}

impl TensorSpec {
    /// A plain tensor: not reshaped, not optional, of no format.
    ///
    /// # Shapes
    /// `dims` are without the batch dimension; `-1` is open.
    pub fn new(name: impl Into<Arc<str>>, data_type: DataType, dims: Shape) -> Self {
        Self {
            name: name.into(),
            data_type,
            dims,
            reshape: None,
            format: TensorFormat::None,
            optional: false,
            ragged: false,
            shape_tensor: false,
            label_filename: None,
        }
    }

    /// Shape that the engine sees, without the batch dimension.
    pub fn engine_dims(&self) -> &Shape {
        self.reshape.as_ref().unwrap_or(&self.dims)
    }
}

/// One tensor as the model file itself describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct ReportedTensor {
    pub name: String,
    pub data_type: DataType,
    /// Full shape, a batch dimension included if the model has one; `-1` is open; empty is a scalar.
    pub shape: Shape,
    /// Inputs only: the model has a default for it (an ONNX initializer).
    pub optional: bool,
}

/// What a backend read from a model file, to complete and check a configuration with.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelReport {
    pub inputs: Vec<ReportedTensor>,
    pub outputs: Vec<ReportedTensor>,
    /// Every tensor's first dimension is open, so that it can be taken for the batch dimension.
    pub batch_dimension: bool,
    /// The model itself sets `max_batch_size`.
    pub max_batch_size: Option<i32>,
    /// The model itself says whether it is decoupled.
    pub decoupled: Option<bool>,
    /// The model itself asks for the dynamic batcher.
    pub dynamic_batching: bool,
}

/// Memory that a loaded model holds, for the statistics extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryUsage {
    /// `CPU`, `CPU_PINNED` or `GPU`.
    pub kind: &'static str,
    /// Device number.
    pub id: i64,
    pub byte_size: u64,
}
