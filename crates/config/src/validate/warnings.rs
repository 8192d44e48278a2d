//! What is valid but does nothing, or harms: why, and what to write instead.

use trireme_proto::inference::model_config::SchedulingChoice;
use trireme_proto::inference::model_instance_group::Kind;
use trireme_proto::inference::model_queue_policy::TimeoutAction;
use trireme_proto::inference::{ModelConfig, ModelDynamicBatching, ModelQueuePolicy};

use crate::error::Note;
use crate::normalize::MachineFacts;

/// Every warning for a valid configuration.
pub(super) fn of(config: &ModelConfig, facts: &MachineFacts) -> Vec<Note> {
    let mut notes = Vec::new();
    if let Some(SchedulingChoice::DynamicBatching(batching)) = &config.scheduling_choice {
        batches(&mut notes, config, batching);
        ordering(&mut notes, config, batching);
        priorities(&mut notes, config, batching);
        policies(&mut notes, config, batching);
    }
    if config.scheduling_choice.is_none() {
        joining(&mut notes, config);
    }
    notes.extend(super::sequence_advice::notes(config));
    instances(&mut notes, config, facts);
    warmup(&mut notes, config);
    notes
}

fn warn(notes: &mut Vec<Note>, path: impl Into<String>, message: String, hint: impl Into<String>) {
    notes.push(Note::warning(path, message).with_hint(hint));
}

fn batches(notes: &mut Vec<Note>, config: &ModelConfig, batching: &ModelDynamicBatching) {
    let name = &config.name;
    let max = config.max_batch_size;
    if max == 0 {
        let message = format!(
            "model '{name}' has dynamic_batching but max_batch_size is 0, so no two requests are ever batched"
        );
        let hint = "write `max_batch_size: 4` (or more) and leave the batch axis out of dims, or remove dynamic_batching";
        return warn(notes, "dynamic_batching", message, hint);
    }
    if max == 1 {
        let message = format!(
            "model '{name}' has dynamic_batching but max_batch_size is 1, so no two requests are ever batched"
        );
        return warn(
            notes,
            "dynamic_batching",
            message,
            "write a larger max_batch_size, or remove dynamic_batching",
        );
    }
    let preferred = &batching.preferred_batch_size;
    let delay = batching.max_queue_delay_microseconds;
    if delay == 0 && preferred.iter().any(|size| *size != max) {
        let message = format!(
            "preferred_batch_size {preferred:?} of model '{name}' does nothing without max_queue_delay_microseconds: \
             an idle instance takes whatever waits"
        );
        let hint = "write a max_queue_delay_microseconds, or remove preferred_batch_size";
        warn(notes, "dynamic_batching.preferred_batch_size", message, hint);
    }
    if delay > 0 && preferred.contains(&1) {
        let message = format!(
            "max_queue_delay_microseconds {delay} of model '{name}' does nothing: 1 is a preferred_batch_size, so a \
             request that is alone runs at once"
        );
        let hint = "remove 1 from preferred_batch_size, or remove the delay";
        warn(notes, "dynamic_batching.max_queue_delay_microseconds", message, hint);
    }
}

/// What only matters to requests that share a batch.
fn joining(notes: &mut Vec<Note>, config: &ModelConfig) {
    let ragged = config.input.iter().position(|io| io.allow_ragged_batch);
    let ragged = ragged.map(|i| (format!("input[{i}].allow_ragged_batch"), "allow_ragged_batch"));
    let is_padded = config.parameters.keys().any(|key| key.starts_with("padding."));
    let padded = is_padded.then(|| ("parameters".to_owned(), "parameters for padding"));
    for (path, what) in ragged.into_iter().chain(padded) {
        let message = format!(
            "model '{}' has {what} but no scheduler that joins requests, so every request runs on its own",
            config.name
        );
        warn(notes, path, message, "write `dynamic_batching { }`");
    }
}

fn ordering(notes: &mut Vec<Note>, config: &ModelConfig, batching: &ModelDynamicBatching) {
    let decoupled = config.model_transaction_policy.as_ref().is_some_and(|policy| policy.decoupled);
    if batching.preserve_ordering && !decoupled && working_instances(config) == 1 {
        let message = format!(
            "preserve_ordering of model '{}' does nothing: its only instance answers in order anyway",
            config.name
        );
        let hint = "remove preserve_ordering, or raise count of the instance_group";
        warn(notes, "dynamic_batching.preserve_ordering", message, hint);
    }
}

fn priorities(notes: &mut Vec<Note>, config: &ModelConfig, batching: &ModelDynamicBatching) {
    let name = &config.name;
    let without = |what: &str| format!("{what} of model '{name}' does nothing without priority_levels");
    let hint = "write `priority_levels: N` and default_priority_level, or remove it";
    match batching.priority_levels {
        0 if !batching.priority_queue_policy.is_empty() => {
            let hint = "write `priority_levels: N` and default_priority_level, or use default_queue_policy";
            let path = "dynamic_batching.priority_queue_policy";
            warn(notes, path, without("priority_queue_policy"), hint);
        }
        0 if batching.default_priority_level != 0 => {
            warn(notes, "dynamic_batching.default_priority_level", without("default_priority_level"), hint);
        }
        1 => {
            let message = format!(
                "priority_levels 1 of model '{name}' does nothing: every request is on the same level"
            );
            warn(notes, "dynamic_batching.priority_levels", message, "write 2 or more, or remove it");
        }
        _ => {}
    }
}

