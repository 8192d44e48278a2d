//! Which Python runs a model: that of its environment, or the server's.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use flate2::read::GzDecoder;
use parking_lot::Mutex;
use tempfile::TempDir;
use trireme_backend::ModelContext;
use trireme_types::{Error, Result};

const ENVIRONMENT: &str = "EXECUTION_ENV_PATH";
const MODEL_DIRECTORY: &str = "$$TRITON_MODEL_DIRECTORY";
const SETTING: &str = "python";
const VARIABLE: &str = "TRIREME_PYTHON";

/// An interpreter and what keeps it there.
#[derive(Clone, Debug)]
pub(crate) struct Interpreter {
    pub(crate) path: PathBuf,
    /// Directory of the environment that it belongs to.
    pub(crate) environment: Option<PathBuf>,
    /// An environment that was unpacked, deleted with the last user.
    _unpacked: Option<Arc<TempDir>>,
}

/// Environments that were unpacked, by archive and its time.
#[derive(Default)]
pub(crate) struct Environments(Mutex<HashMap<Archive, Weak<TempDir>>>);

/// A packed environment and when it was written.
type Archive = (PathBuf, Option<SystemTime>);

impl Environments {
    /// The interpreter of a model.
    ///
    /// # Errors
    /// The environment is missing or is none, or there is no Python; the message names what was looked at.
    pub(crate) fn find(&self, context: &ModelContext) -> Result<Interpreter> {
        if let Some(named) = context.parameter(ENVIRONMENT).filter(|value| !value.is_empty()) {
            return self.environment(named, context);
        }
        if let Some(path) = context.settings.get(SETTING) {
            return named(path, "the backend setting 'python'");
        }
        if let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
            return named(&path.to_string_lossy(), "TRIREME_PYTHON");
        }
        let names = ["python3", "python"];
        let found = names.iter().find_map(|name| on_path(name)).ok_or_else(|| {
            Error::unavailable(
                "a python model needs a Python interpreter, and there is no 'python3' on PATH; install Python 3.8 or later \
                 with numpy, or name one with --backend-config=python,python=PATH or the variable TRIREME_PYTHON",
            )
        })?;
        Ok(Interpreter { path: found, environment: None, _unpacked: None })
    }

    fn environment(&self, named: &str, context: &ModelContext) -> Result<Interpreter> {
        let dir = &context.files.model_dir;
        let path = match named.strip_prefix(MODEL_DIRECTORY) {
            Some(rest) => dir.join(rest.trim_start_matches('/')),
            None => dir.join(named),
        };
        let looked = |what: &str| {
            Error::invalid_arg(format!(
                "{ENVIRONMENT} '{named}' of model '{}': {what} '{}'; expected a directory of an environment (with \
                 bin/python), or a .tar.gz of one as conda-pack makes it; a relative path starts at the model's directory",
                context.name,
                path.display()
            ))
        };
        let meta = fs_err::metadata(&path).map_err(|_| looked("there is nothing at"))?;
        if meta.is_dir() {
            let python = inside(&path).ok_or_else(|| looked("there is no bin/python in"))?;
            return Ok(Interpreter { path: python, environment: Some(path), _unpacked: None });
        }
        let key = (path.clone(), meta.modified().ok());
        let mut known = self.0.lock();
        let unpacked = match known.get(&key).and_then(Weak::upgrade) {
            Some(unpacked) => unpacked,
            None => {
                let unpacked =
                    Arc::new(unpack(&path).map_err(|error| looked(&format!("cannot unpack ({error})")))?);
                known.insert(key, Arc::downgrade(&unpacked));
                unpacked
            }
        };
        let root = unpacked.path().to_path_buf();
        let python = inside(&root).ok_or_else(|| looked("there is no bin/python in"))?;
        Ok(Interpreter { path: python, environment: Some(root), _unpacked: Some(unpacked) })
    }
}

impl Interpreter {
    /// A command that runs it with its environment's programs first.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        if let Some(root) = &self.environment {
            let mut path = OsString::from(root.join("bin"));
            if let Some(rest) = std::env::var_os("PATH") {
                path.push(":");
                path.push(rest);
            }
            command.env("PATH", path);
            command.env_remove("PYTHONHOME").env_remove("PYTHONPATH");
            let is_venv = root.join("pyvenv.cfg").exists();
            command.env(if is_venv { "VIRTUAL_ENV" } else { "CONDA_PREFIX" }, root);
        }
        command
    }
}

fn named(path: &str, origin: &str) -> Result<Interpreter> {
    let found = if path.contains('/') { Some(PathBuf::from(path)) } else { on_path(path) };
    let found = found.filter(|found| found.is_file()).ok_or_else(|| {
        Error::unavailable(format!("{origin} names the Python interpreter '{path}', which is not there"))
    })?;
    Ok(Interpreter { path: found, environment: None, _unpacked: None })
}

fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

fn inside(root: &Path) -> Option<PathBuf> {
    ["bin/python3", "bin/python"].iter().map(|name| root.join(name)).find(|file| file.is_file())
}

fn unpack(archive: &Path) -> std::io::Result<TempDir> {
    let target = tempfile::Builder::new().prefix("trireme-python-").tempdir()?;
    let file = std::io::BufReader::new(fs_err::File::open(archive)?);
    tar::Archive::new(GzDecoder::new(file)).unpack(target.path())?;
    let mender = target.path().join("bin/conda-unpack");
    if mender.is_file() {
        // Mends the paths in the files of a packed environment.
        let python = inside(target.path()).ok_or(std::io::ErrorKind::NotFound)?;
        let output = Command::new(python).arg(mender).output()?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(std::io::Error::other(format!("conda-unpack failed: {text}")));
        }
    }
    Ok(target)
}
