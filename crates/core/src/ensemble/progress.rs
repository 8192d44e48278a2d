//! How far one request has come: which steps become ready when which tensors arrive, and which tensor is let go after
//! its last reader. Pure: values in, decisions out; no clock, no lock, no model.
//!
//! Work is grouped in *scopes*: the request itself, and one for every response of a decoupled step. A tensor lives in the
//! scope that it was made for. The response of the ensemble is a step like any other here: it reads the outputs that the
//! client wants, once in each scope of its stream. *Invariants:* a step is launched at most once in a scope, when all its
//! tensors are decided; a value is held only while a step that may still be launched reads it; nothing recurses, however
//! long the chain.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use super::plan::{Plan, StreamId, TensorId};

/// A running step: index into [`Progress::runs`].
pub(super) type RunId = usize;
type ScopeId = usize;

/// A step that shall run.
#[derive(Debug, PartialEq)]
pub(super) struct Launch<T> {
    pub(super) run: RunId,
    pub(super) step: usize,
    /// In the order of the step's inputs; `None` was left out by the client, or by the step before.
    pub(super) inputs: Vec<Option<T>>,
}

/// What follows from an event, in this order.
#[derive(Debug)]
pub(super) struct Effects<T> {
    /// Responses of the ensemble: a value for each wanted output, `None` if it is left out.
    pub(super) answers: Vec<Vec<Option<T>>>,
    pub(super) launches: Vec<Launch<T>>,
    /// Streams of the scopes that were opened: responses of decoupled steps that are to be worked on.
    pub(super) opened: Vec<StreamId>,
    /// Streams of the scopes that were closed: the work for one response of a decoupled step is done.
    pub(super) closed: Vec<StreamId>,
}

impl<T> Default for Effects<T> {
    fn default() -> Self {
        Self { answers: Vec::new(), launches: Vec::new(), opened: Vec::new(), closed: Vec::new() }
    }
}

/// A tensor in a scope.
#[derive(Debug)]
struct Cell<T> {
    value: Value<T>,
    /// Steps that have not taken it yet.
    readers: usize,
}

#[derive(Debug)]
enum Value<T> {
    Open,
    /// Decided: it does not come.
    Absent,
    Here(T),
    /// Decided and let go.
    Gone,
}

#[derive(Debug)]
struct Scope<T> {
    stream: StreamId,
    cells: Vec<Cell<T>>,
    /// One for each step of the stream, and one for the response.
    waiting: Vec<Waiting>,
    /// Steps of this scope that run.
    running: usize,
    is_closed: bool,
}

#[derive(Clone, Debug)]
struct Waiting {
    /// Tensors of this scope that are not decided yet.
    missing: usize,
    is_over: bool,
}

/// A step, over all scopes.
#[derive(Debug)]
struct StepState {
    /// Tensors that it reads, each once.
    reads: Vec<TensorId>,
    stream: StreamId,
    /// Place among the steps of its stream.
    place: usize,
    /// Tensors of the request's scope that it reads from a stream of its own and that are not decided yet.
    missing_of_request: usize,
    /// Scopes in which it has neither been launched nor given up.
    pending: usize,
    running: usize,
    /// It will never be launched again.
    is_done: bool,
}

