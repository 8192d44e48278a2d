//! Loading an ensemble: no file of its own, but the models of its steps must be loaded before it.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use trireme_backend::ModelTensors;
use trireme_config::{ComposingModel, MachineFacts, ModelSpec, Scheduling};
use trireme_proto::inference::model_config::SchedulingChoice;
use trireme_proto::inference::{ModelConfig, ModelEnsembling, ModelTransactionPolicy};
use trireme_types::Error;

use super::files::{self, Places};
use super::{LabelMap, LoadFailure, LoadOverrides, Loaded, Loader, Plan, plain, told};
use crate::ensemble::Ensemble;
use crate::latencies::Latencies;
use crate::model::{ModelParts, ModelVersion};
use crate::repository::ModelSource;
use crate::scheduler::Scheduler;

/// Whether a configuration is that of an ensemble, or means to be.
pub(super) fn is_ensemble(config: &ModelConfig) -> bool {
    config.platform == "ensemble" || steps(config).is_some()
}

fn steps(config: &ModelConfig) -> Option<&ModelEnsembling> {
    match &config.scheduling_choice {
        Some(SchedulingChoice::EnsembleScheduling(ensemble)) => Some(ensemble),
        _ => None,
    }
}

impl Loader {
    /// Models that the steps of a model name, each once; none for a model that is no ensemble or cannot be read.
    pub(crate) fn composing_models(&self, source: &ModelSource, overrides: &LoadOverrides) -> Vec<String> {
        let Ok(read) = files::read_config(source, &self.options, overrides) else { return Vec::new() };
        let ensemble = steps(&read.config).cloned().unwrap_or_default();
        let mut names: Vec<String> = ensemble.step.into_iter().map(|step| step.model_name).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Loads every version of an ensemble.
    pub(super) fn load_ensemble(&self, plan: Plan<'_>) -> Loaded {
        let started = Instant::now();
        let Plan { source, mut config, places, versions, .. } = plan;
        let mut loaded = Loaded::default();
        match self.build_ensemble(source, &mut config, &places, &versions, started, &mut loaded) {
            Ok(models) => loaded.versions = models,
            Err(mut failure) => {
                failure.affected.clone_from(&versions);
                loaded.failures = failure.per_version();
            }
        }
        loaded.config = Some(config);
        loaded
    }

    fn build_ensemble(
        &self,
        source: &ModelSource,
        config: &mut ModelConfig,
        places: &Places,
        versions: &[i64],
        started: Instant,
        loaded: &mut Loaded,
    ) -> Result<Vec<Arc<ModelVersion>>, Box<LoadFailure>> {
        let name = source.name.as_str();
        let facts = MachineFacts::default();
        let notes = trireme_config::validate(config, &facts).map_err(|errors| places.advise(errors))?;
        loaded.warnings.extend(notes.into_iter().map(|note| told(name, places.locate(note))));
        let members = self.members(config)?;
        let views: Vec<ComposingModel<'_>> = members.iter().map(|model| view(model)).collect();
        let (flow, notes) =
            trireme_config::check_ensemble(config, &views).map_err(|errors| places.advise(errors))?;
        loaded.warnings.extend(notes.into_iter().map(|note| told(name, places.locate(note))));
        config.model_transaction_policy = Some(ModelTransactionPolicy { decoupled: flow.decoupled() });
        // Only now is it known whether the ensemble is decoupled, which not every other setting goes with.
        trireme_config::validate(config, &facts).map_err(|errors| places.advise(errors))?;
        loaded.warnings.extend(self.useless_cache(config));

        let spec = ModelSpec::from_config(config).map_err(|errors| places.advise(errors))?;
        let Scheduling::Ensemble(ensemble) = &spec.scheduling else {
            return Err(plain(Error::internal(format!("model '{name}' is no ensemble"))));
        };
        let mut labels = files::read_labels(source, &spec)?;
        inherit_labels(&mut labels, ensemble, &spec, &members);
        let tensors = ModelTensors {
            max_batch_size: spec.max_batch_size,
            inputs: spec.inputs.clone(),
            outputs: spec.outputs.clone(),
            ..ModelTensors::default()
        };
        let (shared, config_json) = (Arc::new(config.clone()), Bytes::from(trireme_config::to_json(config)));
        let version = |version: &i64| {
            let scheduler = Ensemble::new(
                &spec,
                ensemble,
                flow.clone(),
                &members,
                &self.table,
                self.executor.clone(),
                self.timer.clone(),
            );
            Ok(Arc::new(ModelVersion::new(ModelParts {
                name: Arc::from(name),
                version: *version,
                spec: spec.clone(),
                config: Arc::clone(&shared),
                config_json: config_json.clone(),
                tensors: tensors.clone(),
                labels: labels.clone(),
                backend_model: None,
                scheduler: Scheduler::Ensemble(scheduler.map_err(plain)?),
                cache: self.cache_of(source, config, *version).map_err(plain)?,
                latencies: Latencies::new(&self.options.latencies, &spec.metric_buckets),
                load_duration: started.elapsed(),
            })))
        };
        versions.iter().map(version).collect()
    }

    /// The models of the steps, one for each.
    fn members(&self, config: &ModelConfig) -> Result<Vec<Arc<ModelVersion>>, Box<LoadFailure>> {
        let name = &config.name;
        let ensemble = steps(config).cloned().unwrap_or_default();
        let names = ensemble.step.iter().map(|step| step.model_name.as_str());
        let mut absent: Vec<&str> = names.filter(|model| self.table.entry(model).is_none()).collect();
        absent.sort_unstable();
        absent.dedup();
        if !absent.is_empty() {
            let which: Vec<String> = (0..)
                .zip(&ensemble.step)
                .filter(|(_, step)| absent.contains(&step.model_name.as_str()))
                .map(|(i, step): (usize, _)| format!("'{}' (step {i})", step.model_name))
                .collect();
            let error = Error::invalid_arg(format!(
                "ensemble {name} contains models that are not available or ambiguous: {}",
                absent.join(", ")
            ));
            let advice = format!(
                "No repository holds {}. Put it there, or name another model in the step.",
                which.join(", ")
            );
            return Err(Box::new(LoadFailure::of_model(error, advice)));
        }
        let member = |(i, step): (usize, &trireme_proto::inference::model_ensembling::Step)| {
            let model = &step.model_name;
            let advice = format!(
                "Step {i} of ensemble '{name}' runs model '{model}'. See why that one is not loaded."
            );
            let fail =
                |text: String| Box::new(LoadFailure::of_model(Error::invalid_arg(text), advice.clone()));
            let start = format!("ensemble '{name}' depends on '{model}'");
            let Some(entry) = self.table.entry(model).filter(|entry| !entry.ready.is_empty()) else {
                let why = self.table.entry(model).and_then(|entry| Some(entry.failures.first()?.reason()));
                let why = why.map(|why| format!(" Model '{model}' loading failed with error: {why}"));
                return Err(fail(format!("{start} which has no loaded version.{}", why.unwrap_or_default())));
            };
            let wanted = (step.model_version > 0).then_some(step.model_version);
            let found = match wanted {
                Some(version) => entry.ready.iter().find(|model| model.version() == version),
                None => entry.ready.last(),
            };
            found.cloned().ok_or_else(|| {
                fail(format!("{start} whose required version {} is not loaded.", step.model_version))
            })
        };
        ensemble.step.iter().enumerate().map(member).collect()
    }
}

fn view(model: &ModelVersion) -> ComposingModel<'_> {
    ComposingModel {
        name: model.name(),
        max_batch_size: model.max_batch_size(),
        inputs: model.inputs(),
        outputs: model.outputs(),
        decoupled: model.is_decoupled(),
    }
}

/// An output without labels of its own has those of the model that writes it.
fn inherit_labels(
    labels: &mut LabelMap,
    ensemble: &ModelEnsembling,
    spec: &ModelSpec,
    members: &[Arc<ModelVersion>],
) {
    for (step, model) in ensemble.step.iter().zip(members) {
        for (output, tensor) in &step.output_map {
            let own = spec.outputs.iter().find(|spec| *spec.name == **tensor);
            if let (Some(own), Some(found)) = (own, model.labels(output)) {
                labels.entry(Arc::clone(&own.name)).or_insert_with(|| found.clone());
            }
        }
    }
}
