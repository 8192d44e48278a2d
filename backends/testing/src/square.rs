//! `square`: a decoupled model that answers the number n with n responses.

use std::sync::Arc;
use std::time::Duration;

use trireme_backend::{
    Backend, Batch, InstanceContext, Model, ModelContext, ModelInstance, ModelTensors, OpenModel,
};
use trireme_types::{DataType, Error, InferResponse, ModelReport, Responder, Result};

use crate::parameter::number;
use crate::pause::{cancelled, wait};
use crate::stream::{MAX_RESPONSES, Streams, required, response, words};

/// Longest delay that a configuration may ask for: one hour in nanoseconds.
const MAX_DELAY_NS: u64 = 60 * 60 * 1_000_000_000;

/// Triton's sample backend `square`.
///
/// # Shapes
/// `IN` INT32 `[1]` with the value n -> n responses with `OUT` INT32 `[1]` = n, then an end without a response.
///
/// Parameters: `CUSTOM_INFER_DELAY_NS` and `CUSTOM_OUTPUT_DELAY_NS` (nanoseconds before each response, for the
/// computation and for the output), `CUSTOM_CANCEL_DELAY_NS` (before a cancelled request ends),
/// `CUSTOM_FAIL_COUNT` (so many first responses of a request are errors), `CUSTOM_EMPTY_COUNT` (so many after
/// them carry no output).
#[derive(Clone, Copy, Debug, Default)]
pub struct SquareBackend;

impl Backend for SquareBackend {
    fn name(&self) -> &str {
        "square"
    }

    fn default_model_filename(&self) -> Option<&str> {
        None
    }

    fn open(&self, context: &ModelContext) -> Result<Box<dyn OpenModel>> {
        let delay = |key| number(context, key, MAX_DELAY_NS).map(Duration::from_nanos);
        let count = |key| number(context, key, u32::MAX.into());
        Ok(Box::new(Opened {
            name: context.name.clone(),
            decoupled: context.decoupled,
            settings: Settings {
                delay: delay("CUSTOM_INFER_DELAY_NS")? + delay("CUSTOM_OUTPUT_DELAY_NS")?,
                cancel_delay: delay("CUSTOM_CANCEL_DELAY_NS")?,
                fail_count: count("CUSTOM_FAIL_COUNT")?,
                empty_count: count("CUSTOM_EMPTY_COUNT")?,
            },
        }))
    }
}

#[derive(Clone, Copy, Debug)]
struct Settings {
    delay: Duration,
    cancel_delay: Duration,
    fail_count: u64,
    empty_count: u64,
}

#[derive(Debug)]
struct Opened {
    name: Arc<str>,
    decoupled: bool,
    settings: Settings,
}

impl OpenModel for Opened {
    fn report(&self) -> Result<Option<ModelReport>> {
        Ok(None)
    }

    fn load(self: Box<Self>, tensors: ModelTensors) -> Result<Arc<dyn Model>> {
        let refuse = |text: &str| {
            Err(Error::invalid_arg(format!("model '{}' on backend 'square': {text}", self.name)))
        };
        if !self.decoupled {
            return refuse("expected 'model_transaction_policy { decoupled: true }'");
        }
        if tensors.max_batch_size > 0 {
            return refuse("expected max_batch_size 0");
        }
        let is_int32 = |spec: &trireme_types::TensorSpec| spec.data_type == DataType::Int32;
        if !tensors.input("IN").is_some_and(is_int32) || !tensors.output("OUT").is_some_and(is_int32) {
            return refuse("expected an input 'IN' and an output 'OUT' of TYPE_INT32");
        }
        Ok(Arc::new(Square { settings: self.settings, streams: Streams::default() }))
    }
}

struct Square {
    settings: Settings,
    streams: Streams,
}

impl Model for Square {
    fn instance(&self, _: &InstanceContext) -> Result<Box<dyn ModelInstance>> {
        Ok(Box::new(Instance { settings: self.settings, streams: self.streams.clone(), out: "OUT".into() }))
    }
}

