//! Runs a backend in a test: opens, loads, executes requests and collects what was answered.

use std::sync::{Arc, mpsc};
use std::task::Waker;
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};
use trireme_backend::{
    Backend, Batch, BatchRequest, InstanceContext, ModelContext, ModelInstance, ModelTensors,
};
use trireme_types::{
    DataType, InferInput, InferRequest, InferResponse, RequestedOutput, Responder, ResponseSink, Result,
    Shape, TensorSpec,
};

pub(crate) type Reply = (Option<Result<InferResponse>>, bool);

/// The client's side of a request, who may leave.
#[derive(Clone, Default)]
pub(crate) struct Client(Arc<(Mutex<State>, Condvar)>);

#[derive(Default)]
struct State {
    has_left: bool,
    replies: usize,
    watcher: Option<Waker>,
}

impl Client {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.0.lock()
    }

    /// Goes away.
    pub(crate) fn leave(&self) {
        let watcher = {
            let mut state = self.state();
            state.has_left = true;
            state.watcher.take()
        };
        if let Some(watcher) = watcher {
            watcher.wake();
        }
    }

    /// Waits for the first reply.
    pub(crate) fn wait_for_reply(&self) {
        self.0.1.wait_while(&mut self.state(), |state| state.replies == 0);
    }
}

struct Channel {
    sender: mpsc::Sender<Reply>,
    client: Client,
}

impl ResponseSink for Channel {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        self.sender.send((reply, last)).expect("the test holds the receiver");
        self.client.state().replies += 1;
        self.client.0.1.notify_all();
    }

    fn is_closed(&self) -> bool {
        self.client.state().has_left
    }

    fn watch_closed(&mut self, waker: &Waker) {
        self.client.state().watcher = Some(waker.clone());
    }
}

pub(crate) fn spec(name: &str, data_type: DataType, dims: &[i64]) -> TensorSpec {
    TensorSpec::new(name, data_type, Shape::new(dims))
}

pub(crate) fn input(name: &str, data_type: DataType, shape: &[i64], data: Vec<u8>) -> InferInput {
    InferInput { name: name.into(), data_type, shape: Shape::new(shape), data: data.into() }
}

fn load_as(
    backend: &dyn Backend,
    parameters: &[(&str, &str)],
    tensors: ModelTensors,
    decoupled: bool,
) -> Result<Box<dyn ModelInstance>> {
    let context = ModelContext {
        name: "m".into(),
        parameters: parameters.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        decoupled,
        ..ModelContext::default()
    };
    let model = backend.open(&context)?.load(tensors)?;
    model.instance(&InstanceContext { name: "m_0_0".to_owned(), ..InstanceContext::default() })
}

pub(crate) fn load(
    backend: &dyn Backend,
    parameters: &[(&str, &str)],
    tensors: ModelTensors,
) -> Result<Box<dyn ModelInstance>> {
    load_as(backend, parameters, tensors, false)
}

pub(crate) fn load_decoupled(
    backend: &dyn Backend,
    parameters: &[(&str, &str)],
    tensors: ModelTensors,
) -> Result<Box<dyn ModelInstance>> {
    load_as(backend, parameters, tensors, true)
}

/// Runs one request as the server does and gives every reply up to the last.
pub(crate) fn run_stream(
    instance: &mut dyn ModelInstance,
    inputs: Vec<InferInput>,
    outputs: &[&str],
) -> Vec<Reply> {
    run_for(&Client::default(), instance, inputs, outputs)
}

/// As [`run_stream`], for a client that may leave.
pub(crate) fn run_for(
    client: &Client,
    instance: &mut dyn ModelInstance,
    inputs: Vec<InferInput>,
    outputs: &[&str],
) -> Vec<Reply> {
    let (sender, receiver) = mpsc::channel();
    let mut request = InferRequest::new();
    request.inputs = inputs.into();
    request.outputs = outputs.iter().map(|name| RequestedOutput { name: (*name).into() }).collect();
    let request =
        BatchRequest::new(request, Responder::new(Box::new(Channel { sender, client: client.clone() })));
    let mut batch = Batch::new(vec![request], Instant::now());
    instance.execute(&mut batch).expect("the execution");
    for request in batch.requests {
        let (_, responder, answer) = request.into_parts();
        if let Some(responder) = responder {
            responder.finish(answer);
        }
    }
    let replies: Vec<_> = receiver.iter().collect();
    assert_eq!(replies.iter().filter(|(_, last)| *last).count(), 1, "one end");
    replies
}

/// As [`run_stream`], for models that answer once.
pub(crate) fn run(
    instance: &mut dyn ModelInstance,
    inputs: Vec<InferInput>,
    outputs: &[&str],
) -> Vec<Result<InferResponse>> {
    run_stream(instance, inputs, outputs).into_iter().filter_map(|(reply, _)| reply).collect()
}

/// Runs requests as one batch, for models that answer once, and gives the answers in order.
pub(crate) fn run_batch(
    instance: &mut dyn ModelInstance,
    requests: Vec<Vec<InferInput>>,
) -> Vec<Result<InferResponse>> {
    let (sender, _receiver) = mpsc::channel();
    let requests = requests.into_iter().map(|inputs| {
        let mut request = InferRequest::new();
        request.inputs = inputs.into();
        let channel = Channel { sender: sender.clone(), client: Client::default() };
        BatchRequest::new(request, Responder::new(Box::new(channel)))
    });
    let mut batch = Batch::new(requests.collect(), Instant::now());
    instance.execute(&mut batch).expect("the execution");
    let parts = batch.requests.into_iter().map(|request| {
        let (_, responder, answer) = request.into_parts();
        responder.expect("the responder was left").finish(answer.clone());
        answer
    });
    parts.collect()
}
