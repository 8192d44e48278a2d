//! ModelInferRequest: any bytes are a request or an error, and a request's inputs are as long as they claim.

#![no_main]

use std::time::Instant;

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use trireme_frontend::grpc::convert::{Target, WireRequest, request};
use trireme_types::{DataType, Shape, TensorSpec};

fuzz_target!(|message: &[u8]| {
    let message = Bytes::copy_from_slice(message);
    let Ok(wire) = WireRequest::parse(&message) else { return };
    let specs: Vec<TensorSpec> = DataType::ALL.map(spec).into();
    let target = Target { model: "m", inputs: &specs, outputs: &specs };
    if let Ok(call) = request(&message, &wire, target, &[], Instant::now()) {
        // Typed contents grow at most to 8 bytes an element, strings by their length.
        assert!(call.request.input_bytes() <= message.len().saturating_mul(16));
    }
});

fn spec(data_type: DataType) -> TensorSpec {
    TensorSpec { optional: true, ..TensorSpec::new(data_type.wire_name(), data_type, Shape::new(&[-1])) }
}
