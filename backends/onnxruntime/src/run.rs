//! One instance: gathers the requests of a batch, runs the session, and takes the outputs apart.
//!
//! A single request is read where it lies and its outputs are written where they stay: nothing is copied unless
//! elements are misaligned. The inputs of several requests are copied once, to one place; their outputs are parts of one
//! buffer that they share. Requests of a batch that do not fit together (other dimensions, other optional inputs) run one
//! after the other, so that batching never changes an answer.

use std::ffi::c_char;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ort_sys::OrtValue;
use smallvec::SmallVec;
use trireme_backend::ragged::{self, Piece};
use trireme_backend::{Batch, BatchRequest, ModelInstance, engine_shape, wire_shape};
use trireme_types::{
    Code, DataType, Error, HostBuffer, InferInput, InferRequest, InferResponse, OutputTensor, Result, Shape,
    TensorBuffer,
};

use crate::api::{Failure, INVALID_ARGUMENT, Outcome, RunOptions, Value, ort};
use crate::promise::{BatchInputPlan, Extent, InputPlan, OutputPlan, Plan};
use crate::session::Session;
use crate::value::{self, Strings};

/// Most bytes given to the engine for one output. Above, the engine makes the memory itself: it answers with an
/// error where there is none, and a shape that a client made up must not take memory from the process.
const MAX_BOUND: usize = 256 << 20;

/// An instance of a loaded model.
pub(crate) struct Instance {
    session: Arc<Session>,
    plan: Arc<Plan>,
    options: RunOptions,
}

/// What the engine is given for one input.
struct Feed {
    plan: usize,
    value: Value,
    shape: Shape,
}

/// Inputs of a run with the memory that they lie in, beside that of the requests.
#[derive(Default)]
struct Feeds {
    list: SmallVec<[Feed; 4]>,
    /// Addresses and lengths of the memory under the values.
    memory: SmallVec<[(usize, usize); 4]>,
    copies: SmallVec<[HostBuffer; 2]>,
}

/// An output of a run.
struct Fetched {
    plan: usize,
    /// Full shape as the engine made it.
    shape: Shape,
    data: Fetch,
    /// The part of each request in order, for outputs that are not cut by rows.
    pieces: Vec<Piece>,
}

/// Which part of a run belongs to a request.
struct Part {
    /// The request's place among those of the run.
    index: usize,
    rows: Range<usize>,
    /// Rows of the run.
    all: usize,
}

enum Fetch {
    Fixed(TensorBuffer),
    Text(Strings),
}

impl Instance {
    pub(crate) fn new(session: Arc<Session>, plan: Arc<Plan>) -> Result<Self> {
        let options = session.run_options()?;
        Ok(Self { session, plan, options })
    }

    /// Inputs of requests that fit together. `rows` counts the rows of all of them.
    fn feed(&self, requests: &[BatchRequest], rows: i64) -> Result<Feeds> {
        let mut feeds = Feeds::default();
        for (index, plan) in self.plan.inputs.iter().take(self.plan.from_requests).enumerate() {
            let Some(first) = requests.first().and_then(|request| request.request.input(&plan.name)) else {
                if plan.optional {
                    continue;
                }
                return Err(Error::invalid_arg(format!(
                    "input '{}' is missing, and model '{}' has no default for it",
                    plan.name, self.plan.model
                )));
            };
            let parts = || requests.iter().filter_map(|request| request.request.input(&plan.name));
            let mut shape = match plan.ragged {
                true => self.flat_shape(plan, parts())?,
                false => self.engine_shape(plan, first),
            };
            if requests.len() > 1
                && !plan.ragged
                && let Some(batch) = shape.first_mut()
            {
                *batch = rows;
            }
            let value = match plan.data_type {
                DataType::Bytes => {
                    let parts = parts().map(|input| input.data.as_slice());
                    value::strings(self.session.runtime, &plan.name, parts, &shape)?
                }
                _ => self.fixed(plan, parts(), first, &shape, &mut feeds)?,
            };
            feeds.list.push(Feed { plan: index, value, shape });
        }
        for plan in &self.plan.batch_inputs {
            self.feed_batch_input(plan, requests, &mut feeds)?;
        }
        Ok(feeds)
    }

