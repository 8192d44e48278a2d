//! The padding that a model's parameters ask for.

use std::sync::Arc;

use trireme_backend::padding::PaddingPlan;
use trireme_config::{ConfigErrors, ModelSpec};

/// The plan of a model, if it has one. The mask becomes an input that requests may leave out.
///
/// # Errors
/// Parameters that do not fit the model.
pub(super) fn plan(spec: &mut ModelSpec) -> Result<Option<Arc<PaddingPlan>>, ConfigErrors> {
    let wrong = |reason: String| ConfigErrors::at("parameters", reason);
    let plan = crate::batch_kind::padding_of(spec)
        .map_err(|error| wrong(format!("model '{}': {}", spec.name, error.message())))?;
    let Some(plan) = plan else { return Ok(None) };
    if spec.decoupled {
        return Err(wrong(format!(
            "model '{}': the outputs of a decoupled model cannot be cut back; remove the parameters that begin with \
             padding., or model_transaction_policy",
            spec.name
        )));
    }
    for input in &mut spec.inputs {
        input.optional |= plan.mask() == Some(&*input.name);
    }
    Ok(Some(Arc::new(plan)))
}