#[derive(Clone, Copy, Debug)]
struct Run {
    step: usize,
    scope: ScopeId,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Progress<T> {
    plan: Arc<Plan>,
    /// Those of the plan, then the response.
    steps: Vec<StepState>,
    /// What the response reads, in the client's order.
    wanted: Vec<TensorId>,
    answer_stream: StreamId,
    scopes: Vec<Option<Scope<T>>>,
    free_scopes: Vec<ScopeId>,
    runs: Vec<Option<Run>>,
    free_runs: Vec<RunId>,
    running: usize,
    /// No further scope of that stream will come.
    is_exhausted: Vec<bool>,
    is_aborted: bool,
    ready: VecDeque<(usize, ScopeId)>,
    may_close: Vec<ScopeId>,
    may_be_done: Vec<usize>,
    effects: Effects<T>,
}

/// The scope of the request.
const REQUEST: ScopeId = 0;

impl<T: Clone> Progress<T> {
    /// A request that wants these outputs, by their index in the ensemble's configuration.
    pub(super) fn new(plan: Arc<Plan>, wanted: &[usize]) -> Self {
        let tensors: Vec<TensorId> =
            wanted.iter().filter_map(|output| plan.outputs.get(*output).copied()).collect();
        let answer_stream = plan.stream_of(wanted);
        let mut steps = Vec::with_capacity(plan.steps.len() + 1);
        for step in &plan.steps {
            let reads = step.inputs.iter().map(|(_, tensor)| *tensor);
            steps.push(StepState::new(&plan, reads, step.stream, step.place));
        }
        let place = plan.steps_of_stream.get(answer_stream).map_or(0, Vec::len);
        steps.push(StepState::new(&plan, tensors.iter().copied(), answer_stream, place));
        let mut is_exhausted = vec![false; plan.slots_of_stream.len()];
        if let Some(request) = is_exhausted.first_mut() {
            *request = true;
        }
        Self {
            plan,
            steps,
            wanted: tensors,
            answer_stream,
            scopes: Vec::new(),
            free_scopes: Vec::new(),
            runs: Vec::new(),
            free_runs: Vec::new(),
            running: 0,
            is_exhausted,
            is_aborted: false,
            ready: VecDeque::new(),
            may_close: Vec::new(),
            may_be_done: Vec::new(),
            effects: Effects::default(),
        }
    }

    /// Begins with the ensemble's inputs, in the order of its configuration; `None` was left out.
    pub(super) fn start(&mut self, inputs: Vec<Option<T>>) -> Effects<T> {
        let scope = self.open(0);
        let plan = Arc::clone(&self.plan);
        for (tensor, value) in plan.inputs.iter().zip(inputs) {
            self.decide(scope, *tensor, value);
        }
        self.settle(Some(scope))
    }

    /// Takes what a run answered: the values by the step's outputs, `None` for an end without a response. `last` ends the
    /// run.
    pub(super) fn reply(&mut self, run: RunId, outputs: Option<Vec<Option<T>>>, last: bool) -> Effects<T> {
        let Some(Run { step, scope }) = self.runs.get(run).copied().flatten() else {
            return Effects::default();
        };
        let plan = Arc::clone(&self.plan);
        let mut opened = None;
        if let Some(planned) = plan.steps.get(step).filter(|_| !self.is_aborted) {
            let answered = outputs.is_some();
            let into = match planned.is_decoupled {
                true if answered => {
                    opened = Some(self.open(step + 1));
                    opened
                }
                true => None,
                false => Some(scope),
            };
            let values = outputs.unwrap_or_default().into_iter().chain(std::iter::repeat_with(|| None));
            if let Some(into) = into {
                for ((_, tensor), value) in planned.outputs.iter().zip(values) {
                    // What a model leaves out never comes; who needs it waits in vain, unless that is allowed.
                    if value.is_some() || (plan.skip_without_input && (answered || last)) {
                        self.decide(into, *tensor, value);
                    }
                }
            }
        }
        if last {
            self.end_run(run, step, scope);
        }
        self.settle(opened)
    }

    /// Gives everything up but the count of what runs. Nothing is launched or answered any more.
    pub(super) fn abort(&mut self) -> Effects<T> {
        self.is_aborted = true;
        self.ready.clear();
        for scope in self.scopes.iter_mut().flatten() {
            scope.cells.clear();
            if !scope.is_closed {
                scope.is_closed = true;
                if scope.stream > 0 {
                    self.effects.closed.push(scope.stream);
                }
            }
        }
        std::mem::take(&mut self.effects)
    }

    /// Whether it was given up.
    pub(super) fn is_aborted(&self) -> bool {
        self.is_aborted
    }

    /// Whether nothing runs, and so nothing more will happen.
    pub(super) fn is_over(&self) -> bool {
        self.running == 0
    }

