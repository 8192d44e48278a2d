//! Implicit state: what a model gives out of one request of a sequence and gets back with the next.
//!
//! A state is an output of the model that the server keeps for the sequence and sends in as an input. Its shape is what
//! the model makes of it, so a state may grow from request to request.
//!
//! # Shapes
//! `[1, dims...]` for a model with a batch dimension, else `dims`. Before the first request an open dimension is 1, or
//! what `initial_state` says. Source: `SequenceStates::Initialize` and `GenerateInitialStateData` in Triton.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use trireme_proto::inference::ModelSequenceBatching;
use trireme_proto::inference::model_sequence_batching::State;
use trireme_proto::inference::model_sequence_batching::initial_state::StateData;
use trireme_types::{
    DataType, Error, HostBuffer, InferInput, InferResponse, OutputTensor, Result, Shape, TensorBuffer,
    TensorSpec,
};

use super::table::Form;

/// Folder of a model with the files that `initial_state` names.
const FOLDER: &str = "initial_state";

/// Most bytes of one state before the first request.
const MAX_INITIAL_BYTES: usize = 1 << 30;

/// One state of a model.
#[derive(Clone, Debug)]
struct Kept {
    input: Arc<str>,
    /// The output that it comes from.
    output: TensorSpec,
    /// Value before the first request.
    initial: Value,
    /// Clients may ask for the output as well.
    is_output: bool,
}

#[derive(Clone, Debug)]
struct Value {
    shape: Shape,
    data: TensorBuffer,
}

/// The states of one model.
#[derive(Clone, Debug, Default)]
pub(super) struct States {
    has_batch: bool,
    model: Arc<str>,
    kept: Vec<Kept>,
}

/// The states of one sequence.
#[derive(Debug, Default)]
pub(super) struct Memory {
    remembered: Mutex<Remembered>,
    /// An instance has a request of the sequence.
    is_running: AtomicBool,
}

#[derive(Debug, Default)]
struct Remembered {
    /// In the order of the model's states; empty before the first request.
    values: Vec<Value>,
    is_cancelled: bool,
}

impl States {
    /// Takes over the states of a configuration and reads their initial values.
    ///
    /// # Errors
    /// A state without a name, type or dimensions that can be kept, or an initial value that does not fit it.
    pub(super) fn new(
        model: &Arc<str>,
        batching: &ModelSequenceBatching,
        has_batch: bool,
        outputs: &[TensorSpec],
        model_dir: &Path,
    ) -> Result<Self> {
        let mut states = Self { has_batch, model: model.clone(), kept: Vec::new() };
        for state in &batching.state {
            let refuse = |what: &str| {
                Err(Error::invalid_arg(format!(
                    "state with the input '{}' and the output '{}' of model '{model}': {what}",
                    state.input_name, state.output_name
                )))
            };
            if state.input_name.is_empty() || state.output_name.is_empty() {
                return refuse("expected both an input_name and an output_name");
            }
            if states
                .kept
                .iter()
                .any(|kept| *kept.input == *state.input_name || *kept.output.name == *state.output_name)
            {
                return refuse("one of the names is that of another state");
            }
            let Some(data_type) = DataType::from_config_number(state.data_type) else {
                return refuse("expected a data_type");
            };
            if state.dims.iter().any(|dim| *dim < -1 || *dim == 0) {
                return refuse("dims must be integers >= 1, or -1 to indicate a variable-size dimension");
            }
            if state.use_growable_memory && !state.use_same_buffer_for_input_output {
                return refuse(
                    "in order to 'use_growable_memory', you must also enable 'use_same_buffer_for_input_output'",
                );
            }
            let listed = outputs.iter().find(|output| *output.name == *state.output_name);
            let output = TensorSpec::new(state.output_name.as_str(), data_type, Shape::new(&state.dims));
            if listed.is_some_and(|listed| listed.data_type != data_type) {
                return refuse("its data_type is not that of the output of the same name");
            }
            if listed.is_some_and(|listed| listed.reshape.is_some()) {
                return refuse("the output of the same name must not have a reshape");
            }
            states.kept.push(Kept {
                input: Arc::from(state.input_name.as_str()),
                initial: initial(state, data_type, has_batch, model_dir)?,
                is_output: listed.is_some(),
                output,
            });
        }
        Ok(states)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Names and types of the inputs that requests get.
    pub(super) fn inputs(&self) -> impl Iterator<Item = (Arc<str>, DataType)> + '_ {
        self.kept.iter().map(|kept| (kept.input.clone(), kept.output.data_type))
    }

