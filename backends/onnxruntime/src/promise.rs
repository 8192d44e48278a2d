//! The configuration's promise beside what the session really has: checked once at load, and laid out so that a run
//! has nothing left to look up.
//!
//! Error texts follow Triton's backend where it has one.

use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use trireme_backend::ModelTensors;
use trireme_types::{DataType, Error, Result, Shape, TensorSpec};

use crate::session::{Session, TensorInfo};

/// What a run feeds and fetches.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) model: Arc<str>,
    /// Every tensor has a batch dimension in front.
    pub(crate) batching: bool,
    pub(crate) inputs: Vec<InputPlan>,
    pub(crate) outputs: Vec<OutputPlan>,
}

#[derive(Debug)]
pub(crate) struct InputPlan {
    pub(crate) name: Arc<str>,
    pub(crate) c_name: CString,
    pub(crate) data_type: DataType,
    /// `None` for inputs that the server adds itself.
    pub(crate) spec: Option<TensorSpec>,
    /// The engine takes a scalar where clients send one element.
    pub(crate) scalar: bool,
    /// A request may leave it out, because an initializer stands in.
    pub(crate) optional: bool,
}

#[derive(Debug)]
pub(crate) struct OutputPlan {
    pub(crate) spec: TensorSpec,
    pub(crate) c_name: CString,
    /// The dimensions, if they are known before a run.
    pub(crate) extents: Option<Vec<Extent>>,
    /// Whether memory is given to the engine; off once the engine made another shape than the model declares.
    pub(crate) bind: AtomicBool,
    /// That the shape is not the promised one has been said.
    pub(crate) warned: AtomicBool,
}

/// One dimension of an output, before the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    Fixed(i64),
    /// Rows of all requests together.
    Rows,
    /// The dimension of that input, which has the same name in the model.
    OfInput {
        input: usize,
        axis: usize,
    },
}

impl Plan {
    /// # Errors
    /// INVALID_ARG: names, types or dimensions that the session does not have; UNSUPPORTED: ragged batches.
    pub(crate) fn new(model: &Arc<str>, session: &Session, tensors: &ModelTensors) -> Result<Self> {
        let batching = tensors.max_batch_size > 0;
        let check = Check { model, batching };
        let mut inputs = Vec::with_capacity(tensors.inputs.len() + tensors.injected.len());
        for spec in &tensors.inputs {
            let info = check.find(&spec.name, "input", &session.inputs)?;
            let scalar = check.tensor(spec, info, false)?;
            if spec.ragged {
                return Err(Error::unsupported(format!(
                    "input '{}' of model '{model}' sets allow_ragged_batch, which the backend 'onnxruntime' does not \
                     serve; remove it, so that only requests of one shape are batched",
                    spec.name
                )));
            }
            inputs.push(InputPlan {
                name: spec.name.clone(),
                c_name: info.c_name.clone(),
                data_type: spec.data_type,
                spec: Some(spec.clone()),
                scalar,
                optional: info.optional,
            });
        }
        for (name, data_type) in &tensors.injected {
            let info = check.find(name, "input", &session.inputs)?;
            check.data_type(name, *data_type, info)?;
            let scalar = !batching && info.shape.as_ref().is_some_and(|shape| shape.is_empty());
            inputs.push(InputPlan {
                name: name.clone(),
                c_name: info.c_name.clone(),
                data_type: *data_type,
                spec: None,
                scalar,
                optional: info.optional,
            });
        }
        check.nothing_missing(session, &inputs)?;
        let mut outputs = Vec::with_capacity(tensors.outputs.len());
        for spec in &tensors.outputs {
            if let Some(unsupported) = session.unsupported.iter().find(|output| output.name == *spec.name) {
                return Err(Error::unsupported(format!(
                    "output '{}' of model '{model}' is {}, which the protocol cannot carry; remove it from the \
                     configuration",
                    spec.name, unsupported.what
                )));
            }
            let info = check.find(&spec.name, "output", &session.outputs)?;
            check.tensor(spec, info, true)?;
            outputs.push(OutputPlan {
                spec: spec.clone(),
                c_name: info.c_name.clone(),
                extents: extents(info, batching, &inputs, session),
                bind: AtomicBool::new(true),
                warned: AtomicBool::new(false),
            });
        }
        Ok(Self { model: model.clone(), batching, inputs, outputs })
    }
}

struct Check<'a> {
    model: &'a str,
    batching: bool,
}

