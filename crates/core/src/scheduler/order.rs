//! `preserve_ordering`: answers leave in the order in which their requests came.
//!
//! A request gets a place when it enters the queue. Its answers wait until the places before it have ended. Sending is
//! done outside of the lock, by one thread at a time, because the receiver of an answer may bring the next request.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Waker;

use parking_lot::Mutex;
use trireme_types::{InferResponse, Responder, ResponseSink, Result};

type Reply = (Option<Result<InferResponse>>, bool);

/// The order of the answers of one model.
#[derive(Clone, Default)]
pub(crate) struct Order {
    line: Arc<Mutex<Line>>,
}

#[derive(Default)]
struct Line {
    /// Place of the request that may send now.
    first: u64,
    /// Requests from `first` on.
    places: VecDeque<Place>,
    /// A thread is sending.
    is_sending: bool,
}

struct Place {
    responder: Option<Responder>,
    /// Answers that wait, in order.
    replies: VecDeque<Reply>,
}

/// The way back of one request in line.
struct Ordered {
    line: Arc<Mutex<Line>>,
    place: u64,
}

impl Order {
    /// Puts a request at the end of the line. Must be called in the order in which requests enter the queue.
    pub(crate) fn enter(&self, responder: Responder) -> Responder {
        let mut line = self.line.lock();
        let place = line.first + line.places.len() as u64;
        line.places.push_back(Place { responder: Some(responder), replies: VecDeque::new() });
        drop(line);
        Responder::new(Box::new(Ordered { line: Arc::clone(&self.line), place }))
    }
}

impl Line {
    fn at(&self, place: u64) -> Option<&Place> {
        let index = usize::try_from(place.checked_sub(self.first)?).ok()?;
        self.places.get(index)
    }

    fn at_mut(&mut self, place: u64) -> Option<&mut Place> {
        let index = usize::try_from(place.checked_sub(self.first)?).ok()?;
        self.places.get_mut(index)
    }
}

impl ResponseSink for Ordered {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        let mut line = self.line.lock();
        if let Some(place) = line.at_mut(self.place) {
            place.replies.push_back((reply, last));
        }
        if line.is_sending {
            return;
        }
        line.is_sending = true;
        // Whoever finds nobody sending sends all that may go, its own answers or those of others behind it.
        while let Some(front) = line.places.front_mut()
            && let Some((reply, last)) = front.replies.pop_front()
            && let Some(mut responder) = front.responder.take()
        {
            if last {
                line.places.pop_front();
                line.first += 1;
            }
            let kept = parking_lot::MutexGuard::unlocked(&mut line, || match (reply, last) {
                (Some(reply), true) => {
                    responder.finish(reply);
                    None
                }
                (None, true) => {
                    responder.close();
                    None
                }
                (reply, false) => {
                    if let Some(reply) = reply {
                        responder.send(reply);
                    }
                    Some(responder)
                }
            });
            if let (Some(responder), Some(front)) = (kept, line.places.front_mut()) {
                front.responder = Some(responder);
            }
        }
        line.is_sending = false;
    }

    fn is_closed(&self) -> bool {
        let line = self.line.lock();
        line.at(self.place).is_some_and(|place| place.responder.as_ref().is_some_and(Responder::is_closed))
    }

    fn watch_closed(&mut self, waker: &Waker) {
        let mut line = self.line.lock();
        if let Some(responder) = line.at_mut(self.place).and_then(|place| place.responder.as_mut()) {
            responder.watch_closed(waker);
        }
    }
}

#[cfg(test)]
mod tests;