    /// The outputs that every response must have.
    pub(super) fn outputs(&self) -> Vec<TensorSpec> {
        self.kept.iter().map(|kept| kept.output.clone()).collect()
    }

    /// Form of the states before the first request.
    pub(super) fn initial_form(&self) -> Form {
        self.kept.iter().flat_map(|kept| words(&kept.initial.shape)).collect()
    }

    /// The inputs for the next request of a sequence.
    pub(super) fn of(&self, memory: &Memory, start: bool) -> Vec<InferInput> {
        if self.is_empty() {
            return Vec::new();
        }
        let mut remembered = memory.remembered.lock();
        if start || remembered.values.is_empty() {
            remembered.values = self.kept.iter().map(|kept| kept.initial.clone()).collect();
        }
        let pairs = self.kept.iter().zip(&remembered.values);
        let input = |(kept, value): (&Kept, &Value)| InferInput {
            name: kept.input.clone(),
            data_type: kept.output.data_type,
            shape: value.shape.clone(),
            data: value.data.clone(),
        };
        pairs.map(input).collect()
    }

    /// Takes the states out of a response and keeps them. `copy`: the response is part of a larger batch, whose memory
    /// must not live as long as the sequence. `wants` says which outputs the client asked for.
    ///
    /// # Errors
    /// A state has not the dimensions that the configuration promises.
    pub(super) fn keep(
        &self,
        memory: &Memory,
        response: &mut InferResponse,
        copy: bool,
        wants: impl Fn(&str) -> bool,
    ) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let mut remembered = memory.remembered.lock();
        for (place, kept) in self.kept.iter().enumerate() {
            let Some(at) = response.outputs.iter().position(|output| output.name == kept.output.name) else {
                continue;
            };
            let Some(value) = response.outputs.get(at).map(|output| self.value(kept, output, copy)) else {
                continue;
            };
            if !(kept.is_output && wants(&kept.output.name)) {
                response.outputs.remove(at);
            }
            let value = value?;
            if let Some(known) = remembered.values.get_mut(place) {
                *known = value;
            }
        }
        Ok(())
    }

    fn value(&self, kept: &Kept, output: &OutputTensor, copy: bool) -> Result<Value> {
        let dims = output.shape.get(usize::from(self.has_batch)..).unwrap_or_default();
        let is_row = !self.has_batch || output.shape.first() == Some(&1);
        if !is_row || !kept.output.dims.accepts(dims) || output.data_type != kept.output.data_type {
            let expected = match self.has_batch {
                true => Shape::with_leading(1, &kept.output.dims),
                false => kept.output.dims.clone(),
            };
            return Err(Error::internal(format!(
                "state output '{}' of model '{}' is {} of shape {}, expected {} of shape {expected}",
                kept.output.name, self.model, output.data_type, output.shape, kept.output.data_type
            )));
        }
        let data = if copy {
            let mut buffer = HostBuffer::zeroed(output.data.len());
            buffer.as_mut_slice().copy_from_slice(output.data.as_slice());
            buffer.into()
        } else {
            output.data.clone()
        };
        Ok(Value { shape: output.shape.clone(), data })
    }
}

impl Memory {
    /// Marks that a request of the sequence was cancelled while an instance had it.
    pub(super) fn cancel(&self) {
        self.remembered.lock().is_cancelled = true;
    }

    /// Marks that an instance has a request of the sequence.
    pub(super) fn begin(&self) {
        self.is_running.store(true, Ordering::Release);
    }

    pub(super) fn is_running(&self) -> bool {
        self.is_running.load(Ordering::Acquire)
    }

    /// The instance has run the request: form of the states now, or `None` if a request was cancelled since this was asked last.
    pub(super) fn outcome(&self) -> Option<Form> {
        self.is_running.store(false, Ordering::Release);
        let mut remembered = self.remembered.lock();
        if std::mem::take(&mut remembered.is_cancelled) {
            return None;
        }
        Some(remembered.values.iter().flat_map(|value| words(&value.shape)).collect())
    }
}

/// Dimensions behind their number, so that shapes in a row can be told apart.
fn words(shape: &Shape) -> impl Iterator<Item = i64> + '_ {
    std::iter::once(i64::try_from(shape.len()).unwrap_or(i64::MAX)).chain(shape.iter().copied())
}

