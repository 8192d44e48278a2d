//! The cache in the server's own memory: a limit in bytes, and the answer that was not asked for longest goes first.
//!
//! One short lock: a lookup finds an entry, moves it to the front and takes a handle on it. Answers are copied before
//! the lock is taken and freed after it has been left. Invariant: the bytes of all entries, their bookkeeping
//! included, are never above the limit.

mod recent;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use trireme_types::{Error, InferResponse, Result};

use self::recent::{Entry, Recent};
use super::answer::{self, Answer};
use super::key::Key;

/// A cache below this cannot hold a single answer.
const LEAST_SIZE: usize = 1024;

/// Entries that are looked at or removed under the lock before others get their turn.
const AT_ONCE: usize = 1024;

/// Answers in memory.
pub(super) struct LocalCache {
    limit: usize,
    entries: Mutex<Recent<Arc<Answer>>>,
    lookups: AtomicU64,
    hits: AtomicU64,
    evictions: AtomicU64,
    lookup_ns: AtomicU64,
    insertion_ns: AtomicU64,
}

/// What the cache holds and what it has done, for the metrics.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    /// Bytes in use, of the limit.
    pub(super) bytes: usize,
    pub(super) limit: usize,
    pub(super) entries: usize,
    pub(super) lookups: u64,
    pub(super) hits: u64,
    pub(super) evictions: u64,
    pub(super) lookup_ns: u64,
    pub(super) insertion_ns: u64,
}

impl LocalCache {
    /// # Errors
    /// A limit that no answer fits into.
    pub(super) fn new(limit: usize) -> Result<Self> {
        if limit < LEAST_SIZE {
            return Err(Error::invalid_arg(format!(
                "a local response cache of {limit} bytes holds no answer; give at least {LEAST_SIZE}, as in \
                 --cache-config local,size=67108864"
            )));
        }
        Ok(Self {
            limit,
            entries: Mutex::new(Recent::new(limit)),
            lookups: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
            lookup_ns: AtomicU64::new(0),
            insertion_ns: AtomicU64::new(0),
        })
    }

    pub(super) fn lookup(&self, key: &Key) -> Option<Arc<Answer>> {
        let start = Instant::now();
        let found = self.entries.lock().get(key).cloned();
        self.lookups.fetch_add(1, Ordering::Relaxed);
        self.hits.fetch_add(u64::from(found.is_some()), Ordering::Relaxed);
        self.lookup_ns.fetch_add(nanoseconds(start.elapsed()), Ordering::Relaxed);
        found
    }

    /// Keeps a copy of a response, if it is not larger than the whole cache and not there already.
    pub(super) fn insert(&self, key: Key, owner: u64, response: &InferResponse) {
        let start = Instant::now();
        let bytes =
            answer::kept_bytes(response).and_then(|bytes| bytes.checked_add(Recent::<Arc<Answer>>::OVERHEAD));
        let Some(bytes) = bytes.filter(|bytes| *bytes <= self.limit) else { return };
        if self.entries.lock().get(&key).is_some() {
            return;
        }
        let Some(answer) = Answer::keep(response) else { return };
        let mut entry = Entry { value: Arc::new(answer), bytes, owner };
        loop {
            let (evicted, is_enough) = self.entries.lock().make_room(bytes, AT_ONCE);
            self.evictions.fetch_add(evicted.len() as u64, Ordering::Relaxed);
            drop(evicted);
            if !is_enough {
                continue;
            }
            // Another thread may have taken the room, or brought the same answer.
            let back = self.entries.lock().put(key, entry);
            match back {
                Some(value) if self.entries.lock().get(&key).is_none() => {
                    entry = Entry { value, bytes, owner }
                }
                _ => break,
            }
        }
        self.insertion_ns.fetch_add(nanoseconds(start.elapsed()), Ordering::Relaxed);
    }

    /// Forgets what a model has answered that is not there any more.
    pub(super) fn forget(&self, owner: u64) {
        let mut end = None;
        loop {
            let (forgotten, next) = self.entries.lock().remove_owner(owner, end, AT_ONCE);
            drop(forgotten);
            end = next;
            if end.is_none() {
                return;
            }
        }
    }

