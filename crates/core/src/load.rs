//! From a model on disk to versions that can serve: configuration, backend, completion, instances.
//!
//! Loading touches nothing that serves. Whatever goes wrong becomes a [`LoadFailure`] of that model or version
//! alone, with a paragraph that says what was looked for, what was found and what to do.

mod advice;
mod dependents;
mod ensemble;
mod files;
mod instances;
mod order;
mod padding;
mod ragged;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use trireme_backend::{Backend, ModelContext, ModelTensors, OpenModel};
use trireme_config::{ConfigErrors, InstanceGroup, ModelSpec, Note, NoteLevel, Scheduling, VersionPolicy};
use trireme_proto::inference::ModelConfig;
use trireme_types::{Error, Result};

pub(crate) use self::dependents::Dependents;
pub(crate) use self::files::config_path;
use self::files::{Places, ReadConfig};
use self::instances::InstancePlan;
pub(crate) use self::order::order;

use crate::cache::{Made, ModelCache, ResponseCache};
use crate::caller::TableCaller;
use crate::check::Finding;
use crate::executor::Executor;
use crate::host_policy::{Cores, HostPolicies};
use crate::latencies::Latencies;
use crate::model::{Labels, ModelParts, ModelVersion};
use crate::options::ServerOptions;
use crate::rate_limiter::RateLimiter;
use crate::repository::{self, ModelSource, Place};
use crate::scheduler::{InstancePool, PoolParts, Scheduler, SequencePlan, Timer, sequence_plan, source_of};
use crate::table::{Entry, ModelTable, VersionState};
use crate::threads::ThreadBudget;
use crate::warmup;

/// What a load request brings along instead of what lies on disk.
#[derive(Clone, Debug, Default)]
pub struct LoadOverrides {
    /// Configuration as JSON, in place of the configuration file.
    pub config: Option<String>,
    /// Files by path relative to the model directory, in place of the directory.
    pub files: Vec<(String, Bytes)>,
}

/// Why a model, or one version of it, cannot serve.
#[derive(Clone, Debug)]
pub(crate) struct LoadFailure {
    /// `None`: the model as a whole.
    pub(crate) version: Option<i64>,
    pub(crate) error: Error,
    /// What was looked for, what was found, what to do.
    pub(crate) advice: String,
    pub(crate) findings: Vec<Finding>,
    no_version: bool,
    empty_folder: bool,
    /// Versions that fail for this reason, if it is known which.
    affected: Vec<i64>,
}

impl LoadFailure {
    fn of_model(error: Error, advice: impl Into<String>) -> Self {
        Self {
            version: None,
            error,
            advice: advice.into(),
            findings: Vec::new(),
            no_version: false,
            empty_folder: false,
            affected: Vec::new(),
        }
    }

    /// One failure for each version that this one affects, or the failure of the model as a whole.
    fn per_version(self) -> Vec<Self> {
        if self.affected.is_empty() {
            return vec![self];
        }
        self.affected.iter().map(|version| Self { version: Some(*version), ..self.clone() }).collect()
    }

    /// As the repository index gives it: `Invalid argument: ...`.
    pub(crate) fn reason(&self) -> String {
        format!("{}: {}", self.error.code().as_str(), self.error.message())
    }

    /// Whether a model that should serve does not: an empty folder is no model.
    pub(crate) fn is_failure(&self) -> bool {
        !self.empty_folder
    }

    /// Whether the version policy left nothing to load.
    pub(crate) fn is_version_policy(&self) -> bool {
        self.no_version
    }
}

/// Outcome of loading one model.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    /// Versions that can serve, ascending.
    pub(crate) versions: Vec<Arc<ModelVersion>>,
    pub(crate) failures: Vec<LoadFailure>,
    /// The completed configuration, as far as it came.
    pub(crate) config: Option<ModelConfig>,
    pub(crate) warnings: Vec<Finding>,
}

impl Loaded {
    fn failed(failure: LoadFailure) -> Self {
        Self { failures: vec![failure], ..Self::default() }
    }

    /// A model that was asked for by name and lies in no repository.
    pub(crate) fn missing(name: &str, repositories: &str) -> Self {
        let error = Error::not_found(format!("no directory '{name}' in {repositories}"));
        let advice = format!(
            "Looked for a directory '{name}' in {repositories} and found none. Check the name given to --load-model, or \
             put the model there."
        );
        Self::failed(LoadFailure::of_model(error, advice))
    }

