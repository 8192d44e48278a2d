//! Frames on the socket between server and worker.
//!
//! A frame is a head of two little-endian 32-bit numbers (bytes of the JSON text, bytes of the data), the text and
//! the data. Descriptors of regions come with the first bytes of the frame that names them.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType, recvmsg, sendmsg, shutdown,
    socketpair,
};

const HEAD: usize = 8;
const READ_SIZE: usize = 256 * 1024;
/// Text and data of one frame; larger things go through regions.
const MAX_FRAME: usize = 1 << 30;
/// Descriptors that one read may bring.
const MAX_FDS: usize = 16;

/// One frame that came from the worker.
pub(crate) struct Frame {
    pub(crate) text: Bytes,
    pub(crate) data: Bytes,
}

/// The server's end of the socket, for sending.
pub(crate) struct Sender {
    socket: OwnedFd,
    lock: Mutex<()>,
}

/// Two connected sockets: the server's and the worker's.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}

impl Sender {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket, lock: Mutex::new(()) }
    }

    /// Sends a frame whole. Waits while the worker does not read.
    pub(crate) fn send(&self, text: &[u8], data: &[u8], fd: Option<&OwnedFd>) -> io::Result<()> {
        let size = |bytes: &[u8]| {
            let size =
                Some(bytes.len()).filter(|&len| len <= MAX_FRAME).and_then(|len| u32::try_from(len).ok());
            size.ok_or_else(|| io::Error::other("a message to the worker is too large"))
        };
        let mut frame = Vec::with_capacity(HEAD + text.len() + data.len());
        frame.extend(size(text)?.to_le_bytes());
        frame.extend(size(data)?.to_le_bytes());
        frame.extend(text);
        frame.extend(data);
        self.send_raw(&frame, fd)
    }

    /// Sends bytes as they are.
    pub(crate) fn send_raw(&self, bytes: &[u8], fd: Option<&OwnedFd>) -> io::Result<()> {
        let _turn = self.lock.lock();
        let mut rest = bytes;
        let mut fd = fd;
        while !rest.is_empty() {
            let fds: Vec<BorrowedFd<'_>> = fd.iter().map(|fd| fd.as_fd()).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
                return Err(io::Error::other("no room for a descriptor"));
            }
            match sendmsg(&self.socket, &[IoSlice::new(rest)], &mut ancillary, SendFlags::NOSIGNAL) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => {
                    rest = rest.get(sent..).unwrap_or_default();
                    fd = None;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Ends the connection in both directions, also for whoever waits in it.
    pub(crate) fn close(&self) {
        // A socket whose other end is gone is closed already.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// What a read brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filled {
    Some,
    Nothing,
    /// The other side has closed the connection.
    End,
}

/// What has been read and makes no whole frame yet.
#[derive(Default)]
pub(crate) struct Receiver {
    buffer: BytesMut,
    fds: VecDeque<OwnedFd>,
}

impl Receiver {
    /// Reads what is there without waiting.
    pub(crate) fn fill(&mut self, socket: BorrowedFd<'_>) -> io::Result<Filled> {
        let start = self.buffer.len();
        let wanted = self.missing().clamp(4096, READ_SIZE);
        self.buffer.resize(start + wanted, 0);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let target = self.buffer.get_mut(start..).unwrap_or_default();
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let result = recvmsg(socket, &mut [IoSliceMut::new(target)], &mut ancillary, flags);
        let received = result.as_ref().map_or(0, |message| message.bytes);
        self.buffer.truncate(start + received);
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        match result {
            Ok(message) if message.flags.contains(ReturnFlags::CTRUNC) => {
                Err(io::Error::other("the worker sent too many descriptors at once"))
            }
            Ok(message) if message.bytes == 0 => Ok(Filled::End),
            Ok(_) => Ok(Filled::Some),
            Err(Errno::AGAIN | Errno::INTR) => Ok(Filled::Nothing),
            Err(Errno::CONNRESET) => Ok(Filled::End),
            Err(error) => Err(error.into()),
        }
    }

    /// The next whole frame.
    pub(crate) fn next(&mut self) -> io::Result<Option<Frame>> {
        let Some((text, data)) = self.head() else { return Ok(None) };
        if text > MAX_FRAME || data > MAX_FRAME {
            return Err(io::Error::other(format!("the worker announced a frame of {text} and {data} bytes")));
        }
        if self.buffer.len() < HEAD + text + data {
            return Ok(None);
        }
        let mut frame = self.buffer.split_to(HEAD + text + data).freeze();
        let _head = frame.split_to(HEAD);
        let text = frame.split_to(text);
        Ok(Some(Frame { text, data: frame }))
    }

    pub(crate) fn take_fd(&mut self) -> Option<OwnedFd> {
        self.fds.pop_front()
    }

    fn head(&self) -> Option<(usize, usize)> {
        let word = |at: usize| {
            let bytes = self.buffer.get(at..at + 4)?;
            usize::try_from(u32::from_le_bytes(bytes.try_into().ok()?)).ok()
        };
        Some((word(0)?, word(4)?))
    }

    /// Bytes up to the end of the frame that has begun.
    fn missing(&self) -> usize {
        let Some((text, data)) = self.head() else { return READ_SIZE / 8 };
        (HEAD.saturating_add(text).saturating_add(data)).saturating_sub(self.buffer.len()).max(READ_SIZE / 8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_and_descriptors_arrive_whole() {
        let (ours, theirs) = pair().expect("sockets");
        let (sender, extra) = (Sender::new(ours), pair().expect("sockets").0);
        sender.send(b"{}", b"abc", Some(&extra)).expect("sent");
        sender.send(b"[1]", b"", None).expect("sent");
        drop(sender);
        let mut receiver = Receiver::default();
        while receiver.fill(theirs.as_fd()).expect("read") != Filled::End {}
        let first = receiver.next().expect("valid").expect("whole");
        assert_eq!((&*first.text, &*first.data), (&b"{}"[..], &b"abc"[..]));
        assert!(receiver.take_fd().is_some());
        let second = receiver.next().expect("valid").expect("whole");
        assert_eq!(&*second.text, b"[1]");
        assert!(receiver.next().expect("valid").is_none());
        assert!(receiver.take_fd().is_none());
    }

    #[test]
    fn an_absurd_frame_is_an_error() {
        let mut receiver = Receiver::default();
        receiver.buffer.extend_from_slice(&[0xff; 8]);
        assert!(receiver.next().is_err());
    }
}
