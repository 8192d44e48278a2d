//! Many requests over every scheduler at once, with random clients that leave, priorities, limits, failures and panics:
//! each request is answered exactly once, and what is answered is its own.
//!
//! `TRIREME_STRESS_REQUESTS` sets how many (100,000 by default; `make stress` takes a million).

#![expect(clippy::expect_used, reason = "a test that cannot set itself up must end")]

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::task::Waker;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use trireme_backend::{
    Backend, Batch, InstanceContext, Model, ModelContext, ModelInstance, ModelTensors, OpenModel,
};
use trireme_core::{RateLimitResource, Server, ServerOptions};
use trireme_types::{
    Code, CorrelationId, DataType, Error, InferInput, InferRequest, InferResponse, ModelReport, OutputTensor,
    Responder, ResponseSink, Result, Sequence, Shape,
};

/// Requests of one producer that are inside at once.
const WINDOW: usize = 200;
const PRODUCERS: usize = 4;

/// What there is of the resource of the rate limiter.
const RESOURCE: u32 = 3;

/// Echoes its input after as many microseconds as the second value says; a first value that ends in 0007 fails the
/// batch, one that ends in 00013 panics.
#[derive(Clone, Debug, Default)]
struct Flaky {
    use_of_resource: Arc<Use>,
    /// What the instance takes of it.
    needs: u32,
}

/// How much of the resource is in use, and how much was at most.
#[derive(Debug, Default)]
struct Use {
    now: AtomicU32,
    most: AtomicU32,
}

/// An execution; a panic ends it as well.
struct Execution<'a>(&'a Flaky);

impl<'a> Execution<'a> {
    fn begin(instance: &'a Flaky) -> Self {
        let now = instance.use_of_resource.now.fetch_add(instance.needs, Ordering::SeqCst) + instance.needs;
        instance.use_of_resource.most.fetch_max(now, Ordering::SeqCst);
        Self(instance)
    }
}

impl Drop for Execution<'_> {
    fn drop(&mut self) {
        self.0.use_of_resource.now.fetch_sub(self.0.needs, Ordering::SeqCst);
    }
}

impl Backend for Flaky {
    fn name(&self) -> &str {
        "flaky"
    }

    fn default_model_filename(&self) -> Option<&str> {
        None
    }

    fn open(&self, _context: &ModelContext) -> Result<Box<dyn OpenModel>> {
        Ok(Box::new(self.clone()))
    }
}

impl OpenModel for Flaky {
    fn report(&self) -> Result<Option<ModelReport>> {
        Ok(None)
    }

    fn load(self: Box<Self>, _tensors: ModelTensors) -> Result<Arc<dyn Model>> {
        Ok(Arc::new(*self))
    }
}

impl Model for Flaky {
    fn instance(&self, context: &InstanceContext) -> Result<Box<dyn ModelInstance>> {
        // The group is called `needs2_0`, or anything else.
        let needs = context.name.strip_prefix("needs").and_then(|rest| rest.split('_').next()?.parse().ok());
        Ok(Box::new(Self { needs: needs.unwrap_or(0), ..self.clone() }))
    }
}

impl ModelInstance for Flaky {
    fn execute(&mut self, batch: &mut Batch) -> Result<()> {
        assert!(batch.rows() <= 8, "a batch over its limit");
        let _execution = Execution::begin(self);
        for request in &mut batch.requests {
            let input = &request.request.inputs[0];
            let [number, pause] = values(input.data.as_slice());
            if number % 10_000 == 7 {
                return Err(Error::internal("failed on purpose"));
            }
            assert!(number % 100_000 != 13, "panicked on purpose");
            if pause > 0 {
                thread::sleep(Duration::from_micros(pause.unsigned_abs().into()));
            }
            let output = OutputTensor {
                name: Arc::from("OUTPUT0"),
                data_type: input.data_type,
                shape: input.shape.clone(),
                data: input.data.clone(),
            };
            let outputs = [output].into_iter().collect();
            request.answer(Ok(InferResponse { outputs, ..InferResponse::default() }));
        }
        Ok(())
    }
}