    /// Outputs that are wanted and were not decided, of the request itself.
    pub(super) fn undecided(&self) -> Vec<&str> {
        let is_open = |tensor: &&TensorId| {
            let cell = self.plan.tensors.get(**tensor).filter(|tensor| tensor.stream == 0);
            let cell = cell.and_then(|tensor| self.scope(REQUEST)?.cells.get(tensor.slot));
            cell.is_some_and(|cell| matches!(cell.value, Value::Open))
        };
        let names = self.wanted.iter().filter(is_open);
        names.filter_map(|tensor| self.plan.tensors.get(*tensor)).map(|tensor| &*tensor.name).collect()
    }

    fn scope(&self, id: ScopeId) -> Option<&Scope<T>> {
        self.scopes.get(id)?.as_ref()
    }

    fn scope_mut(&mut self, id: ScopeId) -> Option<&mut Scope<T>> {
        self.scopes.get_mut(id)?.as_mut()
    }

    fn cell_mut(&mut self, scope: ScopeId, slot: usize) -> Option<&mut Cell<T>> {
        self.scope_mut(scope)?.cells.get_mut(slot)
    }

    /// Index of the response among the steps.
    fn answer(&self) -> usize {
        self.plan.steps.len()
    }

    /// A new scope; its steps wait for the tensors of its stream.
    fn open(&mut self, stream: StreamId) -> ScopeId {
        let plan = Arc::clone(&self.plan);
        let id = self.free_scopes.pop().unwrap_or_else(|| {
            self.scopes.push(None);
            self.scopes.len() - 1
        });
        let mut readers = vec![0; plan.slots_of_stream.get(stream).copied().unwrap_or_default()];
        for slot in self.steps.iter().flat_map(|step| step.reads_of(&plan, stream)) {
            if let Some(count) = readers.get_mut(slot) {
                *count += 1;
            }
        }
        let members = self.members(stream);
        let mut waiting = Vec::with_capacity(members.len());
        for index in members {
            let Some(step) = self.steps.get_mut(index) else { continue };
            let missing = step.reads_of(&plan, stream).count();
            step.pending += 1;
            if missing == 0 && step.missing_of_request == 0 {
                self.ready.push_back((index, id));
            }
            waiting.push(Waiting { missing, is_over: false });
        }
        let cells = readers.into_iter().map(|readers| Cell { value: Value::Open, readers }).collect();
        if let Some(slot) = self.scopes.get_mut(id) {
            *slot = Some(Scope { stream, cells, waiting, running: 0, is_closed: false });
        }
        if stream > 0 {
            self.effects.opened.push(stream);
        }
        id
    }

    /// Steps that run in the scopes of a stream, the response last if it does.
    fn members(&self, stream: StreamId) -> Vec<usize> {
        let answer = (self.answer_stream == stream).then_some(self.answer());
        self.plan.steps_of_stream.get(stream).into_iter().flatten().copied().chain(answer).collect()
    }

    /// Sets a tensor, once, and finds the steps that were waiting for it.
    fn decide(&mut self, scope: ScopeId, tensor: TensorId, value: Option<T>) {
        let plan = Arc::clone(&self.plan);
        let Some(planned) = plan.tensors.get(tensor) else { return };
        let Some(cell) = self.cell_mut(scope, planned.slot).filter(|cell| matches!(cell.value, Value::Open))
        else {
            return;
        };
        cell.value = match value {
            _ if cell.readers == 0 => Value::Gone,
            Some(value) => Value::Here(value),
            None => Value::Absent,
        };
        let answer = self.wanted.contains(&tensor).then_some(self.answer());
        for reader in planned.readers.iter().copied().chain(answer) {
            let Some(step) = self.steps.get_mut(reader) else { continue };
            let (stream, place) = (step.stream, step.place);
            if stream == planned.stream {
                let ready = step.missing_of_request == 0;
                let waiting = self.scope_mut(scope).and_then(|scope| scope.waiting.get_mut(place));
                if let Some(waiting) = waiting {
                    waiting.missing = waiting.missing.saturating_sub(1);
                    if ready && waiting.missing == 0 {
                        self.ready.push_back((reader, scope));
                    }
                }
                continue;
            }
            step.missing_of_request = step.missing_of_request.saturating_sub(1);
            if step.missing_of_request == 0 {
                let waits = |scope: &Scope<T>| {
                    scope.stream == stream
                        && scope
                            .waiting
                            .get(place)
                            .is_some_and(|waiting| waiting.missing == 0 && !waiting.is_over)
                };
                let found = self.scopes.iter().enumerate();
                let found = found.filter(|(_, scope)| scope.as_ref().is_some_and(waits));
                self.ready.extend(found.map(|(id, _)| (reader, id)));
            }
        }
    }

