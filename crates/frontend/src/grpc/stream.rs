//! `ModelStreamInfer`: requests and responses on one stream, each at its own pace.
//!
//! A task of its own reads requests; the connection takes responses from the [`Outbox`] when the client has room
//! for them. A request that fails costs an error message, not the stream.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, Response};
use hyper::body::Incoming;
use smallvec::SmallVec;
use tonic::Status;
use trireme_core::ModelVersion;
use trireme_types::{Error, InferResponse, Responder, ResponseSink, Result};

use super::body::{self, ResponseBody, Source};
use super::compression::{self, Encoding, Level};
use super::convert::{self, Classification, Tags};
use super::message::{Framed, Messages};
use super::outbox::{Outbox, Place};
use super::{Frontend, deadline, forwarded, infer, shutting_down, status};
use crate::single::wrong_count;

/// Request metadata that asks for gRPC statuses in place of error messages.
const GRPC_ERROR: &str = "triton_grpc_error";

/// One message of the stream before it is encoded.
#[derive(Debug)]
struct Outgoing {
    request: Arc<Request>,
    reply: Reply,
    /// `triton_final_response`; absent from errors that end a request by themselves.
    last: Option<bool>,
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "the large variant is the usual one")]
enum Reply {
    Response(InferResponse),
    Error(Error),
    /// The model has ended the request without a further response, and the client wants to know.
    EmptyFinal {
        model: String,
        version: String,
    },
}

/// What answers need to know of their request.
#[derive(Debug)]
struct Request {
    id: String,
    model: Option<Arc<ModelVersion>>,
    classifications: SmallVec<[Classification; 1]>,
    /// Model and version as the request named them, if it wants an empty final response.
    empty_final_response: Option<(String, String)>,
    input_bytes: usize,
}

/// Answers one `ModelStreamInfer` call.
pub(super) fn model_stream_infer(
    frontend: Arc<Frontend>,
    headers: &HeaderMap,
    body: Incoming,
    deadline: Option<tokio::time::Instant>,
) -> Result<Response<ResponseBody>, Status> {
    let forwarded = forwarded(&frontend, headers)?;
    let messages = Messages::new(body, compression::request_encoding(headers)?);
    let level = frontend.options.compression_level;
    let encoding = if level == Level::None { None } else { compression::response_encoding(headers) };
    let outbox = Arc::new(Outbox::new(frontend.options.max_response_pool_size));
    let responses = Responses {
        outbox: Arc::clone(&outbox),
        grpc_errors: headers.get(GRPC_ERROR).is_some_and(|value| value == "true"),
        compression: encoding.map(|encoding| (encoding, level)),
        deadline: deadline.map(|at| Box::pin(tokio::time::sleep_until(at))),
    };
    let shutdown = frontend.shutdown.clone();
    shutdown.spawn(read_requests(frontend, messages, forwarded, outbox));
    Ok(body::stream(responses, encoding))
}

/// Starts the requests of a stream until the client, the server or an error ends it.
async fn read_requests(
    frontend: Arc<Frontend>,
    mut messages: Messages<Incoming>,
    forwarded: Vec<(String, String)>,
    outbox: Arc<Outbox<Outgoing>>,
) {
    let mut stopping = std::pin::pin!(frontend.shutdown.begun());
    loop {
        tokio::select! {
            biased;
            () = outbox.closed() => return,
            () = &mut stopping => return outbox.end_requests(shutting_down()),
            () = outbox.room() => {}
        }
        let next = tokio::select! {
            biased;
            () = outbox.closed() => return,
            next = messages.next() => next,
            () = &mut stopping => return outbox.end_requests(shutting_down()),
        };
        match next {
            Ok(Some(message)) => start(&frontend, &message, &forwarded, &outbox),
            Ok(None) => return outbox.end_requests(Status::ok("")),
            Err(status) => return outbox.end_requests(status),
        }
    }
}

/// Gives one request to its model, or puts its error into the outbox.
fn start(
    frontend: &Frontend,
    message: &Bytes,
    forwarded: &[(String, String)],
    outbox: &Arc<Outbox<Outgoing>>,
) {
    let server = &frontend.server;
    let (id, understood) = match infer::parse(server, message) {
        Ok(wire) => {
            let call = infer::understand(server, message, &wire, forwarded, Instant::now(), true);
            let named = || (wire.model_name.to_owned(), wire.model_version.to_owned());
            (
                wire.id,
                call.map(|(model, call, placements)| {
                    (model, call.empty_final_response.then(named), call, placements)
                }),
            )
        }
        Err(error) => ("", Err(error)),
    };
    match understood {
        Ok((model, empty_final_response, call, placements)) => {
            let request = Arc::new(Request {
                id: id.to_owned(),
                model: Some(Arc::clone(&model)),
                classifications: call.classifications,
                empty_final_response,
                input_bytes: call.request.input_bytes(),
            });
            let place = outbox.begin(!model.is_decoupled(), request.input_bytes);
            let sink = StreamSink { outbox: Arc::clone(outbox), request, place, watcher: None };
            server.infer(&model, call.request, placements.before(Responder::new(Box::new(sink))));
        }
        Err(error) => {
            let request = Arc::new(Request {
                id: id.to_owned(),
                model: None,
                classifications: SmallVec::new(),
                empty_final_response: None,
                input_bytes: 0,
            });
            let place = outbox.begin(true, 0);
            outbox.put(place, Outgoing { request, reply: Reply::Error(error), last: None }, |_, refused| {
                refused
            });
            outbox.finish(place, 0);
        }
    }
}

