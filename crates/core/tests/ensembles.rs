//! Ensembles under odd models and leaving clients: every request ends once, nothing stays behind, nothing is copied.

#![expect(clippy::expect_used, reason = "a test that cannot set itself up must end")]

use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::task::Waker;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use trireme_backend::{
    Backend, Batch, InstanceContext, Model, ModelContext, ModelInstance, ModelTensors, OpenModel,
};
use trireme_core::{ModelControlMode, Server, ServerOptions};
use trireme_types::{
    Code, CorrelationId, DataType, Error, InferInput, InferRequest, InferResponse, ModelReport, OutputTensor,
    ParameterValue, RequestedOutput, Responder, ResponseSink, Result, Sequence, Shape,
};

/// A request's number, reply, and whether it was the last.
type Reply = (usize, Option<Result<InferResponse>>, bool);

/// A client that goes away after so many questions whether it is still there.
struct Client {
    number: usize,
    replies: mpsc::Sender<Reply>,
    patience: Option<AtomicUsize>,
}

impl ResponseSink for Client {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        let _gone = self.replies.send((self.number, reply, last));
    }

    fn is_closed(&self) -> bool {
        let left = |patience: &AtomicUsize| {
            patience.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| Some(left.saturating_sub(1)))
                == Ok(0)
        };
        self.patience.as_ref().is_some_and(left)
    }
}

/// A model that echoes, and every so often fails, panics, forgets a request, or answers late from another thread. A
/// decoupled one answers as often as the first element says.
#[derive(Clone, Debug, Default)]
struct Moody {
    moods: bool,
    decoupled: bool,
    turns: Arc<AtomicUsize>,
    /// Requests as they came, without their tensors; kept by models of the parameter `remembers`.
    seen: Option<Arc<Mutex<Vec<InferRequest>>>>,
}

impl Backend for Moody {
    fn name(&self) -> &str {
        "moody"
    }

    fn default_model_filename(&self) -> Option<&str> {
        None
    }

    fn open(&self, context: &ModelContext) -> Result<Box<dyn OpenModel>> {
        let has = |wanted: &str| context.parameters.iter().any(|(name, _)| name == wanted);
        let seen = self.seen.clone().filter(|_| has("remembers"));
        Ok(Box::new(Self { moods: has("moods"), decoupled: context.decoupled, turns: Arc::default(), seen }))
    }
}

impl OpenModel for Moody {
    fn report(&self) -> Result<Option<ModelReport>> {
        Ok(None)
    }

    fn load(self: Box<Self>, _: ModelTensors) -> Result<Arc<dyn Model>> {
        Ok(Arc::new(*self))
    }
}

impl Model for Moody {
    fn instance(&self, _: &InstanceContext) -> Result<Box<dyn ModelInstance>> {
        Ok(Box::new(self.clone()))
    }
}

fn echo(request: &InferRequest) -> InferResponse {
    let output = |input: &InferInput| OutputTensor {
        name: Arc::from(input.name.replace("INPUT", "OUTPUT")),
        data_type: input.data_type,
        shape: input.shape.clone(),
        data: input.data.clone(),
    };
    InferResponse { outputs: request.inputs.iter().map(output).collect(), ..InferResponse::default() }
}

impl ModelInstance for Moody {
    fn execute(&mut self, batch: &mut Batch) -> Result<()> {
        for request in &mut batch.requests {
            let answer = echo(&request.request);
            if let Some(seen) = &self.seen {
                seen.lock().push(InferRequest { inputs: Default::default(), ..request.request.clone() });
            }
            let turn = self.turns.fetch_add(1, Ordering::SeqCst);
            let mood = if self.moods { turn % 29 } else { usize::MAX };
            if self.decoupled {
                let count = answer.outputs.first().and_then(|output| output.data.as_slice().first().copied());
                let Some(mut responder) = request.take_responder() else { continue };
                for _ in 0..count.unwrap_or_default() {
                    responder.send(Ok(answer.clone()));
                }
                match mood {
                    3 => responder.finish(Err(Error::unavailable("no more today"))),
                    5 => drop(responder),
                    7 => responder.finish(Ok(answer)),
                    _ => responder.close(),
                }
                continue;
            }
            match mood {
                3 => request.answer(Err(Error::invalid_arg("not this one"))),
                11 => {}
                17 => panic!("moody on purpose"),
                19 => return Err(Error::internal("nobody today")),
                23 | 5 => {
                    let Some(responder) = request.take_responder() else { continue };
                    std::thread::spawn(move || {
                        std::thread::sleep(Duration::from_millis(2));
                        responder.finish(Ok(answer));
                    });
                }
                _ => request.answer(Ok(answer)),
            }
        }
        Ok(())
    }
}

