//! gzip and deflate, both ways.
//!
//! A request is decompressed up to `--http-max-input-size` and no further, whatever it claims. Codings other than
//! gzip, deflate (with the zlib wrapper, or bare as some clients send it) and identity are answered 415 with the list
//! of what is understood; Triton answers 501.

use std::io::{Read, Write};

use bytes::Bytes;
use flate2::Compression;
use flate2::read::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use flate2::write::{GzEncoder, ZlibEncoder};
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, HeaderMap};
use http::{HeaderValue, StatusCode};

use super::reply::Refusal;

/// Work on more bytes than this leaves the async workers.
pub(crate) const BLOCKING_BYTES: usize = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    Identity,
    Gzip,
    Deflate,
}

impl Encoding {
    pub(crate) fn header_value(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Identity => "identity",
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
        })
    }

    fn named(name: &str) -> Option<Self> {
        [
            ("identity", Self::Identity),
            ("gzip", Self::Gzip),
            ("x-gzip", Self::Gzip),
            ("deflate", Self::Deflate),
        ]
        .into_iter()
        .find_map(|(known, encoding)| name.eq_ignore_ascii_case(known).then_some(encoding))
    }
}

/// How the body of a request is encoded.
pub(crate) fn of_request(headers: &HeaderMap) -> Result<Encoding, Refusal> {
    let Some(value) = headers.get(CONTENT_ENCODING) else { return Ok(Encoding::Identity) };
    let name = value.to_str().unwrap_or_default().trim();
    if name.is_empty() {
        return Ok(Encoding::Identity);
    }
    Encoding::named(name).ok_or_else(|| Refusal {
        encodings: true,
        ..Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "Unsupported compression type")
    })
}

/// How the answer shall be encoded: of the codings that the client takes and this server knows, the one with the
/// highest weight, the first of equals.
pub(crate) fn for_response(headers: &HeaderMap) -> Encoding {
    let mut best = (Encoding::Identity, 0.0);
    let lists = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    for item in lists.flat_map(|list| list.split(',')) {
        let (name, parameters) = item.split_once(';').unwrap_or((item, ""));
        let weight = parameters
            .split(';')
            .filter_map(|parameter| parameter.split_once('='))
            .find(|(key, _)| key.trim().eq_ignore_ascii_case("q"))
            .map_or(1.0, |(_, value)| value.trim().parse::<f32>().unwrap_or(0.0));
        if let Some(encoding) = Encoding::named(name.trim()).filter(|_| weight > best.1) {
            best = (encoding, weight);
        }
    }
    best.0
}

/// The body as it was before its compression.
///
/// # Errors
/// 400 if it is broken or empty, 413 if it becomes larger than `limit`.
pub(crate) fn decompress(encoding: Encoding, body: &[u8], limit: usize) -> Result<Bytes, Refusal> {
    if body.is_empty() {
        return Err(Refusal::new(StatusCode::BAD_REQUEST, "nothing to be decompressed"));
    }
    match encoding {
        Encoding::Identity => Ok(Bytes::copy_from_slice(body)),
        Encoding::Gzip => inflate(MultiGzDecoder::new(body), body.len(), limit),
        Encoding::Deflate if is_zlib(body) => inflate(ZlibDecoder::new(body), body.len(), limit),
        Encoding::Deflate => inflate(DeflateDecoder::new(body), body.len(), limit),
    }
}

/// Whether the bytes begin with a zlib header (RFC 1950): method 8 and a checksum of its two bytes.
fn is_zlib(body: &[u8]) -> bool {
    body.first_chunk::<2>()
        .is_some_and(|head| head[0] & 15 == 8 && u16::from_be_bytes(*head).is_multiple_of(31))
}

