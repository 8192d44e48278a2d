//! `identity`: OUTPUT<n> is INPUT<n>, after a delay if the configuration asks for one.
//!
//! The four parameters that Triton's sample adds to every response (`param0` to `param3`) are left out: they are
//! an example in its source, not behaviour that a client could want.

use std::sync::Arc;
use std::time::Duration;

use trireme_backend::{
    Backend, Batch, InstanceContext, Model, ModelContext, ModelInstance, ModelTensors, OpenModel,
    engine_shape, wire_shape,
};
use trireme_types::{Error, InferRequest, InferResponse, ModelReport, OutputTensor, Result, TensorSpec};

use crate::parameter::number;
use crate::pause::{cancelled, wait_for_batch};

/// Longest delay that a configuration may ask for: one day.
const MAX_DELAY_SEC: u64 = 24 * 60 * 60;

/// Triton's sample backend `identity`.
///
/// Parameters: `execute_delay_ms` (before an execution answers), `instance_wise_delay_multiplier` (the delay is
/// multiplied by this and the instance's number, if that is above 1), `creation_delay_sec` (before the model is
/// ready).
#[derive(Clone, Copy, Debug, Default)]
pub struct IdentityBackend;

impl Backend for IdentityBackend {
    fn name(&self) -> &str {
        "identity"
    }

    fn default_model_filename(&self) -> Option<&str> {
        None
    }

    fn open(&self, context: &ModelContext) -> Result<Box<dyn OpenModel>> {
        Ok(Box::new(Opened {
            name: context.name.clone(),
            execute_delay: Duration::from_millis(number(context, "execute_delay_ms", MAX_DELAY_SEC * 1000)?),
            multiplier: number(context, "instance_wise_delay_multiplier", u64::from(u16::MAX))?,
            creation_delay: Duration::from_secs(number(context, "creation_delay_sec", MAX_DELAY_SEC)?),
        }))
    }
}

#[derive(Debug)]
struct Opened {
    name: Arc<str>,
    execute_delay: Duration,
    multiplier: u64,
    creation_delay: Duration,
}

impl OpenModel for Opened {
    fn report(&self) -> Result<Option<ModelReport>> {
        Ok(None)
    }

    fn load(self: Box<Self>, tensors: ModelTensors) -> Result<Arc<dyn Model>> {
        let pairs = pair(&self.name, &tensors)?;
        std::thread::sleep(self.creation_delay);
        Ok(Arc::new(Identity {
            pairs: pairs.into(),
            batching: tensors.max_batch_size > 0,
            execute_delay: self.execute_delay,
            multiplier: self.multiplier,
        }))
    }
}

/// An input and the output that repeats it.
#[derive(Debug)]
struct Pair {
    input: TensorSpec,
    output: TensorSpec,
    /// The shape goes out as it came in; otherwise through the engine's shape.
    same_dims: bool,
}

fn pair(model: &str, tensors: &ModelTensors) -> Result<Vec<Pair>> {
    let refuse =
        |text: String| Err(Error::invalid_arg(format!("model '{model}' on backend 'identity': {text}")));
    if tensors.inputs.len() != tensors.outputs.len() {
        return refuse(format!(
            "expected as many outputs as inputs, got {} input(s) and {} output(s)",
            tensors.inputs.len(),
            tensors.outputs.len()
        ));
    }
    if let Some(input) = tensors.inputs.iter().find(|input| !input.name.starts_with("INPUT")) {
        return refuse(format!("expected input name to start with 'INPUT', got '{}'", input.name));
    }
    let mut pairs = Vec::with_capacity(tensors.outputs.len());
    for output in &tensors.outputs {
        let Some(number) = output.name.strip_prefix("OUTPUT") else {
            return refuse(format!("expected output name to start with 'OUTPUT', got '{}'", output.name));
        };
        let source = format!("INPUT{number}");
        let Some(input) = tensors.input(&source) else {
            return refuse(format!("output '{}' needs an input '{source}', but there is none", output.name));
        };
        if input.data_type != output.data_type {
            return refuse(format!(
                "expected '{source}' and '{}' of one data type, got {} and {}",
                output.name,
                input.data_type.config_name(),
                output.data_type.config_name()
            ));
        }
        if input.engine_dims() != output.engine_dims() {
            return refuse(format!(
                "expected '{source}' and '{}' of one shape, got {} and {}",
                output.name,
                input.engine_dims(),
                output.engine_dims()
            ));
        }
        let same_dims = input.dims == output.dims;
        pairs.push(Pair { input: input.clone(), output: output.clone(), same_dims });
    }
    Ok(pairs)
}

struct Identity {
    pairs: Arc<[Pair]>,
    batching: bool,
    execute_delay: Duration,
    multiplier: u64,
}

