//! `ModelInfer`: one request, one response.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, Response};
use tonic::Status;
use trireme_core::{ModelVersion, Placements, Server, parse_version};
use trireme_types::{Error, InferResponse, Responder, Result};

use super::body::{self, ResponseBody};
use super::compression::{self, LARGE_MESSAGE_LEN, Level};
use super::convert::{self, Classification, InferCall, MemorySlice, Tags, Target, WireRequest};
use super::message::Framed;
use super::{Frontend, forwarded, status};
use crate::classification::classify;
use crate::single::single;

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
    let forwarded = forwarded(frontend, headers)?;
    let (model, call, placements) = parse(server, &message)
        .and_then(|wire| understand(server, &message, &wire, &forwarded, received, false))
        .map_err(status)?;
    drop(message);

    let (sink, response) = single();
    let responder = placements.before(Responder::new(Box::new(sink)));
    server.infer(&model, call.request, responder);
    let reply = response.received().await.map_err(status)?;

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

/// Finds the model of a request, converts the request for it, and finds its shared memory. One that fails here is counted as refused.
pub(super) fn understand(
    server: &Server,
    message: &Bytes,
    wire: &WireRequest<'_>,
    forwarded: &[(String, String)],
    received: Instant,
    on_stream: bool,
) -> Result<(Arc<ModelVersion>, InferCall, Placements)> {
    let call = || {
        let model = server.model(wire.model_name, parse_version(wire.model_version)?)?;
        if model.is_decoupled() && !on_stream {
            return Err(Error::unsupported(DECOUPLED));
        }
        let target = Target { model: model.name(), inputs: model.inputs(), outputs: model.outputs() };
        let mut call = convert::request(message, wire, target, forwarded, received)?;
        let placements = find_memory(server, &model, &mut call)?;
        Ok((model, call, placements))
    };
    call().inspect_err(|_| server.record_refused_request())
}

/// Gives inputs that are in shared memory their data, and outputs their places.
fn find_memory(server: &Server, model: &ModelVersion, call: &mut InferCall) -> Result<Placements> {
    let mut placements = Placements::default();
    let memory = server.shared_memory();
    for (index, slice) in call.memory_inputs.drain(..) {
        if let Some(input) = call.request.inputs.get_mut(index) {
            let MemorySlice { region, offset, byte_size } = &slice;
            let in_place = model.bears_changes(input.data_type);
            input.data = memory.input(&mut placements, region, *offset, *byte_size, in_place)?;
        }
    }
    for (output, slice) in call.memory_outputs.drain(..) {
        memory.place(&mut placements, &output, &slice.region, slice.offset, slice.byte_size)?;
    }
    Ok(placements)
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
