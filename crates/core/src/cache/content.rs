//! What tells the content of a model version from another one.
//!
//! For a cache in the server it is the number of the load. For one that outlives the server and is shared with others it
//! is a hash of the version's files, of the configuration as far as answers depend on it, and of the engine. An ensemble's
//! answers depend on the models of its steps too, which may be loaded anew without it, so its content is asked for with
//! every request.
//!
//! Times and sizes of files will not do: weights that were trained anew have the same size, and images for containers
//! are often built with one time for every file.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use blake3::Hasher;
use fs_err as fs;
use trireme_proto::inference::ModelConfig;

use crate::model::ModelVersion;

/// Directories inside a version directory; deeper ones are a loop of links.
const MAX_DEPTH: usize = 32;

/// Ensembles in ensembles; deeper ones are a circle that reloads have made.
const MAX_NESTING: usize = 16;

/// Numbers of loads, over all models: a later load has a higher one.
static LOADS: AtomicU64 = AtomicU64::new(1);

/// What a model version is made of, as far as its answers are concerned.
#[derive(Clone, Copy)]
pub(crate) struct Made<'a> {
    pub(crate) name: &'a str,
    pub(crate) version: i64,
    /// The directory with all files that the answers depend on; `None` if there is no such directory.
    pub(crate) version_dir: Option<&'a Path>,
    /// The completed configuration.
    pub(crate) config: &'a ModelConfig,
    /// The engine and its version.
    pub(crate) engine: &'a str,
}

/// What a version is, and which load of the server it came with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    hash: [u8; 32],
    /// The newest load that has part in it.
    load: u64,
}

impl Content {
    /// Of a version that is just being loaded, unlike any other load.
    pub(super) fn of_load() -> Self {
        let load = LOADS.fetch_add(1, Ordering::Relaxed);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let text = format!("load {load} of process {} at {}", std::process::id(), now.as_nanos());
        Self { hash: blake3::hash(text.as_bytes()).into(), load }
    }

    /// Of a version that is just being loaded, like any other load of the same files; unlike any if they cannot be
    /// read.
    pub(super) fn of_files(made: Made<'_>) -> Self {
        let this = Self::of_load();
        let Some(version_dir) = made.version_dir else { return this };
        let start = Instant::now();
        let (name, version) = (made.name, made.version);
        match hash(version_dir, made.config, made.engine) {
            Ok(hash) => {
                tracing::debug!("hashed the files of '{name}' version {version} in {:?}", start.elapsed());
                Self { hash, ..this }
            }
            Err(error) => {
                tracing::warn!(
                    "the response cache will not find answers of other loads of '{name}' version {version}: {error}"
                );
                this
            }
        }
    }

    pub(super) fn hash(&self) -> &[u8; 32] {
        &self.hash
    }

    pub(super) fn load(&self) -> u64 {
        self.load
    }

    /// Of a model as it would answer now; `None` while a model of an ensemble's steps is not there.
    pub(super) fn now(model: &ModelVersion) -> Option<Self> {
        Self::nested(model, MAX_NESTING)
    }

    fn nested(model: &ModelVersion, depth: usize) -> Option<Self> {
        let own = *model.content();
        let Some(ensemble) = model.ensemble() else { return Some(own) };
        let depth = depth.checked_sub(1)?;
        let mut hasher = Hasher::new();
        hasher.update(&own.hash);
        let mut load = own.load;
        for member in ensemble.members()? {
            let member_content = Self::nested(&member, depth)?;
            hasher.update(&member.version().to_le_bytes()).update(&member_content.hash);
            load = load.max(member_content.load);
        }
        Some(Self { hash: hasher.finalize().into(), load })
    }
}

/// The hash of a version.
///
/// # Errors
/// A file that cannot be read.
fn hash(version_dir: &Path, config: &ModelConfig, engine: &str) -> io::Result<[u8; 32]> {
    let mut hasher = Hasher::new();
    for text in [env!("CARGO_PKG_VERSION"), engine, &trireme_config::to_json(&essence(config))] {
        hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    }
    let mut files = Vec::new();
    collect(version_dir, MAX_DEPTH, &mut files)?;
    files.sort();
    for path in files {
        let name = path.strip_prefix(version_dir).unwrap_or(&path).as_os_str().as_encoded_bytes();
        let mut content = Hasher::new();
        content.update_reader(fs::File::open(&path)?)?;
        hasher.update(&(name.len() as u64).to_le_bytes()).update(name);
        hasher.update(content.finalize().as_bytes());
    }
    Ok(hasher.finalize().into())
}

/// The configuration without what may differ between servers that answer the same.
fn essence(config: &ModelConfig) -> ModelConfig {
    ModelConfig {
        instance_group: Vec::new(),
        version_policy: None,
        model_warmup: Vec::new(),
        metric_tags: Default::default(),
        model_metrics: None,
        ..config.clone()
    }
}

fn collect(dir: &Path, depth: usize, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let metadata = fs::metadata(&path)?;
        if metadata.is_file() {
            files.push(path);
        } else if metadata.is_dir() {
            let Some(depth) = depth.checked_sub(1) else {
                return Err(io::Error::other(format!(
                    "'{}' lies too deep; is it a loop of links?",
                    path.display()
                )));
            };
            collect(&path, depth, files)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sees_every_change_that_matters_and_no_other() {
        let root = tempfile::tempdir().expect("a directory");
        let version = root.path().join("1");
        fs::create_dir_all(version.join("sub")).expect("can create");
        fs::write(version.join("model"), b"weights").expect("can write");
        fs::write(version.join("sub/part"), b"more").expect("can write");
        let mut config = ModelConfig { name: "m".into(), max_batch_size: 8, ..ModelConfig::default() };
        let of = |config: &ModelConfig, engine| hash(&version, config, engine).expect("can be read");
        let first = of(&config, "engine 1");
        assert_eq!(of(&config, "engine 1"), first);
        assert_ne!(of(&config, "engine 2"), first);

        config.instance_group.push(Default::default());
        config.metric_tags.insert("tag".into(), "value".into());
        assert_eq!(of(&config, "engine 1"), first, "the same answers, faster or slower");
        config.max_batch_size = 4;
        assert_ne!(of(&config, "engine 1"), first);
        config.max_batch_size = 8;

        fs::write(version.join("model"), b"wejghts").expect("can write");
        assert_ne!(of(&config, "engine 1"), first, "other weights of the same size");
        fs::write(version.join("model"), b"weights").expect("can write");
        fs::rename(version.join("sub/part"), version.join("sub/port")).expect("can rename");
        assert_ne!(of(&config, "engine 1"), first);
        fs::rename(version.join("sub/port"), version.join("sub/part")).expect("can rename");
        assert_eq!(of(&config, "engine 1"), first);
    }

    #[test]
    fn a_loop_of_links_ends() {
        let root = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::symlink(root.path(), root.path().join("again")).expect("can link");
        hash(root.path(), &ModelConfig::default(), "").expect_err("too deep");
    }
}
