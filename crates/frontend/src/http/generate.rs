//! `POST /v2/models/{m}[/versions/{v}]/generate` and `generate_stream`: a flat JSON object in, flat JSON out.
//!
//! The members of the body that are named like inputs become tensors, the others parameters; a response has its
//! outputs by name. `generate` needs a model that answers once. `generate_stream` sends any number of responses as
//! server-sent events, each as soon as the model gives it; the status is that of the first. A client that goes away
//! closes its request.

mod events;
mod request;
mod response;

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderValue};
use http::request::Parts;
use http::{Response, StatusCode};
use hyper::body::Incoming;
use trireme_core::{ModelVersion, parse_version};
use trireme_types::{Error, InferRequest, InferResponse, Responder, ResponseSink, Result};

pub(crate) use self::events::EventStream;
use self::events::{EventStatus, Events};
use super::Frontend;
use super::compression::BLOCKING_BYTES;
use super::reply::{Pieces, Refusal, Reply, json_reply};

const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream; charset=utf-8");

const ONE_RESPONSE: &str = "generate expects model to produce exactly 1 response, use generate stream for model that \
    generates various number of responses";

/// Answers `generate`.
pub(super) async fn generate(
    frontend: &Frontend,
    name: &str,
    version: &str,
    parts: &Parts,
    body: &mut Incoming,
) -> Result<Reply, Refusal> {
    let stream = begin(frontend, (name, version), parts, body, Form::Plain).await?;
    let Some(first) = stream.next().await else {
        return Err(Refusal::from(Error::invalid_arg(ONE_RESPONSE)));
    };
    if first.status.code != StatusCode::OK {
        let mut reply = json_reply(first.text);
        first.status.write(&mut reply);
        return Ok(reply);
    }
    match stream.next().await {
        None => Ok(json_reply(first.text)),
        // Dropping the stream closes the request, so that the model need not go on.
        Some(_) => Err(Refusal::from(Error::invalid_arg(ONE_RESPONSE))),
    }
}

/// Answers `generate_stream`.
pub(super) async fn generate_stream(
    frontend: &Frontend,
    name: &str,
    version: &str,
    parts: &Parts,
    body: &mut Incoming,
) -> Result<Reply, Refusal> {
    let stream = begin(frontend, (name, version), parts, body, Form::Event).await?;
    let status = stream.first_status().await;
    let mut reply = Response::new(Pieces::streamed(stream));
    status.write(&mut reply);
    reply.headers_mut().insert(CONTENT_TYPE, EVENT_STREAM);
    Ok(reply)
}

/// How a response is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Plain,
    Event,
}

async fn begin(
    frontend: &Frontend,
    (name, version): (&str, &str),
    parts: &Parts,
    body: &mut Incoming,
    form: Form,
) -> Result<EventStream, Refusal> {
    let received = Instant::now();
    let understood = understand(frontend, (name, version), parts, body, received).await;
    let (model, request) = understood.inspect_err(|refusal| frontend.count_refused(refusal))?;
    let events = Arc::new(Events::default());
    let sink = Sink { events: Arc::clone(&events), model: Arc::clone(&model), form };
    frontend.server.infer(&model, request, Responder::new(Box::new(sink)));
    Ok(EventStream::new(events))
}

async fn understand(
    frontend: &Frontend,
    (name, version): (&str, &str),
    parts: &Parts,
    body: &mut Incoming,
    received: Instant,
) -> Result<(Arc<ModelVersion>, InferRequest), Refusal> {
    let model = frontend.server.model(name, parse_version(version)?)?;
    let is_encoded =
        parts.headers.get(CONTENT_ENCODING).is_some_and(|coding| !coding.is_empty() && coding != "identity");
    if is_encoded {
        return Err(Refusal::from(Error::invalid_arg(
            "Unsupported content-encoding, only 'identity' is supported.",
        )));
    }
    let limit = frontend.options.max_input_size;
    let body: Bytes = super::small_body(frontend, body).await?;
    let request = if body.len() > BLOCKING_BYTES {
        let model = Arc::clone(&model);
        frontend.heavy(move || request::read(&model, &body, limit, received)).await??
    } else {
        request::read(&model, &body, limit, received)?
    };
    Ok((model, request))
}

/// Writes what the model answers.
struct Sink {
    events: Arc<Events>,
    model: Arc<ModelVersion>,
    form: Form,
}

impl Sink {
    fn write(&self, reply: Result<InferResponse>) -> events::Event {
        let written = reply
            .and_then(|response| response::write(self.model.name(), self.model.version_str(), &response));
        let (status, json) = match written {
            Ok(json) => (EventStatus::OK, json),
            Err(error) => (EventStatus::of(&error), response::error(&error)),
        };
        let text = match self.form {
            Form::Plain => json,
            Form::Event => [b"data: ", &json[..], b"\n\n"].concat(),
        };
        events::Event { status, text: Bytes::from(text) }
    }
}

impl ResponseSink for Sink {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        // The last response of a decoupled model is often only the mark that it is the last.
        let is_mark = |reply: &Result<InferResponse>| {
            last && self.model.is_decoupled()
                && reply.as_ref().is_ok_and(|response| response.outputs.is_empty())
        };
        if let Some(reply) = reply.filter(|reply| !is_mark(reply)) {
            let event = self.write(reply);
            self.events.put(event);
        }
        if last {
            self.events.end();
        }
    }

    fn is_closed(&self) -> bool {
        self.events.is_closed()
    }

    fn watch_closed(&mut self, waker: &std::task::Waker) {
        self.events.watch(waker);
    }
}
