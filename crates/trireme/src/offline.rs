//! Models looked at without a running server: which ones the paths of a command mean, and how they would be loaded.
//!
//! A path is a repository, the directory of one model, or a model file. What is in them is core's business: this
//! module only turns paths and flags into its options.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use trireme_core::{ModelCheck, ModelControlMode, Server, ServerOptions, SingleModel};

use crate::engines;
use crate::settings;

/// Flags of `serve` that change what becomes of a configuration.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct LoadArgs {
    /// Use configs/NAME.pbtxt of a model where it exists, else its config.pbtxt
    #[arg(long, value_name = "NAME")]
    model_config_name: Option<String>,
    /// Demand complete configurations, as the server does under the same flag
    #[arg(long)]
    disable_auto_complete_config: bool,
    /// Setting of a backend, or of all of them; may be given several times
    #[arg(long, value_name = "[BACKEND,]KEY=VALUE")]
    backend_config: Vec<String>,
    /// The ONNX Runtime library to load (libonnxruntime.so)
    #[arg(long, value_name = "PATH")]
    onnxruntime_library: Option<PathBuf>,
    /// The response cache of the server to be, as in `serve`; may be given several times
    #[arg(long, value_name = "NAME,KEY=VALUE")]
    cache_config: Vec<String>,
    /// Run instance groups of KIND_GPU on the CPU when there is no such GPU
    #[arg(long)]
    cpu_fallback: bool,
}

/// What a path of the command line means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Repository(PathBuf),
    /// `<repository>/<name>`
    Model {
        repository: PathBuf,
        name: String,
    },
    /// A model file of its own.
    File(SingleModel),
}

impl Target {
    /// # Errors
    /// The path does not exist, or gives a model no name.
    pub(crate) fn of(path: &Path) -> Result<Self> {
        let metadata = match fs_err::metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => bail!(
                "expected a model repository, a model directory or a model file, and there is no '{}'",
                path.display()
            ),
            Err(error) => bail!("cannot look at '{}': {error}", path.display()),
        };
        if !metadata.is_dir() {
            if path.file_name().is_some_and(|name| name == "config.pbtxt") {
                bail!(
                    "'{}' is a configuration file; give the model directory that holds it, or convert the file with \
                     `trireme config convert`",
                    path.display()
                );
            }
            let Some(name) = path.file_stem().and_then(|stem| stem.to_str()) else {
                bail!(
                    "the file name of '{}' is not UTF-8 and gives the model no name; rename it",
                    path.display()
                );
            };
            return Ok(Self::File(SingleModel { name: name.to_owned(), path: path.to_owned() }));
        }
        if !is_model_directory(path) {
            return Ok(Self::Repository(path.to_owned()));
        }
        // `.` and `..` have no name of their own.
        let whole = if path.file_name().is_some() { path.to_owned() } else { fs_err::canonicalize(path)? };
        let (Some(name), Some(repository)) =
            (whole.file_name().and_then(|name| name.to_str()), whole.parent())
        else {
            bail!("the directory '{}' has no name that a model could have", whole.display());
        };
        let repository = if repository.as_os_str().is_empty() { Path::new(".") } else { repository };
        Ok(Self::Model { repository: repository.to_owned(), name: name.to_owned() })
    }
}

/// Whether a directory is one model and not a repository of models: it holds a configuration, or a version.
fn is_model_directory(path: &Path) -> bool {
    path.join("config.pbtxt").is_file() || is_version_holder(path)
}

/// Whether a directory holds a version directory. A model that is named by a number holds versions itself, and
/// then the directory around it is a repository.
fn is_version_holder(path: &Path) -> bool {
    let versions = |path: &Path| -> Vec<PathBuf> {
        let entries =
            fs_err::read_dir(path).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
        entries.filter(|entry| is_number(entry) && entry.is_dir()).collect()
    };
    versions(path)
        .iter()
        .any(|version| versions(version).is_empty() && !version.join("config.pbtxt").is_file())
}

fn is_number(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit())
}

