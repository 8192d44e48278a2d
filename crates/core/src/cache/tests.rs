//! The cache in a server: what is answered from it, what is not, and what is counted.

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use trireme_backend::{
    Backend, Batch, InstanceContext, Model, ModelContext, ModelInstance, ModelTensors, OpenModel,
};
use trireme_types::{
    DataType, Error, InferInput, InferRequest, InferResponse, ModelReport, OutputTensor, RequestedOutput,
    Responder, ResponseSink, Result, Shape,
};

use crate::{CacheSettings, LoadOverrides, ModelControlMode, Server, ServerOptions};

/// Answers each request with a number that no other execution had: a hit is one that repeats a number. Takes its time
/// when the last byte of the input is `~`, and fails when the first is `!`.
#[derive(Debug)]
struct Unique;

static EXECUTIONS: AtomicU64 = AtomicU64::new(0);

impl Backend for Unique {
    fn name(&self) -> &str {
        "unique"
    }

    fn default_model_filename(&self) -> Option<&str> {
        None
    }

    fn open(&self, _context: &ModelContext) -> Result<Box<dyn OpenModel>> {
        Ok(Box::new(Unique))
    }
}

impl OpenModel for Unique {
    fn report(&self) -> Result<Option<ModelReport>> {
        Ok(None)
    }

    fn load(self: Box<Self>, _tensors: ModelTensors) -> Result<Arc<dyn Model>> {
        Ok(Arc::new(Unique))
    }
}

impl Model for Unique {
    fn instance(&self, _context: &InstanceContext) -> Result<Box<dyn ModelInstance>> {
        Ok(Box::new(Unique))
    }
}

impl ModelInstance for Unique {
    fn execute(&mut self, batch: &mut Batch) -> Result<()> {
        for request in &mut batch.requests {
            let number = EXECUTIONS.fetch_add(1, Ordering::SeqCst);
            let input = &request.request.inputs[0];
            if input.data.as_slice().last() == Some(&b'~') {
                std::thread::sleep(Duration::from_millis(200));
            }
            if input.data.as_slice().first() == Some(&b'!') {
                request.answer(Err(Error::internal("told to fail")));
                continue;
            }
            let output = |name: &str, number: u64| OutputTensor {
                name: Arc::from(name),
                data_type: DataType::Uint64,
                shape: Shape::new(&[1]),
                data: number.to_le_bytes().to_vec().into(),
            };
            let outputs = [output("NUMBER", number), output("LENGTH", input.data.len() as u64)];
            let outputs = outputs.into_iter().filter(|output| request.request.wants(&output.name)).collect();
            request.answer(Ok(InferResponse { outputs, ..InferResponse::default() }));
        }
        Ok(())
    }
}

struct Channel(mpsc::Sender<Result<InferResponse>>);

impl ResponseSink for Channel {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        assert!(last);
        self.0.send(reply.expect("an answer")).expect("the test waits");
    }

    fn is_closed(&self) -> bool {
        false
    }
}

/// A client that has gone away.
struct Vanished;

impl ResponseSink for Vanished {
    fn send(&mut self, _reply: Option<Result<InferResponse>>, _last: bool) {}

    fn is_closed(&self) -> bool {
        true
    }
}