fn write_model(repository: &Path, name: &str, config: &str) {
    fs_err::create_dir_all(repository.join(name).join("1")).expect("can create");
    fs_err::write(repository.join(name).join("config.pbtxt"), config).expect("can write");
}

fn tensors(side: &str, names: &[&str]) -> String {
    names.iter().fold(String::new(), |mut text, name| {
        let _infallible = writeln!(text, "{side} {{ name: '{name}' data_type: TYPE_UINT8 dims: -1 }}");
        text
    })
}

fn moody(repository: &Path, name: &str, inputs: usize, more: &str) {
    let ins: Vec<String> = (0..inputs).map(|i| format!("INPUT{i}")).collect();
    let outs: Vec<String> = (0..inputs).map(|i| format!("OUTPUT{i}")).collect();
    let (ins, outs) =
        (Vec::from_iter(ins.iter().map(String::as_str)), Vec::from_iter(outs.iter().map(String::as_str)));
    let config = format!("backend: 'moody' {} {} {more}", tensors("input", &ins), tensors("output", &outs));
    write_model(repository, name, &config);
}

/// Steps are model, inputs, outputs.
fn ensemble(
    repository: &Path,
    name: &str,
    inputs: &[&str],
    outputs: &[&str],
    steps: &[(&str, &[&str], &[&str])],
    more: &str,
) {
    let mut config =
        format!("platform: 'ensemble' {} {}", tensors("input", inputs), tensors("output", outputs));
    config += "ensemble_scheduling {\n";
    for (model, from, to) in steps {
        let _infallible = writeln!(config, "step {{ model_name: '{model}' model_version: -1");
        for (side, tensors) in [("input", from), ("output", to)] {
            for (i, tensor) in tensors.iter().enumerate() {
                let port = side.to_ascii_uppercase();
                let _infallible = writeln!(config, "{side}_map {{ key: '{port}{i}' value: '{tensor}' }}");
            }
        }
        config += "}\n";
    }
    write_model(repository, name, &format!("{config}{more} }}"));
}

fn start(repository: &Path) -> Arc<Server> {
    start_with(repository, Moody::default())
}

fn start_with(repository: &Path, moody: Moody) -> Arc<Server> {
    let options = ServerOptions {
        repositories: vec![repository.to_owned()],
        control_mode: ModelControlMode::Explicit,
        load_models: vec!["*".to_owned()],
        ..ServerOptions::default()
    };
    let mut backends = trireme_backend_testing::backends();
    backends.push(Arc::new(moody));
    let server = Server::start(options, backends).expect("the repository exists");
    let failed: Vec<String> =
        server.load_report().into_iter().filter(|row| row.failed).map(|row| format!("{row:?}")).collect();
    assert!(failed.is_empty(), "{failed:?}");
    server
}

fn request(inputs: &[(&str, &[u8])]) -> InferRequest {
    let mut request = InferRequest::new();
    request.id = "a".into();
    for (name, data) in inputs {
        request.inputs.push(InferInput {
            name: Arc::from(*name),
            data_type: DataType::Uint8,
            shape: Shape::new(&[data.len() as i64]),
            data: data.to_vec().into(),
        });
    }
    request
}

fn ask(server: &Server, model: &str, request: InferRequest) -> Vec<(Option<Result<InferResponse>>, bool)> {
    let model = server.model(model, None).expect("the model is ready");
    let (replies, receiver) = mpsc::channel();
    server.infer(&model, request, Responder::new(Box::new(Client { number: 0, replies, patience: None })));
    let mut answers = Vec::new();
    loop {
        let (_, reply, last) = receiver.recv_timeout(Duration::from_secs(20)).expect("every request ends");
        answers.push((reply, last));
        if last {
            return answers;
        }
    }
}

