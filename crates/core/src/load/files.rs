//! Files of a model: its configuration, its labels, and the one that a version is loaded from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use trireme_backend::{Backend, ModelFiles};
use trireme_config::{ConfigErrors, MAX_PBTXT_BYTES, ModelSpec, Note, SpanMap};
use trireme_proto::inference::ModelConfig;
use trireme_types::Error;

use super::{LabelMap, LoadFailure, LoadOverrides, advice, model_dir};
use crate::model::Labels;
use crate::options::ServerOptions;
use crate::repository::{self, ModelSource, Place};

/// A label file above this is refused before it is read.
const MAX_LABEL_BYTES: u64 = 256 << 20;

/// A configuration as it was written, before anything was filled in.
#[derive(Default)]
pub(super) struct ReadConfig {
    pub(super) config: ModelConfig,
    pub(super) places: Places,
    pub(super) notes: Vec<Note>,
}

/// Where the members of a configuration stand in its file, if it came from one.
#[derive(Default)]
pub(super) struct Places(Option<SpanMap>);

impl Places {
    /// The advice for errors that were found after parsing, with their lines.
    pub(super) fn advise(&self, errors: ConfigErrors) -> Box<LoadFailure> {
        advice::config(&match &self.0 {
            Some(spans) => errors.located(spans),
            None => errors,
        })
    }

    pub(super) fn locate(&self, note: Note) -> Note {
        match &self.0 {
            Some(spans) => note.located(spans),
            None => note,
        }
    }
}

/// The configuration from the load request, the named file, `config.pbtxt`, or nothing at all.
pub(super) fn read_config(
    source: &ModelSource,
    options: &ServerOptions,
    overrides: &LoadOverrides,
) -> Result<ReadConfig, Box<LoadFailure>> {
    let name = &source.name;
    if let Some(json) = &overrides.config {
        let config = trireme_config::from_json(json).map_err(|errors| {
            let mut failure = advice::config(&errors);
            failure.error = failure.error.prefixed("Invalid config override: ");
            if has_parameters_as_entry(json) {
                failure.error = Error::new(
                    failure.error.code(),
                    format!(
                        "{}; parameters are an object by name: \"parameters\": {{\"NAME\": {{\"string_value\": \"...\"}}}}",
                        failure.error.message()
                    ),
                );
            }
            failure
        })?;
        return Ok(ReadConfig { config, ..ReadConfig::default() });
    }
    let Some(path) = config_path(source, options) else {
        if options.strict_config {
            let error = Error::invalid_arg(format!(
                "model '{name}' has no config.pbtxt, which --disable-auto-complete-config demands"
            ));
            let text = format!(
                "Looked for '{}'. Write one, or leave --disable-auto-complete-config out so that the model file can \
                 tell its inputs and outputs.",
                model_dir(source).join("config.pbtxt").display()
            );
            return Err(Box::new(LoadFailure::of_model(error, text)));
        }
        return Ok(ReadConfig::default());
    };
    let unreadable = |error: std::io::Error| {
        let error = Error::internal(format!("cannot read the configuration: {error}"));
        Box::new(LoadFailure::of_model(error, "Make the file readable for the server, or remove it."))
    };
    let size = fs_err::metadata(&path).map_err(unreadable)?.len();
    if size > MAX_PBTXT_BYTES as u64 {
        let error = Error::invalid_arg(format!(
            "'{}' has {size} bytes; a configuration has at most {MAX_PBTXT_BYTES}",
            path.display()
        ));
        return Err(Box::new(LoadFailure::of_model(
            error,
            "Put a protobuf text file there, as the documentation shows.",
        )));
    }
    let text = fs_err::read(&path).map_err(unreadable)?;
    match trireme_config::parse_pbtxt(&text, &path.display().to_string()) {
        Ok(parsed) => {
            Ok(ReadConfig { config: parsed.config, places: Places(Some(parsed.spans)), notes: parsed.notes })
        }
        Err(errors) => Err(advice::config(&errors)),
    }
}

/// Whether `parameters` is written as one entry of the map, the way that `config.pbtxt` has it.
fn has_parameters_as_entry(json: &str) -> bool {
    let config: Option<serde_json::Value> = serde_json::from_str(json).ok();
    let parameters = config.as_ref().and_then(|config| config.get("parameters"));
    let is_entry = |value: &serde_json::Value| value.get("key").is_some_and(serde_json::Value::is_string);
    parameters.is_some_and(|parameters| match parameters.as_array() {
        Some(list) => list.iter().any(is_entry),
        None => is_entry(parameters),
    })
}

/// Path of the configuration file, if there is one.
pub(crate) fn config_path(source: &ModelSource, options: &ServerOptions) -> Option<PathBuf> {
    let Place::Directory(dir) = &source.place else { return None };
    let named =
        options.model_config_name.as_ref().map(|name| dir.join("configs").join(format!("{name}.pbtxt")));
    named.into_iter().chain([dir.join("config.pbtxt")]).find(|path| path.exists())
}

/// File names that tell which backend a model wants: those in its first version directory.
pub(super) fn version_listing(source: &ModelSource, first_version: Option<i64>) -> Vec<String> {
    match (&source.place, first_version) {
        (Place::Directory(dir), Some(version)) => repository::listing(&dir.join(version.to_string())),
        (Place::File(path), _) => {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            vec![if path.is_dir() { name + "/" } else { name }]
        }
        _ => Vec::new(),
    }
}

/// Class labels of the outputs that name a label file.
pub(super) fn read_labels(source: &ModelSource, spec: &ModelSpec) -> Result<LabelMap, Box<LoadFailure>> {
    let mut labels = LabelMap::new();
    let dir = model_dir(source);
    for output in &spec.outputs {
        let Some(file) = output.label_filename.as_deref().filter(|file| !file.is_empty()) else { continue };
        let path = dir.join(file);
        let text = fs_err::metadata(&path).and_then(|metadata| {
            if metadata.len() > MAX_LABEL_BYTES {
                return Err(std::io::Error::other(format!(
                    "{} bytes are too many for labels",
                    metadata.len()
                )));
            }
            fs_err::read(&path)
        });
        let text = text.map_err(|error| {
            let message = format!("cannot read the labels of output '{}' of model '{}': {error}", output.name, spec.name);
            let text = format!(
                "Looked for '{}', which label_filename names. Put the file there, one label a line, or remove \
                 label_filename. The model directory holds: {}.",
                path.display(),
                repository::listing(&dir).join(", ")
            );
            Box::new(LoadFailure::of_model(Error::invalid_arg(message), text))
        })?;
        labels.insert(Arc::clone(&output.name), Labels::parse(&String::from_utf8_lossy(&text)));
    }
    Ok(labels)
}

/// Where the files of one version are.
pub(super) fn of_version(
    source: &ModelSource,
    backend: &dyn Backend,
    config: &ModelConfig,
    version: i64,
) -> ModelFiles {
    match &source.place {
        Place::File(path) => {
            let dir = path.parent().map(Path::to_path_buf).unwrap_or_default();
            ModelFiles { model_dir: dir.clone(), version_dir: dir, model_path: path.clone() }
        }
        Place::Directory(dir) => {
            let version_dir = dir.join(version.to_string());
            let named = Some(config.default_model_filename.as_str()).filter(|name| !name.is_empty());
            let file = named.or(backend.default_model_filename());
            let model_path = file.map(|file| version_dir.join(file)).unwrap_or_default();
            ModelFiles { model_dir: dir.clone(), version_dir, model_path }
        }
        Place::Ambiguous(_) => ModelFiles::default(),
    }
}
