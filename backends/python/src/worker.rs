//! One worker process: started, spoken to and reaped; `watch` is the thread that reads from it.
//!
//! *Invariant:* a request that the worker holds is answered once: by the worker's response, or, when the process
//! ends for whatever reason, with an error that says how it ended.

mod watch;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use trireme_types::{Error, InferRequest, InferResponse, Responder, Result, TensorBuffer};

use self::watch::{Lines, Watch};
use crate::call::{CallRequest, CallSink};
use crate::channel::{self, Receiver, Sender};
use crate::launch::{Launch, spawn};
use crate::message::{Answer, Notes, Op, WorkerError};
use crate::promise::{Promise, Wanted};
use crate::region::{InputRegions, OutputRegions};

const START: &str = include_str!("../python/start.py");
const SURFACE: &str = include_str!("../python/triton_python_backend_utils.py");
const WORKER: &str = include_str!("../python/worker.py");

/// Tensors of a message that are smaller together travel in it, larger ones in a region.
const INLINE_LIMIT: usize = 32 * 1024;
const ALIGNMENT: usize = 64;

/// A running worker process.
pub(crate) struct Worker {
    /// The model's at first, then the instance's.
    name: Mutex<Arc<str>>,
    sender: Sender,
    process: OwnedFd,
    state: Mutex<State>,
    changed: Condvar,
    pub(crate) inputs: Mutex<InputRegions>,
    pub(crate) outputs: OutputRegions,
    promise: std::sync::OnceLock<Arc<Promise>>,
}

#[derive(Default)]
struct State {
    held: HashMap<u64, Held>,
    done: Option<Done>,
    /// Why the process ended.
    ended: Option<Error>,
    /// Why the server ended it.
    killed_for: Option<String>,
    on_end: Option<Box<dyn FnOnce() + Send>>,
}

/// A request that the worker has.
pub(crate) struct Held {
    pub(crate) wanted: Wanted,
    /// `None` while the execution lasts and the model is not decoupled: its answer goes by the batch then.
    pub(crate) responder: Option<Responder>,
    /// What a sender answered before the execution ended.
    early: Option<Result<InferResponse>>,
    pub(crate) left: Arc<ClientLeft>,
    /// Models that wait for it.
    callers: Vec<Arc<str>>,
}

impl Held {
    pub(crate) fn new(request: &InferRequest, responder: Option<Responder>, left: Arc<ClientLeft>) -> Self {
        let callers = request.callers.clone();
        Self { wanted: Wanted::of(request), responder, early: None, left, callers }
    }
}

/// Whether the client of a request has gone away.
#[derive(Default)]
pub(crate) struct ClientLeft(AtomicBool);

