//! The cache in a Redis server, for answers that outlive this server or are shared with others.
//!
//! Requests never wait for Redis longer than they must: lookups go to a few threads with a connection each, which ask
//! for all that wait in one round trip. When Redis does not answer in time the cache counts as down: every lookup is a
//! miss at once, and one of the threads tries, in growing intervals, whether it is back. Invariants: every lookup that
//! is taken is answered once; no frontend thread touches a socket of Redis; what waits to be stored is bounded.

mod tls;
mod worker;

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use redis::{
    Client, Connection, ConnectionAddr, ErrorKind, IntoConnectionInfo, RedisConnectionInfo, RedisError,
};
use trireme_types::{Error, InferResponse, Result};

use super::answer::Answer;
use super::codec;
use super::key::Key;
use super::settings::RedisSettings;

/// An answer above this is not stored: it would keep a connection busy for longer than most models take.
const MAX_VALUE_BYTES: usize = 64 << 20;
/// Lookups that wait; more are misses at once.
const MAX_LOOKUPS: usize = 4096;
/// Bytes that wait to be stored; more are not stored.
const MAX_STORE_BYTES: usize = 2 * MAX_VALUE_BYTES;
/// Pauses between attempts to find Redis back.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Time between two complaints about single answers of Redis.
const COMPLAINT_PAUSE: Duration = Duration::from_secs(60);

/// Gets what was found, on a thread of the cache, and must not block it.
pub(super) type Found = Box<dyn FnOnce(Option<Answer>) + Send>;

/// Name of an answer in Redis: model and version for people, and the key.
#[derive(Clone, Debug)]
pub(super) struct Name {
    text: String,
    key: Key,
}

impl Name {
    pub(super) fn new(model: &str, version: i64, key: Key) -> Self {
        let mut text = format!("trireme:{model}:{version}:");
        for byte in key.as_bytes() {
            let _infallible = write!(text, "{byte:02x}");
        }
        Self { text, key }
    }
}

/// A question for Redis.
struct Lookup {
    name: Name,
    asked: Instant,
    found: Found,
}

/// An answer for Redis.
struct Value {
    name: Name,
    bytes: Vec<u8>,
}

/// What the threads and the requests share.
struct Shared {
    client: Client,
    settings: RedisSettings,
    queue: Mutex<Queue>,
    wake: Condvar,
    down: AtomicBool,
    counters: Counters,
    complained: Mutex<Option<Instant>>,
}

#[derive(Default)]
struct Queue {
    lookups: VecDeque<Lookup>,
    values: VecDeque<Value>,
    value_bytes: usize,
    /// While down: when to try again.
    retry: Option<Instant>,
    /// The pause before that attempt.
    pause: Duration,
    stopped: bool,
}

/// What the cache has done, for the metrics.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Times that Redis was found not to answer.
    pub(super) failures: AtomicU64,
    /// Lookups that were misses without asking: Redis was down, or too much waited.
    pub(super) skipped: AtomicU64,
    /// Answers that were stored.
    pub(super) stored: AtomicU64,
}

/// Answers in Redis.
pub(super) struct RedisCache {
    shared: Arc<Shared>,
}