/// The value of a state before the first request of a sequence.
fn initial(state: &State, data_type: DataType, has_batch: bool, model_dir: &Path) -> Result<Value> {
    let name = &state.input_name;
    let refuse = |what: String| Err(Error::invalid_arg(what));
    let given = match &state.initial_state[..] {
        [] => None,
        [given] => Some(given),
        more => {
            return refuse(format!(
                "initial_state field for state input '{name}' must contain exactly one or zero element. Found '{}' \
                 elements.",
                more.len()
            ));
        }
    };
    let mut dims: Vec<i64> = state.dims.iter().map(|dim| if *dim < 0 { 1 } else { *dim }).collect();
    if let Some(given) = given {
        if given.data_type != state.data_type {
            return refuse(format!(
                "The data type used for 'initial_state' field of state '{name}' does not match the state data type."
            ));
        }
        if given.name.is_empty() {
            return refuse(format!(
                "Field 'name' must be set when using initial_state for state input '{name}'."
            ));
        }
        if given.dims.len() != state.dims.len() {
            return refuse(format!(
                "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input \
                 '{name}'. {} != {}",
                given.dims.len(),
                state.dims.len()
            ));
        }
        for (dim, promised) in given.dims.iter().zip(&state.dims) {
            if *dim < 0 {
                return refuse(format!(
                    "'initial_state' field for state input name '{name}' contains variable dimensions."
                ));
            }
            if *promised >= 0 && dim != promised {
                return refuse(format!(
                    "'initial_state' dim for input name '{name}' doesn't match 'state' dim description. {dim} != \
                     {promised}"
                ));
            }
        }
        dims.clone_from(&given.dims);
    }
    let shape: Shape = has_batch.then_some(1).into_iter().chain(dims).collect();
    // An element of BYTES is its length at least.
    let element = data_type.byte_size().unwrap_or(4);
    let size = shape.element_count().ok().and_then(|count| count.checked_mul(element));
    let Some(size) = size.filter(|size| *size <= MAX_INITIAL_BYTES) else {
        return refuse(format!(
            "the initial value of state input '{name}' has the shape {shape}, which takes more than {MAX_INITIAL_BYTES} \
             bytes"
        ));
    };
    let data = match given.map(|given| (&given.state_data, &given.name)) {
        None | Some((Some(StateData::ZeroData(_)), _)) => HostBuffer::zeroed(size).into(),
        Some((Some(StateData::DataFile(file)), _)) => read(name, file, data_type, size, model_dir)?,
        Some((None, _)) => {
            return refuse(format!(
                "initial_state setting expects state'{name}' to have state_data set: zero_data or data_file"
            ));
        }
    };
    Ok(Value { shape, data })
}

/// The bytes of an initial value from its file, which must be in the model's folder for them.
fn read(state: &str, file: &str, data_type: DataType, size: usize, model_dir: &Path) -> Result<TensorBuffer> {
    let refuse = |what: String| Error::invalid_arg(what);
    let path = model_dir.join(FOLDER).join(file);
    let is_inside = Path::new(file).components().all(|part| matches!(part, std::path::Component::Normal(_)));
    if !is_inside {
        return Err(refuse(format!(
            "initial_state of state input '{state}' names the file '{file}', which is not in the model's folder \
             '{FOLDER}'"
        )));
    }
    let length = fs_err::metadata(&path).map(|metadata| metadata.len());
    let length = length.map_err(|error| {
        refuse(format!("cannot read the initial value of state input '{state}': {error}"))
    })?;
    if length > MAX_INITIAL_BYTES as u64 {
        return Err(refuse(format!(
            "the initial value of state input '{state}' in '{file}' has {length} bytes, the most is {MAX_INITIAL_BYTES}"
        )));
    }
    let bytes = fs_err::read(&path).map_err(|error| {
        refuse(format!("cannot read the initial value of state input '{state}': {error}"))
    })?;
    if data_type == DataType::Bytes {
        return Ok(bytes.into());
    }
    let Some(bytes) = bytes.get(..size) else {
        return Err(refuse(format!(
            "initial_state setting expects {size} bytes, but the data provided from {file} only has {} bytes.",
            bytes.len()
        )));
    };
    let mut buffer = HostBuffer::zeroed(size);
    buffer.as_mut_slice().copy_from_slice(bytes);
    Ok(buffer.into())
}

#[cfg(test)]
mod tests;
