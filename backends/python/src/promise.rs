//! What the configuration promises of a model's tensors, applied to what the worker answers.

use std::sync::Arc;

use trireme_backend::{ModelCaller, ModelTensors, wire_shape};
use trireme_types::{
    Error, InferRequest, InferResponse, OutputTensor, RequestedOutput, Result, TensorBuffer,
};

use crate::message::{Answer, parameter_values};

/// Outputs that a client asked for; empty means all.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted(Vec<Arc<str>>);

impl Wanted {
    pub(crate) fn of(request: &InferRequest) -> Self {
        Self(request.outputs.iter().map(|output: &RequestedOutput| Arc::clone(&output.name)).collect())
    }

    fn has(&self, name: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|wanted| &**wanted == name)
    }
}

#[derive(Debug)]
pub(crate) struct Promise {
    pub(crate) model: Arc<str>,
    /// The way to other models.
    pub(crate) caller: Option<Arc<dyn ModelCaller>>,
    pub(crate) tensors: ModelTensors,
    pub(crate) decoupled: bool,
}

impl Promise {
    /// The response that an answer stands for; its tensors lie in `data`.
    ///
    /// # Errors
    /// The model answered with an error, or with a tensor that is not what its own description says.
    pub(crate) fn response(
        &self,
        answer: Answer,
        data: &TensorBuffer,
        wanted: &Wanted,
    ) -> Result<InferResponse> {
        if let Some(error) = answer.e {
            return Err(error.into_error());
        }
        let mut response =
            InferResponse { parameters: parameter_values(answer.p), ..InferResponse::default() };
        let batching = self.tensors.max_batch_size > 0;
        for tensor in &answer.o {
            let state = self.tensors.states.iter().find(|state| *state.name == *tensor.0);
            if state.is_none() && !wanted.has(&tensor.0) {
                continue;
            }
            let spec = self.tensors.output(&tensor.0);
            let (data_type, shape, place) = tensor.check(data.len())?;
            let Some(known) = spec.or(state) else {
                return Err(Error::internal(format!(
                    "the python model answered with an output '{}', which its configuration does not have",
                    tensor.0
                )));
            };
            if known.data_type != data_type {
                return Err(Error::internal(format!(
                    "output '{}' of the python model has the data type {}, its configuration says {}",
                    tensor.0,
                    data_type.config_name(),
                    known.data_type.config_name()
                )));
            }
            response.outputs.push(OutputTensor {
                name: Arc::clone(&known.name),
                data_type,
                shape: spec.map_or_else(|| shape.clone(), |spec| wire_shape(spec, batching, &shape)),
                data: data.slice(place),
            });
        }
        Ok(response)
    }
}
