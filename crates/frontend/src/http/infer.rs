//! `POST /v2/models/{m}[/versions/{v}]/infer`: from the bytes of a request to the words of the core, and back.
//!
//! The order of the checks is Triton's: version, model, decoupled, content encoding, lengths, JSON, inputs. What the
//! model expects is checked by the core. Parsing and printing of more than 64 KiB of JSON leaves the async workers,
//! so that one large request does not hold up the small ones.

mod binary;
mod data;
mod head;
mod response;

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Response};
use hyper::body::Incoming;
use smallvec::SmallVec;
use trireme_core::{ModelVersion, Placements, Server, parse_version};
use trireme_types::{
    Error, InferInput, InferRequest, InferResponse, ParameterValue, RequestedOutput, Responder, Result,
    TensorBuffer,
};

pub use self::binary::{BinaryTail, parse_header_length};
pub use self::head::{HeadInput, HeadOutput, InferHead, SharedMemory, Source, parse_infer_head};
pub use self::response::{EncodedResponse, Form, encode};

pub(super) use self::data::{Place, read as read_data};
pub(super) use self::head::custom_value;
pub(super) use self::response::{data as write_data, parameter as write_parameter};

use super::Frontend;
use super::body::{self, BodyLimit};
use super::compression::{self, BLOCKING_BYTES, Encoding};
use super::reply::{Pieces, Refusal, Reply};
use crate::classification::classify;
use crate::single::single;

const HEADER_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");
const OCTETS: HeaderValue = HeaderValue::from_static("application/octet-stream");
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// Answers an inference request.
pub(super) async fn infer(
    frontend: &Frontend,
    name: &str,
    version: &str,
    parts: &Parts,
    body: &mut Incoming,
) -> Result<Reply, Refusal> {
    let received = Instant::now();
    let understood = understand(frontend, (name, version), parts, body, received).await;
    let (model, request, mut plan) = understood.inspect_err(|refusal| frontend.count_refused(refusal))?;

    let (sink, response) = single();
    let responder = std::mem::take(&mut plan.placements).before(Responder::new(Box::new(sink)));
    frontend.server.infer(&model, request, responder);
    let response = response.received().await?;

    let encoded = if plan.json_bytes(&response) > BLOCKING_BYTES {
        frontend.heavy(move || plan.encode(&model, response)).await??
    } else {
        plan.encode(&model, response)?
    };
    reply(frontend, encoded, compression::for_response(&parts.headers)).await
}

/// Finds the model, receives the request and turns it into the core's words.
async fn understand(
    frontend: &Frontend,
    (name, version): (&str, &str),
    parts: &Parts,
    body: &mut Incoming,
    received: Instant,
) -> Result<(Arc<ModelVersion>, InferRequest, OutputPlan), Refusal> {
    let model = frontend.server.model(name, parse_version(version)?)?;
    if model.is_decoupled() {
        return Err(Refusal::from(Error::unsupported(
            "HTTP end point doesn't support models with decoupled transaction policy; use generate_stream, or \
             ModelStreamInfer over gRPC",
        )));
    }
    let limit = frontend.options.max_input_size;
    let encoding = compression::of_request(&parts.headers)?;
    let header = parts.headers.get(&HEADER_LENGTH).map(HeaderValue::as_bytes);
    let body = receive(frontend, header, encoding, body).await?;
    let header_length = header.map(|value| parse_header_length(value, body.len())).transpose()?;
    let json_length = header_length.unwrap_or(body.len());
    if json_length > limit {
        return Err(Refusal::too_large(body::json_too_large(json_length as u64, limit)));
    }
    if header_length == Some(0) && body.len() > limit {
        return Err(Refusal::too_large(raw_too_large(body.len() as u64, limit)));
    }

    let (mut request, plan) = if json_length > BLOCKING_BYTES {
        let (server, model) = (Arc::clone(&frontend.server), Arc::clone(&model));
        frontend.heavy(move || build(&server, &model, &body, header_length, limit, received)).await??
    } else {
        build(&frontend.server, &model, &body, header_length, limit, received)?
    };
    for (name, value) in frontend.options.header_forward.forwarded(&parts.headers, |_| false)? {
        request.parameters.insert(name, ParameterValue::String(value));
    }
    Ok((model, request, plan))
}

/// The whole body, decompressed. What must be small is refused by its announced length.
async fn receive(
    frontend: &Frontend,
    header: Option<&[u8]>,
    encoding: Encoding,
    body: &mut Incoming,
) -> Result<Bytes, Refusal> {
    let limit = frontend.options.max_input_size;
    let announced = header.and_then(|value| std::str::from_utf8(value).ok()?.trim().parse::<usize>().ok());
    let message = match announced {
        None => Some(body::json_too_large as fn(u64, usize) -> String),
        Some(0) => Some(raw_too_large as fn(u64, usize) -> String),
        Some(_) => None,
    };
    let known_part =
        message.filter(|_| encoding == Encoding::Identity && (header.is_none() || announced == Some(0)));
    let body_limit = known_part.map(|message| BodyLimit { bytes: limit, message });
    let received = body::receive(body, announced.unwrap_or(0), body_limit).await?;
    match encoding {
        Encoding::Identity => Ok(received),
        _ if received.len() > BLOCKING_BYTES => {
            frontend.heavy(move || compression::decompress(encoding, &received, limit)).await?
        }
        _ => compression::decompress(encoding, &received, limit),
    }
}