fn one(answers: Vec<(Option<Result<InferResponse>>, bool)>) -> Result<InferResponse> {
    let [(Some(answer), true)] = <[_; 1]>::try_from(answers).expect("one answer") else {
        panic!("no answer")
    };
    answer
}

#[test]
fn tensors_are_handed_on_and_never_copied() {
    let root = tempfile::tempdir().expect("a directory");
    moody(root.path(), "m", 1, "");
    let steps: &[(&str, &[&str], &[&str])] =
        &[("m", &["A"], &["s"]), ("m", &["s"], &["t"]), ("m", &["s"], &["P"]), ("m", &["t"], &["Q"])];
    ensemble(root.path(), "e", &["A"], &["P", "Q"], steps, "");
    ensemble(root.path(), "outer", &["A"], &["Q"], &[("e1", &["A"], &["Q"])], "");
    ensemble(root.path(), "e1", &["INPUT0"], &["OUTPUT0"], &[("m", &["INPUT0"], &["OUTPUT0"])], "");
    let server = start(root.path());
    for (model, outputs) in [("e", 2), ("outer", 1)] {
        let request = request(&[("A", &[7; 1000])]);
        let sent = request.inputs[0].data.as_slice().as_ptr();
        let answer = one(ask(&server, model, request)).expect("an answer");
        assert_eq!(answer.outputs.len(), outputs);
        for output in &answer.outputs {
            assert_eq!(output.data.as_slice().as_ptr(), sent, "{model}: {} is another buffer", output.name);
        }
    }
}

#[test]
fn what_a_request_says_of_itself_goes_along_to_every_step() {
    let root = tempfile::tempdir().expect("a directory");
    moody(root.path(), "m", 1, "parameters { key: 'remembers' value { string_value: 'on' } }");
    ensemble(root.path(), "inner", &["INPUT0"], &["OUTPUT0"], &[("m", &["INPUT0"], &["OUTPUT0"])], "");
    ensemble(root.path(), "e", &["A"], &["B"], &[("m", &["A"], &["s"]), ("inner", &["s"], &["B"])], "");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let server = start_with(root.path(), Moody { seen: Some(Arc::clone(&seen)), ..Moody::default() });
    let mut asked = request(&[("A", &[1])]);
    asked.sequence = Sequence { id: CorrelationId::Number(u64::MAX), start: true, end: false };
    (asked.priority, asked.timeout_us) = (2, 5_000_000);
    asked.parameters.insert("mine", ParameterValue::String("too".into()));
    let answer = one(ask(&server, "e", asked.clone())).expect("an answer");
    assert_eq!(answer.parameters.get("sequence_id"), Some(&ParameterValue::Uint(u64::MAX)));
    assert_eq!(answer.parameters.get("sequence_start"), Some(&ParameterValue::Bool(true)));
    let seen = seen.lock();
    assert_eq!(seen.len(), 2);
    for request in seen.iter() {
        assert_eq!((&request.id, &request.sequence), (&asked.id, &asked.sequence));
        assert_eq!((request.priority, request.timeout_us), (2, 5_000_000));
        assert_eq!(request.parameters, asked.parameters);
        assert_eq!(request.outputs.len(), 1, "only what the ensemble reads is asked for");
        assert!(request.received > asked.received, "a step counts its own time");
    }
}