fn write_model(repository: &Path, name: &str, more: &str) {
    let config = format!(
        "backend: \"unique\" instance_group {{ kind: KIND_CPU count: 2 }}
         input {{ name: \"IN\" data_type: TYPE_UINT8 dims: -1 }}
         output {{ name: \"NUMBER\" data_type: TYPE_UINT64 dims: 1 }}
         output {{ name: \"LENGTH\" data_type: TYPE_UINT64 dims: 1 }} {more}"
    );
    fs_err::create_dir_all(repository.join(name).join("1")).expect("can create");
    fs_err::write(repository.join(name).join("config.pbtxt"), config).expect("can write");
}

const ENABLED: &str = "response_cache { enable: true }";

fn start(repository: &Path, cache: Option<CacheSettings>) -> Arc<Server> {
    let options = ServerOptions {
        repositories: vec![repository.to_owned()],
        control_mode: ModelControlMode::Explicit,
        load_models: vec!["*".into()],
        cache,
        ..ServerOptions::default()
    };
    Server::start(options, vec![Arc::new(Unique)]).expect("the repository exists")
}

fn local(size: usize) -> Option<CacheSettings> {
    Some(CacheSettings::Local { size })
}

fn request(data: &[u8]) -> InferRequest {
    let mut request = InferRequest::new();
    request.inputs.push(InferInput {
        name: Arc::from("IN"),
        data_type: DataType::Uint8,
        shape: Shape::new(&[i64::try_from(data.len()).expect("small")]),
        data: data.to_vec().into(),
    });
    request
}

fn infer(server: &Server, model: &str, request: InferRequest) -> Result<InferResponse> {
    let model = server.model(model, None)?;
    let (sender, receiver) = mpsc::channel();
    server.infer(&model, request, Responder::new(Box::new(Channel(sender))));
    receiver.recv_timeout(Duration::from_secs(20)).expect("every request is answered")
}

fn number(server: &Server, model: &str, data: &[u8]) -> u64 {
    let response = infer(server, model, request(data)).expect("an answer");
    let output = response.output("NUMBER").expect("the output");
    u64::from_le_bytes(output.data.as_slice().try_into().expect("8 bytes"))
}

#[test]
fn a_request_that_was_answered_before_is_not_run() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "m", ENABLED);
    write_model(root.path(), "plain", "");
    let server = start(root.path(), local(1 << 20));
    let first = number(&server, "m", b"a");
    let other = number(&server, "m", b"b");
    assert_ne!(first, other);
    let mut named = request(b"a");
    named.id = "mine".into();
    let again = infer(&server, "m", named).expect("an answer");
    assert_eq!(again.id, "mine");
    assert_eq!(number(&server, "m", b"a"), first);
    assert_ne!(number(&server, "plain", b"a"), number(&server, "plain", b"a"));

    let statistics = &server.statistics("m", None).expect("ready")[0];
    let infer = &statistics.inference_stats;
    assert_eq!((infer.success.count, infer.queue.count, infer.compute_infer.count), (4, 4, 2));
    assert_eq!((infer.cache_hit.count, infer.cache_miss.count), (2, 2));
    assert!(infer.cache_hit.ns > 0 && infer.cache_miss.ns > 0);
    assert_eq!((statistics.inference_count, statistics.execution_count), (2, 2));
    let page = server.metrics_text();
    for line in [
        "nv_cache_num_hits_per_model{model=\"m\",version=\"1\"} 2\n",
        "nv_cache_num_misses_per_model{model=\"m\",version=\"1\"} 2\n",
        "nv_inference_request_success{model=\"m\",version=\"1\"} 4\n",
        "nv_inference_count{model=\"m\",version=\"1\"} 2\n",
        "\nnv_cache_num_entries 2\n",
        "\nnv_cache_num_lookups 4\n",
        "\nnv_cache_num_hits 2\n",
        "\nnv_cache_num_misses 2\n",
        "\nnv_cache_num_evictions 0\n",
    ] {
        assert!(page.contains(line), "{line} is missing in\n{page}");
    }
    assert!(!page.contains("per_model{model=\"plain\""));
}

#[test]
fn an_answer_with_other_outputs_is_another_answer() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "m", ENABLED);
    let server = start(root.path(), local(1 << 20));
    for wanted in [&["NUMBER"][..], &["LENGTH"], &["LENGTH", "NUMBER"], &[]] {
        for _ in 0..2 {
            let mut one = request(b"abc");
            one.outputs.extend(wanted.iter().map(|name| RequestedOutput { name: Arc::from(*name) }));
            let response = infer(&server, "m", one).expect("an answer");
            let got: HashSet<&str> = response.outputs.iter().map(|output| &*output.name).collect();
            let all = ["NUMBER", "LENGTH"];
            let want = if wanted.is_empty() { &all[..] } else { wanted };
            assert_eq!(got, want.iter().copied().collect());
        }
    }
    // Naming all outputs and naming none is the same question.
    assert_eq!(server.statistics("m", None).expect("ready")[0].execution_count, 3);
}

#[test]
fn failures_are_not_kept() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "m", ENABLED);
    let server = start(root.path(), local(1 << 20));
    for _ in 0..3 {
        infer(&server, "m", request(b"!")).expect_err("told to fail");
    }
    let infer = server.statistics("m", None).expect("ready")[0].inference_stats;
    assert_eq!((infer.fail.count, infer.cache_hit.count), (3, 0));
    assert!(server.metrics_text().contains("\nnv_cache_num_entries 0\n"));
}