fn inflate(decoder: impl Read, compressed: usize, limit: usize) -> Result<Bytes, Refusal> {
    let mut out = Vec::with_capacity(compressed.saturating_mul(4).min(limit));
    let above = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    decoder.take(above).read_to_end(&mut out).map_err(|error| {
        Refusal::new(StatusCode::BAD_REQUEST, format!("failed to decompress the request body: {error}"))
    })?;
    if out.len() > limit {
        return Err(Refusal::too_large(format!(
            "Decompressed data size exceeds the maximum allowed value of {limit} bytes. Use --http-max-input-size to \
             increase the limit."
        )));
    }
    Ok(out.into())
}

/// The pieces of an answer as one compressed body.
pub(crate) fn compress(encoding: Encoding, pieces: &[Bytes]) -> std::io::Result<Bytes> {
    let total: usize = pieces.iter().map(Bytes::len).sum();
    let out = Vec::with_capacity(total / 4 + 64);
    let level = Compression::fast();
    let out = match encoding {
        Encoding::Identity => pieces.concat(),
        Encoding::Gzip => {
            let mut encoder = GzEncoder::new(out, level);
            pieces.iter().try_for_each(|piece| encoder.write_all(piece))?;
            encoder.finish()?
        }
        Encoding::Deflate => {
            let mut encoder = ZlibEncoder::new(out, level);
            pieces.iter().try_for_each(|piece| encoder.write_all(piece))?;
            encoder.finish()?
        }
    };
    Ok(out.into())
}

#[cfg(test)]
mod tests {
    use flate2::write::DeflateEncoder;

    use super::*;

    fn accepts(value: &'static str) -> Encoding {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static(value));
        for_response(&headers)
    }

    #[test]
    fn picks_the_coding_of_an_answer() {
        for (value, want) in [
            ("gzip", Encoding::Gzip),
            ("deflate", Encoding::Deflate),
            ("gzip, deflate", Encoding::Gzip),
            ("deflate, gzip", Encoding::Deflate),
            ("br", Encoding::Identity),
            ("br, GZIP;q=0.5, deflate;q=0.7", Encoding::Deflate),
            ("identity, gzip;q=0.9", Encoding::Identity),
            ("gzip;q=0", Encoding::Identity),
            ("gzip;q=x", Encoding::Identity),
            ("*", Encoding::Identity),
            ("", Encoding::Identity),
        ] {
            assert_eq!(accepts(value), want, "{value}");
        }
        assert_eq!(for_response(&HeaderMap::new()), Encoding::Identity);
    }

    #[test]
    fn round_trips() {
        let pieces = [Bytes::from_static(b"hello "), Bytes::from_static(b"world")];
        for encoding in [Encoding::Gzip, Encoding::Deflate] {
            let body = compress(encoding, &pieces).expect("a body");
            assert_eq!(decompress(encoding, &body, 100).expect("the text"), "hello world");
        }
        let mut bare = DeflateEncoder::new(Vec::new(), Compression::fast());
        bare.write_all(b"hello").expect("memory");
        let bare = bare.finish().expect("memory");
        assert_eq!(decompress(Encoding::Deflate, &bare, 100).expect("the text"), "hello");
    }

    #[test]
    fn refuses_bombs_and_garbage() {
        let bomb = compress(Encoding::Gzip, &[Bytes::from(vec![0; 10 << 20])]).expect("a body");
        let refusal = decompress(Encoding::Gzip, &bomb, 1 << 20).expect_err("too large");
        assert_eq!(refusal.status, 413);
        assert!(refusal.message.contains("1048576 bytes. Use --http-max-input-size"));
        for garbage in [&b"not gzip"[..], &bomb[..bomb.len() / 2]] {
            assert_eq!(decompress(Encoding::Gzip, garbage, 100 << 20).expect_err("garbage").status, 400);
        }
        assert_eq!(
            decompress(Encoding::Deflate, b"", 1).expect_err("nothing").message,
            "nothing to be decompressed"
        );
    }

    #[test]
    fn unknown_codings_are_415() {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("br"));
        let refusal = of_request(&headers).expect_err("br");
        assert_eq!((refusal.status.as_u16(), refusal.encodings), (415, true));
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("GZip"));
        assert!(matches!(of_request(&headers), Ok(Encoding::Gzip)));
    }
}
