//! The model repository on disk: which models and versions there are, and which files belong to them.
//!
//! Looking never changes anything, and junk is skipped quietly: hidden entries (`.DS_Store`, `.ipynb_checkpoints`,
//! the `..data` links of Kubernetes volumes), plain files at the top, version folders with other names than
//! numbers. Symbolic links are followed.

mod stamp;
mod upload;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use trireme_types::{Error, Result};

pub(crate) use self::stamp::Stamp;
pub(crate) use self::upload::Upload;
use crate::options::SingleModel;

/// Folders that tools leave beside models.
const JUNK: [&str; 2] = ["lost+found", "__pycache__"];

/// A model as it lies on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ModelSource {
    pub(crate) name: String,
    pub(crate) place: Place,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// `<repository>/<model>`
    Directory(PathBuf),
    /// A model file of its own; version 1.
    File(PathBuf),
    /// The same name in several repositories: none of them can be served.
    Ambiguous(Vec<PathBuf>),
}

/// Names and places of all models.
///
/// # Errors
/// A repository does not exist or cannot be read.
pub(crate) fn scan(repositories: &[PathBuf], single_models: &[SingleModel]) -> Result<Vec<ModelSource>> {
    let mut found: BTreeMap<String, Vec<Place>> = BTreeMap::new();
    for repository in repositories {
        for (name, path) in model_directories(repository)? {
            let places = found.entry(name).or_default();
            // The same repository given twice is one repository.
            if !places
                .iter()
                .any(|place| matches!(place, Place::Directory(known) if same_place(known, &path)))
            {
                places.push(Place::Directory(path));
            }
        }
    }
    for single in single_models {
        found.entry(single.name.clone()).or_default().push(Place::File(single.path.clone()));
    }
    let source = |(name, mut places): (String, Vec<Place>)| match (places.len(), places.pop()) {
        (1, Some(place)) => ModelSource { name, place },
        (_, last) => ModelSource {
            name,
            place: Place::Ambiguous(places.into_iter().chain(last).flat_map(Place::into_paths).collect()),
        },
    };
    Ok(found.into_iter().map(source).collect())
}

impl Place {
    fn into_paths(self) -> Vec<PathBuf> {
        match self {
            Self::Directory(path) | Self::File(path) => vec![path],
            Self::Ambiguous(paths) => paths,
        }
    }
}

fn same_place(a: &Path, b: &Path) -> bool {
    a == b || matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

fn model_directories(repository: &Path) -> Result<Vec<(String, PathBuf)>> {
    let unreadable = |error: std::io::Error| {
        Error::not_found(format!(
            "failed to stat the model repository '{}': {error}; give an existing directory with --model-repository",
            repository.display()
        ))
    };
    let mut models = Vec::new();
    for entry in fs_err::read_dir(repository).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let Some(name) = visible_name(&entry.file_name()) else { continue };
        if JUNK.contains(&name.as_str()) {
            continue;
        }
        match fs_err::metadata(entry.path()) {
            Ok(metadata) if metadata.is_dir() => models.push((name, entry.path())),
            Ok(_) => {}
            Err(error) => {
                tracing::warn!("skipping '{}' in the model repository: {error}", entry.path().display());
            }
        }
    }
    Ok(models)
}

/// The name of an entry unless it is hidden or not UTF-8.
fn visible_name(name: &OsStr) -> Option<String> {
    match name.to_str() {
        Some(name) if !name.starts_with('.') => Some(name.to_owned()),
        Some(_) => None,
        None => {
            tracing::warn!("skipping {name:?}: the name is not UTF-8");
            None
        }
    }
}

/// Version numbers that a model directory holds, ascending.
///
/// # Errors
/// The directory cannot be read.
pub(crate) fn versions(model_dir: &Path) -> Result<Vec<i64>> {
    let unreadable =
        |error: std::io::Error| Error::internal(format!("cannot read the model directory: {error}"));
    let mut versions = Vec::new();
    for entry in fs_err::read_dir(model_dir).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let Some(name) = visible_name(&entry.file_name()) else { continue };
        let Ok(metadata) = fs_err::metadata(entry.path()) else {
            tracing::warn!("skipping '{}': the link leads nowhere or in a circle", entry.path().display());
            continue;
        };
        if !metadata.is_dir() {
            continue;
        }
        match version_number(&name) {
            Ok(version) => versions.push(version),
            Err(Some(reason)) => {
                tracing::warn!("ignoring version directory '{}': {reason}", entry.path().display());
            }
            Err(None) => tracing::debug!("ignoring '{}': not a version directory", entry.path().display()),
        }
    }
    versions.sort_unstable();
    Ok(versions)
}

