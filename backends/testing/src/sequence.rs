//! `sequence`: a stateful model that adds up the numbers of each sequence.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use trireme_backend::{
    Backend, Batch, BatchRequest, InstanceContext, Model, ModelContext, ModelInstance, ModelTensors,
    OpenModel,
};
use trireme_types::{
    DataType, Error, InferInput, InferRequest, InferResponse, ModelReport, OutputTensor, Result, Shape,
};

use crate::parameter::number;

/// Longest delay that a configuration may ask for, milliseconds.
const MAX_DELAY_MS: u64 = 60 * 60 * 1000;

/// In the spirit of Triton's sample backend `sequence`.
///
/// The sum of a sequence is kept by its CORRID, or by its row in the batch if the model has no such control. It starts at
/// 0 with START, and is forgotten with END. Rows that are not READY add nothing.
///
/// # Shapes
/// `INPUT` INT32 of any shape -> `OUTPUT` INT32 of the same shape, the sum so far in every element. If the
/// configuration has it, `ACTIVE` INT32 `[1]` is the number of sums that the instance keeps.
///
/// Parameters: `execute_delay_ms` (length of an execution), `reschedule_count` (for iterative sequences: executions of a
/// request before it is answered; 1 if not set).
#[derive(Clone, Copy, Debug, Default)]
pub struct SequenceBackend;

impl Backend for SequenceBackend {
    fn name(&self) -> &str {
        "sequence"
    }

    fn default_model_filename(&self) -> Option<&str> {
        None
    }

    fn open(&self, context: &ModelContext) -> Result<Box<dyn OpenModel>> {
        Ok(Box::new(Opened {
            name: context.name.clone(),
            delay: Duration::from_millis(number(context, "execute_delay_ms", MAX_DELAY_MS)?),
            rounds: number(context, "reschedule_count", u32::MAX.into())?.max(1),
        }))
    }
}

#[derive(Debug)]
struct Opened {
    name: Arc<str>,
    delay: Duration,
    rounds: u64,
}

impl OpenModel for Opened {
    fn report(&self) -> Result<Option<ModelReport>> {
        Ok(None)
    }

    fn load(self: Box<Self>, tensors: ModelTensors) -> Result<Arc<dyn Model>> {
        let refuse = |text: &str| {
            Err(Error::invalid_arg(format!("model '{}' on backend 'sequence': {text}", self.name)))
        };
        let is_int32 = |spec: &trireme_types::TensorSpec| spec.data_type == DataType::Int32;
        if !tensors.input("INPUT").is_some_and(is_int32) || !tensors.output("OUTPUT").is_some_and(is_int32) {
            return refuse("expected an input 'INPUT' and an output 'OUTPUT' of TYPE_INT32");
        }
        if !tensors.injected.iter().any(|(name, _)| &**name == "START") {
            return refuse("expected sequence_batching with a control input 'START'");
        }
        Ok(Arc::new(Sums {
            delay: self.delay,
            rounds: self.rounds,
            has_batch: tensors.max_batch_size > 0,
            tells_active: tensors.output("ACTIVE").is_some_and(is_int32),
        }))
    }
}

#[derive(Clone, Copy)]
struct Sums {
    delay: Duration,
    rounds: u64,
    has_batch: bool,
    tells_active: bool,
}

impl Model for Sums {
    fn instance(&self, _: &InstanceContext) -> Result<Box<dyn ModelInstance>> {
        let names = ["OUTPUT".into(), "ACTIVE".into()];
        Ok(Box::new(Instance { sums: *self, names, kept: HashMap::new() }))
    }
}

/// What a sum is kept by: the bytes of CORRID, or the row.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Owner {
    Id(Vec<u8>),
    Row(usize),
}

#[derive(Clone, Copy, Default)]
struct Sum {
    value: i32,
    rounds: u64,
}

struct Instance {
    sums: Sums,
    names: [Arc<str>; 2],
    kept: HashMap<Owner, Sum>,
}

/// Whether a control input is there and not zero.
fn is_on(request: &InferRequest, name: &str) -> Option<bool> {
    request.input(name).map(|input| input.data.as_slice().iter().any(|byte| *byte != 0))
}

fn total(input: &InferInput) -> i32 {
    let words = input.data.as_slice().chunks_exact(4);
    let values = words.filter_map(|word| word.try_into().ok()).map(i32::from_le_bytes);
    values.fold(0, i32::wrapping_add)
}

