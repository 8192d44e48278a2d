//! A thread with a connection: takes what waits, asks Redis in one round trip, hands the answers out.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use redis::{Connection, Pipeline, RedisError, Value as Reply};

use super::super::codec;
use super::{Lookup, Shared, Value};

/// Commands of one round trip.
const BATCH: usize = 64;
/// Bytes of values in one round trip, unless a single value has more.
const BATCH_BYTES: usize = 1 << 20;

/// Time that a megabyte of answers may take beside the limits.
const SLOWEST_MEGABYTE: Duration = Duration::from_millis(100);

/// See the module.
pub(super) struct Worker {
    shared: Arc<Shared>,
    connection: Option<Connection>,
    /// Looks for Redis while it is down; one of the threads does.
    looks: bool,
}

/// What to do next.
enum Work {
    Lookups(Vec<Lookup>),
    Values(Vec<Value>),
    /// Try whether Redis is back.
    Look,
    Stop,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, connection: Option<Connection>, looks: bool) -> Self {
        Self { shared, connection, looks }
    }

    pub(super) fn run(mut self) {
        loop {
            match self.next() {
                Work::Lookups(lookups) => self.look_up(lookups),
                Work::Values(values) => self.store(&values),
                Work::Look => self.look(),
                Work::Stop => return,
            }
        }
    }

    fn next(&self) -> Work {
        let mut queue = self.shared.queue.lock();
        loop {
            if queue.stopped {
                return Work::Stop;
            }
            if let Some(retry) = queue.retry {
                if !self.looks {
                    self.shared.wake.wait(&mut queue);
                } else if Instant::now() >= retry {
                    return Work::Look;
                } else {
                    self.shared.wake.wait_until(&mut queue, retry);
                }
                continue;
            }
            if !queue.lookups.is_empty() {
                let count = queue.lookups.len().min(BATCH);
                return Work::Lookups(queue.lookups.drain(..count).collect());
            }
            let mut values = Vec::new();
            let mut bytes = 0;
            while let Some(value) = queue.values.pop_front_if(|value| {
                values.is_empty() || (values.len() < BATCH && bytes + value.bytes.len() <= BATCH_BYTES)
            }) {
                bytes += value.bytes.len();
                values.push(value);
            }
            if !values.is_empty() {
                queue.value_bytes -= bytes;
                return Work::Values(values);
            }
            self.shared.wake.wait(&mut queue);
        }
    }

    fn look_up(&mut self, lookups: Vec<Lookup>) {
        let limit = self.shared.settings.wait_timeout;
        let (lookups, late): (Vec<_>, Vec<_>) =
            lookups.into_iter().partition(|lookup| lookup.asked.elapsed() <= limit);
        for lookup in late {
            self.shared.skip(lookup);
        }
        if lookups.is_empty() {
            return;
        }
        let mut pipeline = Pipeline::with_capacity(lookups.len());
        for lookup in &lookups {
            pipeline.cmd("GET").arg(&lookup.name.text);
        }
        // Who was answered before the exchange failed has been answered.
        let mut lookups = lookups.into_iter();
        let shared = Arc::clone(&self.shared);
        let result = self.exchange(&pipeline, |reply| {
            let Some(lookup) = lookups.next() else { return };
            let answer = match reply {
                Reply::BulkString(bytes) => {
                    let answer = codec::decode(&lookup.name.key, bytes);
                    if answer.is_none() {
                        shared.complain(&format!("what it holds as {} is no answer", lookup.name.text));
                    }
                    answer
                }
                Reply::Nil => None,
                other => {
                    shared.complain(&refused("GET", other));
                    None
                }
            };
            (lookup.found)(answer);
        });
        if let Err(error) = result {
            self.shared.went_down(&error, false);
        }
        for lookup in lookups {
            self.shared.skip(lookup);
        }
    }

    fn store(&mut self, values: &[Value]) {
        let mut pipeline = Pipeline::with_capacity(values.len());
        for value in values {
            pipeline.cmd("SET").arg(&value.name.text).arg(value.bytes.as_slice());
        }
        let shared = Arc::clone(&self.shared);
        let result = self.exchange(&pipeline, |reply| match reply {
            Reply::Okay | Reply::SimpleString(_) => {
                shared.counters.stored.fetch_add(1, Ordering::Relaxed);
            }
            other => shared.complain(&refused("SET", other)),
        });
        if let Err(error) = result {
            self.shared.went_down(&error, false);
        }
    }

    /// Tries whether Redis is back.
    fn look(&mut self) {
        match self.shared.connect() {
            Ok(connection) => {
                self.connection = Some(connection);
                self.shared.came_up();
            }
            Err(error) => self.shared.went_down(&error, true),
        }
    }

    /// One round trip; `each` gets every reply in turn. A connection that Redis has closed in the meantime is
    /// made anew, once, if nothing had come back yet.
    fn exchange(&mut self, pipeline: &Pipeline, mut each: impl FnMut(Reply)) -> Result<(), RedisError> {
        let packed = pipeline.get_packed_pipeline();
        let fresh = self.connection.is_none();
        let mut replies = 0;
        let mut count = |reply| {
            replies += 1;
            each(reply);
        };
        let mut result = self.attempt(&packed, pipeline.len(), &mut count);
        if let Err(error) = &result
            && !fresh
            && !error.is_timeout()
            && replies == 0
        {
            result = self.attempt(&packed, pipeline.len(), &mut each);
        }
        if result.is_ok() {
            self.shared.went_well();
        }
        result
    }

    fn attempt(
        &mut self,
        packed: &[u8],
        count: usize,
        each: &mut impl FnMut(Reply),
    ) -> Result<(), RedisError> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.shared.connect()?,
        };
        let mut deadline = Instant::now() + self.shared.settings.socket_timeout;
        connection.send_packed_command(packed)?;
        for _ in 0..count {
            // The socket's limit is for a single wait; a drop every now and then would pass it for ever.
            if Instant::now() > deadline {
                return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
            }
            let reply = connection.recv_response()?;
            if let Reply::BulkString(bytes) = &reply {
                deadline += SLOWEST_MEGABYTE.mul_f64(bytes.len() as f64 / f64::from(1 << 20));
            }
            each(reply);
        }
        self.connection = Some(connection);
        Ok(())
    }
}

/// What to say of a reply that a command should not have.
fn refused(command: &str, reply: Reply) -> String {
    match reply.extract_error() {
        Err(error) => format!("{command} was refused: {error}"),
        Ok(_) => format!("{command} had a reply of another kind than expected; is this a Redis server?"),
    }
}
