//! The line at the end of the start: a request that works as it stands.

use std::net::SocketAddr;

use percent_encoding::utf8_percent_encode;
use serde::Serialize;
use serde_json::{Value, json};
use trireme_core::Server;
use trireme_types::{DataType, TensorSpec};

use crate::infer::SEGMENT;
use crate::logging;

/// Inputs with more elements than this are not written out.
const MAX_ELEMENTS: usize = 32;

/// Logs one curl command for the first model that is ready. `address` is where HTTP is served.
pub(super) fn tell(server: &Server, address: SocketAddr) {
    let ready = server.repository_index(true);
    let models = ready.iter().filter_map(|entry| server.model(&entry.name, None).ok());
    let mut first = None;
    for model in models {
        let name = utf8_percent_encode(model.name(), SEGMENT);
        let url = format!("http://{}/v2/models/{name}", reachable(address));
        let inputs = example_inputs(model.inputs(), model.max_batch_size() > 0);
        if let Some(inputs) = inputs.filter(|_| !model.is_decoupled()) {
            tell_command(&format!("{url}/infer -d '{{\"inputs\":[{inputs}]}}'"));
            return;
        }
        first.get_or_insert(url);
    }
    if let Some(url) = first {
        tell_command(&url);
    }
}

/// The address as a client on this machine writes it.
fn reachable(address: SocketAddr) -> String {
    if address.ip().is_unspecified() { format!("localhost:{}", address.port()) } else { address.to_string() }
}

/// Written as it is, not as an escaped string, so that it can be copied.
fn tell_command(arguments: &str) {
    tracing::info!(target: logging::TABLE, "Try it:\n  curl {arguments}\n");
}

/// One input, its members in the order in which people read them.
#[derive(Serialize)]
struct Tensor<'a> {
    name: &'a str,
    datatype: &'static str,
    shape: Vec<i64>,
    data: Vec<Value>,
}

/// The inputs as JSON, all zeros, if they are small and of known shape: which sizes an open dimension really takes, only
/// the model's author knows.
fn example_inputs(inputs: &[TensorSpec], batching: bool) -> Option<String> {
    let tensors = inputs.iter().filter(|input| !input.optional).map(|input| {
        let batch = batching.then_some(1);
        let shape: Vec<i64> = batch.into_iter().chain(input.dims.iter().copied()).collect();
        let mut sizes = shape.iter().map(|&dim| usize::try_from(dim).ok());
        let count = sizes.try_fold(1_usize, |count, dim| count.checked_mul(dim?))?;
        if count > MAX_ELEMENTS {
            return None;
        }
        let element = match input.data_type {
            DataType::Bytes => json!("text"),
            DataType::Bool => json!(false),
            _ => json!(0),
        };
        let tensor = Tensor {
            name: &input.name,
            datatype: input.data_type.wire_name(),
            shape,
            data: vec![element; count],
        };
        // Inside single quotes for the shell.
        serde_json::to_string(&tensor).ok().map(|json| json.replace('\'', r"'\''"))
    });
    tensors.collect::<Option<Vec<_>>>().map(|tensors| tensors.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str, data_type: DataType, dims: &[i64]) -> TensorSpec {
        TensorSpec::new(name, data_type, dims.iter().copied().collect())
    }

    #[test]
    fn writes_small_inputs_of_known_shape() {
        let inputs = [spec("it's", DataType::Int32, &[2]), spec("t", DataType::Bytes, &[1])];
        assert_eq!(
            example_inputs(&inputs, true).expect("small"),
            concat!(
                r#"{"name":"it'\''s","datatype":"INT32","shape":[1,2],"data":[0,0]},"#,
                r#"{"name":"t","datatype":"BYTES","shape":[1,1],"data":["text"]}"#
            )
        );
        assert!(example_inputs(&[spec("x", DataType::Fp32, &[-1])], false).is_none());
        assert!(example_inputs(&[spec("x", DataType::Fp32, &[i64::MAX, i64::MAX])], false).is_none());
        assert!(example_inputs(&[spec("x", DataType::Fp32, &[33])], false).is_none());
    }

    #[test]
    fn a_server_on_all_addresses_is_asked_on_this_machine() {
        let shown = |address: &str| reachable(address.parse().expect("an address"));
        assert_eq!(shown("0.0.0.0:8000"), "localhost:8000");
        assert_eq!(shown("[::]:8000"), "localhost:8000");
        assert_eq!(shown("[::1]:8000"), "[::1]:8000");
        assert_eq!(shown("10.0.0.7:1"), "10.0.0.7:1");
    }
}
