//! Answers: the body type, the few forms an answer has, and refusals.

use std::borrow::Cow;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use smallvec::{SmallVec, smallvec};
use trireme_types::{Code, Error};

use super::connection::RequestGuard;
use super::generate::EventStream;
use crate::json::Writer;
use crate::status::{http_status, retry_after_seconds};

pub(crate) type Reply = Response<Pieces>;

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const TEXT: HeaderValue = HeaderValue::from_static("text/plain");

/// A body of known length in pieces that leave one after the other, in one write where the system takes it; or a
/// stream of events that ends when the model does.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    pieces: SmallVec<[Bytes; 3]>,
    next: usize,
    left: u64,
    events: Option<EventStream>,
    /// The request counts as at work until its answer has left.
    request: Option<RequestGuard>,
}

impl Pieces {
    pub(crate) fn new(pieces: SmallVec<[Bytes; 3]>) -> Self {
        let left = pieces.iter().map(|piece| piece.len() as u64).sum();
        Self { pieces, left, ..Self::default() }
    }

    /// A body whose length is not known before its end.
    pub(crate) fn streamed(events: EventStream) -> Self {
        Self { events: Some(events), ..Self::default() }
    }
}

impl Pieces {
    pub(super) fn hold(&mut self, request: RequestGuard) {
        self.request = Some(request);
    }
}

impl From<Bytes> for Pieces {
    fn from(piece: Bytes) -> Self {
        Self { left: piece.len() as u64, pieces: smallvec![piece], ..Self::default() }
    }
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(events) = &self.events {
            return events.poll_text(cx).map(|text| text.map(|text| Ok(Frame::data(text))));
        }
        loop {
            let next = self.next;
            let Some(piece) = self.pieces.get_mut(next) else { return Poll::Ready(None) };
            let piece = std::mem::take(piece);
            self.next += 1;
            if !piece.is_empty() {
                self.left = self.left.saturating_sub(piece.len() as u64);
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0 && self.events.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match self.events {
            Some(_) => SizeHint::default(),
            None => SizeHint::with_exact(self.left),
        }
    }
}

/// An answer that says no: the status and what to tell the client.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) message: Cow<'static, str>,
    /// Tells which content encodings are understood.
    pub(crate) encodings: bool,
    /// The connection cannot be used again: the rest of the request stays unread.
    pub(crate) close: bool,
    /// When the client may try again, if the server can tell.
    pub(crate) retry_after: Option<Duration>,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, message: impl Into<Cow<'static, str>>) -> Self {
        Self { status, message: message.into(), encodings: false, close: false, retry_after: None }
    }

    /// A request that is larger than a flag allows.
    pub(crate) fn too_large(message: String) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    }

    /// Something that should not happen.
    pub(crate) fn internal(message: String) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    pub(crate) fn not_found() -> Self {
        Self::new(StatusCode::NOT_FOUND, "Not Found")
    }

    pub(crate) fn method_not_allowed() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
    }

    /// A route of a group that wants a header.
    pub(crate) fn restricted(header: &str) -> Self {
        Self::new(StatusCode::FORBIDDEN, format!("This API is restricted, expecting header '{header}'"))
    }

    /// A part of the protocol that this version does not have.
    pub(crate) fn not_available(feature: &str) -> Self {
        Self::from(Error::unsupported(format!("{feature} is not available in this version of Trireme")))
    }

    pub(crate) fn into_reply(self) -> Reply {
        let mut json = Writer::with_capacity(self.message.len() + 32);
        json.raw(b"{\"error\":");
        json.string(self.message.as_bytes());
        json.raw(b"}");
        let mut reply = json_reply(json.into_bytes());
        *reply.status_mut() = self.status;
        if self.encodings {
            reply.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip, deflate"));
        }
        if self.close {
            reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        say_when_to_retry(&mut reply, self.retry_after);
        reply
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let message = match error.code() {
            Code::Cancelled if error.message().is_empty() => "the request was cancelled".to_owned(),
            _ => error.message().to_owned(),
        };
        Self { retry_after: error.retry_hint(), ..Self::new(http_status(error.code()), message) }
    }
}

/// Adds `Retry-After`, if the server can tell.
pub(crate) fn say_when_to_retry(reply: &mut Reply, hint: Option<Duration>) {
    if let Some(hint) = hint {
        reply.headers_mut().insert(RETRY_AFTER, HeaderValue::from(retry_after_seconds(hint)));
    }
}

/// 200 with JSON.
pub(crate) fn json_reply(json: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(Pieces::from(json.into()));
    reply.headers_mut().insert(CONTENT_TYPE, JSON);
    reply
}

/// 200 without a body, in the form of the routes that answer JSON.
pub(crate) fn empty_json() -> Reply {
    json_reply(Bytes::new())
}

/// A health answer: the status says it all.
pub(crate) fn health(status: StatusCode) -> Reply {
    let mut reply = Response::new(Pieces::default());
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, TEXT);
    reply
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn pieces_come_in_order_with_their_length() {
        let body = Pieces::new(smallvec![Bytes::from_static(b"ab"), Bytes::new(), Bytes::from_static(b"c")]);
        assert_eq!(body.size_hint().exact(), Some(3));
        assert!(!body.is_end_stream());
        assert_eq!(body.collect().await.expect("a body").to_bytes(), "abc");
        assert!(Pieces::default().is_end_stream());
    }

    #[tokio::test]
    async fn a_refusal_is_json() {
        let reply = Refusal::from(Error::not_found("no \"x\"")).into_reply();
        assert_eq!(reply.status(), 404);
        assert_eq!(reply.headers()[CONTENT_TYPE], "application/json");
        let body = reply.into_body().collect().await.expect("a body").to_bytes();
        assert_eq!(body, "{\"error\":\"no \\\"x\\\"\"}");
    }

    #[test]
    fn a_busy_server_says_when_to_come_again() {
        let busy = Error::unavailable("Exceeds maximum queue size");
        assert!(!Refusal::from(busy.clone()).into_reply().headers().contains_key(RETRY_AFTER));
        let reply = Refusal::from(busy.retry_after(Duration::from_millis(1200))).into_reply();
        assert_eq!(reply.status(), 503);
        assert_eq!(reply.headers()[RETRY_AFTER], "2");
    }
}
