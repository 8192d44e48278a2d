//! Rules of instance groups.

use std::collections::BTreeSet;

use trireme_proto::inference::ModelInstanceGroup;
use trireme_proto::inference::model_config::SchedulingChoice;
use trireme_proto::inference::model_instance_group::Kind;

use super::{Checker, TENSORRT_PLATFORM};
use crate::normalize::MachineFacts;

/// Instances of all groups of a model together; each holds memory of its engine.
const MAX_INSTANCES: i64 = 1024;

pub(super) fn check(checker: &mut Checker<'_>, facts: &MachineFacts) {
    let config = checker.config;
    if matches!(config.scheduling_choice, Some(SchedulingChoice::EnsembleScheduling(_))) {
        return;
    }
    if config.instance_group.is_empty() {
        checker.fail(
            "instance_group",
            format!("must specify one or more 'instance group's for {}", config.name),
        );
    }
    let instances = |group: &ModelInstanceGroup| {
        let devices = if group.kind() == Kind::Gpu { group.gpus.len().max(1) } else { 1 };
        i64::from(group.count.max(1)).saturating_mul(i64::try_from(devices).unwrap_or(i64::MAX))
    };
    let total = config.instance_group.iter().map(instances).fold(0_i64, i64::saturating_add);
    if total > MAX_INSTANCES {
        let reason =
            format!("model {} asks for {total} instances; at most {MAX_INSTANCES} are possible", config.name);
        checker.fail_with_hint("instance_group", reason, "lower `count`; each instance takes memory");
    }
    if !config.instance_group.is_empty() && config.instance_group.iter().all(|group| group.passive) {
        let reason =
            format!("every instance group of model {} is passive, so no request could ever run", config.name);
        checker.fail_with_hint("instance_group[0].passive", reason, "remove `passive` from one group");
    }
    for (i, group) in config.instance_group.iter().enumerate() {
        rate_limiter(checker, group, i);
        let path = format!("instance_group[{i}]");
        let what = format!("instance group {} of model {}", group.name, config.name);
        match Kind::try_from(group.kind) {
            Ok(Kind::Model) if !group.gpus.is_empty() => {
                let reason = format!("{what} has kind KIND_MODEL but specifies one or more GPUs");
                checker.fail_with_hint(format!("{path}.gpus"), reason, "remove `gpus`");
            }
            Ok(Kind::Cpu) if !group.gpus.is_empty() => {
                let reason = format!("{what} has kind KIND_CPU but specifies one or more GPUs");
                checker.fail_with_hint(format!("{path}.gpus"), reason, "remove `gpus`");
            }
            Ok(Kind::Gpu) => gpus(checker, &group.gpus, facts, &path, &what),
            Ok(Kind::Auto) => {
                checker.fail(format!("{path}.kind"), format!("{what} has unexpected kind KIND_AUTO"));
            }
            Ok(Kind::Model | Kind::Cpu) => {}
            Err(_) => {
                let hint = "allowed are KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL";
                checker.fail_with_hint(
                    format!("{path}.kind"),
                    format!("{what} has unknown kind {}", group.kind),
                    hint,
                );
            }
        }
        for (j, profile) in group.profile.iter().enumerate() {
            let path = format!("{path}.profile[{j}]");
            if config.platform != TENSORRT_PLATFORM {
                let reason = format!(
                    "{what} and platform {}specifies profile field which is only supported for TensorRT models",
                    config.platform
                );
                checker.fail(path, reason);
                break;
            }
            if profile.parse::<u32>().is_err() {
                let reason = format!(
                    "{what} and platform {} specifies invalid profile {profile}. The field should contain the string \
                     representation of a non-negative integer.",
                    config.platform
                );
                checker.fail(path, reason);
            }
        }
    }
}

/// Resources have names, each once.
fn rate_limiter(checker: &mut Checker<'_>, group: &ModelInstanceGroup, index: usize) {
    let resources = group.rate_limiter.iter().flat_map(|limiter| &limiter.resources);
    let mut seen = BTreeSet::new();
    for (j, resource) in resources.enumerate() {
        let path = format!("instance_group[{index}].rate_limiter.resources[{j}].name");
        let what = format!("instance group {} of model {}", group.name, checker.config.name);
        if resource.name.is_empty() {
            checker.fail(path, format!("{what} has a rate_limiter resource without a name"));
        } else if !seen.insert(resource.name.as_str()) {
            let reason = format!("{what} names the rate_limiter resource '{}' twice", resource.name);
            checker.fail_with_hint(path, reason, "write it once, with the counts added up");
        }
    }
}

fn gpus(checker: &mut Checker<'_>, wanted: &[i32], facts: &MachineFacts, path: &str, what: &str) {
    if facts.gpus.is_empty() {
        let reason = format!("{what} has kind KIND_GPU but no GPUs are available");
        let hint = "write `kind: KIND_AUTO` to run on GPUs where there are some and on the CPU elsewhere, or `kind: KIND_CPU`";
        checker.fail_with_hint(format!("{path}.kind"), reason, hint);
        return;
    }
    if wanted.is_empty() {
        checker.fail(format!("{path}.gpus"), format!("{what} has kind KIND_GPU but specifies no GPUs"));
    }
    for gpu in wanted.iter().filter(|gpu| !facts.gpus.contains(gpu)) {
        let available: Vec<String> = facts.gpus.iter().map(i32::to_string).collect();
        let reason = format!(
            "{what} specifies invalid or unsupported gpu id {gpu}. The GPUs are: {}",
            available.join(", ")
        );
        checker.fail(format!("{path}.gpus"), reason);
    }
}
