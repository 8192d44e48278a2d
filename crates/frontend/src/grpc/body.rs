//! What a call sends back: nothing but a status, one message, or messages as they come.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, header};
use http_body::{Body, Frame};
use smallvec::SmallVec;
use tonic::Status;

use super::compression::{self, Encoding};
use super::message::Framed;

/// Messages of a streaming call.
pub(super) trait Source: Send {
    /// The next message, or the status with which the call ends; nothing is asked after that.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Framed, Status>>;
}

/// Body of a response.
#[derive(Default)]
pub(super) enum ResponseBody {
    /// The headers carry the status.
    #[default]
    Empty,
    /// One message, then the trailers of success.
    Unary(smallvec::IntoIter<[Bytes; 2]>),
    Stream {
        source: Box<dyn Source>,
        pieces: VecDeque<Bytes>,
    },
    /// The body of a service of tonic.
    Tonic(tonic::body::Body),
    Done,
}

impl std::fmt::Debug for ResponseBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Empty => "Empty",
            Self::Unary(_) => "Unary",
            Self::Stream { .. } => "Stream",
            Self::Tonic(_) => "Tonic",
            Self::Done => "Done",
        })
    }
}

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

fn head(body: ResponseBody, encoding: Option<Encoding>) -> Response<ResponseBody> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, GRPC);
    headers.insert(compression::ACCEPT_ENCODING_HEADER, compression::ACCEPTED);
    if let Some(encoding) = encoding {
        headers.insert(compression::ENCODING_HEADER, encoding.header());
    }
    response
}

/// The response of a unary call that succeeded. `encoding` is how the message is compressed.
pub(super) fn unary(message: Framed, encoding: Option<Encoding>) -> Response<ResponseBody> {
    let pieces: SmallVec<[Bytes; 2]> = message.into_pieces();
    head(ResponseBody::Unary(pieces.into_iter()), encoding)
}

/// The response of a streaming call.
pub(super) fn stream(source: impl Source + 'static, encoding: Option<Encoding>) -> Response<ResponseBody> {
    head(ResponseBody::Stream { source: Box::new(source), pieces: VecDeque::new() }, encoding)
}

fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(2);
    if status.add_header(&mut trailers).is_err() {
        trailers.insert("grpc-status", HeaderValue::from_static("13"));
    }
    trailers
}

fn success() -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    trailers
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match &mut *self {
            Self::Empty | Self::Done => Poll::Ready(None),
            Self::Unary(pieces) => {
                let frame = match pieces.next() {
                    Some(piece) => Frame::data(piece),
                    None => {
                        *self = Self::Done;
                        Frame::trailers(success())
                    }
                };
                Poll::Ready(Some(Ok(frame)))
            }
            Self::Stream { source, pieces } => loop {
                if let Some(piece) = pieces.pop_front() {
                    return Poll::Ready(Some(Ok(Frame::data(piece))));
                }
                match ready!(source.poll_next(cx)) {
                    Ok(message) => pieces.extend(message.into_pieces()),
                    Err(status) => {
                        *self = Self::Done;
                        return Poll::Ready(Some(Ok(Frame::trailers(trailers(&status)))));
                    }
                }
            },
            Self::Tonic(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Empty | Self::Done => true,
            Self::Unary(_) | Self::Stream { .. } => false,
            Self::Tonic(body) => body.is_end_stream(),
        }
    }
}
