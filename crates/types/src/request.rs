//! One inference request, as every protocol turns it into the same words.

use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;

use crate::{DataType, Parameters, Shape, TensorBuffer};

/// One input tensor of a request. `shape` is the full shape as the client sent it, batch dimension included.
#[derive(Clone, Debug)]
pub struct InferInput {
    pub name: Arc<str>,
    pub data_type: DataType,
    pub shape: Shape,
    pub data: TensorBuffer,
}

/// An output that the client asked for by name.
#[derive(Clone, Debug)]
pub struct RequestedOutput {
    pub name: Arc<str>,
}

/// Identity of a sequence: a number or a string, never both.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum CorrelationId {
    /// No sequence: the number 0 or the empty string on the wire.
    #[default]
    None,
    Number(u64),
    Text(String),
}

/// Place of a request in its sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sequence {
    pub id: CorrelationId,
    pub start: bool,
    pub end: bool,
}

/// One request for one model. Shapes and sizes are unchecked until the server has normalised it.
#[derive(Clone, Debug)]
pub struct InferRequest {
    /// Given by the client, empty if none; comes back in the response.
    pub id: String,
    pub inputs: SmallVec<[InferInput; 2]>,
    /// Outputs to return; empty means all of them.
    pub outputs: SmallVec<[RequestedOutput; 2]>,
    pub parameters: Parameters,
    pub sequence: Sequence,
    /// 0 is the model's default priority, 1 the highest.
    pub priority: u64,
    /// Client's limit on the time in the queue, microseconds; 0 is none.
    pub timeout_us: u64,
    /// When the first byte of the request had been received.
    pub received: Instant,
    /// Models that wait for this request, the outermost first: those that called one another up to here.
    pub callers: Vec<Arc<str>>,
    /// Rows in the batch dimension; 1 for models without one. Set by the server when it normalises the request.
    pub batch_size: usize,
}

impl InferRequest {
    /// An empty request received now.
    pub fn new() -> Self {
        Self::received_at(Instant::now())
    }

    pub fn received_at(received: Instant) -> Self {
        Self {
            id: String::new(),
            inputs: SmallVec::new(),
            outputs: SmallVec::new(),
            parameters: Parameters::default(),
            sequence: Sequence::default(),
            priority: 0,
            timeout_us: 0,
            received,
            callers: Vec::new(),
            batch_size: 1,
        }
    }

    /// Whether the client wants the output of that name.
    pub fn wants(&self, output: &str) -> bool {
        self.outputs.is_empty() || self.outputs.iter().any(|o| &*o.name == output)
    }

    pub fn input(&self, name: &str) -> Option<&InferInput> {
        self.inputs.iter().find(|i| &*i.name == name)
    }

    /// Bytes of all inputs together.
    pub fn input_bytes(&self) -> usize {
        self.inputs.iter().map(|i| i.data.len()).sum()
    }
}

impl Default for InferRequest {
    fn default() -> Self {
        Self::new()
    }
}