fn policies(notes: &mut Vec<Note>, config: &ModelConfig, batching: &ModelDynamicBatching) {
    let default =
        batching.default_queue_policy.iter().map(|policy| (String::from("default_queue_policy"), policy));
    let levels = batching
        .priority_queue_policy
        .iter()
        .map(|(level, policy)| (format!("priority_queue_policy[{level}]"), policy));
    let never = |policy: &ModelQueuePolicy| {
        policy.timeout_action() == TimeoutAction::Delay
            && policy.default_timeout_microseconds == 0
            && !policy.allow_timeout_override
    };
    for (what, policy) in default.chain(levels) {
        if never(policy) {
            let message = format!(
                "timeout_action DELAY in {what} of model '{}' does nothing: no request ever times out there",
                config.name
            );
            let hint = "write a default_timeout_microseconds or `allow_timeout_override: true`, or remove timeout_action";
            warn(notes, format!("dynamic_batching.{what}.timeout_action"), message, hint);
        }
    }
}

fn instances(notes: &mut Vec<Note>, config: &ModelConfig, facts: &MachineFacts) {
    let cpu = config.instance_group.iter().filter(|group| group.kind() == Kind::Cpu && !group.passive);
    let count: usize = cpu.map(|group| usize::try_from(group.count).unwrap_or(0)).sum();
    if let Some(cores) = facts.engine_cores
        && count > cores
        && count > facts.default_cpu_instances
    {
        let message = format!(
            "model '{}' has {count} instances for {cores} core(s): the engine computes on the CPU, so more instances than \
             cores take turns, slow one another down and use more memory",
            config.name
        );
        let hint = format!("write `count: {cores}` or less; dynamic_batching makes better use of the cores");
        warn(notes, "instance_group", message, hint);
    }
    for (i, group) in config.instance_group.iter().enumerate() {
        if !group.secondary_devices.is_empty() {
            let message = format!(
                "secondary_devices of instance group {} of model '{}' do nothing: they are for deep learning \
                 accelerators under TensorRT",
                group.name, config.name
            );
            warn(
                notes,
                format!("instance_group[{i}].secondary_devices"),
                message,
                "remove secondary_devices",
            );
        }
    }
}

fn warmup(notes: &mut Vec<Note>, config: &ModelConfig) {
    for (i, sample) in config.model_warmup.iter().enumerate().filter(|(_, sample)| sample.batch_size == 0) {
        let message = format!(
            "warmup sample '{}' of model '{}' is skipped: its batch_size is 0",
            sample.name, config.name
        );
        warn(notes, format!("model_warmup[{i}]"), message, "write `batch_size: 1`");
    }
}

/// Instances that get requests.
fn working_instances(config: &ModelConfig) -> usize {
    let working = config.instance_group.iter().filter(|group| !group.passive);
    let instances = working.map(|group| {
        let devices = if group.kind() == Kind::Gpu { group.gpus.len().max(1) } else { 1 };
        usize::try_from(group.count).unwrap_or(0).saturating_mul(devices)
    });
    instances.fold(0, usize::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{normalize, parse_pbtxt, validate};

    /// Messages of the warnings about a valid configuration.
    fn warnings(text: &str, facts: &MachineFacts) -> Vec<String> {
        let mut config =
            parse_pbtxt(format!("name: 'm' backend: 'b' {text}").as_bytes(), "c").unwrap().config;
        normalize(&mut config, facts);
        validate(&config, facts)
            .unwrap_or_else(|e| panic!("{text}\n{e}"))
            .into_iter()
            .map(|n| n.message)
            .collect()
    }

    #[test]
    fn settings_that_work_are_not_warned_of() {
        let two = "instance_group { kind: KIND_CPU count: 2 }";
        for text in [
            "",
            "max_batch_size: 8 dynamic_batching { }",
            "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 9 }",
            "max_batch_size: 8 dynamic_batching { preferred_batch_size: 8 }",
            &format!("max_batch_size: 8 dynamic_batching {{ preserve_ordering: true }} {two}"),
            "max_batch_size: 8 dynamic_batching { priority_levels: 2 default_priority_level: 1
                priority_queue_policy { key: 2 value { max_queue_size: 1 } } }",
            "max_batch_size: 8 dynamic_batching {
                default_queue_policy { timeout_action: DELAY allow_timeout_override: true } }",
        ] {
            assert!(warnings(text, &MachineFacts::default()).is_empty(), "{text}");
        }
    }

    #[test]
    fn instances_beyond_the_cores() {
        let facts = |cores, default| MachineFacts {
            engine_cores: cores,
            default_cpu_instances: default,
            ..MachineFacts::default()
        };
        let four = "instance_group { kind: KIND_CPU count: 3 } instance_group { kind: KIND_CPU count: 1 }
            instance_group { kind: KIND_CPU count: 9 passive: true } instance_group { kind: KIND_MODEL count: 9 }";
        assert!(warnings(four, &facts(Some(3), 2))[0].contains("has 4 instances for 3 core(s)"));
        assert!(warnings(four, &facts(Some(4), 2)).is_empty());
        assert!(warnings(four, &facts(None, 2)).is_empty(), "the engine only waits");
        // What is filled in is nobody's mistake.
        assert!(warnings("", &facts(Some(1), 2)).is_empty());
    }
}
