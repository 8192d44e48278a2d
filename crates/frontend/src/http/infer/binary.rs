//! The binary tensor extension: a body that is JSON up to a length that a header tells, and tensor bytes behind it.
//!
//! Nothing is copied: tensors are slices of the body. A size that the client states is believed only as far as
//! bytes are there.

use bytes::Bytes;
use trireme_types::{Error, Result};

/// Header with the length of the JSON part; also in responses.
const HEADER_LENGTH: &str = "Inference-Header-Content-Length";

/// Reads the value of the header with the length of the JSON part. 0 means a raw request: no JSON at all.
///
/// # Errors
/// `INVALID_ARG` unless it is a whole number between 0 and the length of the (decompressed) body.
pub fn parse_header_length(value: &[u8], body_length: usize) -> Result<usize> {
    let text = String::from_utf8_lossy(value);
    let length: i128 = text.trim().parse().map_err(|_| {
        Error::invalid_arg(format!(
            "Unable to parse {HEADER_LENGTH}, got: {text}, expected a whole number of bytes"
        ))
    })?;
    if i32::try_from(length).is_err() {
        return Err(Error::invalid_arg(format!(
            "Unable to parse {HEADER_LENGTH}, value is out of range [ {}, {} ], got: {text}",
            i32::MIN,
            i32::MAX
        )));
    }
    usize::try_from(length).ok().filter(|&length| length <= body_length).ok_or_else(|| {
        Error::invalid_arg(format!(
            "inference header size should be in range (0, {body_length}), got: {length}"
        ))
    })
}

/// The bytes behind the JSON, handed out to the inputs in their order.
#[derive(Debug)]
pub struct BinaryTail<'a> {
    bytes: Bytes,
    /// Whether the request had a header that says where the JSON ends.
    announced: bool,
    model: &'a str,
}

impl<'a> BinaryTail<'a> {
    /// Splits a body. Without a header length all of it is JSON.
    pub fn split(body: &Bytes, header_length: Option<usize>, model: &'a str) -> (Bytes, Self) {
        let end = header_length.unwrap_or(body.len()).min(body.len());
        let tail = Self { bytes: body.slice(end..), announced: header_length.is_some(), model };
        (body.slice(..end), tail)
    }

    /// The next `size` bytes, for the input of that name.
    ///
    /// # Errors
    /// `INVALID_ARG` if fewer are left.
    pub fn take(&mut self, input: &str, size: u64) -> Result<Bytes> {
        match usize::try_from(size) {
            Ok(size) if size <= self.bytes.len() => Ok(self.bytes.split_to(size)),
            _ => Err(self.short(input, size)),
        }
    }

    #[cold]
    fn short(&self, input: &str, size: u64) -> Error {
        if !self.announced {
            return Error::invalid_arg(format!(
                "must specify valid 'Infer-Header-Content-Length' in request header and 'binary_data_size' when \
                 passing inputs in binary data format: input '{input}' announces {size} bytes, but the header \
                 {HEADER_LENGTH} is absent"
            ));
        }
        let left = self.bytes.len();
        let missing = size.saturating_sub(u64::try_from(left).unwrap_or(u64::MAX));
        Error::invalid_arg(format!(
            "unexpected size for input '{input}', expecting {missing} additional bytes for model '{}'",
            self.model
        ))
    }

    /// Checks that every byte was handed out.
    ///
    /// # Errors
    /// `INVALID_ARG` if bytes are left.
    pub fn finish(self) -> Result<()> {
        if self.bytes.is_empty() {
            return Ok(());
        }
        Err(Error::invalid_arg(format!("unexpected additional input data for model '{}'", self.model)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reads_the_header() {
        assert_eq!(parse_header_length(b"0", 10), Ok(0));
        assert_eq!(parse_header_length(b" 10 ", 10), Ok(10));
        for (value, says) in [
            ("11", "inference header size should be in range (0, 10), got: 11"),
            ("-1", "inference header size should be in range (0, 10), got: -1"),
            ("abc", "Unable to parse Inference-Header-Content-Length, got: abc"),
            ("", "Unable to parse Inference-Header-Content-Length, got: "),
            ("1.5", "Unable to parse Inference-Header-Content-Length, got: 1.5"),
            (
                "2147483648",
                "Unable to parse Inference-Header-Content-Length, value is out of range [ -2147483648, 2147483647 ], \
                 got: 2147483648",
            ),
        ] {
            let error = parse_header_length(value.as_bytes(), 10).expect_err(value);
            assert!(error.message().starts_with(says), "{error}");
        }
    }

    #[test]
    fn hands_out_slices_in_order() {
        let body = Bytes::from_static(b"{}aabbb");
        let (json, mut tail) = BinaryTail::split(&body, Some(2), "m");
        assert_eq!(json, "{}");
        assert_eq!(tail.take("A", 2).expect("two bytes"), "aa");
        let error = tail.take("B", 5).expect_err("three bytes");
        assert_eq!(
            error.message(),
            "unexpected size for input 'B', expecting 2 additional bytes for model 'm'"
        );
        assert_eq!(tail.take("B", 2).expect("two bytes"), "bb");
        let error = tail.finish().expect_err("one byte is left");
        assert_eq!(error.message(), "unexpected additional input data for model 'm'");
    }

    #[test]
    fn without_the_header_all_is_json() {
        let body = Bytes::from_static(b"{}aabbb");
        let (json, mut tail) = BinaryTail::split(&body, None, "m");
        assert_eq!(json, body);
        let error = tail.take("A", 2).expect_err("no binary data");
        assert!(error.message().starts_with("must specify valid 'Infer-Header-Content-Length'"), "{error}");
        assert!(tail.take("A", 0).expect("nothing").is_empty());
        assert_eq!(tail.finish(), Ok(()));
    }

    proptest! {
        #[test]
        fn never_reads_past_the_body(body: Vec<u8>, head in 0_usize..64, sizes: Vec<u64>) {
            let body = Bytes::from(body);
            let (json, mut tail) = BinaryTail::split(&body, Some(head), "m");
            let mut total = json.len();
            for size in sizes {
                if let Ok(slice) = tail.take("X", size % 16) {
                    total += slice.len();
                }
            }
            prop_assert!(total <= body.len());
            prop_assert_eq!(tail.finish().is_ok(), total == body.len());
        }

        #[test]
        fn any_header_value_is_refused_or_in_range(value: Vec<u8>, length in 0_usize..1000) {
            if let Ok(found) = parse_header_length(&value, length) {
                prop_assert!(found <= length);
            }
        }
    }
}
