//! The threads that run models.
//!
//! Instances are objects, threads are shared: a job needs a thread only while it runs, so idle models cost none.
//! The thread that ended its job last is woken first, since its caches are warm. A thread that has had nothing to
//! do for a while ends.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Work that takes as long as a model takes.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

const IDLE_LIMIT: Duration = Duration::from_secs(10);

/// A pool of operating system threads that grows with the number of instances that run at once.
#[derive(Clone)]
pub(crate) struct Executor {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    idle: Mutex<Vec<Arc<Worker>>>,
}

#[derive(Default)]
struct Worker {
    job: Mutex<Option<Job>>,
    wake: Condvar,
}

impl Executor {
    pub(crate) fn new() -> Self {
        Self { shared: Arc::default() }
    }

    /// Runs a job on an idle thread, or on a new one. If the system refuses a new thread the job runs on the
    /// caller's, late but not lost.
    pub(crate) fn run(&self, job: Job) {
        let worker = self.shared.idle.lock().pop();
        if let Some(worker) = worker {
            *worker.job.lock() = Some(job);
            worker.wake.notify_one();
            return;
        }
        let worker = Arc::new(Worker { job: Mutex::new(Some(job)), wake: Condvar::new() });
        let (shared, mine) = (Arc::clone(&self.shared), Arc::clone(&worker));
        let spawned = thread::Builder::new().name("trireme-exec".into()).spawn(move || work(&shared, &mine));
        if let Err(error) = spawned {
            tracing::error!("no thread for a model instance: {error}; running it on the caller's thread");
            if let Some(job) = worker.job.lock().take() {
                job();
            }
        }
    }
}

fn work(shared: &Shared, me: &Arc<Worker>) {
    loop {
        let job = {
            let mut slot = me.job.lock();
            while slot.is_none() {
                if me.wake.wait_for(&mut slot, IDLE_LIMIT).timed_out() && slot.is_none() {
                    // Whoever popped this worker from the idle list is about to hand it a job.
                    let mut idle = shared.idle.lock();
                    let Some(place) = idle.iter().position(|w| Arc::ptr_eq(w, me)) else { continue };
                    idle.remove(place);
                    return;
                }
            }
            slot.take()
        };
        if let Some(job) = job {
            job();
        }
        shared.idle.lock().push(Arc::clone(me));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn runs_jobs_side_by_side_and_reuses_threads() {
        let executor = Executor::new();
        let (done, finished) = mpsc::channel();
        for round in 0..50 {
            let barrier = Arc::new(std::sync::Barrier::new(3));
            for _ in 0..3 {
                let (barrier, done) = (Arc::clone(&barrier), done.clone());
                executor.run(Box::new(move || {
                    barrier.wait();
                    done.send(round).expect("the test holds the receiver");
                }));
            }
            for _ in 0..3 {
                finished.recv().expect("three jobs run at once");
            }
        }
        assert!(executor.shared.idle.lock().len() <= 9, "threads are reused");
    }
}
