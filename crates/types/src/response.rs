//! The way back: responses, and the responder that makes sure that no request is lost in silence.

use std::fmt;
use std::sync::Arc;
use std::task::Waker;

use smallvec::SmallVec;

use crate::{DataType, Error, Parameters, Result, Shape, TensorBuffer};

/// One output tensor. `shape` is the full shape, batch dimension included.
#[derive(Clone, Debug)]
pub struct OutputTensor {
    pub name: Arc<str>,
    pub data_type: DataType,
    pub shape: Shape,
    pub data: TensorBuffer,
}

/// One response of a model; a decoupled model may send several for one request.
#[derive(Clone, Debug, Default)]
pub struct InferResponse {
    /// The id of the request; the server fills it in.
    pub id: String,
    pub outputs: SmallVec<[OutputTensor; 2]>,
    pub parameters: Parameters,
}

impl InferResponse {
    pub fn output(&self, name: &str) -> Option<&OutputTensor> {
        self.outputs.iter().find(|o| &*o.name == name)
    }
}

/// Receiver of what a model answers; each protocol brings its own.
pub trait ResponseSink: Send {
    /// Takes one response or error. `last` marks the end of the request; `reply` is `None` when a model ends a
    /// request without a further response. Nothing is sent after `last`.
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool);

    /// Whether nobody waits for the answer any more: the connection is closed or the call cancelled.
    fn is_closed(&self) -> bool;

    /// Wakes `waker` once nobody waits any more, at once if that is so already. The last waker given counts. A sink
    /// that cannot tell need not do anything; then a request that waits is found closed only when its turn comes.
    fn watch_closed(&mut self, _waker: &Waker) {}
}

/// The only way to answer a request. Dropping it unanswered sends an error, so that every request ends.
pub struct Responder {
    sink: Option<Box<dyn ResponseSink>>,
}

impl Responder {
    pub fn new(sink: Box<dyn ResponseSink>) -> Self {
        Self { sink: Some(sink) }
    }

    /// Sends a response that is not the last.
    pub fn send(&mut self, reply: Result<InferResponse>) {
        if let Some(sink) = &mut self.sink {
            sink.send(Some(reply), false);
        }
    }

    /// Sends the last response.
    pub fn finish(mut self, reply: Result<InferResponse>) {
        if let Some(mut sink) = self.sink.take() {
            sink.send(Some(reply), true);
        }
    }

    /// Ends the request without a further response.
    pub fn close(mut self) {
        if let Some(mut sink) = self.sink.take() {
            sink.send(None, true);
        }
    }

    /// Whether nobody waits for the answer any more.
    pub fn is_closed(&self) -> bool {
        self.sink.as_ref().is_none_or(|sink| sink.is_closed())
    }

    /// Has `waker` woken when nobody waits for the answer any more; see [`ResponseSink::watch_closed`].
    pub fn watch_closed(&mut self, waker: &Waker) {
        if let Some(sink) = &mut self.sink {
            sink.watch_closed(waker);
        }
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if let Some(mut sink) = self.sink.take() {
            let lost = Error::internal("the request was dropped before it was answered");
            sink.send(Some(Err(lost)), true);
        }
    }
}

impl fmt::Debug for Responder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Responder")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct Channel(mpsc::Sender<(Option<Result<InferResponse>>, bool)>);

    impl ResponseSink for Channel {
        fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
            self.0.send((reply, last)).expect("the test holds the receiver");
        }

        fn is_closed(&self) -> bool {
            false
        }
    }

    #[test]
    fn a_dropped_responder_answers_with_an_error() {
        let (sender, receiver) = mpsc::channel();
        drop(Responder::new(Box::new(Channel(sender))));
        let (reply, last) = receiver.recv().expect("an answer");
        assert!(last);
        assert!(matches!(reply, Some(Err(_))));
    }

    #[test]
    fn a_finished_responder_says_nothing_more() {
        let (sender, receiver) = mpsc::channel();
        let mut responder = Responder::new(Box::new(Channel(sender)));
        responder.send(Ok(InferResponse::default()));
        responder.close();
        let sent: Vec<_> = receiver.iter().map(|(reply, last)| (reply.is_some(), last)).collect();
        assert_eq!(sent, [(true, false), (false, true)]);
    }
}
