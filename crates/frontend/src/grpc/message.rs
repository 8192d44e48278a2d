//! gRPC's length-prefixed messages, in both directions.
//!
//! A message that came in one frame stays a slice of it. Memory for a longer one is taken as its bytes arrive, not
//! on the word of its prefix, so that a client cannot claim memory that it does not fill.

use bytes::{Buf as _, Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt as _;
use smallvec::SmallVec;
use tonic::Status;
use trireme_types::{Error, Result};

use super::compression::{self, Encoding};

/// Compression flag and length in front of every message.
pub(super) const PREFIX_LEN: usize = 5;
/// Longest message in either direction, as Triton sets it.
pub(super) const MAX_MESSAGE_LEN: usize = i32::MAX as usize;

/// Taken at once for a longer message; beyond it the buffer grows with what has arrived.
const FIRST_CAPACITY: usize = 1 << 20;
/// How much more than has arrived may be reserved. Pages that are not written to take no memory.
const GROWTH: usize = 8;

pub(super) fn prefix(compressed: bool, len: usize) -> [u8; PREFIX_LEN] {
    let [a, b, c, d] = u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes();
    [u8::from(compressed), a, b, c, d]
}

/// One message to send: its prefix and its bytes, in pieces.
#[derive(Debug)]
pub(super) struct Framed {
    pieces: SmallVec<[Bytes; 2]>,
}

impl Framed {
    /// # Errors
    /// `INVALID_ARG` if the message is longer than gRPC allows.
    pub(super) fn of(message: &impl prost::Message) -> Result<Self> {
        let len = message.encoded_len();
        if len > MAX_MESSAGE_LEN {
            return Err(Error::invalid_arg(format!(
                "Response has byte size {len} which exceeds gRPC's byte size limit {MAX_MESSAGE_LEN}."
            )));
        }
        let mut bytes = BytesMut::with_capacity(PREFIX_LEN + len);
        bytes.extend_from_slice(&prefix(false, len));
        // A BytesMut grows, so there is always room.
        let _ = message.encode(&mut bytes);
        Ok(Self { pieces: smallvec::smallvec![bytes.freeze()] })
    }

    /// The first piece begins with the prefix.
    pub(super) fn from_pieces(pieces: SmallVec<[Bytes; 2]>) -> Self {
        Self { pieces }
    }

    pub(super) fn into_pieces(self) -> SmallVec<[Bytes; 2]> {
        self.pieces
    }

    /// Bytes of the message without its prefix.
    pub(super) fn message_len(&self) -> usize {
        self.pieces.iter().map(Bytes::len).sum::<usize>().saturating_sub(PREFIX_LEN)
    }

    /// The same message compressed.
    pub(super) fn compressed(mut self, encoding: Encoding, level: compression::Level) -> Result<Self> {
        if let Some(first) = self.pieces.first_mut() {
            first.advance(PREFIX_LEN.min(first.len()));
        }
        let mut bytes = vec![0; PREFIX_LEN];
        compression::compress(encoding, level, &self.pieces, &mut bytes)
            .map_err(|error| Error::internal(format!("cannot compress the response: {error}")))?;
        let prefix = prefix(true, bytes.len() - PREFIX_LEN);
        if let Some(start) = bytes.first_chunk_mut() {
            *start = prefix;
        }
        Ok(Self { pieces: smallvec::smallvec![bytes.into()] })
    }
}

/// The messages of a request body.
#[derive(Debug)]
pub(super) struct Messages<B> {
    body: B,
    encoding: Option<Encoding>,
    /// Received and not yet taken.
    rest: Bytes,
}

impl<B> Messages<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    pub(super) fn new(body: B, encoding: Option<Encoding>) -> Self {
        Self { body, encoding, rest: Bytes::new() }
    }

    /// The only message of a unary call; waits until the client has said that it was the last.
    pub(super) async fn only(mut self) -> Result<Bytes, Status> {
        let Some(message) = self.next().await? else {
            return Err(Status::invalid_argument("the call ended without a request message"));
        };
        if !self.rest.is_empty() || (!self.body.is_end_stream() && self.frame().await?.is_some()) {
            return Err(Status::invalid_argument("expected one request message, got more bytes after it"));
        }
        Ok(message)
    }

    /// The next message, decompressed; `None` when the client has said that there are no more.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        let Some(prefix) = self.take(PREFIX_LEN).await? else { return Ok(None) };
        let Some((&[flag, a, b, c, d], [])) = prefix.split_first_chunk() else {
            return Err(Status::internal("a message prefix of the wrong length"));
        };
        let len = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
        if len > MAX_MESSAGE_LEN {
            return Err(Status::resource_exhausted(format!(
                "Received message larger than max ({len} vs. {MAX_MESSAGE_LEN})"
            )));
        }
        let encoding = match flag {
            0 => None,
            1 => Some(self.encoding.ok_or_else(|| {
                Status::internal("a message is marked as compressed but the call has no grpc-encoding")
            })?),
            _ => {
                return Err(Status::internal(format!(
                    "a message has the compression flag {flag}, expected 0 or 1"
                )));
            }
        };
        if len == 0 && encoding.is_none() {
            return Ok(Some(Bytes::new()));
        }
        let Some(message) = self.take(len).await? else { return Err(truncated()) };
        match encoding {
            None => Ok(Some(message)),
            Some(encoding) => compression::decompress(encoding, message, MAX_MESSAGE_LEN).await.map(Some),
        }
    }

    /// The next `len` bytes; `None` if the body has ended before the first of them.
    async fn take(&mut self, len: usize) -> Result<Option<Bytes>, Status> {
        while self.rest.is_empty() && len > 0 {
            match self.frame().await? {
                Some(data) => self.rest = data,
                None => return Ok(None),
            }
        }
        if self.rest.len() >= len {
            return Ok(Some(self.rest.split_to(len)));
        }
        let mut joined = BytesMut::with_capacity(len.min(FIRST_CAPACITY.max(self.rest.len())));
        joined.extend_from_slice(&std::mem::take(&mut self.rest));
        while joined.len() < len {
            let Some(mut data) = self.frame().await? else { return Err(truncated()) };
            let part = data.split_to(data.len().min(len - joined.len()));
            if joined.capacity() - joined.len() < part.len() {
                // A multiple of what has arrived, so that little is copied twice, but never more than is missing.
                let wanted = joined.len().saturating_mul(GROWTH).max(part.len());
                joined.reserve(wanted.min(len - joined.len()));
            }
            joined.extend_from_slice(&part);
            self.rest = data;
        }
        Ok(Some(joined.freeze()))
    }

    /// The next data of the body that is not empty.
    async fn frame(&mut self) -> Result<Option<Bytes>, Status> {
        while let Some(frame) = self.body.frame().await {
            let frame =
                frame.map_err(|error| Status::cancelled(format!("the request was not received: {error}")))?;
            match frame.into_data() {
                Ok(data) if data.is_empty() => {}
                Ok(data) => return Ok(Some(data)),
                Err(_trailers) => return Ok(None),
            }
        }
        Ok(None)
    }
}