    /// A tensor that tells of the shapes in the batch, for each input that gets it.
    fn feed_batch_input(
        &self,
        plan: &BatchInputPlan,
        requests: &[BatchRequest],
        feeds: &mut Feeds,
    ) -> Result<()> {
        let shapes = self.shapes_of(plan.source, requests)?;
        let (shape, mut data) = plan.made.build(shapes.iter().map(|shape| &**shape))?;
        let (place, len) = (data.as_mut_slice().as_mut_ptr(), data.len());
        for target in plan.targets.clone() {
            // SAFETY: the memory is that of `data`, which stays in place when it is moved and is kept in `feeds` with
            // the values; it is aligned to 8 bytes. The engine only reads inputs.
            let value =
                unsafe { value::over(self.session.runtime, place, len, &shape, plan.made.data_type) }?;
            feeds.list.push(Feed { plan: target, value, shape: shape.clone() });
        }
        feeds.memory.push((place.addr(), len));
        feeds.copies.push(data);
        Ok(())
    }

    /// Shapes of one input in the requests of a batch, as the engine would see each alone.
    fn shapes_of(&self, input: usize, requests: &[BatchRequest]) -> Result<SmallVec<[Shape; 4]>> {
        let plan = self.plan.inputs.get(input).ok_or_else(|| Error::internal("an input without a plan"))?;
        let shapes = requests.iter().map(|request| match request.request.input(&plan.name) {
            Some(input) => Ok(self.engine_shape(plan, input)),
            None => Err(Error::invalid_arg(format!(
                "input '{}' of model '{}' is missing, and batch inputs or outputs take their shape from it",
                plan.name, self.plan.model
            ))),
        });
        shapes.collect()
    }

