//! The JSON text of frames, in the words of `worker.py`.

use serde::{Deserialize, Serialize};
use trireme_types::{Code, CorrelationId, DataType, Error, ParameterValue, Parameters, Result, Shape};

use crate::call::CallRequest;

/// A tensor: name, number of its data type, shape, place and size of its bytes in the data or the region.
#[derive(Debug, Serialize)]
pub(crate) struct SentTensor<'a>(
    pub(crate) &'a str,
    pub(crate) i32,
    pub(crate) &'a [i64],
    pub(crate) usize,
    pub(crate) usize,
);

/// One request of a batch.
#[derive(Debug, Serialize)]
pub(crate) struct SentRequest<'a> {
    /// Its number, by which responses name it.
    pub(crate) k: u64,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub(crate) id: &'a str,
    #[serde(skip_serializing_if = "serde_json::Value::is_null")]
    pub(crate) c: serde_json::Value,
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) f: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) t: u64,
    #[serde(skip_serializing_if = "serde_json::Map::is_empty")]
    pub(crate) p: serde_json::Map<String, serde_json::Value>,
    pub(crate) o: Vec<&'a str>,
    pub(crate) i: Vec<SentTensor<'a>>,
}

/// A batch.
#[derive(Debug, Serialize)]
pub(crate) struct Execute<'a> {
    pub(crate) op: &'static str,
    pub(crate) r: Vec<SentRequest<'a>>,
    /// The region of the inputs.
    #[serde(rename = "in", skip_serializing_if = "Option::is_none")]
    pub(crate) input: Option<u64>,
    /// Number and size of a region that the worker does not know yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) region: Option<(u64, usize)>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) free: Vec<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) gone: Vec<u64>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

pub(crate) fn correlation(id: &CorrelationId) -> serde_json::Value {
    match id {
        CorrelationId::None => serde_json::Value::Null,
        CorrelationId::Number(number) => (*number).into(),
        CorrelationId::Text(text) => text.as_str().into(),
    }
}

pub(crate) fn parameters(parameters: &Parameters) -> serde_json::Map<String, serde_json::Value> {
    let value = |value: &ParameterValue| match value {
        ParameterValue::Bool(value) => (*value).into(),
        ParameterValue::Int(value) => (*value).into(),
        ParameterValue::Uint(value) => (*value).into(),
        ParameterValue::Double(value) => (*value).into(),
        ParameterValue::String(value) => value.as_str().into(),
    };
    parameters.iter().map(|(key, each)| (key.to_owned(), value(each))).collect()
}

/// What the worker sends.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case", tag = "op")]
pub(crate) enum Op {
    /// An operation has ended.
    Done {
        #[serde(default)]
        value: serde_json::Value,
        #[serde(default)]
        error: Option<WorkerError>,
        /// Of an execution: what became of each request.
        #[serde(default)]
        a: Vec<Option<Answer>>,
        #[serde(default)]
        region: Option<(u64, usize, bool)>,
    },
    /// A response of a sender.
    Response {
        r: u64,
        f: u32,
        #[serde(default)]
        a: Vec<Answer>,
        #[serde(default)]
        region: Option<(u64, usize, bool)>,
    },
    Log {
        level: i64,
        text: String,
    },
    /// A request for another model.
    Call {
        call: u64,
        q: CallRequest,
        #[serde(default)]
        region: Option<(u64, usize, bool)>,
    },
    /// Whether a model serves.
    ModelReady {
        call: u64,
        model: String,
        version: i64,
    },
    /// Whether the client of a request has gone away.
    Cancelled {
        r: u64,
        call: u64,
    },
}

/// What any message may bring along.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Notes {
    #[serde(default)]
    pub(crate) free: Vec<u64>,
    #[serde(default)]
    pub(crate) gone: Vec<u64>,
}

/// Code and message.
#[derive(Debug, Deserialize)]
pub(crate) struct WorkerError(i64, String);

impl WorkerError {
    pub(crate) fn into_error(self) -> Error {
        let code = match self.0 {
            0 => Code::Unknown,
            2 => Code::NotFound,
            3 => Code::InvalidArg,
            4 => Code::Unavailable,
            5 => Code::Unsupported,
            6 => Code::AlreadyExists,
            7 => Code::Cancelled,
            _ => Code::Internal,
        };
        Error::new(code, self.1)
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct Answer {
    /// Outputs.
    #[serde(default)]
    pub(crate) o: Vec<ReceivedTensor>,
    #[serde(default)]
    pub(crate) e: Option<WorkerError>,
    #[serde(default)]
    pub(crate) p: serde_json::Map<String, serde_json::Value>,
    /// The request shall run again.
    #[serde(default)]
    pub(crate) s: bool,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ReceivedTensor(
    pub(crate) String,
    pub(crate) i32,
    pub(crate) Vec<i64>,
    pub(crate) usize,
    pub(crate) usize,
);

impl ReceivedTensor {
    /// Data type, shape and the place of the bytes, checked against `available` bytes.
    pub(crate) fn check(&self, available: usize) -> Result<(DataType, Shape, std::ops::Range<usize>)> {
        let Self(name, number, shape, offset, size) = self;
        let wrong = |what: String| Error::internal(format!("output '{name}' of the python model {what}"));
        let data_type = DataType::from_config_number(*number)
            .ok_or_else(|| wrong(format!("has the unknown data type {number}")))?;
        let shape = Shape::new(shape);
        let expected =
            shape.byte_size(data_type).map_err(|error| wrong(format!("has a bad shape: {error}")))?;
        let end = offset.checked_add(*size).filter(|&end| end <= available);
        let end = end.ok_or_else(|| wrong("lies outside its message".to_owned()))?;
        match expected {
            Some(expected) if expected != *size => {
                Err(wrong(format!("has {size} bytes, expected {expected} for the shape {shape}")))
            }
            _ => Ok((data_type, shape, *offset..end)),
        }
    }
}

pub(crate) fn parameter_values(map: serde_json::Map<String, serde_json::Value>) -> Parameters {
    let mut parameters = Parameters::default();
    for (key, value) in map {
        let value = match value {
            serde_json::Value::Bool(value) => ParameterValue::Bool(value),
            serde_json::Value::String(text) => ParameterValue::String(text),
            serde_json::Value::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(value), _) => ParameterValue::Int(value),
                (None, Some(value)) => ParameterValue::Uint(value),
                (None, None) => ParameterValue::Double(number.as_f64().unwrap_or_default()),
            },
            other => ParameterValue::String(other.to_string()),
        };
        parameters.insert(key, value);
    }
    parameters
}