    /// An ensemble that depends on itself, `way` around.
    pub(crate) fn circular(way: &str) -> Self {
        let error = Error::invalid_arg(format!("circular dependency between ensembles: {way}"));
        let advice = "Each of these has a step that runs the next one. Take one of the steps out.";
        Self::failed(LoadFailure::of_model(error, advice))
    }

    pub(crate) fn to_entry(&self) -> Entry {
        let ready = self.versions.iter().map(|model| (model.version(), VersionState::ready()));
        let failed = self.failures.iter().filter_map(|failure| {
            failure.version.map(|version| (version, VersionState::unavailable(failure.reason())))
        });
        Entry {
            states: ready.chain(failed).collect(),
            ready: self.versions.clone(),
            failures: self.failures.clone(),
        }
    }
}

/// Loads models with the engines and options of one server.
pub(crate) struct Loader {
    options: ServerOptions,
    backends: BTreeMap<String, Arc<dyn Backend>>,
    executor: Executor,
    timer: Timer,
    budget: ThreadBudget,
    cache: Option<Arc<ResponseCache>>,
    /// Where ensembles find the models of their steps.
    table: Arc<ModelTable>,
    host_policies: HostPolicies,
    rate_limiter: Option<Arc<RateLimiter>>,
}

/// A model between its configuration and its versions.
struct Plan<'a> {
    source: &'a ModelSource,
    /// `None`: an ensemble.
    backend: Option<&'a Arc<dyn Backend>>,
    config: ModelConfig,
    places: Places,
    versions: Vec<i64>,
}

impl Loader {
    /// # Errors
    /// A host policy names cores that are not there.
    pub(crate) fn new(
        options: ServerOptions,
        backends: Vec<Arc<dyn Backend>>,
        executor: Executor,
        budget: ThreadBudget,
        cache: Option<Arc<ResponseCache>>,
        table: Arc<ModelTable>,
    ) -> Result<Self> {
        let backends = backends.into_iter().map(|backend| (backend.name().to_owned(), backend)).collect();
        let host_policies = HostPolicies::new(&options.host_policies)?;
        let rate_limiter = options.rate_limit.clone().map(RateLimiter::new);
        let timer = Timer::default();
        Ok(Self { options, backends, executor, timer, budget, cache, table, host_policies, rate_limiter })
    }

    pub(crate) fn budget(&self) -> ThreadBudget {
        self.budget
    }

    pub(crate) fn backend_rows(&self) -> Vec<(String, String, String)> {
        let row = |(name, backend): (&String, &Arc<dyn Backend>)| {
            let settings: serde_json::Map<String, serde_json::Value> =
                self.options.settings_for(name).iter().map(|(k, v)| (k.to_owned(), v.into())).collect();
            let place = backend.describe().unwrap_or_else(|| "built in".to_owned());
            (name.clone(), place, serde_json::json!({ "cmdline": settings }).to_string())
        };
        self.backends.iter().map(row).collect()
    }

    /// Loads every version that the model's policy selects.
    pub(crate) fn load(&self, source: &ModelSource, overrides: &LoadOverrides) -> Loaded {
        self.load_beside(source, overrides, &[])
    }

    /// As [`Loader::load`], but versions in `kept` are taken as they are: neither they nor what versions share has changed
    /// since they were loaded.
    pub(crate) fn load_beside(
        &self,
        source: &ModelSource,
        overrides: &LoadOverrides,
        kept: &[Arc<ModelVersion>],
    ) -> Loaded {
        let mut warnings = Vec::new();
        let plan = match self.plan(source, overrides, &mut warnings) {
            Ok(plan) => plan,
            Err(failure) => {
                return Loaded { warnings, failures: failure.per_version(), ..Loaded::default() };
            }
        };
        let mut loaded = self.load_versions(plan, kept);
        warnings.append(&mut loaded.warnings);
        loaded.warnings = warnings;
        loaded
    }