impl RedisCache {
    /// Opens nothing yet; see [`RedisCache::open`].
    ///
    /// # Errors
    /// Settings that no connection can be made with.
    pub(super) fn new(settings: &RedisSettings) -> Result<Self> {
        let client = client(settings).map_err(|error| {
            Error::invalid_arg(format!(
                "--cache-config redis: no connection to {} can be made with these settings: {error}",
                settings.place()
            ))
        })?;
        let shared = Shared {
            client,
            settings: settings.clone(),
            queue: Mutex::default(),
            wake: Condvar::new(),
            down: AtomicBool::new(false),
            counters: Counters::default(),
            complained: Mutex::new(None),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Connects and starts the threads. A Redis that is not there is looked for again and again; one that refuses
    /// the user or the database is an error.
    ///
    /// # Errors
    /// Redis refuses these settings, or the system refuses a thread.
    pub(super) fn open(&self) -> Result<()> {
        let mut first = None;
        match self.shared.connect() {
            Ok(connection) => {
                tracing::info!("the response cache is in Redis at {}", self.shared.settings.place());
                first = Some(connection);
            }
            Err(error) if is_refusal(&error) => {
                return Err(Error::invalid_arg(format!(
                    "Redis at {} refuses the connection of the response cache: {error}; check user, password and db of \
                     --cache-config",
                    self.shared.settings.place()
                )));
            }
            Err(error) => self.shared.went_down(&error, false),
        }
        for index in 0..self.shared.settings.pool_size.max(1) {
            let (shared, connection) = (Arc::clone(&self.shared), first.take());
            let worker = worker::Worker::new(shared, connection, index == 0);
            thread::Builder::new()
                .name("trireme-redis".into())
                .spawn(move || worker.run())
                .map_err(|error| Error::internal(format!("no thread for the response cache: {error}")))?;
        }
        Ok(())
    }

    /// Whether Redis does not answer at present.
    pub(super) fn is_down(&self) -> bool {
        self.shared.down.load(Ordering::Acquire)
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// Asks for an answer. `found` gets it, or `None` if it is not there or Redis does not answer in time.
    pub(super) fn look_up(&self, name: Name, found: Found) {
        let lookup = Lookup { name, asked: Instant::now(), found };
        let refused = {
            let mut queue = self.shared.queue.lock();
            if queue.stopped || queue.retry.is_some() || queue.lookups.len() >= MAX_LOOKUPS {
                Some(lookup)
            } else {
                queue.lookups.push_back(lookup);
                None
            }
        };
        match refused {
            None => {
                self.shared.wake.notify_one();
            }
            Some(lookup) => self.shared.skip(lookup),
        }
    }

    /// Counts a lookup that was not made because Redis is down.
    pub(super) fn skipped(&self) {
        self.shared.counters.skipped.fetch_add(1, Ordering::Relaxed);
    }

    /// Has an answer stored, some time after this has returned.
    pub(super) fn store(&self, name: Name, response: &InferResponse) {
        if self.is_down() {
            return;
        }
        let Some(bytes) = codec::encode(&name.key, response, MAX_VALUE_BYTES) else { return };
        {
            let mut queue = self.shared.queue.lock();
            let waiting = queue.value_bytes.saturating_add(bytes.len());
            if queue.stopped || queue.retry.is_some() || waiting > MAX_STORE_BYTES {
                return;
            }
            queue.value_bytes = waiting;
            queue.values.push_back(Value { name, bytes });
        }
        self.shared.wake.notify_one();
    }
}

impl Drop for RedisCache {
    fn drop(&mut self) {
        self.shared.queue.lock().stopped = true;
        self.shared.wake.notify_all();
    }
}

impl Shared {
    fn connect(&self) -> Result<Connection, RedisError> {
        let connection = self.client.get_connection_with_timeout(self.settings.connect_timeout)?;
        connection.set_read_timeout(Some(self.settings.socket_timeout))?;
        connection.set_write_timeout(Some(self.settings.socket_timeout))?;
        Ok(connection)
    }

    /// From now on every lookup is a miss, those that wait included, until [`Shared::came_up`].
    /// `looked`: it was down, and an attempt to find it back has failed.
    fn went_down(&self, error: &RedisError, looked: bool) {
        let (lookups, first, pause) = {
            let mut queue = self.queue.lock();
            let first = queue.retry.is_none();
            if first || looked {
                queue.pause = (queue.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
                queue.retry = Some(Instant::now() + queue.pause);
            }
            queue.values.clear();
            queue.value_bytes = 0;
            self.down.store(true, Ordering::Release);
            (std::mem::take(&mut queue.lookups), first, queue.pause)
        };
        self.wake.notify_all();
        if first {
            self.counters.failures.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                "the response cache in Redis at {} does not answer: {error}; requests run as without it, and it is looked \
                 for again in {pause:?}",
                self.settings.place()
            );
        }
        for lookup in lookups {
            self.skip(lookup);
        }
    }

    fn came_up(&self) {
        {
            let mut queue = self.queue.lock();
            queue.retry = None;
            self.down.store(false, Ordering::Release);
        }
        self.wake.notify_all();
        tracing::info!("the response cache in Redis at {} answers again", self.settings.place());
    }

    /// An exchange went well: the next failure is a new one.
    fn went_well(&self) {
        let mut queue = self.queue.lock();
        if queue.retry.is_none() {
            queue.pause = Duration::ZERO;
        }
    }

    /// Ends a lookup without asking.
    fn skip(&self, lookup: Lookup) {
        self.counters.skipped.fetch_add(1, Ordering::Relaxed);
        (lookup.found)(None);
    }

    /// Says, not too often, that Redis refused a single command or holds what is no answer.
    fn complain(&self, what: &str) {
        let now = Instant::now();
        let mut complained = self.complained.lock();
        if complained.is_none_or(|before| now - before >= COMPLAINT_PAUSE) {
            *complained = Some(now);
            tracing::warn!("the response cache in Redis at {}: {what}", self.settings.place());
        }
    }
}

impl RedisSettings {
    /// `host:port`
    fn place(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

fn client(settings: &RedisSettings) -> Result<Client, RedisError> {
    let mut login = RedisConnectionInfo::default().set_db(settings.db).set_skip_set_lib_name();
    if let Some(user) = &settings.user {
        login = login.set_username(user);
    }
    if let Some(password) = &settings.password {
        login = login.set_password(password);
    }
    let (host, port) = (settings.host.clone(), settings.port);
    let Some(tls) = &settings.tls else {
        return Client::open(
            ConnectionAddr::Tcp(host, port).into_connection_info()?.set_redis_settings(login),
        );
    };
    let address = ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None };
    tls::client(address.into_connection_info()?.set_redis_settings(login), tls)
}

/// Whether Redis was there and did not want this client, which no waiting changes.
fn is_refusal(error: &RedisError) -> bool {
    use redis::ServerErrorKind::{BusyLoading, ClusterDown, MasterDown, TryAgain};
    match error.kind() {
        ErrorKind::Server(kind) => !matches!(kind, BusyLoading | ClusterDown | MasterDown | TryAgain),
        ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
