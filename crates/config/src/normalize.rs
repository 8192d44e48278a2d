//! The defaults that Triton writes into a configuration before it uses and shows it. Doing it twice changes nothing.
//!
//! Source: `NormalizeModelConfig`, `NormalizeInstanceGroup` in Triton's `model_config_utils.cc`.

use trireme_proto::inference::model_config::SchedulingChoice;
use trireme_proto::inference::model_instance_group::Kind;
use trireme_proto::inference::model_optimization_policy::PinnedMemoryBuffer;
use trireme_proto::inference::model_sequence_batching::StrategyChoice;
use trireme_proto::inference::model_version_policy::{Latest, PolicyChoice};
use trireme_proto::inference::{ModelConfig, ModelInstanceGroup, ModelVersionPolicy};

use crate::error::Note;

/// Idle time after which a sequence loses its slot, in microseconds, if none is configured.
const SEQUENCE_IDLE_US: u64 = 1_000_000;

/// What a configuration's defaults and rules depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineFacts {
    /// Numbers of the GPUs that can be used.
    pub gpus: Vec<i32>,
    /// Instances of a CPU group without a count, by the backend; 0 is 1.
    pub default_cpu_instances: usize,
    /// Cores that the engine computes on; `None` if it does not compute on the CPU, or that is not known.
    pub engine_cores: Option<usize>,
}

/// Fills the defaults in. Returns what may surprise.
pub fn normalize(config: &mut ModelConfig, facts: &MachineFacts) -> Vec<Note> {
    if config.version_policy.is_none() {
        let latest = PolicyChoice::Latest(Latest { num_versions: 1 });
        config.version_policy = Some(ModelVersionPolicy { policy_choice: Some(latest) });
    }
    fill_batching(config);
    if matches!(config.scheduling_choice, Some(SchedulingChoice::EnsembleScheduling(_))) {
        return Vec::new();
    }
    let optimization = config.optimization.get_or_insert_default();
    optimization.input_pinned_memory.get_or_insert(PinnedMemoryBuffer { enable: true });
    optimization.output_pinned_memory.get_or_insert(PinnedMemoryBuffer { enable: true });
    fill_instance_groups(config, facts)
}

/// The defaults of the schedulers, which depend on `max_batch_size`; completion may have changed it.
pub(crate) fn fill_batching(config: &mut ModelConfig) {
    let max_batch_size = config.max_batch_size;
    let fill_sizes = |sizes: &mut Vec<i32>| {
        if sizes.is_empty() && max_batch_size > 0 {
            sizes.push(max_batch_size);
        }
    };
    match &mut config.scheduling_choice {
        Some(SchedulingChoice::DynamicBatching(batching)) => fill_sizes(&mut batching.preferred_batch_size),
        Some(SchedulingChoice::SequenceBatching(batching)) => {
            if batching.max_sequence_idle_microseconds == 0 {
                batching.max_sequence_idle_microseconds = SEQUENCE_IDLE_US;
            }
            if let Some(StrategyChoice::Oldest(oldest)) = &mut batching.strategy_choice {
                fill_sizes(&mut oldest.preferred_batch_size);
            }
        }
        Some(SchedulingChoice::EnsembleScheduling(_)) | None => {}
    }
}

fn fill_instance_groups(config: &mut ModelConfig, facts: &MachineFacts) -> Vec<Note> {
    let mut notes = Vec::new();
    let model = config.name.clone();
    if config.instance_group.is_empty() {
        config
            .instance_group
            .push(ModelInstanceGroup { name: model.clone(), ..ModelInstanceGroup::default() });
    }
    for (index, group) in config.instance_group.iter_mut().enumerate() {
        if group.name.is_empty() {
            group.name = format!("{model}_{index}");
        }
        if group.kind() == Kind::Auto && Kind::try_from(group.kind).is_ok() {
            let usable = !facts.gpus.is_empty() && group.gpus.iter().all(|gpu| facts.gpus.contains(gpu));
            group.set_kind(if usable { Kind::Gpu } else { Kind::Cpu });
            if !usable && !group.gpus.is_empty() {
                let gpus = std::mem::take(&mut group.gpus);
                let message = format!(
                    "instance group {} of model {model} runs on the CPU: the GPUs {gpus:?} that it names are not available",
                    group.name
                );
                notes.push(Note::warning(format!("instance_group[{index}].gpus"), message));
            }
        }
        if group.count < 1 {
            let cpu = i32::try_from(facts.default_cpu_instances).unwrap_or(1).max(1);
            group.count = if group.kind() == Kind::Cpu { cpu } else { 1 };
        }
        if group.kind() == Kind::Gpu && group.gpus.is_empty() {
            group.gpus.clone_from(&facts.gpus);
        }
    }
    notes
}

