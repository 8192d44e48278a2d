//! The split of a body into JSON and tensors: nothing outside the body is handed out, whatever the client states.
//!
//! Input: the value of the length header up to the first NUL, then the body; its JSON is read as such.

#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use trireme_frontend::http::infer::{BinaryTail, Source, parse_header_length, parse_infer_head};

fuzz_target!(|input: &[u8]| {
    let end = input.iter().position(|&byte| byte == 0).unwrap_or(0);
    let (header, body) = input.split_at(end);
    let body = Bytes::copy_from_slice(body);
    let length = match header {
        b"" => None,
        value => match parse_header_length(value, body.len()) {
            Ok(length) => Some(length),
            Err(_) => return,
        },
    };
    let (json, mut tail) = BinaryTail::split(&body, length, "m");
    assert_eq!(json.len(), length.unwrap_or(body.len()));
    let Ok(head) = parse_infer_head(&json, 1 << 20) else { return };
    let mut taken = json.len();
    for input in head.inputs {
        if let Source::Binary(size) = input.source {
            match tail.take(&input.name, size) {
                Ok(slice) => taken += slice.len(),
                Err(_) => return,
            }
        }
    }
    assert!(taken <= body.len());
    assert_eq!(tail.finish().is_ok(), taken == body.len());
});
