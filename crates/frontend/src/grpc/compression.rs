//! Compression of messages: `gzip` and `deflate` both ways, as the headers of a call agree on it.

use std::io::{self, Read, Write as _};

use bytes::{Buf as _, Bytes};
use flate2::Compression;
use flate2::read::{MultiGzDecoder, ZlibDecoder};
use flate2::write::{GzEncoder, ZlibEncoder};
use http::{HeaderMap, HeaderValue};
use tonic::Status;

pub(super) const ENCODING_HEADER: &str = "grpc-encoding";
pub(super) const ACCEPT_ENCODING_HEADER: &str = "grpc-accept-encoding";
pub(super) const ACCEPTED: HeaderValue = HeaderValue::from_static("identity,gzip,deflate");

/// Messages from this size on are compressed and decompressed beside the network threads.
pub(super) const LARGE_MESSAGE_LEN: usize = 256 * 1024;

/// How hard inference responses are compressed (`--grpc-infer-response-compression-level`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Level {
    #[default]
    None,
    Low,
    Medium,
    High,
}

impl std::str::FromStr for Level {
    type Err = trireme_types::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self::None),
            "low" => Ok(Self::Low),
            "medium" => Ok(Self::Medium),
            "high" => Ok(Self::High),
            _ => Err(trireme_types::Error::invalid_arg(format!(
                "invalid compression level '{text}', expected none, low, medium or high"
            ))),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Gzip,
    Deflate,
}

impl Encoding {
    pub(super) const fn header(self) -> HeaderValue {
        match self {
            Self::Gzip => HeaderValue::from_static("gzip"),
            Self::Deflate => HeaderValue::from_static("deflate"),
        }
    }

    fn of(name: &str) -> Option<Self> {
        match name {
            "gzip" => Some(Self::Gzip),
            "deflate" => Some(Self::Deflate),
            _ => None,
        }
    }
}

/// How the messages of a request are compressed.
pub(super) fn request_encoding(headers: &HeaderMap) -> Result<Option<Encoding>, Status> {
    let Some(value) = headers.get(ENCODING_HEADER) else { return Ok(None) };
    let name = value.to_str().unwrap_or_default();
    if name == "identity" {
        return Ok(None);
    }
    Encoding::of(name).map(Some).ok_or_else(|| {
        let mut status = Status::unimplemented(format!(
            "the request is compressed with '{name}', expected identity, gzip or deflate"
        ));
        if let Ok(accepted) = "identity,gzip,deflate".parse() {
            status.metadata_mut().insert(ACCEPT_ENCODING_HEADER, accepted);
        }
        status
    })
}

/// The first encoding that the client can read and this server can write.
pub(super) fn response_encoding(headers: &HeaderMap) -> Option<Encoding> {
    headers.get(ACCEPT_ENCODING_HEADER)?.to_str().ok()?.split(',').find_map(|name| Encoding::of(name.trim()))
}

/// Appends the compressed pieces to `to`.
pub(super) fn compress(
    encoding: Encoding,
    level: Level,
    pieces: &[Bytes],
    to: &mut Vec<u8>,
) -> io::Result<()> {
    let level = match level {
        Level::None => Compression::none(),
        Level::Low => Compression::fast(),
        Level::Medium => Compression::default(),
        Level::High => Compression::best(),
    };
    match encoding {
        Encoding::Gzip => {
            let mut encoder = GzEncoder::new(to, level);
            pieces.iter().try_for_each(|piece| encoder.write_all(piece))?;
            encoder.finish()?;
        }
        Encoding::Deflate => {
            let mut encoder = ZlibEncoder::new(to, level);
            pieces.iter().try_for_each(|piece| encoder.write_all(piece))?;
            encoder.finish()?;
        }
    }
    Ok(())
}

/// A decompressed message of at most `limit` bytes; large ones do not block the calling thread.
pub(super) async fn decompress(encoding: Encoding, message: Bytes, limit: usize) -> Result<Bytes, Status> {
    if message.len() < LARGE_MESSAGE_LEN {
        return decompress_now(encoding, message, limit);
    }
    tokio::task::spawn_blocking(move || decompress_now(encoding, message, limit))
        .await
        .unwrap_or_else(|_| Err(Status::internal("decompressing the request was interrupted")))
}

fn decompress_now(encoding: Encoding, message: Bytes, limit: usize) -> Result<Bytes, Status> {
    let most = limit as u64 + 1;
    let mut data = Vec::new();
    let read = match encoding {
        Encoding::Gzip => MultiGzDecoder::new(message.reader()).take(most).read_to_end(&mut data),
        Encoding::Deflate => ZlibDecoder::new(message.reader()).take(most).read_to_end(&mut data),
    };
    match read {
        Err(error) => Err(Status::invalid_argument(format!("the request cannot be decompressed: {error}"))),
        Ok(len) if len > limit => Err(Status::resource_exhausted(format!(
            "Received message larger than max after decompression (limit {limit})"
        ))),
        Ok(_) => Ok(data.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(name.parse().expect("a name"), HeaderValue::from_static(value))])
    }

    #[test]
    fn headers_agree_on_an_encoding() {
        let request =
            |value| request_encoding(&headers(ENCODING_HEADER, value)).map_err(|status| status.code());
        assert_eq!(request("gzip"), Ok(Some(Encoding::Gzip)));
        assert_eq!(request("deflate"), Ok(Some(Encoding::Deflate)));
        assert_eq!(request("identity"), Ok(None));
        assert_eq!(request("br"), Err(tonic::Code::Unimplemented));
        let response = |value| response_encoding(&headers(ACCEPT_ENCODING_HEADER, value));
        assert_eq!(response("identity, deflate, gzip"), Some(Encoding::Deflate));
        assert_eq!(response("identity"), None);
        assert_eq!(response_encoding(&HeaderMap::new()), None);
    }

    #[tokio::test]
    async fn a_small_message_cannot_become_a_large_one() {
        let mut bomb = Vec::new();
        let zeros = Bytes::from(vec![0; 1 << 20]);
        compress(Encoding::Gzip, Level::High, &vec![zeros; 8], &mut bomb).expect("compresses");
        let status = decompress(Encoding::Gzip, bomb.into(), 1 << 20).await.expect_err("too large");
        assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    }

    #[test]
    fn levels_have_tritons_names() {
        assert_eq!("medium".parse::<Level>(), Ok(Level::Medium));
        assert!("best".parse::<Level>().is_err());
    }
}
