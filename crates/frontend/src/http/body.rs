//! Receiving the body of a request into one buffer.
//!
//! Memory follows the bytes that arrive, not the length that a header claims. A body that came with its head is not
//! copied at all. Large bodies are placed so that the binary data behind the JSON begins at an aligned address.

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;

use super::reply::Refusal;

/// Largest body, as in Triton, which counts it in 32 bits with a sign.
const MAX_BODY: u64 = i32::MAX as u64;

/// Memory taken at once for a body of known length.
const FIRST_RESERVE: u64 = 4 << 20;

/// Non-empty chunks that a chunked body may have, as in Triton, while they are small.
const MAX_CHUNKS: usize = 65536;
const SMALL_CHUNK: usize = 1024;

/// Bytes of a refused request that are read and thrown away, so that the client comes to read the answer.
const MAX_DISCARD: u64 = 256 << 20;

/// Receives a body. `json_length` is where its binary data begins, if it has any.
///
/// # Errors
/// 400 for a body that breaks off, is above 2 GiB - 1 or comes in too many small chunks; 413 above `limit`, at once
/// if the length is known.
pub(crate) async fn receive(
    body: &mut Incoming,
    json_length: usize,
    limit: Option<BodyLimit>,
) -> Result<Bytes, Refusal> {
    let announced = body.size_hint().exact();
    if let Some(length) = announced {
        check(length, limit)?;
    }
    let Some(first) = next(body).await? else { return Ok(Bytes::new()) };
    if body.is_end_stream() {
        return Ok(first);
    }
    let padding = (64 - json_length % 64) % 64;
    let expected = announced.unwrap_or(0).min(FIRST_RESERVE);
    let mut buffer =
        BytesMut::with_capacity(padding + usize::try_from(expected).unwrap_or(0).max(first.len()));
    buffer.resize(padding, 0);
    buffer.extend_from_slice(&first);
    let mut chunks = 1;
    while let Some(piece) = next(body).await? {
        chunks += 1;
        let length = buffer.len() - padding + piece.len();
        check(u64::try_from(length).unwrap_or(u64::MAX), limit)?;
        if announced.is_none() && chunks > MAX_CHUNKS && length / chunks < SMALL_CHUNK {
            let message = format!(
                "Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks. Send fewer or larger HTTP chunks."
            );
            return Err(Refusal { close: true, ..Refusal::new(StatusCode::BAD_REQUEST, message) });
        }
        if let Some(total) = announced {
            grow(&mut buffer, piece.len(), padding + usize::try_from(total).unwrap_or(usize::MAX));
        }
        buffer.extend_from_slice(&piece);
    }
    Ok(buffer.freeze().slice(padding..))
}

/// Doubles the buffer when it is full, but not beyond what is announced.
fn grow(buffer: &mut BytesMut, more: usize, total: usize) {
    if buffer.capacity() - buffer.len() < more {
        let target = buffer.capacity().saturating_mul(2).min(total).max(buffer.len() + more);
        buffer.reserve(target - buffer.len());
    }
}

/// A limit that a flag sets, and how it is told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimit {
    pub(crate) bytes: usize,
    pub(crate) message: fn(u64, usize) -> String,
}

/// The message for JSON above `--http-max-input-size`.
pub(crate) fn json_too_large(bytes: u64, limit: usize) -> String {
    format!(
        "request JSON size of {bytes} bytes exceeds the maximum allowed input size of {limit} bytes. Use \
         --http-max-input-size to increase the limit."
    )
}

fn check(length: u64, limit: Option<BodyLimit>) -> Result<(), Refusal> {
    if length > MAX_BODY {
        let message = format!(
            "Unable to parse Content-Length, value is out of range [ {}, {} ], got: {length}",
            i32::MIN,
            i32::MAX
        );
        return Err(Refusal { close: true, ..Refusal::new(StatusCode::BAD_REQUEST, message) });
    }
    match limit {
        Some(limit) if length > limit.bytes as u64 => {
            Err(Refusal::too_large((limit.message)(length, limit.bytes)))
        }
        _ => Ok(()),
    }
}

/// The next bytes of the body; trailers are ignored.
async fn next(body: &mut Incoming) -> Result<Option<Bytes>, Refusal> {
    loop {
        match body.frame().await {
            None => return Ok(None),
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) if data.is_empty() => {}
                Ok(data) => return Ok(Some(data)),
                Err(_trailers) => {}
            },
            Some(Err(error)) => {
                let message = format!("failed to receive the request body: {error}");
                return Err(Refusal { close: true, ..Refusal::new(StatusCode::BAD_REQUEST, message) });
            }
        }
    }
}

/// Reads the rest of a body that nobody wants. Whether the connection may be used again.
pub(crate) async fn discard(body: &mut Incoming) -> bool {
    if body.size_hint().lower() > MAX_DISCARD {
        return false;
    }
    let mut left = MAX_DISCARD;
    loop {
        match next(body).await {
            Ok(None) => return true,
            Ok(Some(piece)) if (piece.len() as u64) < left => left -= piece.len() as u64,
            Ok(Some(_)) | Err(_) => return false,
        }
    }
}