#[test]
fn a_model_that_is_loaded_anew_starts_with_nothing_kept() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "m", ENABLED);
    write_model(root.path(), "other", ENABLED);
    let server = start(root.path(), local(1 << 20));
    let (before, other) = (number(&server, "m", b"a"), number(&server, "other", b"a"));
    fs_err::write(root.path().join("m/1/weights"), "changed").expect("can write");
    server.load_model("m", LoadOverrides::default()).expect("loads");
    let after = number(&server, "m", b"a");
    assert_ne!(before, after);
    assert_eq!(number(&server, "m", b"a"), after);
    assert_eq!(number(&server, "other", b"a"), other, "other models keep theirs");
    server.unload_model("m", false).expect("unloads");
    // The thread that ran it last may hold it for a moment.
    let end = Instant::now() + Duration::from_secs(10);
    while !server.metrics_text().contains("\nnv_cache_num_entries 1\n") {
        assert!(Instant::now() < end, "what it kept is gone with it");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn write_ensemble(repository: &Path, name: &str, step: &str, output: &str) {
    let config = format!(
        "platform: \"ensemble\" {ENABLED}
         input {{ name: \"IN\" data_type: TYPE_UINT8 dims: -1 }}
         output {{ name: \"NUMBER\" data_type: TYPE_UINT64 dims: 1 }}
         ensemble_scheduling {{ step {{ model_name: \"{step}\" model_version: -1
             input_map {{ key: \"IN\" value: \"IN\" }}
             output_map {{ key: \"{output}\" value: \"NUMBER\" }} }} }}"
    );
    fs_err::create_dir_all(repository.join(name).join("1")).expect("can create");
    fs_err::write(repository.join(name).join("config.pbtxt"), config).expect("can write");
}

#[test]
fn an_ensemble_forgets_when_a_model_of_its_steps_is_loaded_anew() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "m", "");
    write_model(root.path(), "other", "");
    write_ensemble(root.path(), "inner", "m", "NUMBER");
    write_ensemble(root.path(), "outer", "inner", "NUMBER");
    let server = start(root.path(), local(1 << 20));
    let first = number(&server, "outer", b"a");
    assert_eq!(number(&server, "outer", b"a"), first);
    assert_eq!(number(&server, "inner", b"a"), first, "it has the answer that the outer one asked for");
    server.load_model("other", LoadOverrides::default()).expect("loads");
    assert_eq!(number(&server, "outer", b"a"), first, "that one has no part in it");
    fs_err::write(root.path().join("m/1/weights"), "changed").expect("can write");
    server.load_model("m", LoadOverrides::default()).expect("loads");
    let second = number(&server, "outer", b"a");
    assert_ne!(second, first);
    assert_eq!(number(&server, "outer", b"a"), second);
    let infer = server.statistics("outer", None).expect("ready")[0].inference_stats;
    assert_eq!((infer.success.count, infer.cache_hit.count, infer.cache_miss.count), (5, 3, 2));
    assert_eq!(server.statistics("m", None).expect("ready")[0].execution_count, 1, "since it was loaded");
}

/// Answers to as many equal requests at once.
fn at_once(server: &Server, model: &str, data: &[u8], count: usize) -> Vec<Result<InferResponse>> {
    let version = server.model(model, None).expect("ready");
    let (sender, receiver) = mpsc::channel();
    for n in 0..count {
        let mut one = request(data);
        one.id = n.to_string();
        server.infer(&version, one, Responder::new(Box::new(Channel(sender.clone()))));
    }
    (0..count).map(|_| receiver.recv_timeout(Duration::from_secs(20)).expect("answered")).collect()
}

const WAIT: &str = "parameters { key: \"TRIREME_CACHE_EQUAL_REQUESTS\" value { string_value: \"wait\" } }";

#[test]
fn equal_requests_run_once_where_they_may_wait_for_one_another() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "run", ENABLED);
    write_model(root.path(), "wait", &format!("{ENABLED} {WAIT}"));
    let server = start(root.path(), local(1 << 20));
    for (model, executions) in [("run", 6), ("wait", 1)] {
        let answers = at_once(&server, model, b"~", 6);
        let ids: HashSet<String> = answers.into_iter().map(|answer| answer.expect("no failure").id).collect();
        assert_eq!(ids.len(), 6, "each has its own id");
        let statistics = &server.statistics(model, None).expect("ready")[0];
        let infer = statistics.inference_stats;
        assert_eq!(statistics.execution_count, executions, "{model}");
        assert_eq!((infer.cache_miss.count, infer.cache_hit.count), (executions, 6 - executions));
        assert_eq!(infer.success.count, 6);
    }
    assert_eq!(server.wait_idle(Duration::from_secs(5)), 0);
}

#[test]
fn those_that_wait_run_when_what_they_waited_for_has_no_answer() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "m", &format!("{ENABLED} {WAIT}"));
    let server = start(root.path(), local(1 << 20));
    for answer in at_once(&server, "m", b"! fails ~", 4) {
        assert!(answer.expect_err("told to fail").message().contains("told to fail"));
    }
    let infer = server.statistics("m", None).expect("ready")[0].inference_stats;
    assert_eq!((infer.fail.count, infer.cache_hit.count), (4, 0));

    // The client of the one that others wait for goes away before it runs.
    let version = server.model("m", None).expect("ready");
    let (sender, receiver) = mpsc::channel();
    for busy in [&b"1~"[..], b"2~"] {
        server.infer(&version, request(busy), Responder::new(Box::new(Channel(sender.clone()))));
    }
    server.infer(&version, request(b"x"), Responder::new(Box::new(Vanished)));
    let others = at_once(&server, "m", b"x", 3);
    assert!(others.iter().all(Result::is_ok));
    for _ in 0..2 {
        receiver.recv_timeout(Duration::from_secs(20)).expect("answered").expect("no failure");
    }
    assert_eq!(server.wait_idle(Duration::from_secs(5)), 0);
}

#[test]
fn a_parameter_of_another_value_is_refused() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "m", &format!("{ENABLED} {}", WAIT.replace("wait", "perhaps")));
    let server = start(root.path(), local(1 << 20));
    let rows = server.load_report();
    assert!(rows[0].status.contains("must be 'run' or 'wait', got 'perhaps'"), "{}", rows[0].status);
}

#[test]
fn large_inputs_are_looked_up_elsewhere_and_answered_the_same() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "m", ENABLED);
    let server = start(root.path(), local(1 << 20));
    let large = vec![7; 1 << 20];
    assert_eq!(number(&server, "m", &large), number(&server, "m", &large));
    let infer = server.statistics("m", None).expect("ready")[0].inference_stats;
    assert_eq!((infer.cache_hit.count, infer.cache_miss.count), (1, 1));
    assert_eq!(server.wait_idle(Duration::from_secs(5)), 0);
}

#[test]
fn clients_of_a_small_cache_get_their_own_answers() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "m", &format!("{ENABLED} dynamic_batching {{ }}"));
    let server = start(root.path(), local(30_000));
    std::thread::scope(|scope| {
        for thread in 0..8_usize {
            let server = &server;
            scope.spawn(move || {
                for round in 0..200 {
                    let length = (round * (thread + 1)) % 61 + 1;
                    let response = infer(server, "m", request(&vec![1; length])).expect("an answer");
                    let got = response.output("LENGTH").expect("the output");
                    assert_eq!(got.data.as_slice(), (length as u64).to_le_bytes());
                }
            });
        }
    });
    let infer = server.statistics("m", None).expect("ready")[0].inference_stats;
    assert_eq!(infer.success.count, 1600);
    assert_eq!(infer.cache_hit.count + infer.cache_miss.count, 1600);
    assert!(infer.cache_hit.count > 0);
}

#[test]
fn a_model_that_asks_for_a_cache_that_is_not_there_serves_with_a_warning() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "m", ENABLED);
    let server = start(root.path(), None);
    assert_ne!(number(&server, "m", b"a"), number(&server, "m", b"a"));
    assert!(!server.metrics_text().contains("nv_cache_"));
    let warned = |cache| {
        let options =
            ServerOptions { repositories: vec![root.path().to_owned()], cache, ..ServerOptions::default() };
        let checks = Server::check(options, vec![Arc::new(Unique)]).expect("can be read");
        checks[0].warnings.iter().any(|finding| finding.message.contains("response_cache is enabled"))
    };
    assert!(warned(None));
    assert!(!warned(local(4096)));
}

#[test]
fn a_cache_without_room_is_refused() {
    let options = ServerOptions { cache: local(10), ..ServerOptions::default() };
    let error = Server::start(options, Vec::new()).expect_err("no room");
    assert!(error.message().contains("at least 1024"), "{error}");
}
