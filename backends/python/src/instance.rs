//! Runs batches in the worker process of one instance.

use std::sync::Arc;
use std::time::Duration;

use trireme_backend::{Batch, ModelInstance, engine_shape};
use trireme_types::{Error, InferInput, InferRequest, Result, Shape};

use crate::message::{Execute, SentRequest, SentTensor, correlation, parameters};
use crate::promise::{Promise, Wanted};
use crate::supervisor::Supervisor;
use crate::worker::{ClientLeft, Done, Held, Worker};

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

impl Instance {
    /// Shapes of the inputs as the model sees them.
    fn shapes(&self, request: &InferRequest) -> Vec<Shape> {
        let tensors = &self.promise.tensors;
        let batching = tensors.max_batch_size > 0;
        let shape = |input: &InferInput| match tensors.input(&input.name) {
            Some(spec) => engine_shape(spec, batching, &input.shape),
            None => input.shape.clone(),
        };
        request.inputs.iter().map(shape).collect()
    }

    /// Sends the batch; the worker holds its requests from then on.
    fn send(&self, worker: &Worker, batch: &mut Batch, first: u64) -> Result<()> {
        let inputs = batch.requests.iter().flat_map(|each| &each.request.inputs);
        let data: Vec<&[u8]> = inputs.map(|input| input.data.as_slice()).collect();
        let placed = worker.place(&data)?;
        let shapes: Vec<_> = batch.requests.iter().map(|each| self.shapes(&each.request)).collect();
        batch.inputs_ready();

        let mut offsets = placed.offsets.iter().copied();
        let requests = batch.requests.iter().zip(&shapes).zip(first..).map(|((each, shapes), key)| {
            let inputs = each.request.inputs.iter().zip(shapes).zip(&mut offsets);
            let inputs = inputs.map(|((input, shape), offset)| {
                SentTensor(&input.name, input.data_type.config_number(), shape, offset, input.data.len())
            });
            let inputs = inputs.collect();
            self.request(&each.request, key, inputs)
        });
        let message = Execute {
            op: "execute",
            r: requests.collect(),
            input: placed.region.map(|(number, _)| number),
            region: placed.region.filter(|_| placed.fd.is_some()),
            free: worker.outputs.take_released(),
            gone: std::mem::take(&mut worker.inputs.lock().gone),
        };
        let text = serde_json::to_vec(&message)
            .map_err(|error| Error::internal(format!("a batch cannot be written down: {error}")))?;

        let decoupled = self.promise.decoupled;
        let held = batch.requests.iter_mut().zip(first..).map(|(each, key)| {
            let left = Arc::new(ClientLeft::default());
            if !decoupled {
                each.watch_closed(&left.waker());
            }
            let responder = if decoupled { each.take_responder() } else { None };
            (key, Held::new(&each.request, responder, left))
        });
        worker.hold(held)?;
        worker.send(&text, &placed.inline, placed.fd.as_ref())
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
