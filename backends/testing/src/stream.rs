//! Sending many answers to one request: at once where nothing waits, otherwise on a thread of its own.
//!
//! The number of threads is bounded, and each ends when its client goes away while it waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use trireme_types::{
    DataType, Error, InferInput, InferRequest, InferResponse, OutputTensor, Responder, Result, Shape,
};

/// Most answers that one request may ask for.
pub(crate) const MAX_RESPONSES: usize = 1_000_000;
/// Most requests of one model that may be waiting between answers.
const MAX_THREADS: usize = 256;

/// Counts the threads of one model.
#[derive(Clone, Debug, Default)]
pub(crate) struct Streams(Arc<AtomicUsize>);

/// One counted thread; dropping it gives the place back.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Streams {
    /// Runs `work` on a thread of its own, which owns the responder.
    pub(crate) fn spawn(&self, responder: Responder, work: impl FnOnce(Responder) + Send + 'static) {
        if self.0.fetch_add(1, Ordering::Relaxed) >= MAX_THREADS {
            self.0.fetch_sub(1, Ordering::Relaxed);
            return responder.finish(Err(Error::unavailable(format!(
                "{MAX_THREADS} requests of this model are waiting for delayed responses already, try again later"
            ))));
        }
        let place = Place(self.0.clone());
        let thread = std::thread::Builder::new().name("delayed-responses".to_owned());
        // A thread that cannot be started drops the responder, which answers with an error.
        let _ = thread.spawn(move || {
            let _place = place;
            work(responder);
        });
    }
}

/// The 32-bit elements of an input.
pub(crate) fn words(input: &InferInput) -> Vec<u32> {
    let words = input.data.as_slice().as_chunks::<4>().0;
    words.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

/// The input of that name.
///
/// # Errors
/// The request lacks it.
pub(crate) fn required<'a>(request: &'a InferRequest, name: &str) -> Result<&'a InferInput> {
    request.input(name).ok_or_else(|| Error::invalid_arg(format!("expected an input '{name}', got none")))
}

/// One answer with outputs of one 32-bit element each, those that the client wants.
pub(crate) fn response(wanted: &[bool], outputs: &[(&Arc<str>, DataType, [u8; 4])]) -> InferResponse {
    let outputs = outputs.iter().zip(wanted).filter(|(_, wanted)| **wanted);
    let outputs = outputs.map(|((name, data_type, bytes), _)| OutputTensor {
        name: (*name).clone(),
        data_type: *data_type,
        shape: Shape::new(&[1]),
        data: bytes.to_vec().into(),
    });
    InferResponse { outputs: outputs.collect(), ..InferResponse::default() }
}