    /// All elements of all requests in one dimension.
    fn flat_shape<'a>(
        &self,
        plan: &InputPlan,
        mut parts: impl Iterator<Item = &'a InferInput>,
    ) -> Result<Shape> {
        let total = parts.try_fold(0_usize, |total, input| {
            input.shape.element_count().ok().and_then(|count| total.checked_add(count))
        });
        let total = total.and_then(|total| i64::try_from(total).ok()).ok_or_else(|| {
            Error::invalid_arg(format!(
                "the inputs '{}' of this batch of model '{}' have too many elements together",
                plan.name, self.plan.model
            ))
        })?;
        Ok(Shape::new(&[total]))
    }

    /// A tensor of fixed-size elements: over the request's own bytes, or over a copy of those of all requests.
    fn fixed<'a>(
        &self,
        plan: &InputPlan,
        parts: impl Iterator<Item = &'a InferInput> + Clone,
        first: &InferInput,
        shape: &Shape,
        feeds: &mut Feeds,
    ) -> Result<Value> {
        let given: usize = parts.clone().map(|input| input.data.len()).sum();
        let expected = shape.byte_size(plan.data_type);
        if expected != Ok(Some(given)) {
            return Err(Error::invalid_arg(format!(
                "input '{}' of model '{}' has {given} bytes, which is not what {} of shape {shape} takes",
                plan.name, self.plan.model, plan.data_type
            )));
        }
        let bytes = first.data.as_slice();
        let (data, len) = if bytes.len() == given && value::is_readable_in_place(bytes, plan.data_type) {
            (bytes.as_ptr().cast_mut(), bytes.len())
        } else {
            let mut copy = HostBuffer::zeroed(given);
            let mut rest = copy.as_mut_slice();
            for input in parts {
                let bytes = input.data.as_slice();
                let (place, tail) = rest.split_at_mut_checked(bytes.len()).unwrap_or_default();
                value::copy_elements(bytes, place, plan.data_type);
                rest = tail;
            }
            let place = (copy.as_mut_slice().as_mut_ptr(), given);
            feeds.copies.push(copy);
            place
        };
        feeds.memory.push((data.addr(), len));
        // SAFETY: the memory is that of a request, which outlives the run, or of a copy kept in `feeds` with its
        // value; elements are aligned. The engine only reads inputs, so the constant bytes stay what they are.
        Ok(unsafe { value::over(self.session.runtime, data, len, shape, plan.data_type) }?)
    }

    fn engine_shape(&self, plan: &InputPlan, input: &InferInput) -> Shape {
        match &plan.spec {
            _ if plan.scalar => Shape::default(),
            Some(spec) => engine_shape(spec, self.plan.batching, &input.shape),
            None => input.shape.clone(),
        }
    }

    /// Runs the session and fetches the outputs that `wanted` names by their place in the plan.
    fn run(&self, feeds: &Feeds, rows: i64, wanted: &[usize]) -> Outcome<SmallVec<[Fetched; 4]>> {
        match self.run_bound(feeds, rows, wanted, true) {
            // Some models declare other shapes than they make; then the memory given to the engine does not fit,
            // and it makes its own.
            Err((failure, true)) if failure.message.contains("shape") => {
                let fetched = self.run_bound(feeds, rows, wanted, false).map_err(|(failure, _)| failure)?;
                for output in &fetched {
                    if let Some(plan) = self.plan.outputs.get(output.plan)
                        && predicted(plan, feeds, rows).is_some_and(|shape| shape != output.shape)
                    {
                        plan.bind.store(false, Ordering::Relaxed);
                    }
                }
                Ok(fetched)
            }
            result => result.map_err(|(failure, _)| failure),
        }
    }

    /// One call of the engine. The error says whether memory was given for any output.
    fn run_bound(
        &self,
        feeds: &Feeds,
        rows: i64,
        wanted: &[usize],
        bind: bool,
    ) -> Result<SmallVec<[Fetched; 4]>, (Failure, bool)> {
        let runtime = self.session.runtime;
        let mut bound: SmallVec<[Option<(Value, Shape, HostBuffer)>; 4]> = SmallVec::new();
        let mut output_names: SmallVec<[*const c_char; 4]> = SmallVec::new();
        for &index in wanted {
            let Some(plan) = self.plan.outputs.get(index) else { continue };
            output_names.push(plan.c_name.as_ptr());
            let place = match bind && plan.bind.load(Ordering::Relaxed) {
                true => prepare(runtime, plan, feeds, rows).map_err(|failure| (failure, false))?,
                false => None,
            };
            bound.push(place);
        }
        let any_bound = bound.iter().any(Option::is_some);
        let plans = feeds.list.iter().filter_map(|feed| self.plan.inputs.get(feed.plan));
        let input_names: SmallVec<[*const c_char; 4]> = plans.map(|plan| plan.c_name.as_ptr()).collect();
        let inputs: SmallVec<[*const OrtValue; 4]> =
            feeds.list.iter().map(|feed| feed.value.as_ptr().cast_const()).collect();
        let mut outputs: SmallVec<[*mut OrtValue; 4]> = bound
            .iter()
            .map(|place| place.as_ref().map_or(std::ptr::null_mut(), |(value, _, _)| value.as_ptr()))
            .collect();
        // SAFETY: session, options and values are alive. Names and values are arrays of one length each. Where an
        // output is null the engine makes a value that is taken below; elsewhere it writes into memory of ours
        // that `bound` keeps.
        let ran = unsafe {
            ort!(
                runtime.api,
                Run,
                self.session.handle.as_ptr(),
                self.options.as_ptr(),
                input_names.as_ptr(),
                inputs.as_ptr(),
                inputs.len(),
                output_names.as_ptr(),
                output_names.len(),
                outputs.as_mut_ptr(),
            )
        };
        // What the engine made is ours from here on, whatever happens.
        let made: SmallVec<[Option<Value>; 4]> = bound
            .iter()
            .zip(&outputs)
            .map(|(place, &pointer)| match place {
                Some(_) => None,
                None => Value::create(runtime.api, |out| {
                    // SAFETY: `out` is the place that `create` reads the handle from.
                    unsafe { *out = pointer };
                    Ok(())
                })
                .ok(),
            })
            .collect();
        ran.map_err(|failure| (failure, any_bound))?;
        let fetched = wanted.iter().zip(bound.into_iter().zip(made)).map(|(&plan, (place, value))| {
            if let Some((value, shape, buffer)) = place {
                drop(value);
                let data = Fetch::Fixed(buffer.into());
                return Ok(Fetched { plan, shape, data, pieces: Vec::new() });
            }
            let value =
                value.ok_or_else(|| Failure { code: 1, message: "an output was not made".to_owned() })?;
            self.fetch(plan, value, &feeds.memory)
        });
        fetched.collect::<Outcome<_>>().map_err(|failure| (failure, false))
    }

    fn fetch(&self, plan: usize, value: Value, ours: &[(usize, usize)]) -> Outcome<Fetched> {
        let shape = value::shape_of(&value)?;
        let data_type = self.plan.outputs.get(plan).map_or(DataType::Bytes, |output| output.spec.data_type);
        let data = match data_type {
            DataType::Bytes => Fetch::Text(Strings::read(&value, &shape)?),
            _ => Fetch::Fixed(value::read(&self.session, value, &shape, data_type, ours)?),
        };
        Ok(Fetched { plan, shape, data, pieces: Vec::new() })
    }

    /// Finds the pieces of outputs that are scattered by the shapes of an input.
    fn scatter(&self, fetched: &mut [Fetched], requests: &[BatchRequest]) -> Result<()> {
        for output in fetched {
            let Some(plan) = self.plan.outputs.get(output.plan) else { continue };
            let Some(source) = plan.scattered_by else { continue };
            let shapes = self.shapes_of(source, requests)?;
            let elements = output.shape.element_count().map_err(|error| {
                Error::internal(format!(
                    "output '{}' has the shape {}: {error}",
                    plan.spec.name, output.shape
                ))
            })?;
            let shapes = shapes.iter().map(|shape| &**shape);
            output.pieces = ragged::scatter(&plan.spec, self.plan.batching, shapes, elements)?;
        }
        Ok(())
    }

    /// A piece of a scattered output, as the client sees it.
    fn piece(&self, fetched: &Fetched, plan: &OutputPlan, index: usize) -> Result<OutputTensor> {
        let piece = fetched.pieces.get(index).ok_or_else(|| Error::internal("a request without a piece"))?;
        let data = match &fetched.data {
            Fetch::Fixed(data) => {
                let size = plan.spec.data_type.byte_size().unwrap_or(1);
                data.slice(piece.elements.start * size..piece.elements.end * size)
            }
            Fetch::Text(text) => text.encode(piece.elements.clone())?,
        };
        let shape = wire_shape(&plan.spec, self.plan.batching, &piece.shape);
        Ok(OutputTensor { name: plan.spec.name.clone(), data_type: plan.spec.data_type, shape, data })
    }

    /// The part of an output that belongs to some rows, as the client sees it.
    fn part(&self, fetched: &Fetched, plan: &OutputPlan, part: &Part) -> Result<OutputTensor> {
        let (rows, all) = (part.rows.clone(), part.all);
        let promised = || {
            let dims = &plan.spec.dims;
            if self.plan.batching { Shape::with_leading(-1, dims) } else { dims.clone() }
        };
        let wrong = |what: &str| {
            Error::internal(format!(
                "output '{}' of model '{}' has the shape {}, {what}; the configuration promises {}",
                plan.spec.name,
                self.plan.model,
                fetched.shape,
                promised()
            ))
        };
        let mut shape = fetched.shape.clone();
        if self.plan.batching {
            match shape.first_mut() {
                Some(batch) if usize::try_from(*batch) == Ok(all) => {
                    *batch = i64::try_from(rows.len()).unwrap_or(i64::MAX);
                }
                _ => return Err(wrong(&format!("which is not one row for each of the {all} in the batch"))),
            }
        }
        let count = |shape: &Shape| shape.element_count().map_err(|error| wrong(&error.to_string()));
        let data = match &fetched.data {
            Fetch::Fixed(data) if rows.len() == all => data.clone(),
            Fetch::Fixed(data) => {
                let row = data.len() / all.max(1);
                data.slice(rows.start * row..rows.end * row)
            }
            Fetch::Text(text) => {
                let elements = if rows.len() == all {
                    0..count(&fetched.shape)?
                } else {
                    let row = count(&fetched.shape)? / all.max(1);
                    rows.start * row..rows.end * row
                };
                text.encode(elements)?
            }
        };
        let shape = self.client_shape(plan, shape, &wrong)?;
        Ok(OutputTensor { name: plan.spec.name.clone(), data_type: plan.spec.data_type, shape, data })
    }

    /// The shape that the configuration gives to what the engine made.
    fn client_shape(&self, plan: &OutputPlan, engine: Shape, wrong: &dyn Fn(&str) -> Error) -> Result<Shape> {
        let skip = usize::from(self.plan.batching);
        let dims = engine.get(skip..).unwrap_or_default();
        if plan.spec.engine_dims().accepts(dims) {
            return Ok(wire_shape(&plan.spec, self.plan.batching, &engine));
        }
        if plan.spec.reshape.is_some() {
            return Err(wrong("which cannot be reshaped"));
        }
        // A scalar goes out as one element, because the configuration cannot say "scalar" without a batch.
        if engine.is_empty() && plan.spec.dims.iter().all(|&dim| dim == 1 || dim == -1) {
            return Ok(plan.spec.dims.iter().map(|_| 1).collect());
        }
        // Triton answers with what the model made, and so must we: clients read the shape in the answer.
        if !plan.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "{}; correct the configuration's dims",
                wrong("which is not what was promised").message()
            );
        }
        Ok(engine)
    }

    /// Runs requests that fit together and answers each.
    fn run_group(&self, batch: &mut Batch, group: Range<usize>, is_first: bool) -> Result<()> {
        let requests = batch.requests.get(group.clone()).unwrap_or_default();
        let rows: usize = requests.iter().map(|request| request.request.batch_size).sum();
        let batch_rows =
            i64::try_from(rows).map_err(|_| Error::invalid_arg("the batch has too many rows"))?;
        let wants = |plan: &OutputPlan| {
            plan.always || requests.iter().any(|request| request.request.wants(&plan.spec.name))
        };
        let outputs = self.plan.outputs.iter().enumerate();
        let wanted: SmallVec<[usize; 8]> =
            outputs.filter(|(_, plan)| wants(plan)).map(|(index, _)| index).collect();
        let feeds = self.feed(requests, batch_rows)?;
        if is_first {
            batch.inputs_ready();
        }
        let mut fetched = match wanted.is_empty() {
            true => SmallVec::new(),
            false => self.run(&feeds, batch_rows, &wanted).map_err(|failure| self.refused(&failure))?,
        };
        batch.outputs_start();
        self.scatter(&mut fetched, batch.requests.get(group.clone()).unwrap_or_default())?;
        let mut next = 0;
        for (index, request) in batch.requests.get_mut(group).unwrap_or_default().iter_mut().enumerate() {
            let part = Part { index, rows: next..next + request.request.batch_size, all: rows };
            next = part.rows.end;
            let answer = self.answer(&request.request, &fetched, &part);
            request.answer(answer);
        }
        Ok(())
    }

    fn answer(&self, request: &InferRequest, fetched: &[Fetched], part: &Part) -> Result<InferResponse> {
        let mut response = InferResponse::default();
        for output in fetched {
            let Some(plan) = self.plan.outputs.get(output.plan) else { continue };
            if plan.always || request.wants(&plan.spec.name) {
                response.outputs.push(match plan.scattered_by {
                    Some(_) => self.piece(output, plan, part.index)?,
                    None => self.part(output, plan, part)?,
                });
            }
        }
        Ok(response)
    }

    /// An error of the engine in a run: the client's fault if the engine says that an argument was wrong.
    fn refused(&self, failure: &Failure) -> Error {
        let code = if failure.code == INVALID_ARGUMENT { Code::InvalidArg } else { Code::Internal };
        Error::new(code, format!("{}, in model '{}'", failure.text(), self.plan.model))
    }

    /// Whether two requests may be rows of one run.
    fn fits(&self, a: &InferRequest, b: &InferRequest) -> bool {
        self.plan.batching
            && self.plan.inputs.iter().take(self.plan.from_requests).all(|plan| {
                match (a.input(&plan.name), b.input(&plan.name)) {
                    (Some(a), Some(b)) => plan.ragged || a.shape.get(1..) == b.shape.get(1..),
                    (None, None) => true,
                    _ => false,
                }
            })
    }

    /// End of the group that begins at `start`.
    fn group_end(&self, requests: &[BatchRequest], start: usize) -> usize {
        let mut rest = requests.iter().skip(start);
        let Some(first) = rest.next() else { return start };
        let same = rest.take_while(|next| !next.is_answered() && self.fits(&first.request, &next.request));
        start + 1 + same.count()
    }
}