/// Takes the responses of one request.
struct StreamSink {
    outbox: Arc<Outbox<Outgoing>>,
    request: Arc<Request>,
    place: Place,
    /// Woken when the stream is closed.
    watcher: Option<Waker>,
}

impl StreamSink {
    fn put(&self, reply: Reply, last: bool) {
        // A request of a model that is not decoupled has one answer, so that its errors need no mark.
        let unmarked = matches!((&reply, self.place), (Reply::Error(_), Place::InOrder(_)));
        let last = if unmarked { None } else { Some(last) };
        let outgoing = Outgoing { request: Arc::clone(&self.request), reply, last };
        self.outbox.put(self.place, outgoing, |_, second| Outgoing {
            reply: Reply::Error(wrong_count("more than one")),
            last: None,
            ..second
        });
    }

    /// The model has ended the request without a further response.
    fn put_end(&self) {
        let waiting = self.outbox.amend(self.place, |waiting| {
            if let Some(last) = &mut waiting.last {
                *last = true;
            }
        });
        if waiting {
            return;
        }
        if let Some((model, version)) = self.request.empty_final_response.clone() {
            self.put(Reply::EmptyFinal { model, version }, true);
        } else if let Place::InOrder(_) = self.place {
            self.put(Reply::Error(wrong_count(0)), true);
        }
    }
}

impl ResponseSink for StreamSink {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        match reply {
            Some(Ok(response)) => self.put(Reply::Response(response), last),
            Some(Err(error)) => self.put(Reply::Error(error), last),
            None if last => self.put_end(),
            None => {}
        }
        if last {
            self.outbox.finish(self.place, self.request.input_bytes);
            if let Some(watcher) = self.watcher.take() {
                self.outbox.unwatch(&watcher);
            }
        }
    }

    fn is_closed(&self) -> bool {
        self.outbox.is_closed()
    }

    fn watch_closed(&mut self, waker: &Waker) {
        if self.watcher.as_ref().is_some_and(|earlier| earlier.will_wake(waker)) && !self.is_closed() {
            return;
        }
        self.outbox.watch(waker);
        if let Some(earlier) = self.watcher.replace(waker.clone()) {
            self.outbox.unwatch(&earlier);
        }
    }
}

/// The sending half of a stream.
struct Responses {
    outbox: Arc<Outbox<Outgoing>>,
    /// The first error ends the stream with its gRPC status.
    grpc_errors: bool,
    compression: Option<(Encoding, Level)>,
    deadline: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl Source for Responses {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Framed, Status>> {
        if self.deadline.as_mut().is_some_and(|at| at.as_mut().poll(cx).is_ready()) {
            return Poll::Ready(Err(deadline::exceeded()));
        }
        self.outbox.poll_next(cx).map(|next| self.encode(next?))
    }
}

impl Responses {
    fn encode(&self, outgoing: Outgoing) -> Result<Framed, Status> {
        let Outgoing { request, reply, last } = outgoing;
        let encoded = match reply {
            Reply::Response(response) => encode_response(&request, response, last),
            Reply::EmptyFinal { model, version } => {
                let tags = Tags { model: &model, version: &version, final_response: last };
                convert::stream_response(tags, InferResponse { id: request.id.clone(), ..Default::default() })
            }
            Reply::Error(error) => Err(error),
        };
        let framed = match encoded {
            Ok(framed) => framed,
            Err(error) if self.grpc_errors => return Err(status(error)),
            Err(error) => convert::stream_error(error.message(), &request.id, last).map_err(status)?,
        };
        match self.compression {
            Some((encoding, level)) => framed.compressed(encoding, level).map_err(status),
            None => Ok(framed),
        }
    }
}

fn encode_response(request: &Request, response: InferResponse, last: Option<bool>) -> Result<Framed> {
    let Some(model) = &request.model else {
        return Err(Error::internal("a response for a request without a model"));
    };
    let response = infer::classified(model, &request.classifications, response)?;
    let tags = Tags { model: model.name(), version: model.version_str(), final_response: last };
    convert::stream_response(tags, response)
}

/// The stream is over, by its end or because the client is gone.
impl Drop for Responses {
    fn drop(&mut self) {
        self.outbox.close();
    }
}
