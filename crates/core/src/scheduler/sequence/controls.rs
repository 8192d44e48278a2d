//! The control inputs of a sequence model: START, END, READY and CORRID, made once and handed out.
//!
//! # Shapes
//! `[1, 1]` for a model with a batch dimension, else `[1]`. Source: `CreateBooleanControlTensors` in Triton's
//! `sequence_batch_scheduler.cc`.

use std::sync::Arc;

use trireme_proto::inference;
use trireme_proto::inference::ModelSequenceBatching;
use trireme_proto::inference::model_sequence_batching::Control;
use trireme_proto::inference::model_sequence_batching::control::Kind;
use trireme_types::{CorrelationId, DataType, Error, InferInput, Result, Shape, TensorBuffer};

use super::table::Name;

/// Where a request stands in its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Signals {
    pub(super) start: bool,
    pub(super) end: bool,
    pub(super) ready: bool,
}

/// A row without a request.
pub(super) const NOT_READY: Signals = Signals { start: false, end: false, ready: false };

/// START, END or READY.
#[derive(Clone, Debug)]
struct Switch {
    name: Arc<str>,
    kind: Kind,
    data_type: DataType,
    no: TensorBuffer,
    yes: TensorBuffer,
}

/// The control inputs of one model.
#[derive(Clone, Debug)]
pub(super) struct Controls {
    shape: Shape,
    switches: Vec<Switch>,
    /// Name and type of CORRID.
    corrid: Option<(Arc<str>, DataType)>,
}

impl Controls {
    /// Takes over a configuration that has been validated.
    pub(super) fn new(batching: &ModelSequenceBatching, has_batch: bool) -> Self {
        let shape = if has_batch { Shape::new(&[1, 1]) } else { Shape::new(&[1]) };
        let mut controls = Self { shape, switches: Vec::new(), corrid: None };
        for input in &batching.control_input {
            let name: Arc<str> = Arc::from(input.name.as_str());
            for control in &input.control {
                match Kind::try_from(control.kind) {
                    Ok(Kind::ControlSequenceCorrid) => {
                        let number = inference::DataType::try_from(control.data_type);
                        controls.corrid = number.ok().and_then(corrid_type).map(|kind| (name.clone(), kind));
                    }
                    Ok(kind) => controls.switches.extend(Switch::new(&name, kind, control)),
                    Err(_) => {}
                }
            }
        }
        controls
    }

    /// Names and types of the inputs that requests get.
    pub(super) fn inputs(&self) -> impl Iterator<Item = (Arc<str>, DataType)> + '_ {
        let switches = self.switches.iter().map(|switch| (switch.name.clone(), switch.data_type));
        switches.chain(self.corrid.clone())
    }

    /// The inputs for one request.
    ///
    /// # Errors
    /// The id does not fit the data type of CORRID.
    pub(super) fn of(&self, id: &CorrelationId, signals: Signals) -> Result<Vec<InferInput>> {
        let input = |name: &Arc<str>, data_type, data| InferInput {
            name: name.clone(),
            data_type,
            shape: self.shape.clone(),
            data,
        };
        let mut inputs = Vec::with_capacity(self.switches.len() + 1);
        for switch in &self.switches {
            let is_on = match switch.kind {
                Kind::ControlSequenceStart => signals.start,
                Kind::ControlSequenceEnd => signals.end,
                _ => signals.ready,
            };
            let data = if is_on { &switch.yes } else { &switch.no };
            inputs.push(input(&switch.name, switch.data_type, data.clone()));
        }
        if let Some((name, data_type)) = &self.corrid {
            inputs.push(input(name, *data_type, corrid(id, *data_type)?));
        }
        Ok(inputs)
    }
}

impl Switch {
    fn new(name: &Arc<str>, kind: Kind, control: &Control) -> Option<Self> {
        let (data_type, no, yes) = if let [no, yes] = control.int32_false_true[..] {
            (DataType::Int32, no.to_le_bytes().to_vec(), yes.to_le_bytes().to_vec())
        } else if let [no, yes] = control.fp32_false_true[..] {
            (DataType::Fp32, no.to_le_bytes().to_vec(), yes.to_le_bytes().to_vec())
        } else if let [no, yes] = control.bool_false_true[..] {
            (DataType::Bool, vec![u8::from(no)], vec![u8::from(yes)])
        } else {
            return None;
        };
        Some(Self { name: name.clone(), kind, data_type, no: no.into(), yes: yes.into() })
    }
}

fn corrid_type(data_type: inference::DataType) -> Option<DataType> {
    match data_type {
        inference::DataType::TypeUint64 => Some(DataType::Uint64),
        inference::DataType::TypeInt64 => Some(DataType::Int64),
        inference::DataType::TypeUint32 => Some(DataType::Uint32),
        inference::DataType::TypeInt32 => Some(DataType::Int32),
        inference::DataType::TypeString => Some(DataType::Bytes),
        _ => None,
    }
}

