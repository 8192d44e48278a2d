//! A model whose files came with the load request. They lie in a temporary directory that is removed with the model.

use std::path::{Component, Path, PathBuf};

use bytes::Bytes;
use tempfile::TempDir;
use trireme_types::{Error, Result};

use super::{ModelSource, Place};

/// Files of one request.
const MAX_FILES: usize = 4096;
/// Bytes of a path.
const MAX_PATH_BYTES: usize = 1024;

/// See the module.
#[derive(Debug)]
pub(crate) struct Upload {
    dir: TempDir,
}

impl Upload {
    /// Writes files by path relative to the model's directory.
    ///
    /// # Errors
    /// `INVALID_ARG` for a path that is absolute, leads out of the directory, is given twice, or is a directory of another
    /// one; `INTERNAL` if the files cannot be written.
    pub(crate) fn new(name: &str, files: &[(String, Bytes)]) -> Result<Self> {
        if files.len() > MAX_FILES {
            return Err(Error::invalid_arg(format!(
                "failed to load '{name}': {} files in the request, at most {MAX_FILES} are taken; put the model into the \
                 repository",
                files.len()
            )));
        }
        let mut paths = Vec::with_capacity(files.len());
        for (path, _) in files {
            let inside = inside(path).ok_or_else(|| {
                Error::invalid_arg(format!(
                    "failed to load '{name}': invalid file path '{path}', a relative path inside the model directory is \
                     expected, such as '1/model.onnx'"
                ))
            })?;
            if paths.contains(&inside) {
                return Err(Error::invalid_arg(format!(
                    "failed to load '{name}': file '{path}' is given twice"
                )));
            }
            paths.push(inside);
        }
        let unwritable = |error: std::io::Error| {
            Error::internal(format!(
                "failed to load '{name}': cannot write the files of the request: {error}"
            ))
        };
        let dir = tempfile::Builder::new().prefix("trireme-model-").tempdir().map_err(unwritable)?;
        let root = dir.path().join(name);
        fs_err::create_dir(&root).map_err(unwritable)?;
        for (path, (given, content)) in paths.iter().zip(files) {
            let file = root.join(path);
            if let Some(parent) = file.parent() {
                fs_err::create_dir_all(parent).map_err(unwritable)?;
            }
            if file.is_dir() {
                return Err(Error::invalid_arg(format!(
                    "failed to load '{name}': '{given}' is a file and a directory in the same request"
                )));
            }
            fs_err::write(&file, content).map_err(unwritable)?;
        }
        Ok(Self { dir })
    }

    /// The model as it lies there.
    pub(crate) fn source(&self, name: &str) -> ModelSource {
        ModelSource { name: name.to_owned(), place: Place::Directory(self.dir.path().join(name)) }
    }
}

/// The path, if it stays inside whatever it is appended to.
fn inside(path: &str) -> Option<PathBuf> {
    if path.is_empty() || path.len() > MAX_PATH_BYTES || path.contains(['\0', '\\']) || path.ends_with('/') {
        return None;
    }
    let names: Option<PathBuf> = Path::new(path)
        .components()
        .map(|part| match part {
            Component::Normal(name) => Some(name),
            _ => None,
        })
        .collect();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(list: &[&str]) -> Vec<(String, Bytes)> {
        list.iter().map(|path| ((*path).to_owned(), Bytes::from_static(b"x"))).collect()
    }

    #[test]
    fn files_lie_inside_and_go_with_it() {
        let upload = Upload::new("m", &files(&["1/model.onnx", "labels.txt"])).expect("can write");
        let Place::Directory(dir) = upload.source("m").place else { panic!("a directory") };
        assert_eq!(fs_err::read(dir.join("1/model.onnx")).expect("is there"), b"x");
        drop(upload);
        assert!(!dir.exists());
    }

    #[test]
    fn paths_stay_inside() {
        for bad in ["", "/etc/passwd", "../x", "1/../../x", "./x", "1\\x", "1/x/", "a\0b"] {
            let error = Upload::new("m", &files(&[bad])).expect_err(bad);
            assert!(error.message().contains("inside the model directory"), "{error}");
        }
        Upload::new("m", &files(&["1/x", "1/x"])).expect_err("twice");
        Upload::new("m", &files(&["1/x", "1"])).expect_err("a file and a directory");
    }
}