impl LoadArgs {
    fn options(&self) -> Result<ServerOptions> {
        let name = self.model_config_name.clone().filter(|name| !name.is_empty());
        if name.as_ref().is_some_and(|name| name.chars().any(char::is_whitespace)) {
            bail!("--model-config-name expects a name without blanks");
        }
        let backend_settings =
            self.backend_config.iter().map(|text| settings::backend_setting(text)).collect::<Result<_>>()?;
        Ok(ServerOptions {
            model_config_name: name,
            strict_config: self.disable_auto_complete_config,
            cpu_fallback: self.cpu_fallback,
            backend_settings,
            cache: settings::cache_settings(&self.cache_config)?,
            ..ServerOptions::default()
        })
    }

    /// Loads models as a server would and tells what is wrong with each. `only` names the models to load; none
    /// means all.
    ///
    /// Whole repositories are looked at together, so that a name in two of them is found.
    ///
    /// # Errors
    /// A flag that cannot be followed, a repository that cannot be read.
    pub(crate) fn check(&self, targets: &[Target], only: &[String]) -> Result<Vec<ModelCheck>> {
        let base = self.options()?;
        let mut whole = ServerOptions { load_models: only.to_vec(), ..base.clone() };
        let mut runs = Vec::new();
        for target in targets {
            match target {
                Target::Repository(path) => whole.repositories.push(path.clone()),
                Target::File(model) => whole.single_models.push(model.clone()),
                Target::Model { repository, name } if only.is_empty() || only.contains(name) => {
                    runs.push(ServerOptions {
                        repositories: vec![repository.clone()],
                        load_models: vec![name.clone()],
                        ..base.clone()
                    });
                }
                Target::Model { .. } => {}
            }
        }
        if !whole.repositories.is_empty() || !whole.single_models.is_empty() {
            runs.push(whole);
        }
        let mut checks = Vec::new();
        for options in runs {
            checks.extend(Server::check(options, engines::all(self.onnxruntime_library.clone()))?);
        }
        checks.sort_by(|a, b| a.model.cmp(&b.model));
        Ok(checks)
    }

    /// Names of the models in a target, none of them loaded.
    ///
    /// # Errors
    /// The repository cannot be read.
    pub(crate) fn names(&self, target: &Target) -> Result<Vec<String>> {
        let repository = match target {
            Target::File(model) => return Ok(vec![model.name.clone()]),
            Target::Model { name, .. } => return Ok(vec![name.clone()]),
            Target::Repository(path) => path,
        };
        let options = ServerOptions {
            repositories: vec![repository.clone()],
            control_mode: ModelControlMode::Explicit,
            ..ServerOptions::default()
        };
        let server = Server::start(options, Vec::new())?;
        Ok(server.repository_index(false).into_iter().map(|entry| entry.name).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: PathBuf) {
        fs_err::create_dir_all(path.parent().expect("has a parent")).expect("can create");
        fs_err::write(path, b"").expect("can write");
    }

    #[test]
    fn tells_repositories_models_and_files_apart() {
        let root = tempfile::tempdir().expect("a directory");
        let repository = root.path().join("models");
        touch(repository.join("plain/1/model.onnx"));
        touch(repository.join("configured/config.pbtxt"));
        touch(repository.join("7/1/model.onnx"));
        touch(repository.join("README.md"));
        let model = |name: &str| Target::Model { repository: repository.clone(), name: name.to_owned() };
        let of = |path: &str| Target::of(&repository.join(path)).expect(path);
        assert_eq!(Target::of(&repository).expect("exists"), Target::Repository(repository.clone()));
        assert_eq!(of("plain"), model("plain"));
        assert_eq!(of("configured"), model("configured"));
        assert_eq!(of("7"), model("7"));
        let path = repository.join("plain/1/model.onnx");
        assert_eq!(of("plain/1/model.onnx"), Target::File(SingleModel { name: "model".into(), path }));
        let error = Target::of(&repository.join("nowhere")).expect_err("not there").to_string();
        assert!(error.contains("expected a model repository") && error.contains("nowhere'"), "{error}");
        let error =
            Target::of(&repository.join("configured/config.pbtxt")).expect_err("no model").to_string();
        assert!(error.contains("trireme config convert"), "{error}");
    }

    #[test]
    fn lists_names_without_loading() {
        let root = tempfile::tempdir().expect("a directory");
        touch(root.path().join("b/1/model.onnx"));
        touch(root.path().join("a/config.pbtxt"));
        let names = LoadArgs::default().names(&Target::Repository(root.path().to_owned())).expect("readable");
        assert_eq!(names, ["a", "b"]);
    }
}
