//! The thread that watches one worker process: its messages, what it prints, and how it ends.
//!
//! *Invariant:* a process is waited for, so that none stays behind as a zombie, and its worker is told of the end last.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use trireme_types::{Error, Result};

use super::Worker;
use crate::channel::{Filled, Receiver};

/// How long a worker that has closed its socket, or should end, may take for it.
const LEAVE_LIMIT: Duration = Duration::from_secs(5);
/// Lines of the worker that a message about its end repeats.
const LAST_LINES: usize = 20;
const MAX_LINE: usize = 16 * 1024;

/// The thread of one process.
pub(super) struct Watch {
    pub(super) worker: Arc<Worker>,
    pub(super) child: Option<Child>,
    pub(super) out: Lines,
    pub(super) err: Lines,
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Watch {
    pub(super) fn run(mut self) {
        let mut receiver = Receiver::default();
        let mut last = VecDeque::new();
        let mut leaving: Option<Instant> = None;
        loop {
            let is_over = match self.wait(leaving) {
                Ok(is_over) => is_over,
                Err(error) => {
                    tracing::error!("cannot watch the worker process of '{}': {error}", self.worker.name());
                    self.worker.kill();
                    true
                }
            };
            self.print(&mut last);
            if let Err(why) = self.read(&mut receiver, &mut leaving) {
                self.worker.state.lock().killed_for.get_or_insert(why.message().to_owned());
                self.worker.kill();
                leaving.get_or_insert_with(Instant::now);
            }
            if leaving.is_some_and(|since| since.elapsed() > LEAVE_LIMIT) {
                self.worker.kill();
            }
            if is_over {
                break;
            }
        }
        self.print(&mut last);
        self.worker.sender.close();
        let how = match self.child.take().map(|mut child| child.wait()) {
            Some(Ok(status)) => describe(status),
            Some(Err(error)) => format!("is gone ({error})"),
            None => "is gone".to_owned(),
        };
        self.worker.end(&how, &last);
    }

    /// Waits for news. `true` when the process has ended.
    fn wait(&self, leaving: Option<Instant>) -> io::Result<bool> {
        let worker = &self.worker;
        let mut fds = vec![PollFd::from_borrowed_fd(worker.process.as_fd(), PollFlags::IN)];
        fds.extend(self.out.open().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        fds.extend(self.err.open().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        if leaving.is_none() {
            fds.push(PollFd::from_borrowed_fd(worker.sender.socket(), PollFlags::IN));
        }
        let limit = Timespec { tv_sec: 1, tv_nsec: 0 };
        match poll(&mut fds, leaving.is_some().then_some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(fds.first().is_some_and(|fd| !fd.revents().is_empty()))
    }

    fn read(&self, receiver: &mut Receiver, leaving: &mut Option<Instant>) -> Result<()> {
        while leaving.is_none() {
            let broken = |error: io::Error| Error::internal(format!("its messages cannot be read: {error}"));
            let filled = receiver.fill(self.worker.sender.socket()).map_err(broken)?;
            while let Some(frame) = receiver.next().map_err(broken)? {
                self.worker.handle(&frame, receiver)?;
            }
            match filled {
                Filled::Some => {}
                Filled::Nothing => break,
                Filled::End => *leaving = Some(Instant::now()),
            }
        }
        Ok(())
    }

    fn print(&mut self, last: &mut VecDeque<String>) {
        let name = self.worker.name();
        self.out.read(|line| tracing::info!("{name}: {line}"));
        self.err.read(|line| {
            tracing::warn!("{name}: {line}");
            if last.len() == LAST_LINES {
                last.pop_front();
            }
            last.push_back(line.to_owned());
        });
    }
}

fn describe(status: std::process::ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(signal), _) => {
            let name = match signal {
                4 => " (SIGILL)",
                6 => " (SIGABRT)",
                7 => " (SIGBUS)",
                8 => " (SIGFPE)",
                9 => " (SIGKILL; the kernel sends it when memory is short)",
                11 => " (SIGSEGV)",
                15 => " (SIGTERM)",
                _ => "",
            };
            format!("was ended by signal {signal}{name}")
        }
        (None, Some(code)) => format!("ended with exit code {code}"),
        (None, None) => "ended".to_owned(),
    }
}

/// Lines from a pipe that is read without waiting.
pub(super) struct Lines {
    pipe: Option<OwnedFd>,
    rest: Vec<u8>,
}

impl Lines {
    pub(super) fn new(pipe: OwnedFd) -> Self {
        Self { pipe: Some(pipe), rest: Vec::new() }
    }

    fn open(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    fn read(&mut self, mut tell: impl FnMut(&str)) {
        let mut part = [0; 4096];
        while let Some(pipe) = &self.pipe {
            match rustix::io::read(pipe, &mut part) {
                Ok(0) => self.pipe = None,
                Ok(n) => self.rest.extend(part.get(..n).unwrap_or_default()),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => break,
                Err(_) => self.pipe = None,
            }
        }
        while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            tell(String::from_utf8_lossy(&line).trim_end());
        }
        if self.rest.len() > MAX_LINE || (self.pipe.is_none() && !self.rest.is_empty()) {
            tell(String::from_utf8_lossy(&self.rest).trim_end());
            self.rest.clear();
        }
    }
}