    /// The steps before any model file is opened.
    fn plan<'a>(
        &'a self,
        source: &'a ModelSource,
        overrides: &LoadOverrides,
        warnings: &mut Vec<Finding>,
    ) -> Result<Plan<'a>, Box<LoadFailure>> {
        let name = source.name.as_str();
        if let Place::Ambiguous(paths) = &source.place {
            return Err(Box::new(advice::ambiguous(name, paths)));
        }
        let ReadConfig { mut config, places, notes } = files::read_config(source, &self.options, overrides)?;
        let mut tell =
            |notes: Vec<Note>| warnings.extend(notes.into_iter().map(|note| told(name, places.locate(note))));
        tell(notes);
        trireme_config::check_directory_name(&config, name).map_err(|errors| places.advise(errors))?;
        name.clone_into(&mut config.name);

        let on_disk = match &source.place {
            Place::Directory(dir) => repository::versions(dir).map_err(|error| {
                LoadFailure::of_model(error, "Make the model directory readable for the server.")
            })?,
            _ => vec![1],
        };
        if on_disk.is_empty() {
            return Err(Box::new(advice::no_version(source, None, &on_disk)));
        }
        let first_version = files::version_listing(source, on_disk.first().copied());
        if !self.options.strict_config {
            tell(
                trireme_config::deduce(&mut config, &first_version)
                    .map_err(|errors| places.advise(errors))?,
            );
        }
        let mut unknown = Vec::new();
        let versions = match VersionPolicy::of(&config) {
            VersionPolicy::Latest(count) => on_disk.iter().rev().take(count).rev().copied().collect(),
            VersionPolicy::All => on_disk.clone(),
            VersionPolicy::Specific(wanted) => {
                for version in wanted.iter().filter(|version| !on_disk.contains(version)) {
                    let message =
                        format!("version {version} is named in version_policy but has no directory");
                    unknown.push(Finding::message(message));
                }
                on_disk.iter().filter(|version| wanted.contains(version)).copied().collect::<Vec<_>>()
            }
        };
        if versions.is_empty() {
            let file = Some(config.default_model_filename.as_str()).filter(|file| !file.is_empty());
            return Err(Box::new(advice::no_version(source, file, &on_disk)));
        }
        let backend = match ensemble::is_ensemble(&config) {
            true => None,
            false => Some(self.backend_of(&config, source).map_err(|mut failure| {
                failure.affected.clone_from(&versions);
                failure
            })?),
        };
        let facts = backend.map(|backend| self.facts(backend.as_ref())).unwrap_or_default();
        if self.options.cpu_fallback {
            tell(trireme_config::fall_back_to_cpu(&mut config, &facts));
        }
        tell(trireme_config::normalize(&mut config, &facts));

        warnings.append(&mut unknown);
        Ok(Plan { source, backend, config, places, versions })
    }

    fn backend_of(
        &self,
        config: &ModelConfig,
        source: &ModelSource,
    ) -> Result<&Arc<dyn Backend>, Box<LoadFailure>> {
        self.backends.get(&config.backend).ok_or_else(|| {
            let built_in: Vec<&str> = self.backends.keys().map(String::as_str).collect();
            Box::new(advice::no_backend(config, source, &built_in))
        })
    }

    fn facts(&self, backend: &dyn Backend) -> trireme_config::MachineFacts {
        trireme_config::MachineFacts {
            gpus: Vec::new(),
            default_cpu_instances: backend.default_cpu_instance_count(),
            engine_cores: backend.computes_on_cpu().then(|| self.budget.cores()),
        }
    }

    fn load_versions(&self, plan: Plan<'_>, kept: &[Arc<ModelVersion>]) -> Loaded {
        let Some(backend) = plan.backend else { return self.load_ensemble(plan) };
        let name = plan.source.name.clone();
        let mut loaded = Loaded::default();
        let mut config = plan.config;
        let places = plan.places;
        let mut completed = false;
        if let Some(model) = kept.first() {
            config = model.config().clone();
            completed = true;
        }
        // Threads that the engine makes for the model inherit the cores of its host policies.
        let _bound = self.cores(&config).map(|cores| cores.bind());
        for &version in &plan.versions {
            if let Some(model) = kept.iter().find(|model| model.version() == version) {
                loaded.versions.push(Arc::clone(model));
                continue;
            }
            let started = Instant::now();
            let result = self.open(plan.source, backend, &config, version).and_then(|(opened, context)| {
                if !completed {
                    let notes = self.complete(&mut config, &places, backend.as_ref(), opened.as_ref())?;
                    loaded.warnings.extend(notes);
                    completed = true;
                }
                self.build(plan.source, &config, &places, opened, &context, started)
            });
            match result {
                Ok(model) => loaded.versions.push(Arc::new(model)),
                Err(mut failure) => {
                    failure.version = Some(version);
                    if failure.advice.is_empty() {
                        failure.advice = advice::version(plan.source, version, &config, &failure.error);
                    }
                    loaded.failures.push(*failure);
                }
            }
        }
        tracing::debug!(
            "loading '{name}' ended: {} ready, {} failed",
            loaded.versions.len(),
            loaded.failures.len()
        );
        loaded.config = Some(config);
        loaded
    }

    fn open(
        &self,
        source: &ModelSource,
        backend: &Arc<dyn Backend>,
        config: &ModelConfig,
        version: i64,
    ) -> Result<(Box<dyn OpenModel>, ModelContext), Box<LoadFailure>> {
        let context = self.context(source, backend.as_ref(), config, version);
        let opened = backend.open(&context).map_err(plain)?;
        Ok((opened, context))
    }

    fn context(
        &self,
        source: &ModelSource,
        backend: &dyn Backend,
        config: &ModelConfig,
        version: i64,
    ) -> ModelContext {
        let working = config.instance_group.iter().filter(|group| !group.passive);
        let instances = working.map(|group| usize::try_from(group.count).unwrap_or(1).max(1)).sum();
        let budget = match self.cores(config) {
            Some(cores) => ThreadBudget::new(Some(self.budget.cores().min(cores.count()))),
            None => self.budget,
        };
        let accelerators = config
            .optimization
            .iter()
            .flat_map(|o| &o.execution_accelerators)
            .flat_map(|e| e.gpu_execution_accelerator.iter().chain(&e.cpu_execution_accelerator));
        ModelContext {
            name: Arc::from(source.name.as_str()),
            version,
            files: files::of_version(source, backend, config, version),
            parameters: config.parameters.iter().map(|(k, v)| (k.clone(), v.string_value.clone())).collect(),
            settings: self.options.settings_for(backend.name()),
            graph_level: config.optimization.as_ref().and_then(|o| o.graph.as_ref()).map(|graph| graph.level),
            op_libraries: config
                .model_operations
                .iter()
                .flat_map(|o| o.op_library_filename.clone())
                .collect(),
            accelerators: accelerators
                .map(|a| (a.name.clone(), a.parameters.iter().map(|(k, v)| (k.clone(), v.clone())).collect()))
                .collect(),
            decoupled: config.model_transaction_policy.as_ref().is_some_and(|policy| policy.decoupled),
            threads: budget.per_instance(instances),
            caller: Some(Arc::new(TableCaller::new(&self.table))),
            config_json: Arc::from(trireme_config::to_json(config)),
        }
    }

    /// The cores that host policies leave to a model, if they leave not all of them.
    fn cores(&self, config: &ModelConfig) -> Option<Cores> {
        let groups: Vec<InstanceGroup> = config.instance_group.iter().map(InstanceGroup::of).collect();
        self.host_policies.of_groups(groups.iter())
    }

    /// Completes the configuration with what the model file says and checks the two against one another.
    fn complete(
        &self,
        config: &mut ModelConfig,
        places: &Places,
        backend: &dyn Backend,
        opened: &dyn OpenModel,
    ) -> Result<Vec<Finding>, Box<LoadFailure>> {
        let name = config.name.clone();
        let refused = |errors: ConfigErrors| places.advise(errors);
        let report = opened.report().map_err(plain)?;
        let mut findings = Vec::new();
        if let Some(report) = &report {
            let default = self.options.default_max_batch_size(backend.name());
            let notes = trireme_config::complete(config, report, default, self.options.strict_config)
                .map_err(refused)?;
            findings.extend(notes.into_iter().map(|note| told(&name, places.locate(note))));
        }
        trireme_config::normalize(config, &self.facts(backend));
        let notes = trireme_config::validate(config, &self.facts(backend)).map_err(refused)?;
        findings.extend(notes.into_iter().map(|note| told(&name, places.locate(note))));
        if let Some(report) = &report {
            trireme_config::check_report(config, report).map_err(refused)?;
        }
        findings.extend(self.useless_cache(config));
        Ok(findings)
    }

    /// What to say where a model asks for the response cache and the server has none.
    fn useless_cache(&self, config: &ModelConfig) -> Option<Finding> {
        let asked = config.response_cache.as_ref().is_some_and(|cache| cache.enable);
        (asked && self.cache.is_none()).then(|| {
            let message = "response_cache is enabled and does nothing: the server has no response cache";
            let hint = "start it with --cache-config local,size=BYTES, or leave response_cache out";
            let name = &config.name;
            tracing::warn!("model '{name}': {message}; {hint}");
            Finding { hint: Some(hint.to_owned()), ..Finding::message(message) }
        })
    }

    /// What a version is to the response cache.
    fn cache_of(&self, source: &ModelSource, config: &ModelConfig, version: i64) -> Result<ModelCache> {
        let version_dir = match &source.place {
            Place::Directory(dir) => Some(dir.join(version.to_string())),
            Place::File(_) | Place::Ambiguous(_) => None,
        };
        let engine = self.backends.get(&config.backend).and_then(|backend| backend.describe());
        let made = Made {
            name: &source.name,
            version,
            version_dir: version_dir.as_deref(),
            config,
            engine: &engine.unwrap_or_default(),
        };
        ModelCache::new(self.cache.as_ref(), made)
    }

    fn build(
        &self,
        source: &ModelSource,
        config: &ModelConfig,
        places: &Places,
        opened: Box<dyn OpenModel>,
        context: &ModelContext,
        started: Instant,
    ) -> Result<ModelVersion, Box<LoadFailure>> {
        let name = &source.name;
        let mut spec = ModelSpec::from_config(config).map_err(|errors| places.advise(errors))?;
        let padding = padding::plan(&mut spec).map_err(|errors| places.advise(errors))?;
        if let Some(what) = unsupported(config) {
            return Err(plain(Error::unsupported(format!(
                "{what} of model '{name}' is not available yet in this version of trireme"
            ))));
        }
        let sequences = sequence_plan(&spec, &model_dir(source)).map_err(plain)?;
        let latencies = Latencies::new(&self.options.latencies, &spec.metric_buckets);
        let tensors = ModelTensors {
            max_batch_size: spec.max_batch_size,
            inputs: spec.inputs.clone(),
            outputs: spec.outputs.clone(),
            batch_inputs: ragged::batch_inputs(&spec),
            batch_outputs: ragged::batch_outputs(&spec),
            padding: padding.clone(),
            injected: sequences.as_ref().map(SequencePlan::inputs).unwrap_or_default(),
            states: sequences.as_ref().map(SequencePlan::states).unwrap_or_default(),
        };
        let labels = files::read_labels(source, &spec)?;
        let source_of_work = source_of(&spec, sequences).map_err(plain)?;
        let backend_model = opened.load(tensors.clone()).map_err(plain)?;
        let backend_model = match padding {
            Some(plan) => trireme_backend::padding::padded(backend_model, plan),
            None => backend_model,
        };
        let plan = InstancePlan::of(&spec, &self.host_policies);
        let gate = match &self.rate_limiter {
            Some(limiter) => limiter.register(plan.limits()).map_err(plain)?,
            None => None,
        };
        let mut instances = plan.make(backend_model.as_ref()).map_err(plain)?;
        warmup::run(&spec, &model_dir(source), &mut instances, &plan.names(), self.budget.cores())
            .map_err(|error| LoadFailure::of_model(error, warmup::ADVICE))?;
        let pool = InstancePool::new(PoolParts {
            instances,
            source: source_of_work,
            preserve_ordering: matches!(&spec.scheduling, Scheduling::Dynamic(batching) if batching.preserve_ordering),
            gate,
            executor: self.executor.clone(),
            timer: self.timer.clone(),
            remake: plan.remake(Arc::clone(&backend_model)),
        });
        Ok(ModelVersion::new(ModelParts {
            name: Arc::clone(&context.name),
            version: context.version,
            spec,
            config: Arc::new(config.clone()),
            config_json: Bytes::from(trireme_config::to_json(config)),
            tensors,
            labels,
            backend_model: Some(backend_model),
            scheduler: Scheduler::Instances(pool),
            cache: self.cache_of(source, config, context.version).map_err(plain)?,
            latencies,
            load_duration: started.elapsed(),
        }))
    }
}