impl Check<'_> {
    fn find<'t>(&self, name: &str, side: &str, infos: &'t [TensorInfo]) -> Result<&'t TensorInfo> {
        infos.iter().find(|info| info.name == name).ok_or_else(|| {
            let allowed: Vec<_> = infos.iter().map(|info| info.name.as_str()).collect();
            Error::invalid_arg(format!(
                "unexpected inference {side} '{name}', allowed {side}s are: {}",
                allowed.join(", ")
            ))
        })
    }

    fn data_type(&self, name: &str, data_type: DataType, info: &TensorInfo) -> Result<()> {
        if data_type == info.data_type {
            return Ok(());
        }
        Err(Error::invalid_arg(format!(
            "unable to load model '{}', unexpected datatype {} for tensor '{name}', the model has {}",
            self.model,
            data_type.config_name(),
            info.data_type.config_name()
        )))
    }

    /// Compares type and dimensions; gives whether the engine has a scalar where the configuration has one element.
    /// An open dimension of an output promises less than the fixed one of the model, and is kept.
    fn tensor(&self, spec: &TensorSpec, info: &TensorInfo, is_output: bool) -> Result<bool> {
        self.data_type(&spec.name, spec.data_type, info)?;
        // Without a shape in the model there is nothing to compare before the first run.
        let Some(shape) = &info.shape else { return Ok(false) };
        let start = format!("model '{}', tensor '{}': ", self.model, spec.name);
        if self.batching {
            if shape.first() != Some(&-1) {
                return Err(Error::invalid_arg(format!(
                    "{start}for the model to support batching the shape should have at least 1 dimension and the \
                     first dimension must be -1; but shape expected by the model is {shape}; set max_batch_size: 0 \
                     to serve it without batching"
                )));
            }
        } else if shape.is_empty() && spec.reshape.is_none() && spec.dims.iter().all(|&dim| dim == 1) {
            return Ok(true);
        }
        let full = match self.batching {
            true => Shape::with_leading(-1, spec.engine_dims()),
            false => spec.engine_dims().clone(),
        };
        let agree = |has: i64, says: i64| has == -1 || has == says || (is_output && says == -1);
        let differing = shape.iter().zip(full.iter()).position(|(&has, &says)| !agree(has, says));
        if shape.len() == full.len() && differing.is_none() {
            return Ok(false);
        }
        let how = match self.batching {
            true => format!(
                " (an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, \
                 making complete shape {full})"
            ),
            false => format!(" (shape {full})"),
        };
        let hint = match differing {
            Some(axis) if shape.len() == full.len() => {
                format!(
                    "; dimension {axis} is {} in the model and {} in the configuration",
                    shape.get(axis).copied().unwrap_or(0),
                    full.get(axis).copied().unwrap_or(0)
                )
            }
            _ => String::new(),
        };
        Err(Error::invalid_arg(format!(
            "{start}the model expects {} dimensions (shape {shape}) but the model configuration specifies {} \
             dimensions{how}{hint}",
            shape.len(),
            full.len()
        )))
    }

    /// The configuration leaves no input out that the model cannot do without.
    fn nothing_missing(&self, session: &Session, inputs: &[InputPlan]) -> Result<()> {
        let is_given = |info: &TensorInfo| inputs.iter().any(|input| *input.name == *info.name);
        let required = || session.inputs.iter().filter(|info| !info.optional);
        let missing: Vec<_> =
            required().filter(|info| !is_given(info)).map(|info| format!("'{}'", info.name)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(Error::invalid_arg(format!(
            "unable to load model '{}', configuration expects {} inputs, model provides {}; the configuration lacks {}",
            self.model,
            inputs.len(),
            required().count(),
            missing.join(", ")
        )))
    }
}

fn extents(
    info: &TensorInfo,
    batching: bool,
    inputs: &[InputPlan],
    session: &Session,
) -> Option<Vec<Extent>> {
    let shape = info.shape.as_ref()?;
    // The engine makes strings itself.
    info.data_type.byte_size()?;
    let dims = shape.iter().enumerate().map(|(axis, &dim)| {
        if batching && axis == 0 {
            return Some(Extent::Rows);
        }
        if dim >= 0 {
            return Some(Extent::Fixed(dim));
        }
        let symbol = info.symbols.get(axis).filter(|symbol| !symbol.is_empty())?;
        inputs.iter().enumerate().find_map(|(input, plan)| {
            let info = session.inputs.iter().find(|info| info.name == *plan.name && !info.optional)?;
            let axis = info.symbols.iter().position(|name| name == symbol)?;
            Some(Extent::OfInput { input, axis })
        })
    });
    dims.collect()
}