fn raw_too_large(bytes: u64, limit: usize) -> String {
    format!(
        "Raw input has a byte_size ({bytes} bytes) that exceeds the maximum allowed value of {limit} bytes. Use \
         --http-max-input-size to increase the limit."
    )
}

/// Reads the body of a request for a model.
fn build(
    server: &Server,
    model: &ModelVersion,
    body: &Bytes,
    header_length: Option<usize>,
    limit: usize,
    received: Instant,
) -> Result<(InferRequest, OutputPlan)> {
    let mut request = InferRequest::received_at(received);
    if header_length == Some(0) {
        request.inputs.push(model.raw_input(TensorBuffer::from(body.clone()))?);
        return Ok((request, OutputPlan::new(true)));
    }
    let (json, mut tail) = BinaryTail::split(body, header_length, model.name());
    let head = parse_infer_head(&json, limit)?;
    let mut placements = Placements::default();
    for input in head.inputs {
        let data = match input.source {
            Source::Json(data) => data,
            Source::Binary(size) => TensorBuffer::from(tail.take(&input.name, size)?),
            Source::SharedMemory(memory) => {
                let SharedMemory { region, offset, byte_size } = &memory;
                let in_place = model.bears_changes(input.data_type);
                server.shared_memory().input(&mut placements, region, *offset, *byte_size, in_place)?
            }
        };
        let name = model.input_name(&input.name);
        request.inputs.push(InferInput { name, data_type: input.data_type, shape: input.shape, data });
    }
    tail.finish()?;

    let mut plan = OutputPlan { placements, ..OutputPlan::new(head.binary_data_output) };
    for output in head.outputs {
        // An output that is listed twice is sent once, as the first entry says.
        if plan.listed(&output.name).is_some() {
            continue;
        }
        let name = model.output_name(&output.name);
        let classes = usize::try_from(output.classification).unwrap_or(usize::MAX);
        let form = match &output.shared_memory {
            Some(SharedMemory { region, offset, byte_size }) => {
                server.shared_memory().place(&mut plan.placements, &name, region, *offset, *byte_size)?;
                Form::Memory
            }
            None if output.binary_data => Form::Binary,
            None => Form::Json,
        };
        plan.listed.push(ListedOutput { name: Arc::clone(&name), form, classes });
        request.outputs.push(RequestedOutput { name });
    }
    request.id = head.id.into_owned();
    request.sequence = head.sequence;
    request.priority = head.priority;
    request.timeout_us = head.timeout_us;
    request.parameters = head.parameters;
    Ok((request, plan))
}

/// In which form the outputs go back.
#[derive(Debug)]
struct OutputPlan {
    /// Of outputs that are not listed.
    default: Form,
    listed: SmallVec<[ListedOutput; 2]>,
    /// Until the request runs.
    placements: Placements,
}

#[derive(Debug)]
struct ListedOutput {
    name: Arc<str>,
    form: Form,
    /// 0 for the values themselves.
    classes: usize,
}

impl OutputPlan {
    fn new(binary_by_default: bool) -> Self {
        let default = if binary_by_default { Form::Binary } else { Form::Json };
        Self { default, listed: SmallVec::new(), placements: Placements::default() }
    }

    fn listed(&self, name: &str) -> Option<&ListedOutput> {
        self.listed.iter().find(|listed| *listed.name == *name)
    }

    fn form(&self, name: &str) -> Form {
        self.listed(name).map_or(self.default, |listed| listed.form)
    }

    /// Bytes of tensors that have to be printed or sorted.
    fn json_bytes(&self, response: &InferResponse) -> usize {
        let printed = |name: &str| {
            self.form(name) == Form::Json || self.listed(name).is_some_and(|listed| listed.classes > 0)
        };
        response.outputs.iter().filter(|output| printed(&output.name)).map(|output| output.data.len()).sum()
    }

    fn encode(&self, model: &ModelVersion, mut response: InferResponse) -> Result<EncodedResponse> {
        for output in &mut response.outputs {
            let classes = self.listed(&output.name).map_or(0, |listed| listed.classes);
            if classes > 0 {
                *output = classify(output, classes, model.labels(&output.name), model.max_batch_size() > 0)?;
            }
        }
        response::encode(model.name(), model.version_str(), response, |name| self.form(name))
    }
}

async fn reply(frontend: &Frontend, encoded: EncodedResponse, encoding: Encoding) -> Result<Reply, Refusal> {
    let EncodedResponse { pieces, header_length } = encoded;
    let body = match encoding {
        Encoding::Identity => Pieces::new(pieces),
        _ => {
            let total: usize = pieces.iter().map(Bytes::len).sum();
            let compressed = if total > BLOCKING_BYTES {
                frontend.heavy(move || compression::compress(encoding, &pieces)).await?
            } else {
                compression::compress(encoding, &pieces)
            };
            let compressed = compressed
                .map_err(|error| Refusal::internal(format!("failed to compress the response: {error}")))?;
            Pieces::from(compressed)
        }
    };
    let mut reply = Response::new(body);
    let headers = reply.headers_mut();
    match header_length {
        Some(length) => {
            headers.insert(CONTENT_TYPE, OCTETS);
            headers.insert(HEADER_LENGTH, HeaderValue::from(length));
        }
        None => _ = headers.insert(CONTENT_TYPE, JSON),
    }
    if encoding != Encoding::Identity {
        headers.insert(CONTENT_ENCODING, encoding.header_value());
    }
    Ok(reply)
}