/// A note on its way to the log, a warning also to the report of `trireme check`.
fn told(model: &str, note: Note) -> Finding {
    match note.level {
        NoteLevel::Info => tracing::debug!("model '{model}': {note}"),
        NoteLevel::Warning => tracing::warn!("model '{model}': {note}"),
    }
    Finding::from_note(&note)
}

/// A failure without advice of its own yet.
fn plain(error: Error) -> Box<LoadFailure> {
    Box::new(LoadFailure::of_model(error, ""))
}

/// The part of a configuration that no scheduler here can keep its promise of.
fn unsupported(config: &ModelConfig) -> Option<&'static str> {
    let agents = config.model_repository_agents.as_ref().is_some_and(|agents| !agents.agents.is_empty());
    agents.then_some("model_repository_agents")
}

/// Labels by output.
pub(crate) type LabelMap = HashMap<Arc<str>, Labels>;

/// Path of the model's own directory, for messages and side files.
pub(crate) fn model_dir(source: &ModelSource) -> PathBuf {
    match &source.place {
        Place::Directory(dir) => dir.clone(),
        Place::File(path) => path.parent().map(Path::to_path_buf).unwrap_or_default(),
        Place::Ambiguous(paths) => paths.first().cloned().unwrap_or_default(),
    }
}
