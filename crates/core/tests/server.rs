//! The server as a frontend sees it: models from a repository on disk, requests in, exactly one end per request.

#![expect(clippy::expect_used, reason = "a test that cannot set itself up must end")]

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use trireme_backend::{
    Backend, Batch, InstanceContext, Model, ModelContext, ModelInstance, ModelTensors, OpenModel,
};
use trireme_core::{LoadOverrides, ModelControlMode, ModelState, Server, ServerOptions};
use trireme_types::{
    Code, DataType, Error, InferInput, InferRequest, InferResponse, ModelReport, OutputTensor, Responder,
    ResponseSink, Result, Shape,
};

/// Answers come here: reply and whether it was the last.
type Reply = (Option<Result<InferResponse>>, bool);

struct Channel(mpsc::Sender<Reply>);

impl ResponseSink for Channel {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        // A test that has seen enough may be gone.
        let _gone = self.0.send((reply, last));
    }

    fn is_closed(&self) -> bool {
        false
    }
}

struct Vanished;

impl ResponseSink for Vanished {
    fn send(&mut self, _reply: Option<Result<InferResponse>>, _last: bool) {}

    fn is_closed(&self) -> bool {
        true
    }
}

fn config(backend: &str) -> String {
    format!(
        "backend: \"{backend}\" max_batch_size: 8
         input {{ name: \"INPUT0\" data_type: TYPE_INT32 dims: 2 }}
         output {{ name: \"OUTPUT0\" data_type: TYPE_INT32 dims: 2 }}
         instance_group {{ kind: KIND_CPU count: 1 }}"
    )
}

fn write_model(repository: &Path, name: &str, config: &str) {
    fs_err::create_dir_all(repository.join(name).join("1")).expect("can create");
    fs_err::write(repository.join(name).join("config.pbtxt"), config).expect("can write");
}

fn start(repository: &Path, control_mode: ModelControlMode, load: &[&str]) -> Arc<Server> {
    let options = ServerOptions {
        repositories: vec![repository.to_owned()],
        control_mode,
        load_models: load.iter().map(|name| (*name).to_owned()).collect(),
        ..ServerOptions::default()
    };
    let mut backends = trireme_backend_testing::backends();
    backends.push(Arc::new(Odd));
    Server::start(options, backends).expect("the repository exists")
}

fn request(values: [i32; 2]) -> InferRequest {
    let mut request = InferRequest::new();
    request.id = "a".into();
    let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    request.inputs.push(InferInput {
        name: Arc::from("INPUT0"),
        data_type: DataType::Int32,
        shape: Shape::new(&[1, 2]),
        data: data.into(),
    });
    request
}

fn infer(server: &Server, model: &str, request: InferRequest) -> Result<InferResponse> {
    let model = server.model(model, None)?;
    let (sender, receiver) = mpsc::channel();
    server.infer(&model, request, Responder::new(Box::new(Channel(sender))));
    let (reply, last) = receiver.recv_timeout(Duration::from_secs(20)).expect("every request is answered");
    assert!(last, "a model that is not decoupled answers once");
    reply.expect("an answer")
}

/// A backend of odd ways, chosen by the first value: 1 panics, 2 fails, 3 forgets the request, others are echoed
/// after as many milliseconds as the second value says.
#[derive(Debug)]
struct Odd;

static COUNTED_INSTANCES: AtomicUsize = AtomicUsize::new(0);

impl Backend for Odd {
    fn name(&self) -> &str {
        "odd"
    }

    fn default_model_filename(&self) -> Option<&str> {
        None
    }

    fn open(&self, context: &ModelContext) -> Result<Box<dyn OpenModel>> {
        if &*context.name == "broken" {
            return Err(Error::invalid_arg("this model is broken by design"));
        }
        Ok(Box::new(Odd))
    }
}

impl OpenModel for Odd {
    fn report(&self) -> Result<Option<ModelReport>> {
        Ok(None)
    }

    fn load(self: Box<Self>, _tensors: ModelTensors) -> Result<Arc<dyn Model>> {
        Ok(Arc::new(Odd))
    }
}

impl Model for Odd {
    fn instance(&self, context: &InstanceContext) -> Result<Box<dyn ModelInstance>> {
        // Tests run side by side; only one of them counts.
        if context.name.contains("counted") {
            COUNTED_INSTANCES.fetch_add(1, Ordering::SeqCst);
        }
        Ok(Box::new(Odd))
    }
}

impl ModelInstance for Odd {
    fn execute(&mut self, batch: &mut Batch) -> Result<()> {
        for request in &mut batch.requests {
            let input = &request.request.inputs[0];
            let value = |at: usize| {
                i32::from_le_bytes(input.data.as_slice()[at..at + 4].try_into().expect("4 bytes"))
            };
            match value(0) {
                1 => panic!("odd on purpose"),
                2 => return Err(Error::unavailable("no today")),
                3 => continue,
                _ => {}
            }
            if value(4) > 0 {
                std::thread::sleep(Duration::from_millis(value(4).unsigned_abs().into()));
            }
            let output = OutputTensor {
                name: Arc::from("OUTPUT0"),
                data_type: input.data_type,
                shape: input.shape.clone(),
                data: input.data.clone(),
            };
            request.answer(Ok(InferResponse {
                outputs: [output].into_iter().collect(),
                ..InferResponse::default()
            }));
        }
        Ok(())
    }
}

#[test]
fn answers_and_counts_before_the_answer_leaves() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "m", &config("identity"));
    let server = start(root.path(), ModelControlMode::None, &[]);
    assert!(server.is_ready());
    for n in 1..=30 {
        let response = infer(&server, "m", request([n, 0])).expect("identity answers");
        assert_eq!(response.id, "a");
        assert_eq!(&response.outputs[0].data.as_slice()[..4], n.to_le_bytes());
        let statistics = server.statistics("m", None).expect("the model is ready");
        assert_eq!(statistics[0].inference_count, u64::from(n.unsigned_abs()));
        assert_eq!(statistics[0].inference_stats.success.count, u64::from(n.unsigned_abs()));
    }
    let page = server.metrics_text();
    assert!(page.contains("nv_inference_request_success{model=\"m\",version=\"1\"} 30"), "{page}");
    // A request leaves right behind its answer.
    assert_eq!(server.wait_idle(Duration::from_secs(5)), 0);
}

#[test]
fn a_panic_a_failure_and_a_lost_request_each_end_alone() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "counted", &config("odd"));
    let server = start(root.path(), ModelControlMode::None, &[]);
    let before = COUNTED_INSTANCES.load(Ordering::SeqCst);
    let panicked = infer(&server, "counted", request([1, 0])).expect_err("a panic");
    assert_eq!(panicked.code(), Code::Internal);
    assert!(panicked.message().contains("odd on purpose"), "{panicked}");
    assert_eq!(infer(&server, "counted", request([2, 0])).expect_err("a failure").code(), Code::Unavailable);
    assert!(
        infer(&server, "counted", request([3, 0])).expect_err("lost").message().contains("without an answer")
    );
    infer(&server, "counted", request([4, 0])).expect("the model still serves");
    assert_eq!(
        COUNTED_INSTANCES.load(Ordering::SeqCst),
        before + 1,
        "the instance that panicked was made anew"
    );
    let statistics = &server.statistics("counted", None).expect("ready")[0];
    assert_eq!((statistics.inference_stats.success.count, statistics.inference_stats.fail.count), (1, 3));
    assert!(server.metrics_text().contains("model=\"counted\",version=\"1\",reason=\"BACKEND\"} 3"));
}

