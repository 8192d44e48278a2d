//! Part of an object in the address space of the server, read where it lies.
//!
//! Whoever shares an object can make it smaller while it is mapped; whoever then reads a page that is gone gets the
//! signal SIGBUS, which ends a process. Here a handler puts pages of zeros in the place of those that are gone, marks the
//! mapping as cut, and lets the reader go on; who reads asks afterwards whether it was cut. A signal that is about
//! anything else goes to the handler that was there before.
//!
//! *Invariants:* the handler does nothing but atomic loads and stores, one `mmap` over pages of a mapping of ours, and the
//! call of its predecessor. A mapping is in the table as long as, and only while, it may be read.

#![expect(unsafe_code, reason = "mapped memory and its signal")]

use std::ffi::{c_int, c_void};
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::object::SharedObject;

/// Mappings at a time; without a free place tensors are copied instead.
const PLACES: usize = 1024;

/// `BUS_ADRERR`: there is no memory behind the address.
const NO_MEMORY: c_int = 2;

/// Address range of a mapping, for the handler. A place whose `end` is 0 holds none.
struct Place {
    taken: AtomicBool,
    /// Counts the changes of the range, and is odd during one.
    version: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    cut: AtomicBool,
}

static TABLE: [Place; PLACES] = [const {
    Place {
        taken: AtomicBool::new(false),
        version: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        cut: AtomicBool::new(false),
    }
}; PLACES];

impl Place {
    /// Changes the range; only who has taken the place does.
    fn set(&self, start: usize, end: usize) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(start, Ordering::SeqCst);
        self.end.store(end, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// End of the mapping, if the address is in it. A range that changes meanwhile is not the one that is being read:
    /// that one has a reader, and stays.
    fn end_around(&self, address: usize) -> Option<usize> {
        let version = self.version.load(Ordering::SeqCst);
        let (start, end) = (self.start.load(Ordering::SeqCst), self.end.load(Ordering::SeqCst));
        let settled = version.is_multiple_of(2) && self.version.load(Ordering::SeqCst) == version;
        (settled && (start..end).contains(&address)).then_some(end)
    }
}

/// What handled the signal before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Bytes of an object, mapped for reading. Others may change them at any time: two reads of the same byte need not agree.
pub struct Mapping {
    /// The whole pages that are mapped.
    pages: *mut c_void,
    pages_len: usize,
    /// Where the bytes begin in them.
    skip: usize,
    len: usize,
    place: &'static Place,
}

// SAFETY: the pages are readable from every thread and unmapped once, by the last owner.
unsafe impl Send for Mapping {}
// SAFETY: as above; nothing of the mapping itself changes but atomics.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes at `offset`, which need not be the begin of a page.
    ///
    /// # Errors
    /// The system's; also if there are too many mappings.
    pub fn new(object: &SharedObject, offset: u64, len: usize) -> io::Result<Self> {
        if let Err(errno) = guard() {
            return Err(io::Error::from_raw_os_error(*errno));
        }
        let page = rustix::param::page_size();
        let skip = usize::try_from(offset % page as u64).map_err(io::Error::other)?;
        let pages_len = skip.checked_add(len).filter(|&pages_len| pages_len > 0);
        let pages_len = pages_len.and_then(|pages_len| pages_len.checked_next_multiple_of(page));
        let Some(pages_len) = pages_len else { return Err(io::ErrorKind::InvalidInput.into()) };
        let free = |place: &&Place| {
            place.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let Some(place) = TABLE.iter().find(free) else {
            return Err(io::Error::other("too many mappings"));
        };
        // SAFETY: a new mapping, at an address that the system chooses.
        let pages = unsafe {
            mmap(
                ptr::null_mut(),
                pages_len,
                ProtFlags::READ,
                MapFlags::SHARED,
                object.file(),
                offset - skip as u64,
            )
        };
        let pages = pages.inspect_err(|_| place.taken.store(false, Ordering::Release))?;
        place.cut.store(false, Ordering::Relaxed);
        place.set(pages.addr(), pages.addr() + pages_len);
        Ok(Self { pages, pages_len, skip, len, place })
    }

    /// The bytes; those that are gone are zeros.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the bytes are inside the pages, which stay mapped as long as `self`. That others write there makes
        // the values uncertain, not the memory: each read finds some byte.
        unsafe { std::slice::from_raw_parts(self.pages.cast::<u8>().add(self.skip), self.len) }
    }

    /// Whether bytes that were read may have been gone. Then the mapping is of no further use.
    pub fn is_cut(&self) -> bool {
        self.place.cut.load(Ordering::Acquire)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // First out of the handler's sight, for the address may be given away again at once.
        self.place.set(0, 0);
        // SAFETY: the pages are ours, and nobody has a slice of them any more.
        let _ = unsafe { munmap(self.pages, self.pages_len) };
        self.place.taken.store(false, Ordering::Release);
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapping({} bytes)", self.len)
    }
}

/// Sets the handler, once.
fn guard() -> &'static Result<(), i32> {
    static SET: OnceLock<Result<(), i32>> = OnceLock::new();
    SET.get_or_init(|| {
        let mut before = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: asks for the present handler, which is written to `before`.
        if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), before.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or_default());
        }
        // SAFETY: the call has filled it, and zeros are valid in all its fields.
        let before = unsafe { before.assume_init() };
        // Known before the handler can run.
        let _first = BEFORE.set(before);
        // SAFETY: zeros are valid in all fields; those that count are set below.
        let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        action.sa_sigaction = on_bus_error as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler has the signature that SA_SIGINFO asks for, and calls only what a handler may.
        match unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or_default()),
        }
    })
}

/// The handler of SIGBUS.
extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the system gives a handler of this kind a valid `info`, with an address for this signal.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    if code == NO_MEMORY && replace_pages(address) {
        return;
    }
    pass_on(signal, info, context);
}

/// Puts zeros in the place of the page of that address and all behind it in its mapping. False if it is in none of ours.
fn replace_pages(address: usize) -> bool {
    for place in &TABLE {
        let Some(end) = place.end_around(address) else { continue };
        let first = address & !(rustix::param::page_size() - 1);
        // SAFETY: the address of the thread's error number is valid in a handler as elsewhere.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: as above; what was there is put back, because the interrupted code may be about to look at it.
        let kept = unsafe { *errno };
        // SAFETY: the range is the rest of a mapping of ours, which nobody unmaps while a thread reads it, and this one
        // does. Whoever reads it finds zeros from now on.
        let replaced = unsafe {
            libc::mmap(
                ptr::without_provenance_mut(first),
                end - first,
                libc::PROT_READ,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        // SAFETY: as above.
        unsafe { *errno = kept };
        place.cut.store(true, Ordering::Release);
        return replaced != libc::MAP_FAILED;
    }
    false
}

/// Does what would have been done without our handler.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    if let Some(before) = BEFORE.get() {
        let handler = before.sa_sigaction;
        if handler != libc::SIG_DFL && handler != libc::SIG_IGN {
            if before.sa_flags & libc::SA_SIGINFO != 0 {
                // SAFETY: a handler that was set with SA_SIGINFO has this signature.
                let handler = unsafe {
                    std::mem::transmute::<usize, extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void)>(
                        handler,
                    )
                };
                return handler(signal, info, context);
            }
            // SAFETY: a handler that was set without SA_SIGINFO has this signature.
            let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(handler) };
            return handler(signal);
        }
    }
    // SAFETY: the default handler; the instruction is tried again after the return and ends the process.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}
