//! Calls of a model to other models of the server.

use std::sync::{Arc, Weak};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use trireme_types::{
    Code, CorrelationId, Error, InferInput, InferRequest, InferResponse, RequestedOutput, Responder,
    ResponseSink, Result, Sequence, TensorBuffer,
};

use crate::message::{ReceivedTensor, SentTensor, parameter_values, parameters};
use crate::worker::Worker;

/// A request as the worker sends it.
#[derive(Debug, Deserialize)]
pub(crate) struct CallRequest {
    pub(crate) model: String,
    /// -1 is the latest.
    pub(crate) version: i64,
    id: String,
    /// A number or a text.
    c: serde_json::Value,
    f: u64,
    t: u64,
    p: serde_json::Map<String, serde_json::Value>,
    o: Vec<String>,
    i: Vec<ReceivedTensor>,
}

impl CallRequest {
    pub(crate) fn version(&self) -> Option<i64> {
        Some(self.version).filter(|version| *version >= 0)
    }

    /// The request; its tensors lie in `data`.
    pub(crate) fn into_request(self, data: &TensorBuffer, callers: Vec<Arc<str>>) -> Result<InferRequest> {
        let inputs = self.i.iter().map(|tensor| {
            let (data_type, shape, place) = tensor.check(data.len())?;
            Ok(InferInput { name: tensor.0.as_str().into(), data_type, shape, data: data.slice(place) })
        });
        let id = match &self.c {
            serde_json::Value::String(text) if !text.is_empty() => CorrelationId::Text(text.clone()),
            value => value.as_u64().filter(|id| *id != 0).map_or(CorrelationId::None, CorrelationId::Number),
        };
        let mut request = InferRequest::received_at(Instant::now());
        request.inputs = inputs.collect::<Result<_>>()?;
        request.outputs = self.o.iter().map(|name| RequestedOutput { name: name.as_str().into() }).collect();
        request.id = self.id;
        request.parameters = parameter_values(self.p);
        request.sequence = Sequence { id, start: self.f & 1 != 0, end: self.f & 2 != 0 };
        request.timeout_us = self.t;
        request.callers = callers;
        Ok(request)
    }
}

/// A response on its way to the worker.
#[derive(Serialize)]
struct CallReply<'a> {
    reply: u64,
    last: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    e: Option<(u8, &'a str)>,
    /// `None`: the end without a response.
    #[serde(skip_serializing_if = "Option::is_none")]
    o: Option<Vec<SentTensor<'a>>>,
    p: serde_json::Map<String, serde_json::Value>,
    #[serde(rename = "in", skip_serializing_if = "Option::is_none")]
    input: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    region: Option<(u64, usize)>,
}

/// Takes the responses of a called model to the worker that called.
pub(crate) struct CallSink {
    pub(crate) worker: Weak<Worker>,
    pub(crate) call: u64,
}

impl CallSink {
    pub(crate) fn responder(worker: &Arc<Worker>, call: u64) -> Responder {
        Responder::new(Box::new(Self { worker: Arc::downgrade(worker), call }))
    }
}

impl ResponseSink for CallSink {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        let Some(worker) = self.worker.upgrade() else { return };
        let sent = match &reply {
            Some(Ok(response)) => send_response(&worker, self.call, response, last),
            Some(Err(error)) => send_end(&worker, self.call, Some(error), last),
            None => send_end(&worker, self.call, None, last),
        };
        // A worker that has ended asks no more.
        if let Err(error) = sent
            && worker.ended().is_none()
            && send_end(&worker, self.call, Some(&error), true).is_err()
        {
            tracing::error!("an answer did not reach the model that called: {error}");
        }
    }

    fn is_closed(&self) -> bool {
        self.worker.upgrade().is_none_or(|worker| worker.ended().is_some())
    }
}

fn send_response(worker: &Worker, call: u64, response: &InferResponse, last: bool) -> Result<()> {
    let data: Vec<&[u8]> = response.outputs.iter().map(|output| output.data.as_slice()).collect();
    let placed = worker.place(&data)?;
    let tensors = response.outputs.iter().zip(&placed.offsets).map(|(output, offset)| {
        let number = output.data_type.config_number();
        SentTensor(&output.name, number, &output.shape, *offset, output.data.len())
    });
    let reply = CallReply {
        reply: call,
        last,
        e: None,
        o: Some(tensors.collect()),
        p: parameters(&response.parameters),
        input: placed.region.map(|(number, _)| number),
        region: placed.region.filter(|_| placed.fd.is_some()),
    };
    let text = serde_json::to_vec(&reply).map_err(|error| Error::internal(error.to_string()))?;
    worker.send(&text, &placed.inline, placed.fd.as_ref())
}

fn send_end(worker: &Worker, call: u64, error: Option<&Error>, last: bool) -> Result<()> {
    let code = |error: &Error| match error.code() {
        Code::Unknown => 0,
        Code::Internal => 1,
        Code::NotFound => 2,
        Code::InvalidArg => 3,
        Code::Unavailable => 4,
        Code::Unsupported => 5,
        Code::AlreadyExists => 6,
        Code::Cancelled => 7,
    };
    let reply = CallReply {
        reply: call,
        last,
        e: error.map(|error| (code(error), error.message())),
        o: None,
        p: serde_json::Map::new(),
        input: None,
        region: None,
    };
    let text = serde_json::to_vec(&reply).map_err(|error| Error::internal(error.to_string()))?;
    worker.send(&text, &[], None)
}
