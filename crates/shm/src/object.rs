//! A POSIX shared memory object (`shm_open`), read and written at offsets.

#![expect(unsafe_code, reason = "the lease that tells who has an object open")]

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::buffer::spare_capacity;
use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use rustix::io::{Errno, pread, pwrite};

/// Where the objects lie on Linux.
const DIRECTORY: &str = "/dev/shm";
/// Longest name, as the C library has it.
const MAX_NAME: usize = 255;

/// An object that is open for reading and writing. It lives on after its name is removed, until the last who has it
/// open or mapped lets go.
pub struct SharedObject {
    file: OwnedFd,
    id: (u64, u64),
}

/// Why bytes of an object cannot be had.
#[derive(Debug)]
pub enum ObjectError {
    /// The object has fewer bytes than asked for; it had more when it was registered.
    Truncated {
        /// Bytes that it has now.
        size: u64,
    },
    /// There is no memory for a copy of so many bytes.
    NoMemory,
    System(io::Error),
}

impl fmt::Display for ObjectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated { size } => write!(f, "the object has {size} bytes now"),
            Self::NoMemory => f.write_str("there is no memory for a copy"),
            Self::System(error) => error.fmt(f),
        }
    }
}

impl From<Errno> for ObjectError {
    fn from(errno: Errno) -> Self {
        Self::System(errno.into())
    }
}

impl SharedObject {
    /// Opens the object of that name. Slashes in front are left away; no name leads out of the directory of shared
    /// memory, and no symbolic link is followed.
    ///
    /// # Errors
    /// As `shm_open`; also for what is no regular file.
    pub fn open(name: &str) -> io::Result<Self> {
        let name = name.trim_start_matches('/');
        if name.is_empty() || name.len() > MAX_NAME || name.contains('/') || name == "." || name == ".." {
            return Err(Errno::INVAL.into());
        }
        let path = Path::new(DIRECTORY).join(OsStr::new(name));
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = open(path, flags, Mode::empty())?;
        let found = fstat(&file)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(Errno::INVAL.into());
        }
        Ok(Self { file, id: (found.st_dev, found.st_ino) })
    }

    /// Device and inode: the same for every name of the object.
    pub fn id(&self) -> (u64, u64) {
        self.id
    }

    /// Bytes that the object has now. Anybody who has it open can change that.
    ///
    /// # Errors
    /// The system's, which are not expected.
    pub fn size(&self) -> io::Result<u64> {
        Ok(u64::try_from(fstat(&self.file)?.st_size).unwrap_or_default())
    }

    /// Whether `len` bytes at `offset` are there now.
    ///
    /// # Errors
    /// They are not.
    pub fn check(&self, offset: u64, len: usize) -> Result<(), ObjectError> {
        let size = self.size().map_err(ObjectError::System)?;
        match offset.checked_add(len as u64) {
            Some(end) if end <= size => Ok(()),
            _ => Err(ObjectError::Truncated { size }),
        }
    }

    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// A copy of bytes. Memory is taken only for bytes that are there.
    ///
    /// # Errors
    /// The object ends before `offset + len`.
    pub fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, ObjectError> {
        self.check(offset, len)?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| ObjectError::NoMemory)?;
        while bytes.len() < len {
            // The system may have given room for more than was asked for.
            let at = offset.saturating_add(bytes.len() as u64);
            match pread(&self.file, spare_capacity(&mut bytes), at) {
                Ok(0) => return Err(ObjectError::Truncated { size: self.size().unwrap_or_default() }),
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        bytes.truncate(len);
        Ok(bytes)
    }

    /// Copies bytes into the object.
    ///
    /// # Errors
    /// The object ends before `offset + bytes.len()`; it is never made longer.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), ObjectError> {
        self.check(offset, bytes.len())?;
        let mut done = 0;
        while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
            match pwrite(&self.file, rest, offset.saturating_add(done as u64)) {
                Ok(0) => return Err(Errno::IO.into()),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Whether nobody else can reach the object any more: its name is removed, and nobody else has it open or mapped.
    /// Where the system cannot tell, the answer is no.
    ///
    /// This is told by a lease, which the kernel grants only to the one who has a file open alone; the caller must
    /// therefore not have the object open twice.
    pub fn is_abandoned(&self) -> bool {
        if fstat(&self.file).map_or(true, |found| found.st_nlink > 0) {
            return false;
        }
        let lease = |kind: libc::c_int| {
            // SAFETY: the descriptor is open as long as `self` lives, and the argument of this command is a number.
            unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_SETLEASE, kind) == 0 }
        };
        let alone = lease(libc::F_WRLCK);
        if alone {
            lease(libc::F_UNLCK);
        }
        alone
    }
}

