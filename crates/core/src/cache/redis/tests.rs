//! The Redis cache against a stand-in that speaks as much of the protocol as is needed and misbehaves when told to:
//! tests/python/test_cache_redis.py has the real server.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::AtomicU8;
use std::sync::mpsc;

use super::super::answer::tests::response;
use super::*;

/// How the stand-in behaves.
const ANSWERS: u8 = 0;
/// Reads and says nothing.
const SILENT: u8 = 1;
/// Refuses every command.
const REFUSES: u8 = 2;
/// Closes the connection.
const CLOSES: u8 = 3;

#[derive(Default)]
struct StandIn {
    values: Mutex<HashMap<Vec<u8>, Vec<u8>>>,
    mood: AtomicU8,
    commands: AtomicU64,
    refused_stores: AtomicU64,
}

impl StandIn {
    fn start() -> (Arc<Self>, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let stand_in = Arc::new(Self::default());
        let shared = Arc::clone(&stand_in);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (shared, stream) = (Arc::clone(&shared), stream.expect("a connection"));
                thread::spawn(move || shared.serve(&stream));
            }
        });
        (stand_in, port)
    }

    fn mood(&self, mood: u8) {
        self.mood.store(mood, Ordering::SeqCst);
    }

    fn serve(&self, stream: &TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().expect("can clone"));
        let mut out = stream;
        while let Some(words) = command(&mut reader) {
            self.commands.fetch_add(1, Ordering::SeqCst);
            let reply = match self.mood.load(Ordering::SeqCst) {
                SILENT => continue,
                REFUSES => {
                    let is_store = words.first().is_some_and(|name| name == b"SET");
                    self.refused_stores.fetch_add(is_store.into(), Ordering::SeqCst);
                    b"-OOM command not allowed\r\n".to_vec()
                }
                CLOSES => return,
                _ => self.reply(words),
            };
            if out.write_all(&reply).is_err() {
                return;
            }
        }
    }

    fn reply(&self, mut words: Vec<Vec<u8>>) -> Vec<u8> {
        let name = words.remove(0);
        match (name.as_slice(), words.as_slice()) {
            (b"GET", [key]) => match self.values.lock().get(key) {
                Some(value) => [format!("${}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat(),
                None => b"$-1\r\n".to_vec(),
            },
            (b"SET", [key, value]) => {
                self.values.lock().insert(key.clone(), value.clone());
                b"+OK\r\n".to_vec()
            }
            _ => b"-ERR unknown command\r\n".to_vec(),
        }
    }
}

/// One command: an array of bulk strings.
fn command(reader: &mut BufReader<TcpStream>) -> Option<Vec<Vec<u8>>> {
    fn number(reader: &mut BufReader<TcpStream>) -> Option<usize> {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        line.trim_end().get(1..)?.parse().ok()
    }
    let count = number(reader)?;
    (0..count)
        .map(|_| {
            let mut word = vec![0; number(reader)? + 2];
            reader.read_exact(&mut word).ok()?;
            word.truncate(word.len() - 2);
            Some(word)
        })
        .collect()
}

fn open(port: u16) -> RedisCache {
    let settings =
        RedisSettings { socket_timeout: Duration::from_millis(100), ..RedisSettings::new("127.0.0.1", port) };
    let cache = RedisCache::new(&settings).expect("valid settings");
    cache.open().expect("nothing refuses it");
    cache
}

fn name(number: u8) -> Name {
    Name::new("m", 1, Key::from_bytes([number; 32]))
}

fn look_up(cache: &RedisCache, number: u8) -> Option<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    cache.look_up(
        name(number),
        Box::new(move |found| {
            let first =
                found.map(|answer| answer.for_request(String::new()).outputs[0].data.as_slice().to_vec());
            sender.send(first).expect("the test waits");
        }),
    );
    receiver.recv_timeout(Duration::from_secs(10)).expect("every lookup is answered")
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < end, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_is_stored_is_found_by_another_server_too() {
    let (_, port) = StandIn::start();
    let (one, other) = (open(port), open(port));
    assert_eq!(look_up(&one, 1), None);
    one.store(name(1), &response(&[b"answer"]));
    eventually("it is stored", || one.counters().stored.load(Ordering::Relaxed) == 1);
    assert_eq!(look_up(&other, 1), Some(b"answer".to_vec()));
    assert_eq!(look_up(&other, 2), None);
}

#[test]
fn a_silent_redis_costs_one_wait_and_is_found_back() {
    let (redis, port) = StandIn::start();
    let cache = open(port);
    cache.store(name(1), &response(&[b"answer"]));
    eventually("it is stored", || cache.counters().stored.load(Ordering::Relaxed) == 1);
    redis.mood(SILENT);
    let start = Instant::now();
    thread::scope(|scope| {
        for _ in 0..50 {
            scope.spawn(|| assert_eq!(look_up(&cache, 1), None));
        }
    });
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert!(cache.is_down());
    let (start, commands) = (Instant::now(), redis.commands.load(Ordering::SeqCst));
    for _ in 0..1000 {
        assert_eq!(look_up(&cache, 1), None);
    }
    assert!(start.elapsed() < Duration::from_millis(500), "nothing is asked while it is down");
    assert!(redis.commands.load(Ordering::SeqCst) <= commands + 1);
    assert_eq!(cache.counters().failures.load(Ordering::Relaxed), 1, "an outage is told once");
    assert!(cache.counters().skipped.load(Ordering::Relaxed) >= 1000);
    redis.mood(ANSWERS);
    eventually("it is found back", || !cache.is_down());
    assert_eq!(look_up(&cache, 1), Some(b"answer".to_vec()));
}

#[test]
fn a_connection_that_was_closed_is_made_anew() {
    let (redis, port) = StandIn::start();
    let cache = open(port);
    cache.store(name(1), &response(&[b"answer"]));
    eventually("it is stored", || cache.counters().stored.load(Ordering::Relaxed) == 1);
    redis.mood(CLOSES);
    assert_eq!(look_up(&cache, 1), None, "closed again and again is down");
    assert!(cache.is_down());
    redis.mood(ANSWERS);
    eventually("it is found back", || !cache.is_down());
    assert_eq!(look_up(&cache, 1), Some(b"answer".to_vec()));
}

#[test]
fn a_redis_that_refuses_commands_is_not_down() {
    let (redis, port) = StandIn::start();
    let cache = open(port);
    redis.mood(REFUSES);
    cache.store(name(1), &response(&[b"answer"]));
    assert_eq!(look_up(&cache, 1), None);
    eventually("the store is refused", || redis.refused_stores.load(Ordering::SeqCst) == 1);
    assert!(!cache.is_down());
    redis.mood(ANSWERS);
    assert_eq!(look_up(&cache, 1), None, "it was not stored");
    assert_eq!(cache.counters().stored.load(Ordering::Relaxed), 0);
}

#[test]
fn what_is_no_answer_is_a_miss() {
    let (redis, port) = StandIn::start();
    let cache = open(port);
    cache.store(name(1), &response(&[b"answer"]));
    eventually("it is stored", || !redis.values.lock().is_empty());
    let stored = redis.values.lock().values().next().cloned().expect("one");
    let key = |number| name(number).text.into_bytes();
    let cut = stored[..stored.len() - 1].to_vec();
    redis.values.lock().extend([(key(2), stored), (key(3), cut), (key(4), b"anything".to_vec())]);
    assert_eq!(look_up(&cache, 1), Some(b"answer".to_vec()));
    for number in 2..=4 {
        assert_eq!(look_up(&cache, number), None, "{number}");
    }
    assert!(!cache.is_down());
}

#[test]
fn a_redis_that_is_not_there_is_looked_for() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    drop(listener);
    let cache = open(port);
    assert!(cache.is_down());
    assert_eq!(look_up(&cache, 1), None);
    cache.store(name(1), &response(&[b"answer"]));
}

#[test]
fn names_tell_people_the_model() {
    let name = Name::new("my model", 3, Key::from_bytes([0xab; 32]));
    assert_eq!(name.text, format!("trireme:my model:3:{}", "ab".repeat(32)));
}

#[test]
fn passwords_are_not_shown() {
    let settings = RedisSettings { password: Some("secret".into()), ..RedisSettings::new("h", 1) };
    assert!(!format!("{settings:?}").contains("secret"));
}