impl Instance {
    /// Adds one row; `None` if the request shall run again.
    fn add(&mut self, row: usize, request: &InferRequest) -> Result<Option<InferResponse>> {
        let input = request.input("INPUT").ok_or_else(|| Error::invalid_arg("input 'INPUT' is missing"))?;
        let owner = match request.input("CORRID") {
            Some(id) => Owner::Id(id.data.as_slice().to_vec()),
            None => Owner::Row(row),
        };
        if is_on(request, "START") == Some(true) {
            self.kept.insert(owner.clone(), Sum::default());
        }
        let sum = self.kept.entry(owner.clone()).or_default();
        sum.value = sum.value.wrapping_add(total(input));
        sum.rounds += 1;
        let Sum { value, rounds } = *sum;
        if rounds % self.sums.rounds != 0 {
            return Ok(None);
        }
        if is_on(request, "END") == Some(true) || self.sums.rounds > 1 {
            self.kept.remove(&owner);
        }
        let elements = input.data.len() / 4;
        let mut response = InferResponse::default();
        let [output, active] = &self.names;
        if request.wants(output) {
            response.outputs.push(OutputTensor {
                name: output.clone(),
                data_type: DataType::Int32,
                shape: input.shape.clone(),
                data: value.to_le_bytes().repeat(elements).into(),
            });
        }
        if self.sums.tells_active && request.wants(active) {
            let count = i32::try_from(self.kept.len()).unwrap_or(i32::MAX);
            response.outputs.push(OutputTensor {
                name: active.clone(),
                data_type: DataType::Int32,
                shape: if self.sums.has_batch { Shape::new(&[1, 1]) } else { Shape::new(&[1]) },
                data: count.to_le_bytes().to_vec().into(),
            });
        }
        Ok(Some(response))
    }

    fn serve(&mut self, row: usize, request: &mut BatchRequest) {
        if is_on(&request.request, "READY") == Some(false) {
            request.answer(Ok(InferResponse::default()));
            return;
        }
        match self.add(row, &request.request) {
            Ok(Some(response)) => request.answer(Ok(response)),
            Ok(None) => request.reschedule(),
            Err(error) => request.answer(Err(error)),
        }
    }
}

impl ModelInstance for Instance {
    fn execute(&mut self, batch: &mut Batch) -> Result<()> {
        batch.inputs_ready();
        if !self.sums.delay.is_zero() {
            std::thread::sleep(self.sums.delay);
        }
        batch.outputs_start();
        let mut row = 0;
        for request in &mut batch.requests {
            self.serve(row, request);
            row += request.request.batch_size;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{input, load, run, spec};

    fn tensors(injected: &[&str]) -> ModelTensors {
        ModelTensors {
            max_batch_size: 4,
            inputs: vec![spec("INPUT", DataType::Int32, &[1])],
            outputs: vec![spec("OUTPUT", DataType::Int32, &[1]), spec("ACTIVE", DataType::Int32, &[1])],
            injected: injected.iter().map(|name| ((*name).into(), DataType::Int32)).collect(),
            ..ModelTensors::default()
        }
    }

    /// Sums and numbers of sums after each request; a request is its value and the controls that are on.
    fn sums(instance: &mut dyn ModelInstance, requests: &[(i32, &[(&str, i32)])]) -> Vec<(i32, i32)> {
        let run_one = |(value, controls): &(i32, &[(&str, i32)])| {
            let tensor =
                |name: &str, value: i32| input(name, DataType::Int32, &[1, 1], value.to_le_bytes().to_vec());
            let inputs = std::iter::once(tensor("INPUT", *value));
            let inputs = inputs.chain(controls.iter().map(|(name, value)| tensor(name, *value)));
            let answer = run(instance, inputs.collect(), &[]).remove(0).expect("an answer");
            let value = |name: &str| total_of(&answer, name);
            (value("OUTPUT"), value("ACTIVE"))
        };
        requests.iter().map(run_one).collect()
    }

    fn total_of(answer: &InferResponse, name: &str) -> i32 {
        let data = answer.output(name).expect("the output").data.as_slice();
        i32::from_le_bytes(data.try_into().expect("one element"))
    }

    #[test]
    fn adds_up_by_id_and_forgets_at_the_end() {
        let mut instance = load(&SequenceBackend, &[], tensors(&["START", "END", "CORRID"])).expect("loads");
        let got = sums(
            instance.as_mut(),
            &[
                (5, &[("START", 1), ("END", 0), ("CORRID", 1)]),
                (7, &[("START", 1), ("END", 0), ("CORRID", 2)]),
                (6, &[("START", 0), ("END", 0), ("CORRID", 1)]),
                (1, &[("START", 0), ("END", 1), ("CORRID", 1)]),
                (1, &[("START", 1), ("END", 1), ("CORRID", 2)]),
            ],
        );
        assert_eq!(got, [(5, 1), (7, 2), (11, 2), (12, 1), (1, 0)]);
    }

    #[test]
    fn a_model_that_cannot_know_where_sequences_start_is_refused() {
        let error = load(&SequenceBackend, &[], tensors(&["READY"])).err().expect("refused");
        assert!(error.message().contains("a control input 'START'"), "{error}");
    }
}
