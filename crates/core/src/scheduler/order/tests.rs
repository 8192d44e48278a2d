//! Answers in line, whoever gives them first.

use std::sync::mpsc;
use std::thread;

use trireme_types::Error;

use super::*;

struct Named(u64, mpsc::Sender<(u64, Option<String>, bool)>);

impl ResponseSink for Named {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        let id = reply.map(|reply| reply.map_or_else(|error| error.to_string(), |response| response.id));
        self.1.send((self.0, id, last)).expect("the test listens");
    }

    fn is_closed(&self) -> bool {
        self.0 == 13
    }
}

fn response(id: &str) -> Result<InferResponse> {
    Ok(InferResponse { id: id.to_owned(), ..InferResponse::default() })
}

#[test]
fn answers_wait_for_those_before_them() {
    let (sender, receiver) = mpsc::channel();
    let order = Order::default();
    let mut responders: Vec<_> =
        (0..4).map(|name| order.enter(Responder::new(Box::new(Named(name, sender.clone()))))).collect();
    let last = responders.pop().expect("four");
    let third = responders.pop().expect("three");
    let mut second = responders.pop().expect("two");
    let first = responders.pop().expect("one");
    third.finish(Err(Error::internal("failed")));
    second.send(response("a"));
    assert!(receiver.try_recv().is_err(), "the first has not answered");
    first.finish(response("x"));
    second.send(response("b"));
    second.close();
    drop(last);
    drop(sender);
    drop(order);
    let got: Vec<_> = receiver.iter().map(|(name, id, last)| (name, id.unwrap_or_default(), last)).collect();
    let expected = [(0, "x", true), (1, "a", false), (1, "b", false), (1, "", true), (2, "failed", true)];
    for (got, expected) in got.iter().zip(expected) {
        assert_eq!((got.0, got.1.contains(expected.1), got.2), (expected.0, true, expected.2), "{got:?}");
    }
    assert_eq!((got.len(), got[5].0), (6, 3), "a lost request ends too");
}

#[test]
fn a_closed_client_shows_through() {
    let (sender, _receiver) = mpsc::channel();
    let order = Order::default();
    let open = order.enter(Responder::new(Box::new(Named(1, sender.clone()))));
    let closed = order.enter(Responder::new(Box::new(Named(13, sender))));
    assert!(!open.is_closed() && closed.is_closed());
}

#[test]
fn many_threads_answer_in_line() {
    let (sender, receiver) = mpsc::channel();
    let order = Order::default();
    let mut responders: Vec<_> =
        (0..2000).map(|name| order.enter(Responder::new(Box::new(Named(name, sender.clone()))))).collect();
    drop(sender);
    let mut parts: Vec<Vec<Responder>> = (0..4).map(|_| Vec::new()).collect();
    for (i, responder) in responders.drain(..).enumerate() {
        parts[i * 7 % 4].push(responder);
    }
    thread::scope(|scope| {
        for part in parts {
            scope.spawn(move || part.into_iter().rev().for_each(|responder| responder.finish(response(""))));
        }
    });
    let got: Vec<u64> = receiver.iter().map(|(name, _, _)| name).collect();
    assert!(got.is_sorted() && got.len() == 2000);
}
