//! Whether a connection is at work: a request without its whole answer, or bytes that the peer does not take yet.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Written by the connection's own task only, so that no ordering is needed.
#[derive(Debug, Default)]
pub(super) struct Activity {
    requests: AtomicUsize,
    write_blocked: AtomicBool,
}

impl Activity {
    pub(super) fn enter(self: &Arc<Self>) -> RequestGuard {
        self.requests.fetch_add(1, Ordering::Relaxed);
        RequestGuard(Arc::clone(self))
    }

    pub(super) fn is_idle(&self) -> bool {
        self.requests.load(Ordering::Relaxed) == 0 && !self.write_blocked.load(Ordering::Relaxed)
    }
}

/// A request at work.
#[derive(Debug)]
pub(in crate::http) struct RequestGuard(Arc<Activity>);

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A stream that notes when the peer does not take more.
#[derive(Debug)]
pub(super) struct Watched {
    stream: TokioIo<TcpStream>,
    activity: Arc<Activity>,
}

impl Watched {
    pub(super) fn new(stream: TokioIo<TcpStream>, activity: Arc<Activity>) -> Self {
        Self { stream, activity }
    }

    fn note<T>(&self, result: Poll<T>) -> Poll<T> {
        self.activity.write_blocked.store(result.is_pending(), Ordering::Relaxed);
        result
    }
}

impl Read for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl Write for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.note(result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.note(result)
    }
}