/// Turns the GPU groups of a configuration into CPU groups, for machines without GPUs whose operator asked for it.
/// Call it before [`normalize`].
pub fn fall_back_to_cpu(config: &mut ModelConfig, facts: &MachineFacts) -> Vec<Note> {
    let mut notes = Vec::new();
    let model = config.name.clone();
    for (index, group) in config.instance_group.iter_mut().enumerate() {
        let missing = facts.gpus.is_empty() || group.gpus.iter().any(|gpu| !facts.gpus.contains(gpu));
        if group.kind() == Kind::Gpu && missing {
            group.set_kind(Kind::Cpu);
            group.gpus.clear();
            let message = format!(
                "instance group {index} of model {model} has kind KIND_GPU but its GPUs are not available; it runs on the CPU"
            );
            notes.push(Note::warning(format!("instance_group[{index}].kind"), message));
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{parse_pbtxt, to_json};

    fn normalized(text: &str, facts: &MachineFacts) -> (ModelConfig, Vec<Note>) {
        let mut config = parse_pbtxt(text.as_bytes(), "c").unwrap().config;
        let notes = normalize(&mut config, facts);
        let once = config.clone();
        normalize(&mut config, facts);
        assert_eq!(config, once, "a second run changes nothing");
        (config, notes)
    }

    #[test]
    fn defaults_as_recorded_from_triton() {
        let facts = MachineFacts { default_cpu_instances: 2, ..MachineFacts::default() };
        let (config, _) = normalized(
            "name: 'simple' backend: 'onnxruntime' max_batch_size: 8 dynamic_batching { }",
            &facts,
        );
        let json = to_json(&config);
        for part in [
            r#""version_policy":{"latest":{"num_versions":1}}"#,
            r#""optimization":{"priority":"PRIORITY_DEFAULT","input_pinned_memory":{"enable":true},"output_pinned_memory":{"enable":true},"#,
            r#""instance_group":[{"name":"simple","kind":"KIND_CPU","count":2,"#,
            r#""dynamic_batching":{"preferred_batch_size":[8],"#,
        ] {
            assert!(json.contains(part), "{part} is not in {json}");
        }
        let (config, _) = normalized(
            "name: 'id' instance_group { kind: KIND_CPU } instance_group { name: 'x' count: 3 }",
            &facts,
        );
        let groups: Vec<_> = config.instance_group.iter().map(|g| (g.name.as_str(), g.count)).collect();
        assert_eq!(groups, [("id_0", 2), ("x", 3)]);
    }

    #[test]
    fn sequences_and_ensembles() {
        let facts = MachineFacts::default();
        let (config, _) = normalized("name: 's' max_batch_size: 4 sequence_batching { oldest { } }", &facts);
        let json = to_json(&config);
        assert!(
            json.contains(r#""max_sequence_idle_microseconds":1000000"#)
                && json.contains(r#""preferred_batch_size":[4]"#),
            "{json}"
        );
        let (config, _) = normalized("name: 'e' ensemble_scheduling { }", &facts);
        assert!(config.instance_group.is_empty() && config.optimization.is_none());
    }

    #[test]
    fn auto_groups_choose_by_the_gpus_there_are() {
        let with_gpus =
            MachineFacts { gpus: vec![0, 1], default_cpu_instances: 2, ..MachineFacts::default() };
        let (config, _) = normalized(
            "name: 'm' instance_group { gpus: [ 1 ] } instance_group { } instance_group { gpus: 7 }",
            &with_gpus,
        );
        let groups: Vec<_> =
            config.instance_group.iter().map(|g| (g.kind(), g.gpus.clone(), g.count)).collect();
        assert_eq!(groups, [(Kind::Gpu, vec![1], 1), (Kind::Gpu, vec![0, 1], 1), (Kind::Cpu, vec![], 2)]);
        let (config, notes) =
            normalized("name: 'm' instance_group { gpus: [ 0 ] }", &MachineFacts::default());
        assert_eq!(config.instance_group[0].kind(), Kind::Cpu);
        assert!(notes[0].message.contains("runs on the CPU"), "{notes:?}");
    }

    #[test]
    fn cfg_19_gpu_groups_may_fall_back() {
        let mut config =
            parse_pbtxt(b"name: 'm' instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0, 1 ] } ]", "c")
                .unwrap()
                .config;
        let notes = fall_back_to_cpu(&mut config, &MachineFacts::default());
        assert_eq!(config.instance_group[0].kind(), Kind::Cpu);
        assert!(config.instance_group[0].gpus.is_empty() && notes.len() == 1);
        assert!(crate::to_json(&config).contains("KIND_CPU"));
    }
}
