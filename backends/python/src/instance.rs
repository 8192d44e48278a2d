//! Runs batches in the worker process of one instance.

use std::sync::Arc;
use std::time::Duration;

use trireme_backend::{Batch, ModelInstance, engine_shape};
use trireme_types::{Error, InferRequest, Result, Shape};

use crate::message::{Execute, SentRequest, SentTensor, correlation, parameters};
use crate::promise::{Promise, Wanted};
use crate::supervisor::Supervisor;
use crate::worker::{ClientLeft, Done, Held, Worker};

/// Inputs of a batch that are smaller together travel in the message, larger ones in a region.
const INLINE_LIMIT: usize = 32 * 1024;
const ALIGNMENT: usize = 64;

const SEQUENCE_START: u64 = 1;
const SEQUENCE_END: u64 = 2;

pub(crate) struct Instance {
    pub(crate) name: String,
    pub(crate) supervisor: Arc<Supervisor>,
    pub(crate) promise: Arc<Promise>,
    pub(crate) limit: Option<Duration>,
    pub(crate) next: u64,
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.supervisor.stop();
    }
}

impl ModelInstance for Instance {
    fn execute(&mut self, batch: &mut Batch) -> Result<()> {
        let worker = self.supervisor.worker()?;
        let first = self.next;
        self.next += u64::try_from(batch.requests.len()).unwrap_or(0);
        self.send(&worker, batch, first)?;
        let done = worker.wait(self.limit);
        batch.outputs_start();
        let done = match done {
            Ok(done) => done,
            Err(error) => {
                // What the worker held has been answered by then; the batch answers the rest.
                return Err(error);
            }
        };
        self.supervisor.has_worked();
        self.answer(&worker, batch, first, done)
    }

    fn is_ready(&self) -> bool {
        self.supervisor.is_ready()
    }
}

/// Where each input lies, and how much room all of them take.
struct Layout {
    shapes: Vec<Vec<Shape>>,
    size: usize,
}

impl Instance {
    fn layout(&self, batch: &Batch) -> Result<Layout> {
        let tensors = &self.promise.tensors;
        let batching = tensors.max_batch_size > 0;
        let mut size = 0_usize;
        let shapes = batch.requests.iter().map(|each| {
            let inputs = each.request.inputs.iter().map(|input| {
                let room = input.data.len().checked_next_multiple_of(ALIGNMENT);
                size = room.and_then(|room| size.checked_add(room)).ok_or_else(|| {
                    Error::invalid_arg("the inputs of this batch are larger than the address space")
                })?;
                Ok(match tensors.input(&input.name) {
                    Some(spec) => engine_shape(spec, batching, &input.shape),
                    None => input.shape.clone(),
                })
            });
            inputs.collect::<Result<Vec<_>>>()
        });
        Ok(Layout { shapes: shapes.collect::<Result<_>>()?, size })
    }