impl Model for Identity {
    fn instance(&self, context: &InstanceContext) -> Result<Box<dyn ModelInstance>> {
        let index = context.name.rsplit('_').next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        let factor = self.multiplier.saturating_mul(index).max(1);
        let delay = self.execute_delay.saturating_mul(u32::try_from(factor).unwrap_or(u32::MAX));
        let delay = delay.min(Duration::from_secs(MAX_DELAY_SEC));
        Ok(Box::new(Instance { pairs: self.pairs.clone(), batching: self.batching, delay }))
    }
}

struct Instance {
    pairs: Arc<[Pair]>,
    batching: bool,
    delay: Duration,
}

impl Instance {
    fn answer(&self, request: &InferRequest) -> InferResponse {
        let outputs = self.pairs.iter().filter(|pair| request.wants(&pair.output.name)).filter_map(|pair| {
            // An optional input that was left out has no output.
            let input = request.input(&pair.input.name)?;
            let shape = if pair.same_dims {
                input.shape.clone()
            } else {
                wire_shape(
                    &pair.output,
                    self.batching,
                    &engine_shape(&pair.input, self.batching, &input.shape),
                )
            };
            Some(OutputTensor {
                name: pair.output.name.clone(),
                data_type: pair.output.data_type,
                shape,
                data: input.data.clone(),
            })
        });
        InferResponse { outputs: outputs.collect(), ..InferResponse::default() }
    }
}