#[test]
fn outputs_come_in_the_order_of_the_client_or_by_name() {
    let root = tempfile::tempdir().expect("a directory");
    moody(root.path(), "m", 1, "");
    ensemble(root.path(), "e", &["A"], &["Z", "Y"], &[("m", &["A"], &["Z"]), ("m", &["Z"], &["Y"])], "");
    let server = start(root.path());
    let names = |request| {
        let answer = one(ask(&server, "e", request)).expect("an answer");
        answer.outputs.iter().map(|output| output.name.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(names(request(&[("A", &[1])])), ["Y", "Z"]);
    let mut named = request(&[("A", &[1])]);
    named.outputs = ["Z", "Y"].into_iter().map(|name| RequestedOutput { name: name.into() }).collect();
    assert_eq!(names(named), ["Z", "Y"]);
    // A step that no output needs runs all the same, as with Triton, after the answer or before.
    let before = server.statistics("m", None).expect("ready")[0].inference_count;
    let mut first = request(&[("A", &[1])]);
    first.outputs.push(RequestedOutput { name: "Z".into() });
    assert_eq!(names(first), ["Z"]);
    assert_eq!(server.wait_idle(Duration::from_secs(20)), 0);
    assert_eq!(server.statistics("m", None).expect("ready")[0].inference_count, before + 2);
}

#[test]
fn a_long_chain_of_quick_steps_needs_no_deep_stack() {
    const LENGTH: usize = 600;
    let root = tempfile::tempdir().expect("a directory");
    for name in ["a", "b"] {
        moody(root.path(), name, 1, "instance_group { kind: KIND_CPU count: 4 }");
    }
    let names: Vec<String> = (0..=LENGTH).map(|i| format!("t{i}")).collect();
    let ports: Vec<[&str; 1]> = names.iter().map(|name| [name.as_str()]).collect();
    let steps: Vec<(&str, &[&str], &[&str])> = (0..LENGTH)
        .map(|i| (if i % 2 == 0 { "a" } else { "b" }, &ports[i] as &[&str], &ports[i + 1] as &[&str]))
        .collect();
    ensemble(root.path(), "e", &ports[0], &ports[LENGTH], &steps, "");
    let server = start(root.path());
    let thread = std::thread::Builder::new().stack_size(256 << 10);
    let chain = move || {
        for _ in 0..5 {
            one(ask(&server, "e", request(&[("t0", &[1])]))).expect("an answer");
        }
    };
    thread.spawn(chain).expect("a thread").join().expect("the stack is deep enough");
}

#[test]
fn the_first_step_that_fails_is_named_and_ends_the_request() {
    let root = tempfile::tempdir().expect("a directory");
    moody(root.path(), "m", 1, "");
    let fp32 = "backend: 'identity' input { name: 'INPUT0' data_type: TYPE_UINT8 dims: 3 } \
                output { name: 'OUTPUT0' data_type: TYPE_UINT8 dims: 3 }";
    write_model(root.path(), "three", fp32);
    ensemble(root.path(), "e", &["A"], &["B"], &[("m", &["A"], &["s"]), ("three", &["s"], &["B"])], "");
    let server = start(root.path());
    let error = one(ask(&server, "e", request(&[("A", &[1, 2])]))).expect_err("a wrong shape");
    assert_eq!(
        error.message(),
        "in ensemble 'e', [request id: a] unexpected shape for input 'INPUT0' for model 'three'. Expected [3], got [2]. \
         (step 1, model 'three')"
    );
    one(ask(&server, "e", request(&[("A", &[1, 2, 3])]))).expect("an answer");
}

/// A client that can be made to leave, and says so.
#[derive(Clone, Default)]
struct Leaving {
    has_left: Arc<AtomicBool>,
    watcher: Arc<Mutex<Option<Waker>>>,
    replies: Arc<Mutex<Vec<Result<InferResponse>>>>,
}

impl Leaving {
    fn leave(&self) {
        self.has_left.store(true, Ordering::SeqCst);
        if let Some(waker) = self.watcher.lock().take() {
            waker.wake();
        }
    }

    fn answer_within(&self, time: Duration) -> Option<Result<InferResponse>> {
        let deadline = Instant::now() + time;
        while Instant::now() < deadline {
            if let Some(reply) = self.replies.lock().pop() {
                return Some(reply);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        None
    }
}

impl ResponseSink for Leaving {
    fn send(&mut self, reply: Option<Result<InferResponse>>, _: bool) {
        self.replies.lock().extend(reply);
    }

    fn is_closed(&self) -> bool {
        self.has_left.load(Ordering::SeqCst)
    }

    fn watch_closed(&mut self, waker: &Waker) {
        *self.watcher.lock() = Some(waker.clone());
    }
}

#[test]
fn clients_that_leave_take_their_requests_along_wherever_they_wait() {
    let root = tempfile::tempdir().expect("a directory");
    let slow = "backend: 'identity' input { name: 'INPUT0' data_type: TYPE_UINT8 dims: -1 } \
                output { name: 'OUTPUT0' data_type: TYPE_UINT8 dims: -1 } instance_group { kind: KIND_CPU count: 1 } \
                parameters { key: 'execute_delay_ms' value { string_value: '1000' } }";
    write_model(root.path(), "slow", slow);
    let steps: &[(&str, &[&str], &[&str])] = &[("slow", &["A"], &["B"])];
    ensemble(root.path(), "e", &["A"], &["B"], steps, "max_inflight_requests: 2");
    let server = start(root.path());
    let model = server.model("e", None).expect("ready");
    let clients: Vec<Leaving> = (0..3).map(|_| Leaving::default()).collect();
    // The first runs, the second waits at the step, the third before the ensemble.
    for client in &clients {
        server.infer(&model, request(&[("A", &[1])]), Responder::new(Box::new(client.clone())));
    }
    for client in clients.iter().skip(1).rev() {
        client.leave();
        let answer = client.answer_within(Duration::from_millis(700)).expect("it is not kept waiting");
        assert_eq!(answer.expect_err("nobody is there").code(), Code::Cancelled);
    }
    assert!(clients[0].answer_within(Duration::from_secs(20)).expect("an answer").is_ok());
    let count = server.statistics("slow", None).expect("ready")[0].inference_count;
    assert_eq!(count, 1, "only the first ran");
    let page = server.metrics_text();
    assert!(page.contains("request_failure{model=\"e\",version=\"1\",reason=\"CANCELED\"} 2"), "{page}");
}

/// A client that reads nothing until it is let go.
struct Asleep(Arc<Mutex<()>>, mpsc::Sender<bool>);

impl ResponseSink for Asleep {
    fn send(&mut self, _: Option<Result<InferResponse>>, last: bool) {
        drop(self.0.lock());
        self.1.send(last).expect("the test waits for the end");
    }

    fn is_closed(&self) -> bool {
        false
    }
}

#[test]
fn a_client_that_reads_slowly_slows_the_model_down() {
    let root = tempfile::tempdir().expect("a directory");
    moody(root.path(), "m", 1, "");
    moody(root.path(), "many", 1, "model_transaction_policy { decoupled: true }");
    let steps: &[(&str, &[&str], &[&str])] = &[("many", &["A"], &["s"]), ("m", &["s"], &["B"])];
    ensemble(root.path(), "e", &["A"], &["B"], steps, "");
    let server = start(root.path());
    let bed = Arc::new(Mutex::new(()));
    let (sender, receiver) = mpsc::channel();
    let asleep = bed.lock();
    let model = server.model("e", None).expect("ready");
    let client = Asleep(Arc::clone(&bed), sender);
    let asking = Arc::clone(&server);
    // A thread of its own: it may be the one that has to wait for the client.
    std::thread::spawn(move || {
        asking.infer(&model, request(&[("A", &[250])]), Responder::new(Box::new(client)));
    });
    std::thread::sleep(Duration::from_millis(300));
    let sent = server.statistics("many", None).expect("ready")[0].response_stats.len();
    assert!((1..=70).contains(&sent), "{sent} responses were made for a client that reads none");
    drop(asleep);
    let answers: Vec<bool> = receiver.iter().take(251).collect();
    assert_eq!(answers.iter().filter(|last| **last).count(), 1);
}

#[test]
fn a_limit_does_not_make_a_model_wait_for_itself() {
    let root = tempfile::tempdir().expect("a directory");
    moody(root.path(), "many", 1, "model_transaction_policy { decoupled: true }");
    let steps: &[(&str, &[&str], &[&str])] = &[("many", &["A"], &["s"]), ("many", &["s"], &["B"])];
    ensemble(root.path(), "e", &["A"], &["B"], steps, "max_inflight_requests: 1");
    let server = start(root.path());
    let begin = Instant::now();
    let answers = ask(&server, "e", request(&[("A", &[9])]));
    assert_eq!(answers.len(), 81 + 1);
    assert!(begin.elapsed() < Duration::from_secs(10), "it waited {:?}", begin.elapsed());
}

#[test]
fn every_request_ends_once_whatever_models_and_clients_do() {
    const REQUESTS: usize = 3000;
    let root = tempfile::tempdir().expect("a directory");
    let moods =
        "parameters { key: 'moods' value { string_value: 'on' } } instance_group { kind: KIND_CPU count: 2 }";
    moody(root.path(), "m", 1, moods);
    moody(root.path(), "join", 2, moods);
    moody(root.path(), "many", 1, &format!("{moods} model_transaction_policy {{ decoupled: true }}"));
    let diamond: &[(&str, &[&str], &[&str])] = &[
        ("m", &["A"], &["s"]),
        ("m", &["s"], &["t"]),
        ("m", &["s"], &["u"]),
        ("join", &["t", "u"], &["P", "v"]),
        ("m", &["v"], &["Q"]),
    ];
    ensemble(root.path(), "diamond", &["A"], &["P", "Q"], diamond, "");
    ensemble(root.path(), "bounded", &["A"], &["P", "Q"], diamond, "max_inflight_requests: 3");
    let stream: &[(&str, &[&str], &[&str])] =
        &[("many", &["A"], &["t"]), ("m", &["A"], &["u"]), ("join", &["t", "u"], &["P", "Q"])];
    ensemble(root.path(), "stream", &["A"], &["P", "Q"], stream, "");
    ensemble(root.path(), "flood", &["A"], &["P", "Q"], stream, "max_inflight_requests: 2");
    ensemble(root.path(), "outer", &["A"], &["Z"], &[("inner", &["A"], &["y"]), ("m", &["y"], &["Z"])], "");
    ensemble(root.path(), "inner", &["INPUT0"], &["OUTPUT0"], &[("many", &["INPUT0"], &["OUTPUT0"])], "");
    let server = start(root.path());
    let (replies, receiver) = mpsc::channel();
    let models = ["diamond", "bounded", "stream", "flood", "outer"];
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (server, replies) = (&server, replies.clone());
            scope.spawn(move || {
                for number in (thread..REQUESTS).step_by(4) {
                    let model = server.model(models[number % models.len()], None).expect("ready");
                    let patience = (number % 7 == 0).then(|| AtomicUsize::new(number % 11));
                    let client = Client { number, replies: replies.clone(), patience };
                    let request = request(&[("A", &[[0, 1, 2, 3, 4][number % 5], 1])]);
                    server.infer(&model, request, Responder::new(Box::new(client)));
                    if number % 64 == thread {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            });
        }
    });
    drop(replies);
    let mut ends = vec![0_usize; REQUESTS];
    let (mut good, mut bad) = (0, 0);
    let deadline = Instant::now() + Duration::from_secs(60);
    // The channel closes when the last request has let its client go.
    loop {
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((number, reply, last)) => {
                assert_eq!(ends[number], 0, "request {number} says something after its end");
                match reply {
                    Some(Ok(response)) => {
                        assert_eq!(response.id, "a");
                        good += 1;
                    }
                    Some(Err(_)) => {
                        assert!(last, "an error ends the request");
                        bad += 1;
                    }
                    None => assert!(last),
                }
                ends[number] += usize::from(last);
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let open: Vec<(usize, &str)> =
                    (0..REQUESTS).filter(|n| ends[*n] == 0).map(|n| (n, models[n % models.len()])).collect();
                panic!("{} requests never end: {:?}", open.len(), &open[..open.len().min(20)])
            }
        }
    }
    assert!(ends.iter().all(|ends| *ends == 1), "every request ends once");
    assert!(good > REQUESTS / 4 && bad > REQUESTS / 10, "{good} responses and {bad} errors");
    assert_eq!(server.wait_idle(Duration::from_secs(20)), 0, "nothing is left inside");
    for model in ["bounded", "flood"] {
        let answers = ask(&server, model, request(&[("A", &[0, 1])]));
        assert!(answers.last().is_some_and(|(_, last)| *last), "the next request is let in");
    }
}