    pub(super) fn usage(&self) -> Usage {
        let (bytes, entries) = {
            let entries = self.entries.lock();
            (entries.bytes(), entries.len())
        };
        Usage {
            bytes,
            limit: self.limit,
            entries,
            lookups: self.lookups.load(Ordering::Relaxed),
            hits: self.hits.load(Ordering::Relaxed),
            evictions: self.evictions.load(Ordering::Relaxed),
            lookup_ns: self.lookup_ns.load(Ordering::Relaxed),
            insertion_ns: self.insertion_ns.load(Ordering::Relaxed),
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::super::answer::tests::response;
    use super::*;

    fn key(number: u64) -> Key {
        let mut bytes = [0; 32];
        bytes[24..].copy_from_slice(&number.to_le_bytes());
        Key::from_bytes(bytes)
    }

    fn first_output(answer: &Answer) -> Vec<u8> {
        answer.for_request(String::new()).outputs[0].data.as_slice().to_vec()
    }

    #[test]
    fn answers_larger_than_the_cache_are_not_kept() {
        let cache = LocalCache::new(4096).expect("large enough");
        cache.insert(key(1), 0, &response(&[b"small"]));
        cache.insert(key(2), 0, &response(&[&[0; 4096]]));
        assert!(cache.lookup(&key(1)).is_some(), "and nothing was put out for them");
        assert!(cache.lookup(&key(2)).is_none());
        let usage = cache.usage();
        assert_eq!((usage.entries, usage.lookups, usage.hits, usage.evictions), (1, 2, 1, 0));
        assert!(usage.bytes > 5 && usage.bytes <= usage.limit);
        assert!(LocalCache::new(LEAST_SIZE - 1).is_err());
    }

    #[test]
    fn keys_of_one_prefix_are_different_keys() {
        let cache = LocalCache::new(1 << 20).expect("large enough");
        for number in 0..200 {
            cache.insert(key(number), 0, &response(&[&number.to_le_bytes()]));
        }
        for number in 0..200 {
            let answer = cache.lookup(&key(number)).expect("kept");
            assert_eq!(first_output(&answer), number.to_le_bytes());
        }
        assert!(cache.lookup(&key(200)).is_none());
    }

    #[test]
    fn an_answer_counts_for_a_little_more_than_its_tensors() {
        let cache = LocalCache::new(1 << 20).expect("large enough");
        cache.insert(key(0), 0, &response(&[&[0; 4000]]));
        let more = cache.usage().bytes - 4000;
        assert!((500..700).contains(&more), "{more}; docs/cache.md says some 600");
    }

    #[test]
    fn a_large_answer_makes_many_small_ones_go() {
        let cache = LocalCache::new(4 << 20).expect("large enough");
        for number in 0..6000 {
            cache.insert(key(number), 0, &response(&[b"small"]));
        }
        let entries = cache.usage().entries;
        assert!(entries > 3 * AT_ONCE, "{entries}");
        cache.insert(key(10_000), 1, &response(&[&[1; 4_100_000]]));
        assert!(cache.lookup(&key(10_000)).is_some());
        assert!(cache.usage().entries < 200);
    }

    #[test]
    fn a_model_that_is_gone_leaves_nothing() {
        let cache = LocalCache::new(1 << 20).expect("large enough");
        for number in 0..20 {
            cache.insert(key(number), number % 2, &response(&[b"x"]));
        }
        let half = cache.usage().bytes / 2;
        cache.forget(0);
        assert_eq!((cache.usage().entries, cache.usage().bytes), (10, half));
        assert!(cache.lookup(&key(0)).is_none() && cache.lookup(&key(1)).is_some());
        cache.forget(1);
        assert_eq!((cache.usage().entries, cache.usage().bytes), (0, 0));
    }

    #[test]
    fn threads_get_the_answer_of_their_key_or_none() {
        let cache = LocalCache::new(20_000).expect("large enough");
        thread::scope(|scope| {
            for thread in 0..4_u64 {
                let cache = &cache;
                scope.spawn(move || {
                    for round in 0..3000_u64 {
                        let number = (round * (thread + 1)) % 97;
                        let text = number.to_string();
                        match cache.lookup(&key(number)) {
                            Some(answer) => assert_eq!(first_output(&answer), text.as_bytes()),
                            None => cache.insert(key(number), thread, &response(&[text.as_bytes()])),
                        }
                        let usage = cache.usage();
                        assert!(usage.bytes <= usage.limit);
                        if round % 500 == 0 {
                            cache.forget(thread);
                        }
                    }
                });
            }
        });
        let usage = cache.usage();
        assert!(usage.hits > 0 && usage.evictions > 0 && usage.lookups == 12_000, "{usage:?}");
    }
}