#[test]
fn requests_queue_for_an_instance_and_all_are_answered() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "odd", &config("odd"));
    let server = start(root.path(), ModelControlMode::None, &[]);
    let model = server.model("odd", None).expect("ready");
    let (sender, receiver) = mpsc::channel();
    for n in 0..40 {
        server.infer(&model, request([10 + n, n % 3]), Responder::new(Box::new(Channel(sender.clone()))));
    }
    let mut seen: Vec<i32> = (0..40)
        .map(|_| {
            let (reply, _) = receiver.recv_timeout(Duration::from_secs(20)).expect("answered");
            let response = reply.expect("an answer").expect("no failure");
            i32::from_le_bytes(response.outputs[0].data.as_slice()[..4].try_into().expect("4 bytes"))
        })
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, (10..50).collect::<Vec<_>>());
}

#[test]
fn a_request_whose_client_is_gone_is_not_run() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "odd", &config("odd"));
    let server = start(root.path(), ModelControlMode::None, &[]);
    let model = server.model("odd", None).expect("ready");
    server.infer(&model, request([1, 0]), Responder::new(Box::new(Vanished)));
    assert_eq!(server.wait_idle(Duration::from_secs(10)), 0);
    let statistics = &server.statistics("odd", None).expect("ready")[0];
    assert_eq!(statistics.execution_count, 0);
    assert!(server.metrics_text().contains("reason=\"CANCELED\"} 1"));
}

#[test]
fn a_bad_model_fails_alone_and_says_what_to_do() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "good", &config("identity"));
    write_model(root.path(), "broken", &config("odd"));
    write_model(root.path(), "syntax", "backend: \"identity\" max_batch_size: ${size}");
    write_model(root.path(), "nothing", &config("nope"));
    fs_err::create_dir(root.path().join("empty")).expect("can create");
    let server = start(root.path(), ModelControlMode::None, &[]);
    assert!(!server.is_ready(), "strict readiness");
    infer(&server, "good", request([1, 2])).expect("the good model serves");
    let rows = server.load_report();
    let row = |name: &str| rows.iter().find(|row| row.model == name).expect(name);
    assert_eq!(row("good").status, "READY");
    assert_eq!(row("broken").status, "UNAVAILABLE: Invalid argument: this model is broken by design");
    let advice = row("syntax").advice.as_deref().expect("advice");
    assert!(advice.contains("placeholder") && advice.contains("config.pbtxt"), "{advice}");
    assert!(row("nothing").advice.as_deref().expect("advice").contains("'nope'"));
    let empty = row("empty");
    assert!(empty.advice.as_deref().expect("advice").contains("empty"), "{empty:?}");
    assert_eq!(server.model("broken", None).expect_err("no version").code(), Code::NotFound);
    assert_eq!(server.model("broken", Some(1)).expect_err("not ready").code(), Code::Unavailable);
    assert_eq!(server.model("absent", None).expect_err("unknown").code(), Code::NotFound);
}