/// The version that a folder's name stands for. `Err(None)`: not meant as a version at all.
fn version_number(name: &str) -> Result<i64, Option<&'static str>> {
    let digits = name.strip_prefix('-').unwrap_or(name);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(None);
    }
    if name.starts_with('-') {
        return Err(Some("a version is a whole number above 0"));
    }
    if name.starts_with('0') {
        return Err(Some("a version is a whole number above 0 without leading zeros"));
    }
    name.parse().map_err(|_| Some("a version is at most 9223372036854775807"))
}

/// Names of the visible entries of a directory, directories with a `/` behind; empty if it cannot be read.
pub(crate) fn listing(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs_err::read_dir(dir) else { return Vec::new() };
    let mut names: Vec<String> = entries
        .filter_map(Result::ok)
        .filter_map(|entry| {
            let name = visible_name(&entry.file_name())?;
            let is_dir = fs_err::metadata(entry.path()).is_ok_and(|metadata| metadata.is_dir());
            Some(if is_dir { name + "/" } else { name })
        })
        .collect();
    names.sort_unstable();
    names
}

/// Refuses model names that could lead out of the repository.
///
/// # Errors
/// `INVALID_ARG` with Triton's wording, and the name that was probably meant.
pub(crate) fn check_model_name(name: &str) -> Result<()> {
    if name.is_empty() {
        return Err(Error::invalid_arg("Model name cannot be empty. Please enter a valid name to deploy."));
    }
    let escapes = name.contains(['/', '\\', '\0']) || name == "." || name == "..";
    if !escapes {
        return Ok(());
    }
    let meant = name.split(['/', '\\']).rfind(|part| !part.is_empty() && !part.starts_with('.'));
    let hint =
        meant.map(|part| format!("; a model name is expected, did you mean '{part}'?")).unwrap_or_default();
    Err(Error::invalid_arg(format!(
        "invalid model name '{name}', model name must not contain path traversal characters{hint}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        fs_err::create_dir_all(path.parent().expect("has a parent")).expect("can create");
        fs_err::write(path, b"").expect("can write");
    }

    #[test]
    fn skips_junk_and_follows_links() {
        let root = tempfile::tempdir().expect("a directory");
        let repository = root.path().join("models");
        for file in ["good/1/model.onnx", ".ipynb_checkpoints/x", "lost+found/x", "README.md", ".DS_Store"] {
            touch(&repository.join(file));
        }
        fs_err::create_dir(repository.join("empty")).expect("can create");
        touch(&root.path().join("elsewhere/1/model.onnx"));
        std::os::unix::fs::symlink(root.path().join("elsewhere"), repository.join("linked"))
            .expect("can link");
        std::os::unix::fs::symlink("nowhere", repository.join("dangling")).expect("can link");
        let names: Vec<String> =
            scan(&[repository], &[]).expect("readable").into_iter().map(|source| source.name).collect();
        assert_eq!(names, ["empty", "good", "linked"]);
    }

    #[test]
    fn the_same_name_twice_is_ambiguous() {
        let root = tempfile::tempdir().expect("a directory");
        let (a, b) = (root.path().join("a"), root.path().join("b"));
        touch(&a.join("add/1/model.onnx"));
        touch(&b.join("add/1/model.onnx"));
        let found = scan(&[a.clone(), b.clone()], &[]).expect("readable");
        assert_eq!(found[0].place, Place::Ambiguous(vec![a.join("add"), b.join("add")]));
        let once = scan(&[a.clone(), a.clone()], &[]).expect("readable");
        assert_eq!(once[0].place, Place::Directory(a.join("add")));
    }

    #[test]
    fn only_plain_numbers_are_versions() {
        let root = tempfile::tempdir().expect("a directory");
        for name in [
            "1",
            "10",
            "3",
            "-1",
            "0",
            "01",
            "v2",
            "1_old",
            "configs",
            "20201016",
            "202211070999",
            "9223372036854775807",
            "9223372036854775808",
            "..data",
        ] {
            fs_err::create_dir(root.path().join(name)).expect("can create");
        }
        let found = versions(root.path()).expect("readable");
        assert_eq!(found, [1, 3, 10, 20_201_016, 202_211_070_999, i64::MAX]);
    }

    #[test]
    fn names_stay_inside_the_repository() {
        for good in ["m", "a.b-c_d", "模型", "a+b", "my model"] {
            check_model_name(good).expect(good);
        }
        let error = check_model_name("/models/m/").expect_err("a path");
        assert!(error.message().contains("did you mean 'm'?"), "{error}");
        for bad in ["", ".", "..", "../etc", "a/b", "a\0b"] {
            check_model_name(bad).expect_err(bad);
        }
    }
}