impl ModelInstance for Instance {
    fn execute(&mut self, batch: &mut Batch) -> Result<()> {
        for request in &mut batch.requests {
            if request.is_cancelled() {
                request.answer(Err(Error::new(Code::Cancelled, "the client cancelled the request")));
            }
        }
        let mut start = 0;
        let mut is_first = true;
        while let Some(request) = batch.requests.get(start) {
            if request.is_answered() {
                start += 1;
                continue;
            }
            let end = self.group_end(&batch.requests, start);
            if let Err(error) = self.run_group(batch, start..end, is_first) {
                for request in batch.requests.get_mut(start..end).unwrap_or_default() {
                    request.answer(Err(error.clone()));
                }
            }
            is_first = false;
            start = end;
        }
        Ok(())
    }
}

/// Shape of an output before the run, if it can be known.
fn predicted(plan: &OutputPlan, feeds: &Feeds, rows: i64) -> Option<Shape> {
    let extents = plan.extents.as_ref()?.iter().map(|extent| match *extent {
        Extent::Fixed(dim) => Some(dim),
        Extent::Rows => Some(rows),
        Extent::OfInput { input, axis } => {
            feeds.list.iter().find(|feed| feed.plan == input).and_then(|feed| feed.shape.get(axis).copied())
        }
    });
    extents.collect()
}

/// Memory for an output whose shape is known, and a value over it.
fn prepare(
    runtime: &'static crate::runtime::Runtime,
    plan: &OutputPlan,
    feeds: &Feeds,
    rows: i64,
) -> Outcome<Option<(Value, Shape, HostBuffer)>> {
    let Some(shape) = predicted(plan, feeds, rows) else { return Ok(None) };
    // A size that does not fit is the engine's to refuse.
    let Ok(Some(size @ ..=MAX_BOUND)) = shape.byte_size(plan.spec.data_type) else { return Ok(None) };
    let mut buffer = HostBuffer::zeroed(size);
    let data = buffer.as_mut_slice().as_mut_ptr();
    // SAFETY: the memory is the buffer's, aligned for every type, and stays in place when the buffer is moved; it is
    // kept beside the value.
    let value = unsafe { value::over(runtime, data, size, &shape, plan.spec.data_type) }?;
    Ok(Some((value, shape, buffer)))
}
