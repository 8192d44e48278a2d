//! The words of the domain: data types, shapes, tensor bytes, requests, responses and the error with its code.
//!
//! Nothing here does I/O or knows a protocol, an engine or an async runtime. Every other crate may depend on
//! this one; this one depends on none of them.

#![forbid(unsafe_code)]

mod buffer;
mod data_type;
mod error;
mod model;
mod parameter;
mod request;
mod response;
mod shape;

pub use buffer::{HostBuffer, TensorBuffer};
pub use data_type::{DataType, UnknownDataType};
pub use error::{Code, Error, Result};
pub use model::{MemoryUsage, ModelReport, ReportedTensor, TensorFormat, TensorSpec};
pub use parameter::{ParameterValue, Parameters};
pub use request::{CorrelationId, InferInput, InferRequest, RequestedOutput, Sequence};
pub use response::{InferResponse, OutputTensor, Responder, ResponseSink};
pub use shape::{Shape, ShapeError};