#[test]
fn explicit_mode_loads_and_unloads_on_request() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "m", &config("identity"));
    write_model(root.path(), "other", &config("identity"));
    write_model(root.path(), "broken", &config("odd"));
    let server = start(root.path(), ModelControlMode::Explicit, &["m"]);
    assert!(server.is_ready());
    assert_eq!(server.model("other", None).expect_err("not loaded").code(), Code::NotFound);
    let index = server.repository_index(false);
    let states: Vec<_> = index.iter().map(|entry| (entry.name.as_str(), entry.state)).collect();
    assert_eq!(states, [("broken", None), ("m", Some(ModelState::Ready)), ("other", None)]);

    server.load_model("other", LoadOverrides::default()).expect("loads");
    infer(&server, "other", request([1, 2])).expect("serves");
    let failed = server.load_model("broken", LoadOverrides::default()).expect_err("cannot load");
    assert_eq!(
        failed.message(),
        "load failed for model 'broken': version 1 is at UNAVAILABLE state: Invalid argument: this model is broken by \
         design;\n"
    );
    let absent = server.load_model("nope", LoadOverrides::default()).expect_err("not in the repository");
    assert_eq!(absent.code(), Code::Internal);
    assert!(absent.message().starts_with("failed to load 'nope', failed to poll from model repository"));
    server.load_model("../m", LoadOverrides::default()).expect_err("a path is no name");

    server.unload_model("m", false).expect("unloads");
    assert!(server.model("m", None).expect_err("unloaded").message().ends_with("has no available versions"));
    server.unload_model("nope", false).expect("unloading what is not there does nothing");

    let overrides =
        LoadOverrides { config: Some(r#"{"backend":"identity","max_batch_size":2,"input":[{"name":"INPUT0",
            "data_type":"TYPE_INT32","dims":[2]}],"output":[{"name":"OUTPUT0","data_type":"TYPE_INT32","dims":["2"]}]}"#
            .into()), files: Vec::new() };
    server.load_model("m", overrides).expect("loads with another configuration");
    assert_eq!(server.model("m", None).expect("ready").max_batch_size(), 2);
}

#[test]
fn a_failed_reload_leaves_the_old_version_serving() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "m", &config("identity"));
    let server = start(root.path(), ModelControlMode::Explicit, &["m"]);
    write_model(root.path(), "m", &config("nope"));
    server.load_model("m", LoadOverrides::default()).expect_err("no such backend");
    infer(&server, "m", request([1, 2])).expect("the old version serves");
}

#[test]
fn stopping_answers_what_is_inside_and_refuses_the_rest() {
    let root = tempfile::tempdir().expect("a directory");
    write_model(root.path(), "odd", &config("odd"));
    let server = start(root.path(), ModelControlMode::None, &[]);
    let model = server.model("odd", None).expect("ready");
    let (sender, receiver) = mpsc::channel();
    server.infer(&model, request([9, 100]), Responder::new(Box::new(Channel(sender.clone()))));
    server.begin_stop();
    assert!(!server.is_ready() && !server.is_live());
    server.infer(&model, request([9, 0]), Responder::new(Box::new(Channel(sender))));
    let (refused, _) = receiver.recv().expect("answered");
    assert_eq!(refused.expect("an answer").expect_err("refused").message(), "Server exiting");
    let started = Instant::now();
    assert_eq!(server.wait_idle(Duration::from_secs(10)), 0);
    assert!(started.elapsed() < Duration::from_secs(5));
    let (answered, _) = receiver.recv().expect("answered");
    answered.expect("an answer").expect("the request inside ran to its end");
}

#[test]
fn version_policies_select_versions() {
    let root = tempfile::tempdir().expect("a directory");
    for (name, policy) in [
        ("latest", ""),
        ("two", "version_policy { latest { num_versions: 2 } }"),
        ("all", "version_policy { all { } }"),
        ("some", "version_policy { specific { versions: [1, 10, 99] } }"),
        ("none", "version_policy { specific { versions: 7 } }"),
    ] {
        write_model(root.path(), name, &(config("identity") + policy));
        for version in ["3", "10", "configs", "01"] {
            fs_err::create_dir(root.path().join(name).join(version)).expect("can create");
        }
    }
    let server = start(root.path(), ModelControlMode::None, &[]);
    assert_eq!(server.ready_versions("latest"), [10]);
    assert_eq!(server.ready_versions("two"), [3, 10]);
    assert_eq!(server.ready_versions("all"), [1, 3, 10]);
    assert_eq!(server.ready_versions("some"), [1, 10]);
    assert_eq!(server.model("some", None).expect("ready").version(), 10);
    assert!(server.ready_versions("none").is_empty());
    let advice = server.load_report().into_iter().find(|row| row.model == "none").and_then(|row| row.advice);
    assert!(advice.expect("advice").contains("selects none of them"));
}
