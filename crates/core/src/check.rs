//! `trireme check`: the load pipeline without serving, its findings in a form that programs can read.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use trireme_backend::Backend;
use trireme_config::{ConfigError, Note, NoteLevel};
use trireme_proto::inference::ModelConfig;
use trireme_types::{Error, Result};

use crate::cache::ResponseCache;
use crate::executor::Executor;
use crate::load::{LoadOverrides, Loaded, Loader, config_path, model_dir, order};
use crate::options::ServerOptions;
use crate::repository;
use crate::server::Server;
use crate::table::ModelTable;
use crate::threads::ThreadBudget;

/// One thing that is wrong, or looks wrong, and where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finding {
    pub message: String,
    pub file: Option<PathBuf>,
    /// From 1.
    pub line: Option<u32>,
    /// From 1.
    pub column: Option<u32>,
    pub hint: Option<String>,
    /// The whole report for a person, with the source line and a caret where there is one.
    pub report: String,
    /// Whether it only tells what was filled in, and nothing looks wrong.
    pub is_note: bool,
}

impl Finding {
    pub(crate) fn message(message: impl Into<String>) -> Self {
        let message = message.into();
        Self { report: message.clone(), message, ..Self::default() }
    }

    pub(crate) fn from_config(error: &ConfigError) -> Self {
        Self {
            message: error.reason().to_owned(),
            file: error.file().map(PathBuf::from),
            line: error.line(),
            column: error.column(),
            hint: error.hint().map(str::to_owned),
            report: error.to_string(),
            is_note: false,
        }
    }

    pub(crate) fn from_note(note: &Note) -> Self {
        Self {
            message: note.message.clone(),
            file: note.file.as_ref().map(PathBuf::from),
            line: note.line,
            column: note.column,
            hint: note.hint.clone(),
            report: note.to_string(),
            is_note: note.level == NoteLevel::Info,
        }
    }
}

/// What checking one model found.
#[derive(Clone, Debug)]
pub struct ModelCheck {
    pub model: String,
    pub path: PathBuf,
    pub config_file: Option<PathBuf>,
    /// Versions that were tried.
    pub versions: Vec<(i64, Result<()>)>,
    /// The completed configuration, if it came that far.
    pub config: Option<ModelConfig>,
    pub errors: Vec<Finding>,
    /// What looks wrong, and notes on what was filled in.
    pub warnings: Vec<Finding>,
}

impl Server {
    /// Loads every model of the repositories, one after the other, and tells what is wrong with each. Nothing
    /// serves and no port is opened.
    ///
    /// # Errors
    /// A repository does not exist or cannot be read.
    pub fn check(options: ServerOptions, backends: Vec<Arc<dyn Backend>>) -> Result<Vec<ModelCheck>, Error> {
        let sources = repository::scan(&options.repositories, &options.single_models)?;
        let budget = ThreadBudget::new(options.cores);
        let executor = Executor::new();
        let cache = ResponseCache::of(&options, &executor)?;
        let table = Arc::new(ModelTable::default());
        let loader = Loader::new(options.clone(), backends, executor, budget, cache, Arc::clone(&table))?;
        let none = LoadOverrides::default();
        let steps =
            sources.iter().map(|source| (source.name.clone(), loader.composing_models(source, &none)));
        let steps: Vec<(String, Vec<String>)> = steps.collect();
        let is_asked_for =
            |name: &String| options.load_models.is_empty() || options.load_models.contains(name);
        let order = order(&steps);
        let in_order = order.waves.into_iter().flatten().map(|place| (place, None));
        let in_order = in_order.chain(order.circular.into_iter().map(|(place, way)| (place, Some(way))));
        let needed = needed(&steps, is_asked_for);
        let mut checks = Vec::with_capacity(sources.len());
        for (place, way) in in_order {
            let Some(source) = sources.get(place).filter(|source| needed.contains(source.name.as_str()))
            else {
                continue;
            };
            let loaded = match way {
                None => loader.load(source, &none),
                Some(way) => Loaded::circular(&way),
            };
            if steps.iter().any(|(_, steps)| steps.contains(&source.name)) {
                // A step's model stays loaded until its ensembles have been checked.
                let entry = loaded.to_entry();
                table.update(&source.name, |_| entry);
            }
            if !is_asked_for(&source.name) {
                continue;
            }
            let mut versions: Vec<(i64, Result<()>)> =
                loaded.versions.iter().map(|model| (model.version(), Ok(()))).collect();
            let mut errors = Vec::new();
            for failure in &loaded.failures {
                if let Some(version) = failure.version {
                    versions.push((version, Err(failure.error.clone())));
                }
                if failure.findings.is_empty() {
                    let report = format!("{}\n{}", failure.reason(), failure.advice);
                    let hint = Some(failure.advice.clone());
                    errors.push(Finding { hint, report, ..Finding::message(failure.reason()) });
                } else {
                    errors.extend(failure.findings.iter().cloned());
                }
            }
            versions.sort_by_key(|(version, _)| *version);
            checks.push(ModelCheck {
                model: source.name.clone(),
                path: model_dir(source),
                config_file: config_path(source, &options),
                versions,
                config: loaded.config,
                errors,
                warnings: loaded.warnings,
            });
        }
        checks.sort_by(|a, b| a.model.cmp(&b.model));
        Ok(checks)
    }
}

/// Models that were asked for and those that they are made of.
fn needed(steps: &[(String, Vec<String>)], is_asked_for: impl Fn(&String) -> bool) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    let mut names: Vec<&str> =
        steps.iter().map(|(name, _)| name).filter(|name| is_asked_for(name)).map(String::as_str).collect();
    while let Some(name) = names.pop() {
        if found.insert(name) {
            let own = steps.iter().filter(|(other, _)| other == name);
            names.extend(own.flat_map(|(_, steps)| steps).map(String::as_str));
        }
    }
    found
}
