//! The configuration's promise beside what the session really has: checked once at load, and laid out so that a run
//! has nothing left to look up.
//!
//! Error texts follow Triton's backend where it has one.

use std::ffi::CString;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use trireme_backend::ModelTensors;
use trireme_backend::ragged::{BatchInput, BatchInputKind};
use trireme_types::{DataType, Error, Result, Shape, TensorSpec};

use crate::session::{Session, TensorInfo};

/// What a run feeds and fetches.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) model: Arc<str>,
    /// Every tensor has a batch dimension in front.
    pub(crate) batching: bool,
    /// First those that come with requests, then those that are made from the batch.
    pub(crate) inputs: Vec<InputPlan>,
    /// How many of `inputs` come with requests.
    pub(crate) from_requests: usize,
    pub(crate) batch_inputs: Vec<BatchInputPlan>,
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
    /// Requests may differ in shape: the engine gets their elements one after the other in one dimension.
    pub(crate) ragged: bool,
}

/// A tensor made from the shapes of a batch.
#[derive(Debug)]
pub(crate) struct BatchInputPlan {
    pub(crate) made: BatchInput,
    /// Place of the input that it tells of.
    pub(crate) source: usize,
    /// Places of the inputs that get it.
    pub(crate) targets: Range<usize>,
}

#[derive(Debug)]
pub(crate) struct OutputPlan {
    pub(crate) spec: TensorSpec,
    pub(crate) c_name: CString,
    /// Place of the input whose shapes cut the output into the pieces of the requests; `None`: rows do.
    pub(crate) scattered_by: Option<usize>,
    /// Every response has it, whether the client asked or not.
    pub(crate) always: bool,
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
    /// INVALID_ARG: names, types or dimensions that the session does not have.
    pub(crate) fn new(model: &Arc<str>, session: &Session, tensors: &ModelTensors) -> Result<Self> {
        let batching = tensors.max_batch_size > 0;
        let check = Check { model, batching };
        let mut inputs = Vec::with_capacity(tensors.inputs.len() + tensors.injected.len());
        for spec in &tensors.inputs {
            let info = check.find(&spec.name, "input", &session.inputs)?;
            let scalar = match spec.ragged {
                true => check.ragged(spec, info).map(|()| false)?,
                false => check.tensor(spec, info, false)?,
            };
            inputs.push(InputPlan {
                name: spec.name.clone(),
                c_name: info.c_name.clone(),
                data_type: spec.data_type,
                spec: Some(spec.clone()),
                scalar,
                optional: info.optional,
                ragged: spec.ragged,
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
                ragged: false,
            });
        }
        let from_requests = inputs.len();
        let batch_inputs = check.batch_inputs(session, tensors, &mut inputs)?;
        check.nothing_missing(session, &inputs)?;
        let mut plan =
            Self { model: model.clone(), batching, inputs, from_requests, batch_inputs, outputs: Vec::new() };
        for spec in &tensors.outputs {
            let output = plan.output(spec, session, tensors)?;
            plan.outputs.push(output);
        }
        for state in &tensors.states {
            match plan.outputs.iter_mut().find(|output| output.spec.name == state.name) {
                Some(output) => output.always = true,
                None => {
                    let output = plan.output(state, session, tensors)?;
                    plan.outputs.push(OutputPlan { always: true, ..output });
                }
            }
        }
        Ok(plan)
    }

