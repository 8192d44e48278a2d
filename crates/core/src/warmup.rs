//! Warm-up: what every instance runs before its version is ready, so that no client pays for first-time work.
//!
//! Samples run on the instances themselves: no queue, no statistics, no response cache. A sample of batch size N is N
//! requests of one row in one execution, as in Triton. *Invariant:* a version whose warm-up failed is not served.

mod sample;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Instant;

use trireme_backend::{Batch, BatchRequest, ModelInstance};
use trireme_config::{ModelSpec, WarmupSample};
use trireme_types::{Error, InferRequest, InferResponse, Responder, ResponseSink, Result};

use self::sample::MAX_BATCH_BYTES;

/// What to do about a warm-up that failed.
pub(crate) const ADVICE: &str = "Every instance runs the samples of model_warmup before the version is ready. Mend \
    the sample that the message names, or remove it.";

/// Runs every sample of the model on every instance, in the order of the configuration.
///
/// `names` are those of the instances, `model_dir` holds the folder `warmup`, and at most `threads` instances run at
/// once.
///
/// # Errors
/// `INVALID_ARG` with the sample's name: its data does not fit, or an instance failed with it.
pub(crate) fn run(
    spec: &ModelSpec,
    model_dir: &Path,
    instances: &mut [Box<dyn ModelInstance>],
    names: &[&str],
    threads: usize,
) -> Result<()> {
    for sample in spec.warmup.iter().filter(|sample| sample.batch_size > 0) {
        let request = sample::request(sample, spec, model_dir).map_err(|error| told(sample, &error))?;
        check_size(sample, &request)?;
        let size = instances.len().div_ceil(threads.max(1)).max(1);
        let chunks = instances.chunks_mut(size).zip(names.chunks(size));
        let warm = |(instances, names): (&mut [Box<dyn ModelInstance>], &[&str])| {
            instances.iter_mut().zip(names).try_for_each(|(instance, name)| {
                repeat(instance.as_mut(), sample, &request)
                    .map_err(|error| told(sample, &error.prefixed(format!("instance {name}: "))))
            })
        };
        if chunks.len() <= 1 {
            chunks.into_iter().try_for_each(warm)?;
            continue;
        }
        thread::scope(|scope| {
            let warm = &warm;
            let running: Vec<_> = chunks.map(|chunk| scope.spawn(move || warm(chunk))).collect();
            running.into_iter().try_for_each(|thread| {
                thread.join().unwrap_or_else(|_| Err(Error::internal("a warm-up thread panicked")))
            })
        })?;
    }
    Ok(())
}

/// Triton's words in front of what went wrong.
fn told(sample: &WarmupSample, error: &Error) -> Error {
    Error::invalid_arg(format!("failed to run warmup sample '{}': {}", sample.name, error.message()))
}

fn check_size(sample: &WarmupSample, request: &InferRequest) -> Result<()> {
    let bytes = request.input_bytes().checked_mul(sample.batch_size);
    if bytes.is_none_or(|bytes| bytes > MAX_BATCH_BYTES) || sample.batch_size > MAX_ROWS {
        return Err(told(
            sample,
            &Error::invalid_arg(format!(
                "{} copies of {} bytes are too many; a warm-up batch has at most {MAX_ROWS} copies and {MAX_BATCH_BYTES} \
                 bytes",
                sample.batch_size,
                request.input_bytes()
            )),
        ));
    }
    Ok(())
}

/// Requests of one warm-up batch.
const MAX_ROWS: usize = 1 << 16;

fn repeat(instance: &mut dyn ModelInstance, sample: &WarmupSample, request: &InferRequest) -> Result<()> {
    for iteration in 0..sample.count {
        tracing::debug!("running warmup sample '{}', iteration {iteration}", sample.name);
        execute(instance, sample.batch_size, request)?;
    }
    Ok(())
}

/// One execution of `rows` copies of a request. Returns when every copy has come to its end.
fn execute(instance: &mut dyn ModelInstance, rows: usize, request: &InferRequest) -> Result<()> {
    let (sender, errors): (Sender<Error>, Receiver<Error>) = channel();
    let requests = (0..rows)
        .map(|_| BatchRequest::new(request.clone(), Responder::new(Box::new(ErrorSink(sender.clone())))));
    let mut batch = Batch::new(requests.collect(), Instant::now());
    // The channel ends when the last request has ended.
    drop(sender);
    let result = catch_unwind(AssertUnwindSafe(|| instance.execute(&mut batch)))
        .unwrap_or_else(|_| Err(Error::internal("the backend panicked")));
    if let Err(error) = &result {
        for request in batch.requests.iter_mut().filter(|request| !request.is_answered()) {
            request.answer(Err(error.clone()));
        }
    }
    for request in batch.requests {
        // No scheduler runs a sample again: one round of an iterative sequence is enough.
        let is_over = request.is_rescheduled();
        let (_, responder, answer) = request.into_parts();
        match responder {
            Some(responder) if is_over => responder.close(),
            Some(responder) => responder.finish(answer),
            None => {}
        }
    }
    let first = errors.recv().ok();
    // A decoupled model may still be answering.
    errors.iter().for_each(drop);
    first.or(result.err()).map_or(Ok(()), Err)
}

/// Keeps the errors of a request and forgets its responses.
struct ErrorSink(Sender<Error>);

impl ResponseSink for ErrorSink {
    fn send(&mut self, reply: Option<Result<InferResponse>>, _last: bool) {
        if let Some(Err(error)) = reply {
            // The receiver is gone only after the load was given up.
            let _late = self.0.send(error);
        }
    }

    fn is_closed(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests;
