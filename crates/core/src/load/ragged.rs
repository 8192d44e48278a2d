//! `batch_input` and `batch_output` of a configuration in the words of the backends.

use std::sync::Arc;

use trireme_backend::ragged::{BatchInput, BatchInputKind, BatchOutput};
use trireme_config::ModelSpec;
use trireme_proto::inference::batch_input::Kind;
use trireme_types::DataType;

/// Tensors that the server computes for each batch. The configuration has been validated: a kind, a type and one source
/// each.
pub(super) fn batch_inputs(spec: &ModelSpec) -> Vec<BatchInput> {
    let made = spec.batch_inputs.iter().filter_map(|input| {
        Some(BatchInput {
            kind: match Kind::try_from(input.kind).ok()? {
                Kind::BatchElementCount => BatchInputKind::ElementCount,
                Kind::BatchAccumulatedElementCount => BatchInputKind::AccumulatedElementCount,
                Kind::BatchAccumulatedElementCountWithZero => BatchInputKind::AccumulatedElementCountWithZero,
                Kind::BatchMaxElementCountAsShape => BatchInputKind::MaxElementCountAsShape,
                Kind::BatchItemShape => BatchInputKind::ItemShape,
                Kind::BatchItemShapeFlatten => BatchInputKind::ItemShapeFlatten,
            },
            targets: names(&input.target_name),
            data_type: DataType::from_config_number(input.data_type)?,
            source: Arc::from(input.source_input.first()?.as_str()),
        })
    });
    made.collect()
}

/// Outputs that are scattered over the requests of a batch.
pub(super) fn batch_outputs(spec: &ModelSpec) -> Vec<BatchOutput> {
    let made = spec.batch_outputs.iter().filter_map(|output| {
        let source = Arc::from(output.source_input.first()?.as_str());
        Some(BatchOutput { targets: names(&output.target_name), source })
    });
    made.collect()
}

fn names(names: &[String]) -> Vec<Arc<str>> {
    names.iter().map(|name| Arc::from(name.as_str())).collect()
}
