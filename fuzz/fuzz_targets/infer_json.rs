//! The JSON of an inference request: any bytes are a request or an error, in time and memory that fit their length.

#![no_main]

use libfuzzer_sys::fuzz_target;
use trireme_frontend::http::infer::{Form, Source, encode, parse_infer_head};
use trireme_types::{InferResponse, OutputTensor};

const LIMIT: usize = 1 << 20;

fuzz_target!(|text: &[u8]| {
    let Ok(head) = parse_infer_head(text, LIMIT) else { return };
    // What was read can be written, and reads back as the same bytes.
    for input in head.inputs {
        let Source::Json(data) = input.source else { continue };
        assert!(data.len() <= LIMIT.max(text.len() * 8));
        let output = OutputTensor {
            name: input.name.as_ref().into(),
            data_type: input.data_type,
            shape: input.shape.clone(),
            data: data.clone(),
        };
        let response = InferResponse { outputs: [output].into_iter().collect(), ..InferResponse::default() };
        let encoded = encode("m", "1", response, |_| Form::Json).expect("a tensor that was read can be written");
        let json = encoded.pieces.concat();
        let renamed = String::from_utf8_lossy(&json).replacen("\"outputs\":", "\"inputs\":", 1);
        if renamed.as_bytes().len() != json.len() - 1 {
            // BYTES that are not UTF-8 do not survive as text.
            continue;
        }
        let again = parse_infer_head(renamed.as_bytes(), usize::MAX).expect("what was written is read");
        let Some(Source::Json(read)) = again.inputs.first().map(|input| &input.source) else { panic!("no data") };
        let not_a_number = json.windows(3).any(|word| word == b"NaN");
        assert!(read.as_slice() == data.as_slice() || not_a_number);
    }
});
