//! Which requests may share a batch.

use smallvec::SmallVec;
use trireme_config::ModelSpec;
use trireme_types::InferRequest;

/// Requests of equal kind may run together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kind(SmallVec<[i64; 6]>);

/// How the kind of a request of one model is found.
#[derive(Clone, Debug)]
pub(crate) struct KindRule {
    /// Inputs whose presence or dimensions may differ, by name.
    open: Vec<std::sync::Arc<str>>,
}

impl KindRule {
    pub(crate) fn new(spec: &ModelSpec) -> Self {
        let differs = |input: &&trireme_types::TensorSpec| {
            !input.ragged && (input.optional || input.dims.iter().any(|dim| *dim < 0))
        };
        Self { open: spec.inputs.iter().filter(differs).map(|input| input.name.clone()).collect() }
    }

    pub(crate) fn of(&self, request: &InferRequest) -> Kind {
        let mut kind = SmallVec::new();
        for name in &self.open {
            match request.input(name) {
                Some(input) => {
                    kind.push(input.shape.len() as i64);
                    kind.extend(input.shape.iter().skip(1).copied());
                }
                None => kind.push(-1),
            }
        }
        Kind(kind)
    }
}