impl fmt::Debug for SharedObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedObject({}:{})", self.id.0, self.id.1)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::path::PathBuf;

    use super::*;

    /// An object with a name of its own that is removed at the end.
    struct Made(PathBuf, File);

    impl Made {
        fn new(test: &str, size: u64) -> Self {
            let path = PathBuf::from(format!("{DIRECTORY}/trireme-shm-{test}-{}", std::process::id()));
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .open(&path)
                .expect("an object");
            file.set_len(size).expect("a size");
            Self(path, file)
        }

        fn open(&self) -> SharedObject {
            let name = self.0.file_name().and_then(OsStr::to_str).expect("a name");
            SharedObject::open(&format!("/{name}")).expect("it is there")
        }
    }

    impl Drop for Made {
        fn drop(&mut self) {
            let _gone = fs_err::remove_file(&self.0);
        }
    }

    #[test]
    fn reads_and_writes_inside_the_object_only() {
        let made = Made::new("inside", 100);
        let object = made.open();
        object.write(90, b"0123456789").expect("fits");
        assert_eq!(object.read(92, 8).expect("fits"), b"23456789");
        for (offset, len) in [(92, 9), (101, 0), (u64::MAX, 1), (u64::MAX - 3, 8), (0, usize::MAX)] {
            assert!(
                matches!(object.read(offset, len), Err(ObjectError::Truncated { size: 100 })),
                "{offset} {len}"
            );
        }
        assert!(matches!(object.write(91, &[1; 10]), Err(ObjectError::Truncated { size: 100 })));
        assert_eq!(made.1.metadata().expect("metadata").len(), 100, "it is never made longer");
    }

    #[test]
    fn an_object_made_smaller_is_an_error() {
        let made = Made::new("smaller", 8192);
        let object = made.open();
        made.1.set_len(4096).expect("smaller");
        assert!(matches!(object.read(4090, 16), Err(ObjectError::Truncated { size: 4096 })));
        assert!(matches!(object.write(4090, &[1; 16]), Err(ObjectError::Truncated { size: 4096 })));
        assert_eq!(object.read(4090, 6).expect("still there"), [0; 6]);
    }

    #[test]
    fn names_stay_in_their_directory() {
        for name in ["", "/", "..", "/../../etc/passwd", "a/b", ".", "x\0y", &"n".repeat(300)] {
            assert!(SharedObject::open(name).is_err(), "{name:?}");
        }
        let missing = SharedObject::open("/trireme-shm-nobody").expect_err("not there");
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        let made = Made::new("link", 8);
        let link = made.0.with_extension("lnk");
        std::os::unix::fs::symlink("/etc/passwd", &link).expect("a link");
        let name = link.file_name().and_then(OsStr::to_str).expect("a name");
        assert!(SharedObject::open(name).is_err());
        fs_err::remove_file(&link).expect("the link");
    }

    #[test]
    fn an_object_is_abandoned_when_nobody_else_has_it() {
        let made = Made::new("owner", 4096);
        let object = made.open();
        assert!(!object.is_abandoned(), "it has its name");
        fs_err::remove_file(&made.0).expect("the name");
        assert!(!object.is_abandoned(), "its owner has it open");
        let second = made.1.try_clone().expect("a second descriptor");
        drop(made);
        assert!(!object.is_abandoned(), "a copy of the descriptor is open");
        drop(second);
        assert!(object.is_abandoned());
    }
}