impl Wake for ClientLeft {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl ClientLeft {
    pub(crate) fn waker(self: &Arc<Self>) -> Waker {
        Waker::from(Arc::clone(self))
    }
}

/// How an operation ended.
pub(crate) struct Done {
    pub(crate) result: Result<serde_json::Value>,
    pub(crate) answers: Vec<Option<Answer>>,
    pub(crate) data: TensorBuffer,
}

impl Worker {
    /// Starts a process that knows its program and serves no model yet.
    ///
    /// # Errors
    /// The interpreter cannot be started.
    pub(crate) fn start(launch: &Launch, name: &str) -> Result<Arc<Self>> {
        let failed = |error: io::Error| {
            Error::unavailable(format!(
                "cannot start the worker process of '{name}' with '{}': {error}",
                launch.interpreter.path.display()
            ))
        };
        let (ours, theirs) = channel::pair().map_err(failed)?;
        let mut command = launch.command();
        command.arg("-u").arg("-c").arg(START).arg(std::process::id().to_string()).arg(name);
        command.stdin(Stdio::from(theirs)).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = spawn(command, launch.cores).map_err(failed)?;
        let process = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let opened = process.ok_or_else(|| io::Error::other("no process")).and_then(|pid| {
            let process = pidfd_open(pid, PidfdFlags::empty())?;
            let out = OwnedFd::from(child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?);
            let err = OwnedFd::from(child.stderr.take().ok_or(io::ErrorKind::BrokenPipe)?);
            fcntl_setfl(&out, OFlags::NONBLOCK)?;
            fcntl_setfl(&err, OFlags::NONBLOCK)?;
            Ok((process, out, err))
        });
        let (process, out, err) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                // Not yet watched, so it is ended and reaped here.
                let _ = child.kill();
                let _ = child.wait();
                return Err(failed(error));
            }
        };
        let worker = Arc::new(Self {
            name: Mutex::new(name.into()),
            sender: Sender::new(ours),
            process,
            state: Mutex::default(),
            changed: Condvar::new(),
            inputs: Mutex::default(),
            outputs: OutputRegions::default(),
            promise: std::sync::OnceLock::new(),
        });
        let watch = Watch {
            worker: Arc::clone(&worker),
            child: Some(child),
            out: Lines::new(out),
            err: Lines::new(err),
        };
        let thread = std::thread::Builder::new().name("trireme-python".into());
        // On failure the closure with the child in it is dropped, which ends the process.
        thread.spawn(move || watch.run()).map_err(failed)?;
        for source in [SURFACE, WORKER] {
            let size = u32::try_from(source.len()).unwrap_or(0).to_le_bytes();
            let sent = worker
                .sender
                .send_raw(&size, None)
                .and_then(|()| worker.sender.send_raw(source.as_bytes(), None));
            if sent.is_err() {
                return Err(worker.wait_for_end());
            }
        }
        Ok(worker)
    }

    /// Sends an operation and waits for its end.
    pub(crate) fn request(&self, message: &serde_json::Value) -> Result<serde_json::Value> {
        self.send(message.to_string().as_bytes(), &[], None)?;
        self.wait(None)?.result
    }

    pub(crate) fn send(&self, text: &[u8], data: &[u8], fd: Option<&OwnedFd>) -> Result<()> {
        if let Some(error) = self.ended() {
            return Err(error);
        }
        self.sender.send(text, data, fd).map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => self.wait_for_end(),
            _ => Error::internal(format!("cannot write to the worker process of '{}': {error}", self.name())),
        })
    }

    /// Waits for the end of the operation that was sent last.
    ///
    /// # Errors
    /// The process ended first; it is ended when `limit` is over.
    pub(crate) fn wait(&self, limit: Option<Duration>) -> Result<Done> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut state = self.state.lock();
        loop {
            if let Some(done) = state.done.take() {
                return Ok(done);
            }
            if let Some(error) = &state.ended {
                return Err(error.clone());
            }
            match deadline {
                None => self.changed.wait(&mut state),
                Some(deadline) => {
                    if self.changed.wait_until(&mut state, deadline).timed_out() && state.killed_for.is_none()
                    {
                        let limit = limit.unwrap_or_default().as_millis();
                        state.killed_for = Some(format!("it did not end an execution within {limit} ms"));
                        self.kill();
                    }
                }
            }
        }
    }

    fn name(&self) -> Arc<str> {
        Arc::clone(&self.name.lock())
    }

    /// Gives the process, started for a model, to one of its instances.
    pub(crate) fn rename(&self, name: &str) {
        *self.name.lock() = name.into();
    }

    /// Ends a process that has not initialized the model.
    pub(crate) fn abandon(&self) {
        self.kill();
        let _ = self.wait_for_end();
    }

    fn kill(&self) {
        // A process that is gone already needs no signal.
        let _ = pidfd_send_signal(&self.process, Signal::KILL);
    }

    fn wait_for_end(&self) -> Error {
        let mut state = self.state.lock();
        loop {
            if let Some(error) = &state.ended {
                return error.clone();
            }
            self.changed.wait(&mut state);
        }
    }

    /// Why the process is no more, if so.
    pub(crate) fn ended(&self) -> Option<Error> {
        self.state.lock().ended.clone()
    }

    /// Has `action` done when the process ends, at once if it has ended.
    pub(crate) fn on_end(&self, action: Box<dyn FnOnce() + Send>) {
        {
            let mut state = self.state.lock();
            if state.ended.is_none() {
                state.on_end = Some(action);
                return;
            }
        }
        action();
    }

    pub(crate) fn set_promise(&self, promise: Arc<Promise>) {
        // Set once, before the first execution.
        let _ = self.promise.set(promise);
    }

    /// Notes requests that are about to be sent.
    pub(crate) fn hold(&self, requests: impl Iterator<Item = (u64, Held)>) -> Result<()> {
        let mut state = self.state.lock();
        let requests: Vec<_> = requests.collect();
        if let Some(error) = state.ended.clone() {
            drop(state);
            for (_, held) in requests {
                if let Some(responder) = held.responder {
                    responder.finish(Err(error.clone()));
                }
            }
            return Err(error);
        }
        state.held.extend(requests);
        Ok(())
    }

    /// Takes a request back; gives the answer that a sender made for it, if one did.
    pub(crate) fn release(&self, key: u64) -> (Option<Responder>, Option<Result<InferResponse>>) {
        match self.state.lock().held.remove(&key) {
            Some(held) => (held.responder, held.early),
            None => (None, None),
        }
    }

    /// Leaves a request with the worker after the execution has ended, unless a sender has answered it.
    pub(crate) fn keep(
        &self,
        key: u64,
        responder: impl FnOnce() -> Option<Responder>,
    ) -> Option<Result<InferResponse>> {
        let mut state = self.state.lock();
        let held = state.held.get_mut(&key)?;
        if held.early.is_none() {
            held.responder = responder();
            return None;
        }
        state.held.remove(&key).and_then(|held| held.early)
    }

    /// Lets the model finalize and ends the process, at the latest after `limit`.
    pub(crate) fn stop(&self, limit: Duration) {
        if self.ended().is_none() {
            if self.send(br#"{"op":"finalize"}"#, &[], None).is_ok() {
                let mut state = self.state.lock();
                state.killed_for = Some("it was told to end".to_owned());
                let deadline = Instant::now() + limit;
                while state.done.is_none() && state.ended.is_none() {
                    if self.changed.wait_until(&mut state, deadline).timed_out() {
                        tracing::warn!("'{}' did not end finalize within {} s", self.name(), limit.as_secs());
                        self.kill();
                        break;
                    }
                }
                if let Some(Done { result: Err(error), .. }) = state.done.take() {
                    tracing::warn!("finalize of '{}' failed: {error}", self.name());
                }
            }
            self.sender.close();
            // The process is reaped before the model counts as gone.
            let _ = self.wait_for_end();
        }
    }

    /// Brings tensors to where the worker reads them: into the message, or into a region if they are large.
    pub(crate) fn place(&self, tensors: &[&[u8]]) -> Result<Placed> {
        let mut size = 0_usize;
        let mut offsets = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            offsets.push(size);
            let room = tensor.len().checked_next_multiple_of(ALIGNMENT);
            size = room.and_then(|room| size.checked_add(room)).ok_or_else(|| {
                Error::invalid_arg("the tensors of this message are larger than the address space")
            })?;
        }
        let mut placed = Placed { offsets, ..Placed::default() };
        if size <= INLINE_LIMIT {
            placed.inline.resize(size, 0);
            write(tensors, &mut placed.inline);
            return Ok(placed);
        }
        let taken = self.inputs.lock().take(size);
        let (mut region, fd) = taken
            .map_err(|error| Error::unavailable(format!("no memory for {size} bytes of tensors: {error}")))?;
        write(tensors, region.bytes_mut());
        placed.region = Some((region.number, region.len()));
        placed.fd = fd;
        self.inputs.lock().lend(region);
        Ok(placed)
    }

    // ---- called by the thread that watches the process

    fn handle(self: &Arc<Self>, frame: &channel::Frame, receiver: &mut Receiver) -> Result<()> {
        let bad = |error: serde_json::Error| {
            Error::internal(format!("a message of the worker cannot be read: {error}"))
        };
        let notes: Notes = serde_json::from_slice(&frame.text).map_err(bad)?;
        self.outputs.forget(&notes.gone);
        if !notes.free.is_empty() {
            self.inputs.lock().give_back(&notes.free);
        }
        match serde_json::from_slice(&frame.text).map_err(bad)? {
            Op::Done { value, error, a, region } => {
                let data = self.data(region, &frame.data, receiver)?;
                let result = error.map_or(Ok(value), |error| Err(WorkerError::into_error(error)));
                self.state.lock().done = Some(Done { result, answers: a, data });
                self.changed.notify_all();
            }
            Op::Response { r, f, a, region } => {
                let data = self.data(region, &frame.data, receiver)?;
                self.respond(r, f & 1 == 1, a.into_iter().next(), &data);
            }
            Op::Log { level, text } => self.log(level, &text),
            Op::Call { call, q, region } => {
                let data = self.data(region, &frame.data, receiver)?;
                self.call(call, q, &data);
            }
            Op::ModelReady { call, model, version } => {
                let version = Some(version).filter(|version| *version >= 0);
                let caller = self.promise.get().and_then(|promise| promise.caller.as_ref());
                let value = caller.is_some_and(|caller| caller.is_ready(&model, version));
                self.reply(call, value)?;
            }
            Op::Cancelled { r, call } => {
                let value = self.state.lock().held.get(&r).is_some_and(|held| {
                    held.left.0.load(Ordering::Relaxed)
                        || held.responder.as_ref().is_some_and(Responder::is_closed)
                });
                self.reply(call, value)?;
            }
        }
        Ok(())
    }

    fn reply(&self, call: u64, value: bool) -> Result<()> {
        let reply = serde_json::json!({ "reply": call, "last": true, "value": value }).to_string();
        self.sender.send(reply.as_bytes(), &[], None).map_err(|error| Error::internal(error.to_string()))
    }

    fn call(self: &Arc<Self>, call: u64, request: CallRequest, data: &TensorBuffer) {
        let responder = CallSink::responder(self, call);
        let Some((promise, caller)) = self.promise.get().and_then(|p| Some((p, p.caller.as_ref()?))) else {
            responder.finish(Err(Error::unavailable("other models can be called from initialize on")));
            return;
        };
        let mut callers: Vec<Arc<str>> = Vec::new();
        {
            let state = self.state.lock();
            for name in state.held.values().flat_map(|held| &held.callers).chain([&promise.model]) {
                if !callers.contains(name) {
                    callers.push(Arc::clone(name));
                }
            }
        }
        let (model, version) = (request.model.clone(), request.version());
        match request.into_request(data, callers) {
            Ok(request) => caller.infer(&model, version, request, responder),
            Err(error) => responder.finish(Err(error)),
        }
    }

    /// The bytes that a message's tensors lie in.
    fn data(
        &self,
        region: Option<(u64, usize, bool)>,
        data: &Bytes,
        receiver: &mut Receiver,
    ) -> Result<TensorBuffer> {
        let Some((number, size, is_new)) = region else { return Ok(TensorBuffer::from(data.clone())) };
        if is_new {
            let fd =
                receiver.take_fd().ok_or_else(|| Error::internal("a region came without its descriptor"))?;
            self.outputs
                .add(number, size, &fd)
                .map_err(|error| Error::internal(format!("cannot map a region of the worker: {error}")))?;
        }
        self.outputs
            .open(number)
            .ok_or_else(|| Error::internal(format!("the worker named the unknown region {number}")))
    }

    fn respond(&self, key: u64, is_last: bool, answer: Option<Answer>, data: &TensorBuffer) {
        let Some(promise) = self.promise.get() else { return };
        let (mut responder, reply) = {
            let mut state = self.state.lock();
            let Some(held) = state.held.get_mut(&key) else { return };
            let reply = answer.map(|answer| promise.response(answer, data, &held.wanted));
            let Some(responder) = held.responder.take() else {
                held.early = reply.or_else(|| held.early.take());
                if is_last && held.early.is_none() {
                    held.early = Some(Err(Error::internal(
                        "the response sender of a model that is not decoupled was closed without a response",
                    )));
                }
                return;
            };
            if is_last || !promise.decoupled {
                state.held.remove(&key);
            }
            (responder, reply)
        };
        // Sent outside the lock, and by this thread only, so that responses keep their order.
        match reply {
            Some(reply) if is_last || !promise.decoupled => responder.finish(reply),
            None if !promise.decoupled => responder.finish(Err(Error::internal(
                "the response sender of a model that is not decoupled was closed without a response",
            ))),
            None => responder.close(),
            Some(reply) => {
                responder.send(reply);
                let mut state = self.state.lock();
                match state.held.get_mut(&key) {
                    Some(held) => held.responder = Some(responder),
                    None => drop(state),
                }
            }
        }
    }

    fn log(&self, level: i64, text: &str) {
        let name = self.name();
        match level {
            1 => tracing::warn!("{name}: {text}"),
            2 => tracing::error!("{name}: {text}"),
            3 => tracing::debug!("{name}: {text}"),
            _ => tracing::info!("{name}: {text}"),
        }
    }

    fn end(&self, how: &str, last: &VecDeque<String>) {
        let (held, action) = {
            let mut state = self.state.lock();
            let reason =
                state.killed_for.take().map(|reason| format!(" because {reason}")).unwrap_or_default();
            let mut text =
                format!("Stub process '{}' is not healthy. Its worker process {how}{reason}.", self.name());
            if !last.is_empty() {
                text.push_str(" The last it printed to stderr:\n");
                let lines: Vec<&str> = last.iter().map(String::as_str).collect();
                text.push_str(&lines.join("\n"));
            }
            let error = Error::internal(text);
            state.ended = Some(error.clone());
            let held: Vec<_> = state.held.drain().filter_map(|(_, held)| held.responder).collect();
            let held: Vec<_> = held.into_iter().map(|responder| (responder, error.clone())).collect();
            (held, state.on_end.take())
        };
        self.changed.notify_all();
        for (responder, error) in held {
            responder.finish(Err(error));
        }
        if let Some(action) = action {
            action();
        }
    }
}

/// Where tensors were put for the worker.
#[derive(Default)]
pub(crate) struct Placed {
    pub(crate) offsets: Vec<usize>,
    pub(crate) inline: Vec<u8>,
    /// Number and size.
    pub(crate) region: Option<(u64, usize)>,
    /// Of a region that the worker does not know yet.
    pub(crate) fd: Option<OwnedFd>,
}

fn write(tensors: &[&[u8]], target: &mut [u8]) {
    let mut rest = target;
    for tensor in tensors {
        let room = tensor.len().next_multiple_of(ALIGNMENT).min(rest.len());
        let (place, after) = rest.split_at_mut(room);
        if let Some(place) = place.get_mut(..tensor.len()) {
            place.copy_from_slice(tensor);
        }
        rest = after;
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.sender.close();
    }
}
