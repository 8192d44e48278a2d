//! `ModelInfer`: one request, one response.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, Response};
use tokio::sync::oneshot;
use tonic::Status;
use trireme_core::{ModelVersion, Server, parse_version};
use trireme_types::{Error, InferResponse, Responder, ResponseSink, Result};

use super::body::{self, ResponseBody};
use super::compression::{self, LARGE_MESSAGE_LEN, Level};
use super::convert::{self, Classification, InferCall, Tags, Target, WireRequest};
use super::message::Framed;
use super::{Frontend, forward, status};
use crate::classification::classify;

const DECOUPLED: &str =
    "ModelInfer RPC doesn't support models with decoupled transaction policy; use ModelStreamInfer";

/// Answers one `ModelInfer` call.
pub(super) async fn model_infer(
    frontend: &Frontend,
    headers: &HeaderMap,
    message: Bytes,
    received: Instant,
) -> Result<Response<ResponseBody>, Status> {
    let server = &frontend.server;
    let forwarded =
        forward::forwarded(frontend.options.header_forward_pattern.as_ref(), headers).map_err(status)?;
    let (model, call) = parse(server, &message)
        .and_then(|wire| understand(server, &message, &wire, &forwarded, received, false))
        .map_err(status)?;
    drop(message);

    let (sender, receiver) = oneshot::channel();
    let sink = UnarySink { reply: None, sender: Some(sender) };
    server.infer(&model, call.request, Responder::new(Box::new(sink)));
    let reply = receiver
        .await
        .unwrap_or_else(|_| Err(Error::internal("the request was dropped before it was answered")))
        .map_err(status)?;

    let message = answer(&model, &call.classifications, reply).map_err(status)?;
    let level = frontend.options.compression_level;
    let encoding = if level == Level::None { None } else { compression::response_encoding(headers) };
    let message = match encoding {
        None => message,
        Some(encoding) if message.message_len() < LARGE_MESSAGE_LEN => {
            message.compressed(encoding, level).map_err(status)?
        }
        Some(encoding) => tokio::task::spawn_blocking(move || message.compressed(encoding, level))
            .await
            .map_err(|_| Status::internal("compressing the response was interrupted"))?
            .map_err(status)?,
    };
    Ok(body::unary(message, encoding))
}

/// Reads a request. One that cannot be read is counted as refused.
pub(super) fn parse<'a>(server: &Server, message: &'a Bytes) -> Result<WireRequest<'a>> {
    WireRequest::parse(message).map_err(convert::malformed).inspect_err(|_| server.record_refused_request())
}

/// Finds the model of a request and converts the request for it. One that fails here is counted as refused.
pub(super) fn understand(
    server: &Server,
    message: &Bytes,
    wire: &WireRequest<'_>,
    forwarded: &[(String, String)],
    received: Instant,
    on_stream: bool,
) -> Result<(Arc<ModelVersion>, InferCall)> {
    let call = || {
        let model = server.model(wire.model_name, parse_version(wire.model_version)?)?;
        if model.is_decoupled() && !on_stream {
            return Err(Error::unsupported(DECOUPLED));
        }
        let target = Target { model: model.name(), inputs: model.inputs(), outputs: model.outputs() };
        let call = convert::request(message, wire, target, forwarded, received)?;
        Ok((model, call))
    };
    call().inspect_err(|_| server.record_refused_request())
}

fn answer(model: &ModelVersion, classifications: &[Classification], reply: InferResponse) -> Result<Framed> {
    let reply = classified(model, classifications, reply)?;
    let tags = Tags { model: model.name(), version: model.version_str(), final_response: None };
    convert::response(tags, reply)
}

/// The response with the outputs classified that the request asked for.
pub(super) fn classified(
    model: &ModelVersion,
    classifications: &[Classification],
    mut reply: InferResponse,
) -> Result<InferResponse> {
    for (name, count) in classifications {
        if let Some(output) = reply.outputs.iter_mut().find(|output| output.name == *name) {
            *output = classify(output, *count, model.labels(name), model.max_batch_size() > 0)?;
        }
    }
    Ok(reply)
}

/// Error for a model that answers a request more than once without being decoupled.
pub(super) fn more_than_one_response() -> Error {
    Error::internal("expected a single response, got more than one")
}

/// Error for a model that ends a request without an answer.
pub(super) fn no_response() -> Error {
    Error::internal("expected a single response, got 0")
}

/// Waits for the one response of a model that is not decoupled.
struct UnarySink {
    reply: Option<Result<InferResponse>>,
    sender: Option<oneshot::Sender<Result<InferResponse>>>,
}

impl ResponseSink for UnarySink {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        if let Some(reply) = reply {
            let earlier = self.reply.replace(reply);
            if earlier.is_some() {
                self.reply = Some(Err(more_than_one_response()));
            }
        }
        if last && let Some(sender) = self.sender.take() {
            // Nobody waits if the call was cancelled.
            let _ = sender.send(self.reply.take().unwrap_or_else(|| Err(no_response())));
        }
    }

    fn is_closed(&self) -> bool {
        self.sender.as_ref().is_none_or(oneshot::Sender::is_closed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(replies: Vec<Option<Result<InferResponse>>>) -> Result<InferResponse> {
        let (sender, mut receiver) = oneshot::channel();
        let mut sink = UnarySink { reply: None, sender: Some(sender) };
        let last = replies.len() - 1;
        for (i, reply) in replies.into_iter().enumerate() {
            assert!(!sink.is_closed());
            sink.send(reply, i == last);
        }
        receiver.try_recv().expect("an answer")
    }

    #[test]
    fn one_request_has_one_response() {
        let reply = |id: &str| Some(Ok(InferResponse { id: id.into(), ..Default::default() }));
        assert_eq!(answered(vec![reply("a")]).expect("a response").id, "a");
        assert_eq!(answered(vec![reply("a"), None]).expect("a response").id, "a");
        assert_eq!(answered(vec![None]).expect_err("none"), no_response());
        assert_eq!(answered(vec![reply("a"), reply("b")]).expect_err("two"), more_than_one_response());
        let failed = Error::invalid_arg("x");
        assert_eq!(answered(vec![Some(Err(failed.clone()))]).expect_err("failed"), failed);
    }

    #[test]
    fn a_cancelled_call_closes_its_sink() {
        let (sender, receiver) = oneshot::channel();
        let mut sink = UnarySink { reply: None, sender: Some(sender) };
        drop(receiver);
        assert!(sink.is_closed());
        sink.send(None, true);
    }
}
