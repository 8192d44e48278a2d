//! The paragraph under the start-up table: what was looked for, what was found, what to do.

use std::path::PathBuf;

use trireme_config::ConfigErrors;
use trireme_proto::inference::ModelConfig;
use trireme_types::Error;

use super::{LoadFailure, model_dir};
use crate::check::Finding;
use crate::repository::{self, ModelSource, Place};

/// Several repositories hold a model of that name.
pub(super) fn ambiguous(name: &str, paths: &[PathBuf]) -> LoadFailure {
    let places: Vec<String> = paths.iter().map(|path| format!("'{}'", path.display())).collect();
    let places = places.join(" and ");
    let error = Error::invalid_arg(format!("model '{name}' appears in two or more repositories: {places}"));
    let text = format!(
        "Found the model name '{name}' in {places}. A name must be unique over all repositories: rename one of the \
         directories, or give only one of the repositories."
    );
    LoadFailure::of_model(error, text)
}

/// The configuration cannot be read, or contradicts itself or the model file.
pub(super) fn config(errors: &ConfigErrors) -> Box<LoadFailure> {
    let first = errors.first();
    let place = match (first.file(), first.line()) {
        (Some(file), Some(line)) => format!(" ({file}:{line})"),
        (Some(file), None) => format!(" ({file})"),
        _ => String::new(),
    };
    let error = Error::invalid_arg(format!("{}{place}", first.reason()));
    let mut failure = LoadFailure::of_model(error, errors.to_string());
    failure.findings = errors.iter().map(Finding::from_config).collect();
    Box::new(failure)
}

/// The version policy selects nothing.
pub(super) fn no_version(source: &ModelSource, file: Option<&str>, on_disk: &[i64]) -> LoadFailure {
    let name = &source.name;
    let error = Error::invalid_arg(format!(
        "at least one version must be available under the version policy of model '{name}'"
    ));
    let dir = model_dir(source);
    let found = repository::listing(&dir);
    let empty_folder = found.is_empty();
    let found = if empty_folder { "nothing".to_owned() } else { found.join(", ") };
    let text = if on_disk.is_empty() {
        let file = file.unwrap_or("the model file");
        format!(
            "Looked in '{}' for version directories, folders named by whole numbers as '1', and found {found}. Make \
             the directory '{}' and put {file} into it.",
            dir.display(),
            dir.join("1").display()
        )
    } else {
        format!(
            "Found the versions {on_disk:?} in '{}', and version_policy selects none of them. Change version_policy, or \
             add a version that it selects.",
            dir.display()
        )
    };
    let mut failure = LoadFailure::of_model(error, text);
    failure.no_version = true;
    failure.empty_folder = empty_folder;
    failure
}

/// No engine of that name is here.
pub(super) fn no_backend(config: &ModelConfig, source: &ModelSource, known: &[&str]) -> LoadFailure {
    let known_text = known.join(", ");
    let name = &source.name;
    if config.backend.is_empty() {
        let error = Error::invalid_arg(format!("unexpected platform type '{}' for {name}", config.platform));
        return LoadFailure::of_model(error, format!("Set backend: to one of {known_text} in config.pbtxt."));
    }
    let backend = &config.backend;
    let error = Error::invalid_arg(format!(
        "unable to find backend library for backend '{backend}', try specifying runtime on the model configuration."
    ));
    let later = ["tensorrt", "pytorch", "tensorflow", "openvino", "fil", "dali", "vllm"];
    let hint = if later.contains(&backend.as_str()) {
        format!("The backend '{backend}' is not available yet in this version of trireme.")
    } else {
        nearest(backend, known).map(|near| format!("Did you mean backend: \"{near}\"?")).unwrap_or_default()
    };
    let text = format!("Model '{name}' asks for the backend '{backend}'; available are {known_text}. {hint}");
    LoadFailure::of_model(error, text.trim_end().to_owned())
}

fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let word = word.to_ascii_lowercase();
    known
        .iter()
        .copied()
        .find(|k| k.starts_with(&word) || word.starts_with(k) || k.contains(&word) || word.contains(k))
}

/// A version that failed in its backend or with its configuration.
pub(super) fn version(source: &ModelSource, version: i64, config: &ModelConfig, error: &Error) -> String {
    let Place::Directory(dir) = &source.place else {
        return format!("{error}.");
    };
    let version_dir = dir.join(version.to_string());
    let found = repository::listing(&version_dir);
    let found = if found.is_empty() { "nothing".to_owned() } else { found.join(", ") };
    let file = &config.default_model_filename;
    let looked = if file.is_empty() {
        String::new()
    } else {
        format!("Looked for '{}'. ", version_dir.join(file).display())
    };
    let todo = if !file.is_empty() && !version_dir.join(file).exists() {
        format!(
            "Put the model file there, or name the right one in default_model_filename of '{}'.",
            dir.join("config.pbtxt").display()
        )
    } else {
        "Mend what the message names and start again.".to_owned()
    };
    format!("{looked}The version directory holds: {found}. {error}. {todo}")
}