struct Instance {
    settings: Settings,
    streams: Streams,
    out: Arc<str>,
}

/// Number of responses that the input asks for.
fn count(values: &[u32]) -> Result<u32> {
    let [value] = values else {
        return Err(Error::invalid_arg(format!("expected one element in 'IN', got {}", values.len())));
    };
    let signed = value.cast_signed();
    match usize::try_from(signed) {
        Ok(n) if n <= MAX_RESPONSES => Ok(*value),
        _ => Err(Error::invalid_arg(format!("input 'IN' is {signed}, expected 0 to {MAX_RESPONSES}"))),
    }
}

impl Settings {
    fn send(self, mut responder: Responder, out: &Arc<str>, wanted: bool, count: u32) {
        for index in 0..u64::from(count) {
            if !wait(&mut responder, self.delay) {
                std::thread::sleep(self.cancel_delay);
                return responder.finish(Err(cancelled()));
            }
            responder.send(if index < self.fail_count {
                Err(Error::internal("a failure asked for with CUSTOM_FAIL_COUNT"))
            } else if index - self.fail_count < self.empty_count {
                Ok(InferResponse::default())
            } else {
                Ok(response(&[wanted], &[(out, DataType::Int32, count.to_le_bytes())]))
            });
        }
        responder.close();
    }
}

impl ModelInstance for Instance {
    fn execute(&mut self, batch: &mut Batch) -> Result<()> {
        batch.inputs_ready();
        batch.outputs_start();
        for request in &mut batch.requests {
            let count = match required(&request.request, "IN").and_then(|input| count(&words(input))) {
                Ok(count) => count,
                Err(error) => {
                    request.answer(Err(error));
                    continue;
                }
            };
            let wanted = request.request.wants("OUT");
            let Some(responder) = request.take_responder() else { continue };
            let (settings, out) = (self.settings, self.out.clone());
            if settings.delay.is_zero() {
                settings.send(responder, &out, wanted, count);
            } else {
                self.streams.spawn(responder, move |responder| settings.send(responder, &out, wanted, count));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{input, load_decoupled, run_stream, spec};

    fn replies(parameters: &[(&str, &str)], value: i32) -> Vec<&'static str> {
        let tensors = ModelTensors {
            max_batch_size: 0,
            inputs: vec![spec("IN", DataType::Int32, &[1])],
            outputs: vec![spec("OUT", DataType::Int32, &[1])],
            ..ModelTensors::default()
        };
        let mut instance = load_decoupled(&SquareBackend, parameters, tensors).expect("a valid model");
        let inputs = vec![input("IN", DataType::Int32, &[1], value.to_le_bytes().to_vec())];
        let sent = run_stream(instance.as_mut(), inputs, &[]);
        let kind = |reply: Option<Result<InferResponse>>| match reply {
            None => "end",
            Some(Err(_)) => "error",
            Some(Ok(response)) if response.outputs.is_empty() => "empty",
            Some(Ok(response)) => {
                assert_eq!(response.outputs[0].data.as_slice(), value.to_le_bytes());
                "value"
            }
        };
        sent.into_iter().map(|(reply, _)| kind(reply)).collect()
    }

    #[test]
    fn answers_n_times() {
        assert_eq!(replies(&[], 2), ["value", "value", "end"]);
        assert_eq!(replies(&[], 0), ["end"]);
        assert_eq!(replies(&[("CUSTOM_INFER_DELAY_NS", "1000000")], 1), ["value", "end"]);
    }

    #[test]
    fn fails_and_leaves_empty_as_configured() {
        let parameters = [("CUSTOM_FAIL_COUNT", "1"), ("CUSTOM_EMPTY_COUNT", "2")];
        assert_eq!(replies(&parameters, 4), ["error", "empty", "empty", "value", "end"]);
    }

    #[test]
    fn refuses_counts_out_of_range() {
        for value in [-1, 1_000_001, i32::MIN] {
            assert_eq!(replies(&[], value), ["error"]);
        }
    }
}