impl ModelInstance for Instance {
    fn execute(&mut self, batch: &mut Batch) -> Result<()> {
        batch.inputs_ready();
        let done = self.delay.is_zero() || wait_for_batch(&mut batch.requests, self.delay);
        batch.outputs_start();
        for request in &mut batch.requests {
            let response = if done { Ok(self.answer(&request.request)) } else { Err(cancelled()) };
            request.answer(response);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use trireme_types::{DataType, Shape};

    use super::*;
    use crate::harness::{Client, input, load, run, run_batch, run_for, spec};

    fn tensors(inputs: Vec<TensorSpec>, outputs: Vec<TensorSpec>) -> ModelTensors {
        ModelTensors { max_batch_size: 8, inputs, outputs, ..ModelTensors::default() }
    }

    #[test]
    fn passes_the_bytes_on_without_a_copy() {
        let tensors = tensors(
            vec![spec("INPUT0", DataType::Fp32, &[-1]), spec("INPUT1", DataType::Bytes, &[1])],
            vec![spec("OUTPUT1", DataType::Bytes, &[1]), spec("OUTPUT0", DataType::Fp32, &[-1])],
        );
        let mut instance = load(&IdentityBackend, &[], tensors).expect("a valid model");
        let first = input("INPUT0", DataType::Fp32, &[1, 2], vec![1; 8]);
        let address = first.data.as_slice().as_ptr();
        let text = input("INPUT1", DataType::Bytes, &[1, 1], b"\x02\0\0\0ab".to_vec());
        let replies = run(instance.as_mut(), vec![first, text], &[]);
        let response = replies[0].as_ref().expect("an answer");
        let names: Vec<_> = response.outputs.iter().map(|o| &*o.name).collect();
        assert_eq!(names, ["OUTPUT1", "OUTPUT0"]);
        let output = response.output("OUTPUT0").expect("OUTPUT0");
        assert_eq!(output.data.as_slice().as_ptr(), address);
        assert_eq!(output.shape, Shape::new(&[1, 2]));
    }

    #[test]
    fn every_request_of_a_batch_gets_its_own() {
        let mut ragged = spec("INPUT0", DataType::Int8, &[-1]);
        ragged.ragged = true;
        let tensors = tensors(vec![ragged], vec![spec("OUTPUT0", DataType::Int8, &[-1])]);
        let mut instance = load(&IdentityBackend, &[], tensors).expect("a valid model");
        let requests = [1_u8, 4, 2].map(|length| {
            let data = vec![length; usize::from(length)];
            vec![input("INPUT0", DataType::Int8, &[1, i64::from(length)], data)]
        });
        let responses = run_batch(instance.as_mut(), requests.into());
        for (response, length) in responses.iter().zip([1_u8, 4, 2]) {
            let output = response.as_ref().expect("an answer").output("OUTPUT0").expect("OUTPUT0");
            assert_eq!(&*output.shape, &[1, i64::from(length)]);
            assert_eq!(output.data.as_slice(), vec![length; usize::from(length)]);
        }
    }

    #[test]
    fn leaves_out_what_was_not_given_or_not_asked_for() {
        let mut second = spec("INPUT1", DataType::Fp32, &[1]);
        second.optional = true;
        let tensors = tensors(
            vec![spec("INPUT0", DataType::Fp32, &[1]), second],
            vec![spec("OUTPUT0", DataType::Fp32, &[1]), spec("OUTPUT1", DataType::Fp32, &[1])],
        );
        let mut instance = load(&IdentityBackend, &[], tensors).expect("a valid model");
        let given = || input("INPUT0", DataType::Fp32, &[1, 1], vec![1; 4]);
        let absent = run(instance.as_mut(), vec![given()], &[]);
        assert_eq!(absent[0].as_ref().expect("an answer").outputs.len(), 1);
        let unwanted = run(instance.as_mut(), vec![given()], &["OUTPUT1"]);
        assert!(unwanted[0].as_ref().expect("an answer").outputs.is_empty());
    }

    #[test]
    fn reshapes_only_where_input_and_output_differ() {
        let mut scalar = spec("INPUT0", DataType::Int32, &[1]);
        scalar.reshape = Some(Shape::new(&[]));
        let mut same = spec("OUTPUT0", DataType::Int32, &[1]);
        same.reshape = Some(Shape::new(&[]));
        let mut square = spec("OUTPUT0", DataType::Int32, &[1, 1]);
        square.reshape = Some(Shape::new(&[]));
        for (output, expected) in [(same, &[3, 1][..]), (square, &[3, 1, 1])] {
            let mut instance = load(&IdentityBackend, &[], tensors(vec![scalar.clone()], vec![output]))
                .expect("a valid model");
            let replies =
                run(instance.as_mut(), vec![input("INPUT0", DataType::Int32, &[3, 1], vec![0; 12])], &[]);
            assert_eq!(&*replies[0].as_ref().expect("an answer").outputs[0].shape, expected);
        }
    }

    #[test]
    fn refuses_tensors_that_do_not_pair() {
        let fp32 = |name: &str| spec(name, DataType::Fp32, &[1]);
        for (inputs, outputs, message) in [
            (vec![fp32("X")], vec![fp32("OUTPUT0")], "to start with 'INPUT', got 'X'"),
            (vec![fp32("INPUT0")], vec![fp32("Y")], "to start with 'OUTPUT', got 'Y'"),
            (vec![fp32("INPUT0")], vec![fp32("OUTPUT1")], "needs an input 'INPUT1'"),
            (vec![fp32("INPUT0")], vec![], "got 1 input(s) and 0 output(s)"),
            (
                vec![fp32("INPUT0")],
                vec![spec("OUTPUT0", DataType::Int32, &[1])],
                "got TYPE_FP32 and TYPE_INT32",
            ),
            (vec![fp32("INPUT0")], vec![spec("OUTPUT0", DataType::Fp32, &[2])], "got [1] and [2]"),
        ] {
            let error = load(&IdentityBackend, &[], tensors(inputs, outputs)).err().expect("an error");
            assert!(error.message().contains(message), "{error}");
        }
    }

    #[test]
    fn delays_as_configured() {
        let tensors =
            tensors(vec![spec("INPUT0", DataType::Fp32, &[1])], vec![spec("OUTPUT0", DataType::Fp32, &[1])]);
        let parameters = [("execute_delay_ms", "30")];
        let mut instance = load(&IdentityBackend, &parameters, tensors.clone()).expect("a valid model");
        let start = std::time::Instant::now();
        run(instance.as_mut(), vec![input("INPUT0", DataType::Fp32, &[1, 1], vec![0; 4])], &[]);
        assert!(start.elapsed() >= Duration::from_millis(30));
        let bad = load(&IdentityBackend, &[("execute_delay_ms", "soon")], tensors).err().expect("an error");
        assert!(bad.message().contains("'soon'"), "{bad}");
    }

    #[test]
    fn a_delay_ends_when_no_client_is_left() {
        let tensors =
            tensors(vec![spec("INPUT0", DataType::Fp32, &[1])], vec![spec("OUTPUT0", DataType::Fp32, &[1])]);
        let mut instance =
            load(&IdentityBackend, &[("execute_delay_ms", "60000")], tensors).expect("a valid model");
        let client = Client::default();
        let leaving = client.clone();
        let leaver = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            leaving.leave();
        });
        let start = std::time::Instant::now();
        let inputs = vec![input("INPUT0", DataType::Fp32, &[1, 1], vec![0; 4])];
        let replies = run_for(&client, instance.as_mut(), inputs, &[]);
        leaver.join().expect("no panic");
        assert!(start.elapsed() < Duration::from_secs(30));
        let [(Some(Err(error)), true)] = &replies[..] else { panic!("expected one error, got {replies:?}") };
        assert_eq!(error.code(), trireme_types::Code::Cancelled);
    }
}
