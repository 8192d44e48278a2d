//! How the worker processes of a model are started.

use std::io;
use std::process::{Child, Command};
use std::sync::{OnceLock, mpsc};

use parking_lot::Mutex;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::interpreter::Interpreter;

/// Everything that stays the same from one start to the next.
#[derive(Clone)]
pub(crate) struct Launch {
    pub(crate) interpreter: Interpreter,
    /// Threads that the libraries of a worker should use.
    pub(crate) threads: usize,
    pub(crate) cores: Option<CpuSet>,
}

impl Launch {
    /// For workers on the cores of the calling thread.
    pub(crate) fn new(interpreter: Interpreter, threads: usize) -> Self {
        Self { interpreter, threads: threads.max(1), cores: sched_getaffinity(None).ok() }
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = self.interpreter.command();
        for name in ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"] {
            if std::env::var_os(name).is_none() {
                command.env(name, self.threads.to_string());
            }
        }
        command
    }
}

type Start = Box<dyn FnOnce() + Send>;

/// Starts a process from the one thread that lives as long as the server does: the kernel ends a worker with the
/// thread that started it.
pub(crate) fn spawn(mut command: Command, cores: Option<CpuSet>) -> io::Result<Child> {
    static STARTER: OnceLock<Mutex<mpsc::Sender<Start>>> = OnceLock::new();
    let starter = STARTER.get_or_init(|| {
        let (sender, starts) = mpsc::channel::<Start>();
        let thread = std::thread::Builder::new().name("trireme-pystart".into());
        let made = thread.spawn(move || starts.iter().for_each(|start| start()));
        if let Err(error) = made {
            tracing::error!("no thread to start worker processes: {error}");
        }
        Mutex::new(sender)
    });
    let (sender, started) = mpsc::channel();
    let start: Start = Box::new(move || {
        if let Some(cores) = &cores {
            // Cores that have been taken away since then are no reason not to start.
            let _ = sched_setaffinity(None, cores);
        }
        let _ = sender.send(command.spawn());
    });
    let gone = || io::Error::other("the thread that starts worker processes is gone");
    starter.lock().send(start).map_err(|_| gone())?;
    started.recv().map_err(|_| gone())?
}