fn truncated() -> Status {
    Status::internal("the request ended in the middle of a message")
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use http_body::Frame;
    use tonic::Code;

    use super::*;

    /// A body of given frames.
    struct Frames(VecDeque<Bytes>);

    impl Body for Frames {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(self.0.pop_front().map(|data| Ok(Frame::data(data))))
        }
    }

    fn messages(bytes: &[u8], frame_len: usize, encoding: Option<Encoding>) -> Messages<Frames> {
        Messages::new(Frames(bytes.chunks(frame_len).map(Bytes::copy_from_slice).collect()), encoding)
    }

    fn framed(message: &[u8]) -> Vec<u8> {
        [&prefix(false, message.len())[..], message].concat()
    }

    #[tokio::test]
    async fn frames_and_messages_need_not_agree() {
        let sent: [&[u8]; 4] = [b"first", b"", &[7; 1000], b"last"];
        let bytes = sent.map(framed).concat();
        for frame_len in [1, 3, 5, 6, 100, bytes.len()] {
            let mut messages = messages(&bytes, frame_len, None);
            for expected in sent {
                let got = messages.next().await.expect("well formed").expect("a message");
                assert_eq!(got, expected, "frames of {frame_len}");
            }
            assert_eq!(messages.next().await.expect("well formed"), None);
        }
    }

    #[tokio::test]
    async fn a_message_in_one_frame_is_not_copied() {
        let frame = Bytes::from(framed(&[1; 100]));
        let mut messages = Messages::new(Frames([frame.clone()].into()), None);
        let message = messages.next().await.expect("well formed").expect("a message");
        assert!(frame.as_ptr_range().contains(&message.as_ptr()));
    }

    #[tokio::test]
    async fn refuses_bodies_that_are_not_messages() {
        let table: [(&[u8], Code); 6] = [
            (&[0, 0], Code::Internal),
            (&[0, 0, 0, 0, 9, 1], Code::Internal),
            (&[0, 0x7f, 0xff, 0xff, 0xff, 1], Code::Internal),
            (&[0, 0x80, 0, 0, 0], Code::ResourceExhausted),
            (&[1, 0, 0, 0, 1, 0], Code::Internal),
            (&[2, 0, 0, 0, 1, 0], Code::Internal),
        ];
        for (bytes, code) in table {
            let status = messages(bytes, 4, None).next().await.expect_err("refused");
            assert_eq!(status.code(), code, "{bytes:?}: {status}");
        }
    }

    #[tokio::test]
    async fn a_unary_call_has_one_message() {
        let one = framed(b"one");
        assert_eq!(messages(&one, 100, None).only().await.expect("one"), "one");
        for bytes in [Vec::new(), [one.clone(), one].concat()] {
            let status = messages(&bytes, 100, None).only().await.expect_err("refused");
            assert_eq!(status.code(), Code::InvalidArgument);
        }
    }

    #[tokio::test]
    async fn compressed_messages_come_back() {
        let text = b"repetition repetition repetition repetition".repeat(10);
        for encoding in [Encoding::Gzip, Encoding::Deflate] {
            for level in [compression::Level::Low, compression::Level::Medium, compression::Level::High] {
                let pieces = [framed(&text[..100]), text[100..].to_vec()].map(Bytes::from);
                let compressed = Framed::from_pieces(pieces.into_iter().collect())
                    .compressed(encoding, level)
                    .expect("compresses");
                let bytes = compressed.into_pieces().concat();
                assert!(bytes.len() < text.len());
                let message = messages(&bytes, 7, Some(encoding)).only().await.expect("decompresses");
                assert_eq!(message, text);
            }
            let broken = [&prefix(true, 4)[..], b"junk"].concat();
            let status = messages(&broken, 100, Some(encoding)).only().await.expect_err("refused");
            assert_eq!(status.code(), Code::InvalidArgument);
        }
    }
}