    /// Launches what is ready and closes what is done, until nothing changes.
    fn settle(&mut self, opened: Option<ScopeId>) -> Effects<T> {
        self.may_close.extend(opened);
        if self.is_aborted {
            self.ready.clear();
            self.may_close.clear();
            self.may_be_done.clear();
            return std::mem::take(&mut self.effects);
        }
        loop {
            if let Some((step, scope)) = self.ready.pop_front() {
                self.launch(step, scope);
            } else if let Some(scope) = self.may_close.pop() {
                self.close(scope);
            } else if let Some(step) = self.may_be_done.pop() {
                self.finish_step(step);
            } else {
                return std::mem::take(&mut self.effects);
            }
        }
    }

    fn launch(&mut self, index: usize, scope: ScopeId) {
        let plan = Arc::clone(&self.plan);
        let Some(step) = self.steps.get_mut(index) else { return };
        let (stream, place) = (step.stream, step.place);
        let Some(waiting) =
            self.scopes.get_mut(scope).and_then(Option::as_mut).and_then(|s| s.waiting.get_mut(place))
        else {
            return;
        };
        if std::mem::replace(&mut waiting.is_over, true) {
            return;
        }
        step.pending = step.pending.saturating_sub(1);
        let order: Vec<TensorId> = match plan.steps.get(index) {
            Some(planned) => planned.inputs.iter().map(|(_, tensor)| *tensor).collect(),
            None => self.wanted.clone(),
        };
        let inputs: Vec<Option<T>> = order.iter().map(|tensor| self.look_up(scope, *tensor)).collect();
        self.release(index, stream, scope);
        self.may_be_done.push(index);
        self.may_close.push(scope);
        let Some(planned) = plan.steps.get(index) else {
            self.effects.answers.push(inputs);
            return;
        };
        if plan.skip_without_input && inputs.iter().all(Option::is_none) {
            // A decoupled step that is skipped has no responses, and so no scopes.
            if !planned.is_decoupled {
                for (_, tensor) in &planned.outputs {
                    self.decide(scope, *tensor, None);
                }
            }
            return;
        }
        let run = self.free_runs.pop().unwrap_or_else(|| {
            self.runs.push(None);
            self.runs.len() - 1
        });
        if let Some(slot) = self.runs.get_mut(run) {
            *slot = Some(Run { step: index, scope });
        }
        self.running += 1;
        if let Some(step) = self.steps.get_mut(index) {
            step.running += 1;
        }
        if let Some(scope) = self.scope_mut(scope) {
            scope.running += 1;
        }
        self.effects.launches.push(Launch { run, step: index, inputs });
    }

    /// The value of a tensor as a step of that scope sees it.
    fn look_up(&self, scope: ScopeId, tensor: TensorId) -> Option<T> {
        let planned = self.plan.tensors.get(tensor)?;
        let holder = if self.scope(scope)?.stream == planned.stream { scope } else { REQUEST };
        match &self.scope(holder)?.cells.get(planned.slot)?.value {
            Value::Here(value) => Some(value.clone()),
            Value::Open | Value::Absent | Value::Gone => None,
        }
    }

    /// Takes a step off the readers of the tensors of `stream`, in that stream's scope.
    fn release(&mut self, index: usize, stream: StreamId, scope: ScopeId) {
        let plan = Arc::clone(&self.plan);
        let Some(step) = self.steps.get(index) else { return };
        let slots: Vec<usize> = step.reads_of(&plan, stream).collect();
        for slot in slots {
            if let Some(cell) = self.cell_mut(scope, slot) {
                cell.readers = cell.readers.saturating_sub(1);
                if cell.readers == 0 && !matches!(cell.value, Value::Open) {
                    cell.value = Value::Gone;
                }
            }
        }
    }