    fn output(&self, spec: &TensorSpec, session: &Session, tensors: &ModelTensors) -> Result<OutputPlan> {
        let model = &self.model;
        if let Some(unsupported) = session.unsupported.iter().find(|output| output.name == *spec.name) {
            return Err(Error::unsupported(format!(
                "output '{}' of model '{model}' is {}, which the protocol cannot carry; remove it from the \
                 configuration",
                spec.name, unsupported.what
            )));
        }
        let check = Check { model, batching: self.batching };
        let info = check.find(&spec.name, "output", &session.outputs)?;
        let scattered = tensors.batch_outputs.iter().find(|output| output.targets.contains(&spec.name));
        let scattered_by = match scattered {
            Some(output) => Some(check.source(&output.source, &spec.name, &self.inputs)?),
            None => None,
        };
        match scattered_by {
            // The flat output need not have the shape that clients see.
            Some(_) => check.data_type(&spec.name, spec.data_type, info)?,
            None => check.tensor(spec, info, true).map(|_| ())?,
        }
        // What is ragged has no rows in front.
        let has_rows =
            self.batching && scattered_by.is_none() && !self.inputs.iter().any(|input| input.ragged);
        Ok(OutputPlan {
            spec: spec.clone(),
            c_name: info.c_name.clone(),
            scattered_by,
            always: false,
            extents: extents(info, has_rows, &self.inputs, session),
            bind: AtomicBool::new(true),
            warned: AtomicBool::new(false),
        })
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

    /// A ragged input is flat in the model.
    fn ragged(&self, spec: &TensorSpec, info: &TensorInfo) -> Result<()> {
        self.data_type(&spec.name, spec.data_type, info)?;
        let expects = format!(
            "unable to load model '{}', configuration expects model provides input with shape [-1] for ragged input '{}'",
            self.model, spec.name
        );
        if spec.optional || info.optional {
            return Err(Error::invalid_arg(format!("{expects}, which is not supported for optional input")));
        }
        match &info.shape {
            Some(shape) if shape[..] != [-1] => Err(Error::invalid_arg(format!(
                "{expects}, model provides {shape}; export the model with one flat open dimension, or remove \
                 allow_ragged_batch"
            ))),
            _ => Ok(()),
        }
    }

    /// Checks the inputs that are made from batches and appends them to `inputs`.
    fn batch_inputs(
        &self,
        session: &Session,
        tensors: &ModelTensors,
        inputs: &mut Vec<InputPlan>,
    ) -> Result<Vec<BatchInputPlan>> {
        let mut plans = Vec::with_capacity(tensors.batch_inputs.len());
        for made in &tensors.batch_inputs {
            let start = inputs.len();
            for target in &made.targets {
                if inputs.iter().any(|input| input.name == *target) {
                    return Err(Error::invalid_arg(format!(
                        "batch input '{target}' of model '{}' is given twice; the server makes it, so list it as \
                         target_name of one batch_input and not in 'input'",
                        self.model
                    )));
                }
                let info = self.find(target, "input", &session.inputs)?;
                self.data_type(target, made.data_type, info)?;
                self.batch_input_shape(made, info)?;
                inputs.push(InputPlan {
                    name: target.clone(),
                    c_name: info.c_name.clone(),
                    data_type: made.data_type,
                    spec: None,
                    scalar: false,
                    optional: false,
                    ragged: false,
                });
            }
            let names = made.targets.iter().map(|target| &**target).collect::<Vec<_>>().join(", ");
            let source = self.source(&made.source, &names, inputs)?;
            plans.push(BatchInputPlan { made: made.clone(), source, targets: start..inputs.len() });
        }
        Ok(plans)
    }

    /// Whether the model can take a batch input of that kind in any batch.
    fn batch_input_shape(&self, made: &BatchInput, info: &TensorInfo) -> Result<()> {
        let Some(shape) = &info.shape else { return Ok(()) };
        let (wanted, fits) = match made.kind {
            BatchInputKind::ItemShape => {
                ("[-1,-1], a row for each item of the batch", shape.len() == 2 && shape.first() == Some(&-1))
            }
            _ => ("[-1]", shape[..] == [-1]),
        };
        if fits {
            return Ok(());
        }
        Err(Error::invalid_arg(format!(
            "unable to load model '{}', batch input '{}' has the shape {wanted}, model provides {shape}; export the \
             model with that shape, or choose another kind of batch_input",
            self.model, info.name
        )))
    }

    /// Place of the input that a batch input or output takes its shapes from.
    fn source(&self, source: &str, target: &str, inputs: &[InputPlan]) -> Result<usize> {
        inputs.iter().position(|input| input.spec.is_some() && *input.name == *source).ok_or_else(|| {
            Error::invalid_arg(format!(
                "model '{}': '{target}' takes its shape from the input '{source}', which clients do not send; name an \
                 input of the configuration as source_input",
                self.model
            ))
        })
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
    has_rows: bool,
    inputs: &[InputPlan],
    session: &Session,
) -> Option<Vec<Extent>> {
    let shape = info.shape.as_ref()?;
    // The engine makes strings itself.
    info.data_type.byte_size()?;
    let dims = shape.iter().enumerate().map(|(axis, &dim)| {
        if has_rows && axis == 0 {
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