/// The bytes of CORRID. A number keeps its bits in a signed type; a string type gets its digits.
fn corrid(id: &CorrelationId, data_type: DataType) -> Result<TensorBuffer> {
    let number = match id {
        CorrelationId::None => 0,
        CorrelationId::Number(number) => *number,
        CorrelationId::Text(_) => 0,
    };
    let bytes = match (data_type, id) {
        (DataType::Bytes, CorrelationId::None) => 0_u32.to_le_bytes().to_vec(),
        (DataType::Bytes, id) => {
            let text = Name(id).to_string();
            let length = u32::try_from(text.len()).map_err(|_| too_large(id, data_type))?;
            [&length.to_le_bytes(), text.as_bytes()].concat()
        }
        (_, CorrelationId::Text(text)) => {
            return Err(Error::invalid_arg(format!(
                "correlation ID in request is not an unsigned int, got the string '{text}'; the model takes numbers, \
                 because its control input for CORRID is no TYPE_STRING"
            )));
        }
        (DataType::Uint32 | DataType::Int32, id) => {
            u32::try_from(number).map_err(|_| too_large(id, data_type))?.to_le_bytes().to_vec()
        }
        _ => number.to_le_bytes().to_vec(),
    };
    Ok(bytes.into())
}

fn too_large(id: &CorrelationId, data_type: DataType) -> Error {
    Error::invalid_arg(format!(
        "correlation ID {} does not fit the model's control input for CORRID, which is {}",
        Name(id),
        data_type.config_name()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn controls(text: &str, max_batch_size: i32) -> Controls {
        let text = format!("name: 'm' backend: 'b' sequence_batching {{ {text} }}");
        let config = trireme_config::parse_pbtxt(text.as_bytes(), "c").expect("a configuration").config;
        let Some(inference::model_config::SchedulingChoice::SequenceBatching(batching)) =
            config.scheduling_choice
        else {
            panic!("sequence batching was asked for");
        };
        Controls::new(&batching, max_batch_size > 0)
    }

    fn bytes(inputs: &[InferInput], name: &str) -> Vec<u8> {
        inputs.iter().find(|input| &*input.name == name).expect(name).data.as_slice().to_vec()
    }

    #[test]
    fn the_pairs_say_what_true_and_false_are() {
        let controls = controls(
            "control_input { name: 'S' control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 7, -1 ] } }
             control_input { name: 'E' control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0.5, 2 ] } }
             control_input { name: 'R' control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ true, false ] } }",
            4,
        );
        let on = controls
            .of(&CorrelationId::Number(3), Signals { start: true, end: false, ready: true })
            .expect("fits");
        assert_eq!(bytes(&on, "S"), (-1_i32).to_le_bytes());
        assert_eq!(bytes(&on, "E"), 0.5_f32.to_le_bytes());
        assert_eq!(bytes(&on, "R"), [0]);
        assert!(on.iter().all(|input| *input.shape == [1, 1]));
        let off = controls.of(&CorrelationId::None, NOT_READY).expect("fits");
        assert_eq!((bytes(&off, "S"), bytes(&off, "R")), (7_i32.to_le_bytes().to_vec(), vec![1]));
        let types: Vec<_> =
            controls.inputs().map(|(name, data_type)| (name.to_string(), data_type)).collect();
        let expected = [("S", DataType::Int32), ("E", DataType::Fp32), ("R", DataType::Bool)];
        assert_eq!(types, expected.map(|(name, data_type)| (name.to_owned(), data_type)));
    }

    #[test]
    fn ids_take_the_type_of_the_control() {
        let id = |data_type: &str, id: CorrelationId| {
            let text = format!(
                "control_input {{ name: 'C' control {{ kind: CONTROL_SEQUENCE_CORRID data_type: {data_type} }} }}"
            );
            let inputs = controls(&text, 0).of(&id, NOT_READY)?;
            assert_eq!(*inputs[0].shape, [1]);
            Ok::<_, Error>(bytes(&inputs, "C"))
        };
        let number = CorrelationId::Number;
        let text = || CorrelationId::Text("ab".into());
        assert_eq!(id("TYPE_UINT64", number(u64::MAX)), Ok(vec![255; 8]));
        assert_eq!(id("TYPE_INT64", number(u64::MAX)), Ok(vec![255; 8]));
        assert_eq!(id("TYPE_UINT32", number(7)), Ok(vec![7, 0, 0, 0]));
        assert_eq!(id("TYPE_STRING", text()), Ok(vec![2, 0, 0, 0, b'a', b'b']));
        assert_eq!(id("TYPE_STRING", number(12)), Ok(vec![2, 0, 0, 0, b'1', b'2']));
        let error = id("TYPE_INT32", number(1 << 32)).expect_err("too large");
        assert!(error.message().contains("correlation ID 4294967296 does not fit"), "{error}");
        let error = id("TYPE_UINT64", text()).expect_err("no number");
        assert!(error.message().starts_with("correlation ID in request is not an unsigned int"), "{error}");
    }
}