    fn end_run(&mut self, run: RunId, step: usize, scope: ScopeId) {
        if let Some(slot) = self.runs.get_mut(run) {
            *slot = None;
        }
        self.free_runs.push(run);
        self.running = self.running.saturating_sub(1);
        if let Some(step) = self.steps.get_mut(step) {
            step.running = step.running.saturating_sub(1);
        }
        if let Some(scope) = self.scope_mut(scope) {
            scope.running = scope.running.saturating_sub(1);
        }
        self.may_close.push(scope);
        self.may_be_done.push(step);
    }

    /// Closes a scope if nothing can happen in it any more.
    fn close(&mut self, id: ScopeId) {
        let request_is_over = self.scope(REQUEST).is_none_or(|scope| scope.is_closed);
        let Some(scope) = self.scope(id).filter(|scope| !scope.is_closed && scope.running == 0) else {
            return;
        };
        let stream = scope.stream;
        let has_hope = |waiting: &Waiting| !waiting.is_over && waiting.missing == 0;
        if stream > 0 && !request_is_over && scope.waiting.iter().any(has_hope) {
            return;
        }
        if let Some(scope) = self.scope_mut(id) {
            scope.is_closed = true;
        }
        for index in self.members(stream) {
            let Some(step) = self.steps.get_mut(index) else { continue };
            let place = step.place;
            let waiting =
                self.scopes.get_mut(id).and_then(Option::as_mut).and_then(|s| s.waiting.get_mut(place));
            if waiting.is_some_and(|waiting| !std::mem::replace(&mut waiting.is_over, true)) {
                step.pending = step.pending.saturating_sub(1);
                self.may_be_done.push(index);
                self.release(index, stream, id);
            }
        }
        if stream > 0 {
            self.effects.closed.push(stream);
            if let Some(slot) = self.scopes.get_mut(id) {
                *slot = None;
            }
            self.free_scopes.push(id);
        } else {
            // What waits for a tensor of the request that was not made waits in vain.
            let open = self.scopes.iter().enumerate().filter(|(_, scope)| scope.is_some());
            self.may_close.extend(open.map(|(id, _)| id));
        }
    }

    /// Notes that a step will never be launched again, if that is so: it lets go of what it read of the request, and if
    /// it was the source of a stream, the stream has ended.
    fn finish_step(&mut self, index: usize) {
        let is_exhausted =
            |progress: &Self, stream: StreamId| progress.is_exhausted.get(stream) == Some(&true);
        let Some(step) = self.steps.get(index) else { return };
        let stream = step.stream;
        if step.pending > 0 || !is_exhausted(self, stream) {
            return;
        }
        let running = step.running;
        if let Some(step) = self.steps.get_mut(index)
            && !std::mem::replace(&mut step.is_done, true)
            && stream > 0
        {
            self.release(index, 0, REQUEST);
        }
        let starts = self.plan.steps.get(index).is_some_and(|step| step.is_decoupled);
        let own = index + 1;
        if starts && running == 0 && !is_exhausted(self, own) {
            if let Some(stream) = self.is_exhausted.get_mut(own) {
                *stream = true;
            }
            let members = self.members(own);
            self.may_be_done.extend(members);
        }
    }
}

impl StepState {
    fn new(plan: &Plan, reads: impl Iterator<Item = TensorId>, stream: StreamId, place: usize) -> Self {
        let reads: Vec<TensorId> = reads.collect::<BTreeSet<_>>().into_iter().collect();
        let mut step =
            Self { reads, stream, place, missing_of_request: 0, pending: 0, running: 0, is_done: false };
        if stream > 0 {
            step.missing_of_request = step.reads_of(plan, 0).count();
        }
        step
    }

    /// Slots of the tensors of a stream that it reads.
    fn reads_of<'a>(&'a self, plan: &'a Plan, stream: StreamId) -> impl Iterator<Item = usize> + 'a {
        let tensors = self.reads.iter().filter_map(|tensor| plan.tensors.get(*tensor));
        tensors.filter(move |tensor| tensor.stream == stream).map(|tensor| tensor.slot)
    }
}

#[cfg(test)]
mod tests;