fn values(bytes: &[u8]) -> [i32; 2] {
    [0, 4].map(|at| i32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes")))
}

/// How the models of sequences begin, whose requests have one row.
const SEQUENCES: &str = "sequences";
/// Models that only the ensemble asks.
const PARTS: [&str; 2] = ["part_batching", "part_plain"];

/// Models by name, with the part of the configuration that makes their scheduler.
fn models() -> Vec<(&'static str, String)> {
    let instances = |count: usize| format!("instance_group {{ kind: KIND_CPU count: {count} }}");
    let policies = "priority_levels: 3 default_priority_level: 2
        default_queue_policy { default_timeout_microseconds: 4000 allow_timeout_override: true max_queue_size: 60 }
        priority_queue_policy { key: 3 value { timeout_action: DELAY default_timeout_microseconds: 2000 } }";
    let delay = "max_queue_delay_microseconds: 500";
    vec![
        ("plain", instances(2)),
        ("batching", format!("dynamic_batching {{ preferred_batch_size: [4] {delay} }} {}", instances(2))),
        ("no_delay", format!("dynamic_batching {{ }} {}", instances(1))),
        ("policies", format!("dynamic_batching {{ {policies} {delay} }} {}", instances(1))),
        ("ordered", format!("dynamic_batching {{ preserve_ordering: true {delay} }} {}", instances(3))),
        (
            "sequences_oldest",
            format!(
                "sequence_batching {{ oldest {{ max_candidate_sequences: 8 {delay} preserve_ordering: true }} }} {}",
                instances(2)
            ),
        ),
        (
            "sequences_direct",
            format!(
                "sequence_batching {{ max_sequence_idle_microseconds: 20000
                direct {{ {delay} minimum_slot_utilization: 0.5 }} }} {} parameters {{
                key: \"TRIREME_ABANDONED_SEQUENCE\" value {{ string_value: \"end\" }} }}",
                instances(2)
            ),
        ),
        ("sequences_alone", format!("sequence_batching {{ iterative_sequence: true }} {}", instances(1))),
        (PARTS[0], format!("dynamic_batching {{ {delay} }} {}", instances(1))),
        (PARTS[1], instances(1)),
    ]
}

/// Four steps: one tensor feeds two of them, which meet in the last.
const ENSEMBLE: &str = "platform: \"ensemble\" max_batch_size: 8
    input { name: \"INPUT0\" data_type: TYPE_INT32 dims: 2 }
    output { name: \"OUTPUT0\" data_type: TYPE_INT32 dims: 2 }
    output { name: \"OTHER\" data_type: TYPE_INT32 dims: 2 }
    ensemble_scheduling {
      step { model_name: \"part_batching\" model_version: -1
        input_map { key: \"INPUT0\" value: \"INPUT0\" } output_map { key: \"OUTPUT0\" value: \"first\" } }
      step { model_name: \"part_plain\" model_version: -1
        input_map { key: \"INPUT0\" value: \"first\" } output_map { key: \"OUTPUT0\" value: \"OTHER\" } }
      step { model_name: \"part_batching\" model_version: -1
        input_map { key: \"INPUT0\" value: \"first\" } output_map { key: \"OUTPUT0\" value: \"OUTPUT0\" } }
    }";

/// With `limited`, the instances of each model need one, two or three of the resource.
fn write_models(repository: &Path, limited: bool) {
    for (number, (name, mut scheduler)) in models().into_iter().enumerate() {
        if limited {
            let (needs, priority) = (number % RESOURCE as usize + 1, number % 2 + 1);
            let limiter = format!(
                "name: \"needs{needs}\" rate_limiter {{ resources {{ name: \"R\" global: true count: {needs} }}
                 priority: {priority} }} kind: KIND_CPU"
            );
            scheduler = scheduler.replace("kind: KIND_CPU", &limiter);
        }
        fs_err::create_dir_all(repository.join(name).join("1")).expect("can create");
        let config = format!(
            "backend: \"flaky\" max_batch_size: 8
             input {{ name: \"INPUT0\" data_type: TYPE_INT32 dims: 2 }}
             output {{ name: \"OUTPUT0\" data_type: TYPE_INT32 dims: 2 }} {scheduler}"
        );
        fs_err::write(repository.join(name).join("config.pbtxt"), config).expect("can write");
    }
    fs_err::create_dir_all(repository.join("ensemble").join("1")).expect("can create");
    fs_err::write(repository.join("ensemble").join("config.pbtxt"), ENSEMBLE).expect("can write");
}

/// What became of the requests.
#[derive(Default)]
struct Ledger {
    succeeded: AtomicUsize,
    failed: AtomicUsize,
    cancelled: AtomicUsize,
    refused: AtomicUsize,
    wrong: AtomicUsize,
    twice: AtomicUsize,
}

/// Requests of one producer that are inside.
#[derive(Default)]
struct Window(Mutex<usize>, Condvar);

impl Window {
    fn enter(&self) {
        let mut inside = self.0.lock();
        while *inside >= WINDOW {
            self.1.wait(&mut inside);
        }
        *inside += 1;
    }

    fn leave(&self) {
        *self.0.lock() -= 1;
        self.1.notify_one();
    }

    fn wait_empty(&self, limit: Duration) -> usize {
        let end = Instant::now() + limit;
        let mut inside = self.0.lock();
        while *inside > 0 && Instant::now() < end {
            self.1.wait_for(&mut inside, Duration::from_millis(100));
        }
        *inside
    }
}

/// A client that may leave before its answer.
#[derive(Default)]
struct Client {
    gone: AtomicBool,
    ended: AtomicU8,
    waker: Mutex<Option<Waker>>,
}

impl Client {
    fn leave(&self) {
        self.gone.store(true, Ordering::SeqCst);
        if let Some(waker) = self.waker.lock().take() {
            waker.wake();
        }
    }
}

struct Sink {
    client: Arc<Client>,
    sent: [i32; 2],
    ledger: Arc<Ledger>,
    window: Arc<Window>,
}

impl ResponseSink for Sink {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        assert!(last, "these models answer once");
        if self.client.ended.fetch_add(1, Ordering::SeqCst) > 0 {
            self.ledger.twice.fetch_add(1, Ordering::SeqCst);
        }
        let counter = match reply {
            Some(Ok(response)) => {
                match values(response.output("OUTPUT0").expect("an output").data.as_slice()) == self.sent {
                    true => &self.ledger.succeeded,
                    false => &self.ledger.wrong,
                }
            }
            Some(Err(error)) => match error.code() {
                Code::Cancelled => &self.ledger.cancelled,
                Code::Unavailable => &self.ledger.refused,
                _ => &self.ledger.failed,
            },
            None => &self.ledger.wrong,
        };
        counter.fetch_add(1, Ordering::SeqCst);
        self.window.leave();
    }

    fn is_closed(&self) -> bool {
        self.client.gone.load(Ordering::SeqCst)
    }

    fn watch_closed(&mut self, waker: &Waker) {
        *self.client.waker.lock() = Some(waker.clone());
        if self.is_closed() {
            waker.wake_by_ref();
        }
    }
}

/// Numbers that look random and are the same in each run (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        u32::try_from((z ^ (z >> 31)) % u64::from(limit)).unwrap_or(0)
    }
}

/// A request of up to three rows, or the next one of a sequence of the producer's own.
fn request(number: i32, pause: i32, sequence: Option<u64>, random: &mut Random) -> InferRequest {
    let mut request = InferRequest::new();
    request.id = number.to_string();
    request.priority = random.below(5).into();
    request.timeout_us = if random.below(4) == 0 { random.below(3000).into() } else { 0 };
    let data: Vec<u8> = [number, pause].iter().flat_map(|value| value.to_le_bytes()).collect();
    let rows = if sequence.is_some() { 1 } else { 1 + random.below(3) };
    if let Some(id) = sequence {
        // Often restarted, so that few requests come to a sequence that has been given up.
        let (start, end) = (random.below(2) == 0, random.below(3) == 0);
        request.sequence = Sequence { id: CorrelationId::Number(id), start, end };
    }
    request.inputs.push(InferInput {
        name: Arc::from("INPUT0"),
        data_type: DataType::Int32,
        shape: Shape::new(&[rows.into(), 2]),
        data: data.repeat(rows as usize).into(),
    });
    request
}

/// Sends its share of the requests; some clients are handed on to leave soon.
fn produce(
    server: &Server,
    seed: usize,
    count: usize,
    ledger: &Arc<Ledger>,
    window: &Arc<Window>,
    leavers: &mpsc::Sender<Arc<Client>>,
) {
    let mut random = Random(seed as u64);
    let names: Vec<_> =
        models().into_iter().map(|(name, _)| name).filter(|name| !PARTS.contains(name)).collect();
    let names = [&names[..], &["ensemble"]].concat();
    for index in 0..count {
        window.enter();
        let number = i32::try_from(seed * 10_000_000 + index).expect("small");
        let pause = if random.below(20) == 0 { random.below(200).cast_signed() } else { 0 };
        let client = Arc::new(Client::default());
        let sink = Sink {
            client: Arc::clone(&client),
            sent: [number, pause],
            ledger: Arc::clone(ledger),
            window: Arc::clone(window),
        };
        let name = names[random.below(names.len().try_into().expect("few")) as usize];
        let model = server.model(name, None).expect("every model is ready");
        let sequence =
            name.starts_with(SEQUENCES).then(|| seed as u64 * 100 + u64::from(random.below(20)) + 1);
        let leaves = random.below(10);
        if leaves == 0 {
            client.leave();
        }
        server.infer(&model, request(number, pause, sequence, &mut random), Responder::new(Box::new(sink)));
        if leaves == 1 {
            leavers.send(client).expect("somebody listens");
        }
    }
}

#[test]
fn every_request_is_answered_exactly_once() {
    let (summary, _) = stress(requests(), false);
    println!("{summary}");
}

#[test]
fn every_request_is_answered_exactly_once_under_the_rate_limiter() {
    let (summary, most) = stress(requests() / 4, true);
    println!("{summary}");
    assert!((1..=RESOURCE).contains(&most), "{most} of {RESOURCE} were in use");
}

fn requests() -> usize {
    std::env::var("TRIREME_STRESS_REQUESTS")
        .ok()
        .map_or(100_000, |text| text.parse().expect("TRIREME_STRESS_REQUESTS is a number"))
}

/// Returns what became of the requests, and how much of the rate limiter's resource was in use at most.
fn stress(total: usize, limited: bool) -> (String, u32) {
    // The panics of the engine are part of the test; their traces are not.
    std::panic::set_hook(Box::new(|_| ()));
    let root = tempfile::tempdir().expect("a directory");
    write_models(root.path(), limited);
    let resource = RateLimitResource { name: "R".into(), count: RESOURCE, device: None };
    let options = ServerOptions {
        repositories: vec![root.path().to_owned()],
        rate_limit: limited.then(|| vec![resource]),
        ..ServerOptions::default()
    };
    let engine = Flaky::default();
    let in_use = Arc::clone(&engine.use_of_resource);
    let server = Server::start(options, vec![Arc::new(engine)]).expect("the repository exists");
    assert!(server.is_ready(), "{:?}", server.load_report());

    let ledger = Arc::new(Ledger::default());
    let windows: Vec<Arc<Window>> = (0..PRODUCERS).map(|_| Arc::default()).collect();
    let (leavers, leaving) = mpsc::channel::<Arc<Client>>();
    thread::scope(|scope| {
        scope.spawn(move || leaving.iter().for_each(|client| client.leave()));
        for (seed, window) in windows.iter().enumerate() {
            let (server, ledger, leavers) = (&server, &ledger, leavers.clone());
            let count = total / PRODUCERS;
            scope.spawn(move || produce(server, seed, count, ledger, window, &leavers));
        }
        drop(leavers);
    });
    let lost: usize = windows.iter().map(|window| window.wait_empty(Duration::from_secs(30))).sum();
    let _default = std::panic::take_hook();

    let count = |counter: &AtomicUsize| counter.load(Ordering::SeqCst);
    let (succeeded, failed) = (count(&ledger.succeeded), count(&ledger.failed));
    let (cancelled, refused) = (count(&ledger.cancelled), count(&ledger.refused));
    assert_eq!((lost, count(&ledger.twice), count(&ledger.wrong)), (0, 0, 0), "lost, answered twice, wrong");
    let sent = total / PRODUCERS * PRODUCERS;
    assert_eq!(succeeded + failed + cancelled + refused, sent);
    assert!(succeeded > sent / 2, "{succeeded} of {sent}");
    assert!(
        failed > 0 && cancelled > 0 && refused > 0,
        "{failed} {cancelled} {refused}: every way to end was seen"
    );
    assert_eq!(server.wait_idle(Duration::from_secs(10)), 0);
    let summary = format!(
        "{sent} requests: {succeeded} answered, {failed} failed, {cancelled} cancelled, {refused} refused"
    );

    // What the server counted is what the clients saw.
    let mut statistics = server.statistics("", None).expect("all models");
    statistics.retain(|model| !PARTS.contains(&model.name.as_str()));
    let success: u64 = statistics.iter().map(|model| model.inference_stats.success.count).sum();
    let fail: u64 = statistics.iter().map(|model| model.inference_stats.fail.count).sum();
    assert_eq!((success, fail), (succeeded as u64, (failed + cancelled + refused) as u64));
    let page = server.metrics_text();
    assert!(
        page.lines().filter(|line| line.starts_with("nv_inference_pending")).all(|line| line.ends_with(" 0"))
    );
    (summary, in_use.most.load(Ordering::SeqCst))
}