    /// Sends the batch; the worker holds its requests from then on.
    fn send(&self, worker: &Worker, batch: &mut Batch, first: u64) -> Result<()> {
        let layout = self.layout(batch)?;
        let (mut region, mut fd, mut inline) = (None, None, Vec::new());
        let mut gone = Vec::new();
        if layout.size > INLINE_LIMIT {
            let mut regions = worker.inputs.lock();
            let (mut taken, new) = regions.take(layout.size).map_err(|error| {
                Error::unavailable(format!("no memory for {} bytes of inputs: {error}", layout.size))
            })?;
            gone = std::mem::take(&mut regions.gone);
            drop(regions);
            write(batch, taken.bytes_mut());
            region = Some((taken.number, taken.len()));
            fd = new;
            worker.inputs.lock().lend(taken);
        } else {
            inline.resize(layout.size, 0);
            write(batch, &mut inline);
        }
        batch.inputs_ready();

        let mut offset = 0_usize;
        let requests = batch.requests.iter().zip(&layout.shapes).zip(first..).map(|((each, shapes), key)| {
            let inputs = each.request.inputs.iter().zip(shapes).map(|(input, shape)| {
                let (start, size) = (offset, input.data.len());
                offset += size.next_multiple_of(ALIGNMENT);
                SentTensor(&input.name, input.data_type.config_number(), shape, start, size)
            });
            let inputs = inputs.collect();
            self.request(&each.request, key, inputs)
        });
        let message = Execute {
            op: "execute",
            r: requests.collect(),
            input: region.map(|(number, _)| number),
            region: region.filter(|_| fd.is_some()),
            free: worker.outputs.take_released(),
            gone,
        };
        let text = serde_json::to_vec(&message)
            .map_err(|error| Error::internal(format!("a batch cannot be written down: {error}")))?;

        let decoupled = self.promise.decoupled;
        let held = batch.requests.iter_mut().zip(first..).map(|(each, key)| {
            let left = Arc::new(ClientLeft::default());
            if !decoupled {
                each.watch_closed(&left.waker());
            }
            let wanted = Wanted::of(&each.request);
            let responder = if decoupled { each.take_responder() } else { None };
            (key, Held::new(wanted, responder, left))
        });
        worker.hold(held)?;
        worker.send(&text, &inline, fd.as_ref())
    }

    fn request<'a>(
        &'a self,
        request: &'a InferRequest,
        key: u64,
        inputs: Vec<SentTensor<'a>>,
    ) -> SentRequest<'a> {
        let sequence = &request.sequence;
        let asked = request.outputs.iter().map(|output| &*output.name);
        let all = self.promise.tensors.outputs.iter().map(|output| &*output.name);
        SentRequest {
            k: key,
            id: &request.id,
            c: correlation(&sequence.id),
            f: if sequence.start { SEQUENCE_START } else { 0 } | if sequence.end { SEQUENCE_END } else { 0 },
            t: request.timeout_us,
            p: parameters(&request.parameters),
            o: if request.outputs.is_empty() { all.collect() } else { asked.collect() },
            i: inputs,
        }
    }

    fn answer(&self, worker: &Worker, batch: &mut Batch, first: u64, done: Done) -> Result<()> {
        let keyed = (first..).zip(&mut batch.requests);
        if let Err(error) = done.result {
            let text = format!(
                "Failed to process the request(s) for model instance '{}', message: {}",
                self.name,
                error.message()
            );
            let error = Error::new(error.code(), text);
            for (key, each) in keyed {
                match worker.release(key) {
                    (Some(responder), _) => responder.finish(Err(error.clone())),
                    (None, Some(early)) => each.answer(early),
                    (None, None) if self.promise.decoupled => {}
                    (None, None) => each.answer(Err(error.clone())),
                }
            }
            return Ok(());
        }
        if self.promise.decoupled {
            return Ok(());
        }
        let mut answers = done.answers.into_iter();
        for (key, each) in keyed {
            match answers.next().flatten() {
                None => {
                    if let Some(early) = worker.keep(key, || each.take_responder()) {
                        each.answer(early);
                    }
                }
                Some(answer) if answer.s => {
                    worker.release(key);
                    each.reschedule();
                }
                Some(answer) => {
                    worker.release(key);
                    let wanted = Wanted::of(&each.request);
                    each.answer(self.promise.response(answer, &done.data, &wanted));
                }
            }
        }
        Ok(())
    }
}

fn write(batch: &Batch, target: &mut [u8]) {
    let mut rest = target;
    for input in batch.requests.iter().flat_map(|each| &each.request.inputs) {
        let data = input.data.as_slice();
        let room = data.len().next_multiple_of(ALIGNMENT).min(rest.len());
        let (place, after) = rest.split_at_mut(room);
        if let Some(place) = place.get_mut(..data.len()) {
            place.copy_from_slice(data);
        }
        rest = after;
    }
}
