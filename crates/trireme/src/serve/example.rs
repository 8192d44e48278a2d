//! The line at the end of the start: a request that works as it stands.

use trireme_core::Server;
use trireme_types::{DataType, TensorSpec};

use crate::logging;
use crate::settings::Endpoint;

/// Inputs with more elements than this are not written out.
const MAX_ELEMENTS: usize = 32;

/// Logs one curl command for the first model that is ready.
pub(super) fn tell(server: &Server, http: Option<&Endpoint>) {
    let Some(endpoint) = http else { return };
    let host = match endpoint.address.as_str() {
        "0.0.0.0" | "::" | "[::]" => "127.0.0.1",
        address => address,
    };
    let ready = server.repository_index(true);
    let models = ready.iter().filter_map(|entry| server.model(&entry.name, None).ok());
    let mut first = None;
    for model in models {
        let url = format!("http://{host}:{}/v2/models/{}", endpoint.port, model.name());
        if let Some(inputs) = example_inputs(model.inputs(), model.max_batch_size() > 0)
            && !model.is_decoupled()
        {
            tell_command(&format!("{url}/infer -d '{{\"inputs\":[{inputs}]}}'"));
            return;
        }
        first.get_or_insert(url);
    }
    if let Some(url) = first {
        tell_command(&url);
    }
}

/// Written as it is, not as an escaped string, so that it can be copied.
fn tell_command(arguments: &str) {
    tracing::info!(target: logging::TABLE, "Try it:\n  curl {arguments}\n");
}

/// The inputs as JSON, all zeros, if they are small.
fn example_inputs(inputs: &[TensorSpec], batching: bool) -> Option<String> {
    let tensors = inputs.iter().filter(|input| !input.optional).map(|input| {
        let dims = input.dims.iter().map(|&dim| if dim < 0 { 1 } else { dim });
        let shape: Vec<i64> = batching.then_some(1).into_iter().chain(dims).collect();
        let count =
            usize::try_from(shape.iter().product::<i64>()).ok().filter(|&count| count <= MAX_ELEMENTS)?;
        let element = match input.data_type {
            DataType::Bytes => "\"text\"",
            DataType::Bool => "false",
            _ => "0",
        };
        let shape: Vec<String> = shape.iter().map(i64::to_string).collect();
        Some(format!(
            "{{\"name\":\"{}\",\"datatype\":\"{}\",\"shape\":[{}],\"data\":[{}]}}",
            input.name,
            input.data_type,
            shape.join(","),
            vec![element; count].join(",")
        ))
    });
    tensors.collect::<Option<Vec<_>>>().map(|tensors| tensors.join(","))
}
