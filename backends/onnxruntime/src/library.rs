//! Where the ONNX Runtime library may be, and opening it.
//!
//! Whoever names a library means that one: a path from a setting or the environment that does not work is an
//! error, and no other library is taken in its place. Otherwise the first that opens and is new enough serves.

mod places;

use std::ffi::CStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use libloading::Library;
use ort_sys::{OrtApi, OrtApiBase};
pub(crate) use places::Places;
use trireme_types::{Error, Result};

use crate::api::MIN_LEVEL;

/// Newest level of the C API that this crate has calls for.
const MAX_LEVEL: u32 = ort_sys::ORT_API_VERSION;

const HOW_TO_GET: &str = "install it with `pip install onnxruntime`, or name the library with \
     --backend-config=onnxruntime,library-path=FILE or the environment variable TRIREME_ONNXRUNTIME";

/// An open library and the function table it gave.
pub(crate) struct Opened {
    pub(crate) path: PathBuf,
    /// As the library gives it: `1.32.0`.
    pub(crate) version: String,
    pub(crate) level: u32,
    pub(crate) table: NonNull<OrtApi>,
    pub(crate) library: Library,
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened")
            .field("path", &self.path)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

/// Opens the library that was asked for, or the first that serves.
///
/// # Errors
/// UNAVAILABLE, with the places looked at, what was wrong with each library found, and how to get one.
pub(crate) fn find(explicit: Option<&Path>, places: &Places) -> Result<Opened> {
    if let Some(path) = explicit {
        return open_named(path, "--backend-config=onnxruntime,library-path");
    }
    if let Some((variable, path)) = places.environment() {
        return open_named(&path, variable);
    }
    let mut refused = Vec::new();
    for path in places.candidates() {
        match open(&path) {
            Ok(opened) => return Ok(opened),
            Err(reason) => refused.push(format!("'{}': {reason}", path.display())),
        }
    }
    let system = Path::new("libonnxruntime.so");
    match open(system) {
        Ok(opened) => return Ok(opened),
        // That the loader does not know the name is the usual case; anything else is worth telling.
        Err(reason) if reason.contains("cannot open shared object file") => {}
        Err(reason) => refused.push(format!("'libonnxruntime.so' of the system: {reason}")),
    }
    let mut message = format!("the ONNX Runtime library was not found; looked at {}", places.describe());
    if !refused.is_empty() {
        message = format!(
            "no ONNX Runtime library can be used: {}; also looked at {}",
            refused.join("; "),
            places.describe()
        );
    }
    Err(Error::unavailable(format!("{message}; {HOW_TO_GET}")))
}

fn open_named(path: &Path, by: &str) -> Result<Opened> {
    let file = if path.is_dir() { places::newest_in(path) } else { Some(path.to_owned()) };
    let Some(file) = file else {
        return Err(Error::unavailable(format!(
            "{by} names the directory '{}', which holds no libonnxruntime.so*; {HOW_TO_GET}",
            path.display()
        )));
    };
    open(&file).map_err(|reason| {
        Error::unavailable(format!("the ONNX Runtime library '{}' named by {by}: {reason}", file.display()))
    })
}

/// Opens one library and asks it for its function table; the error is a reason for a list.
fn open(path: &Path) -> Result<Opened, String> {
    type GetApiBase = unsafe extern "system" fn() -> *const OrtApiBase;
    if path.components().count() > 1
        && let Err(error) = fs_err::metadata(path)
    {
        return Err(match error.kind() {
            std::io::ErrorKind::NotFound => "there is no such file".to_owned(),
            _ => error.to_string(),
        });
    }
    // SAFETY: opening a library runs its initialisers; ONNX Runtime's have no requirements. That the file is the
    // library it seems to be is the word of whoever installed or named it.
    let library = unsafe { Library::new(path) }.map_err(|error| {
        // The loader's own words are the source.
        std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
    })?;
    // SAFETY: `OrtGetApiBase` has had this type since the first release of the C API.
    let base = unsafe { library.get::<GetApiBase>(b"OrtGetApiBase\0") }
        .map_err(|_| "it is no ONNX Runtime library (it does not export OrtGetApiBase)".to_owned())?;
    // SAFETY: the function takes nothing and gives a pointer to constant data or null.
    let base = unsafe { base() };
    if base.is_null() {
        return Err("OrtGetApiBase gave nothing".to_owned());
    }
    // SAFETY: `base` is a valid OrtApiBase; the version is a NUL-terminated constant.
    let version = unsafe { CStr::from_ptr(((*base).GetVersionString)()) }.to_string_lossy().into_owned();
    let level = level(&version)?;
    // SAFETY: as above. The library gives null for a level it lacks.
    let table = unsafe { ((*base).GetApi)(level) };
    let table = NonNull::new(table.cast_mut())
        .ok_or_else(|| format!("version {version} does not give level {level} of its C API"))?;
    Ok(Opened { path: path.to_owned(), version, level, table, library })
}

/// Level of the C API to ask a library of that version for.
fn level(version: &str) -> Result<u32, String> {
    let mut parts = version.split('.');
    let major = parts.next().and_then(|n| n.parse::<u32>().ok());
    let minor = parts.next().and_then(|n| n.parse::<u32>().ok());
    match (major, minor) {
        (Some(1), Some(minor)) if minor >= MIN_LEVEL => Ok(minor.min(MAX_LEVEL)),
        (Some(major), Some(_)) if major > 1 => Ok(MAX_LEVEL),
        (Some(_), Some(_)) => Err(format!(
            "its version is {version}, expected 1.{MIN_LEVEL} or newer (C API level {MIN_LEVEL})"
        )),
        _ => Err(format!("its version '{version}' is not understood, expected one as 1.{MIN_LEVEL}.0")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_levels_that_both_sides_know() {
        assert_eq!(level("1.17.0"), Ok(17));
        assert_eq!(level("1.999.3"), Ok(MAX_LEVEL));
        assert_eq!(level("2.0.0"), Ok(MAX_LEVEL));
        let old = level("1.9.1").expect_err("too old");
        assert!(old.contains("1.9.1") && old.contains("1.17 or newer"), "{old}");
        assert!(level("onnx").expect_err("no version").contains("'onnx'"));
    }

    #[test]
    fn a_named_library_that_is_not_there_is_an_error() {
        let error =
            find(Some(Path::new("/nonexistent/libonnxruntime.so")), &Places::none()).expect_err("no file");
        assert_eq!(
            error.message(),
            "the ONNX Runtime library '/nonexistent/libonnxruntime.so' named by \
             --backend-config=onnxruntime,library-path: there is no such file"
        );
    }

    #[test]
    fn a_file_that_is_no_library_says_so() {
        let dir = std::env::temp_dir().join(format!("trireme-library-{}", std::process::id()));
        fs_err::create_dir_all(&dir).expect("a directory");
        let empty = find(Some(&dir), &Places::none()).expect_err("nothing in it");
        assert!(empty.message().contains("holds no libonnxruntime.so*"), "{empty}");
        fs_err::write(dir.join("libonnxruntime.so.1"), b"no library").expect("a file");
        let error = find(Some(&dir), &Places::none()).expect_err("not a library");
        fs_err::remove_dir_all(&dir).expect("it is there");
        assert!(error.message().contains("libonnxruntime.so.1"), "{error}");
    }

    #[test]
    fn absence_names_the_places_and_the_remedy() {
        let error = find(None, &Places::none());
        // The machine may have one for all programs.
        if let Err(error) = error {
            for part in ["was not found", "looked at", "pip install onnxruntime", "TRIREME_ONNXRUNTIME"] {
                assert!(error.message().contains(part), "{error}");
            }
        }
    }
}
