//! Rules of the dynamic and the sequence batcher.

use std::collections::BTreeSet;

use trireme_proto::inference::model_config::SchedulingChoice;
use trireme_proto::inference::model_queue_policy::TimeoutAction;
use trireme_proto::inference::model_sequence_batching::control::Kind;
use trireme_proto::inference::model_sequence_batching::{Control, StrategyChoice};
use trireme_proto::inference::{DataType, ModelDynamicBatching, ModelQueuePolicy, ModelSequenceBatching};

use super::Checker;

/// Every priority level is a queue of its own.
const MAX_PRIORITY_LEVELS: u64 = 10_000;

pub(super) fn check(checker: &mut Checker<'_>) {
    match &checker.config.scheduling_choice {
        Some(SchedulingChoice::DynamicBatching(batching)) => dynamic_batching(checker, batching),
        Some(SchedulingChoice::SequenceBatching(batching)) => sequence_batching(checker, batching),
        Some(SchedulingChoice::EnsembleScheduling(_)) | None => {}
    }
}

fn dynamic_batching(checker: &mut Checker<'_>, batching: &ModelDynamicBatching) {
    let name = &checker.config.name;
    let max = checker.config.max_batch_size;
    for (i, &size) in batching.preferred_batch_size.iter().enumerate() {
        let path = format!("dynamic_batching.preferred_batch_size[{i}]");
        if size <= 0 {
            checker.fail(path, format!("dynamic batching preferred size must be positive for {name}"));
        } else if size > max {
            let reason = format!("dynamic batching preferred size must be <= max batch size for {name}");
            checker.fail_with_hint(
                path,
                reason,
                format!("the preferred size is {size} and max_batch_size is {max}"),
            );
        }
    }
    let levels = batching.priority_levels;
    if levels != 0 {
        priorities(checker, batching);
    }
    if batching.preserve_ordering {
        let path = "dynamic_batching.preserve_ordering";
        if levels > 1 {
            let reason =
                format!("Only one priority level is allowed when 'preserve_ordering' is true for {name}");
            checker.fail(path, reason);
        }
        let delays = |policy: &ModelQueuePolicy| {
            policy.default_timeout_microseconds != 0 && policy.timeout_action() == TimeoutAction::Delay
        };
        let policies = batching.default_queue_policy.iter().chain(batching.priority_queue_policy.values());
        if policies.into_iter().any(delays) {
            let reason = format!(
                "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {name}"
            );
            checker.fail(path, reason);
        }
    }
}

fn priorities(checker: &mut Checker<'_>, batching: &ModelDynamicBatching) {
    let name = &checker.config.name;
    let levels = batching.priority_levels;
    if !(1..=levels).contains(&batching.default_priority_level) {
        let reason = format!("default priority level must be in range [1, {levels}] for {name}");
        let hint = "set default_priority_level, the level of requests that name none";
        checker.fail_with_hint("dynamic_batching.default_priority_level", reason, hint);
    }
    for level in batching.priority_queue_policy.keys().filter(|level| !(1..=levels).contains(*level)) {
        let reason =
            format!("priority queue policy must have priority level in range [1, {levels}] for {name}");
        checker.fail(format!("dynamic_batching.priority_queue_policy[{level}]"), reason);
    }
    if levels > MAX_PRIORITY_LEVELS {
        let reason =
            format!("priority_levels must be at most {MAX_PRIORITY_LEVELS} for {name}, got {levels}");
        checker.fail("dynamic_batching.priority_levels", reason);
    }
}

fn sequence_batching(checker: &mut Checker<'_>, batching: &ModelSequenceBatching) {
    let name = &checker.config.name;
    if checker.response_cache() {
        let reason = format!(
            "Response Cache does not currently support model {name} with sequence batching scheduler. Please disable the \
             response cache."
        );
        checker.fail("response_cache", reason);
    }
    controls(checker, batching);
    let max = checker.config.max_batch_size;
    match &batching.strategy_choice {
        Some(StrategyChoice::Oldest(oldest)) => {
            for (i, &size) in oldest.preferred_batch_size.iter().enumerate() {
                let path = format!("sequence_batching.oldest.preferred_batch_size[{i}]");
                if size <= 0 {
                    let reason =
                        format!("sequence batching preferred batch size must be positive for {name}");
                    checker.fail(path, reason);
                } else if size > max {
                    let reason = format!(
                        "sequence batching preferred batch size must be <= max batch size for {name}"
                    );
                    checker.fail_with_hint(
                        path,
                        reason,
                        format!("the preferred size is {size} and max_batch_size is {max}"),
                    );
                }
            }
        }
        Some(StrategyChoice::Direct(direct)) if !(0.0..=1.0).contains(&direct.minimum_slot_utilization) => {
            let reason =
                format!("sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}");
            checker.fail("sequence_batching.direct.minimum_slot_utilization", reason);
        }
        Some(StrategyChoice::Direct(_)) | None => {}
    }
}

fn controls(checker: &mut Checker<'_>, batching: &ModelSequenceBatching) {
    let model = &checker.config.name;
    let mut tensors = BTreeSet::new();
    let mut kinds = BTreeSet::new();
    for (i, input) in batching.control_input.iter().enumerate() {
        let path = format!("sequence_batching.control_input[{i}]");
        if input.name.is_empty() {
            checker
                .fail(path.clone(), format!("sequence batching control tensor must have a name for {model}"));
        } else if !tensors.insert(input.name.as_str()) {
            let reason = format!(
                "sequence batching control tensor '{}' is specified for multiple control kinds for {model}",
                input.name
            );
            checker.fail(format!("{path}.name"), reason);
        }
        for (j, control) in input.control.iter().enumerate() {
            let path = format!("{path}.control[{j}]");
            let Ok(kind) = Kind::try_from(control.kind) else {
                checker.fail(
                    format!("{path}.kind"),
                    format!("unknown control kind {} for {model}", control.kind),
                );
                continue;
            };
            if !kinds.insert(control.kind) {
                let reason = format!(
                    "sequence batching specifies multiple {} tensors for {model}",
                    kind.as_str_name()
                );
                checker.fail(format!("{path}.kind"), reason);
            }
            if kind == Kind::ControlSequenceCorrid {
                correlation_id(checker, control, &path);
            } else {
                boolean(checker, control, kind, &path);
            }
        }
    }
}

fn pairs(control: &Control) -> [(&'static str, usize); 3] {
    [
        ("int32_false_true", control.int32_false_true.len()),
        ("fp32_false_true", control.fp32_false_true.len()),
        ("bool_false_true", control.bool_false_true.len()),
    ]
}

/// START, END and READY have exactly one pair of values.
fn boolean(checker: &mut Checker<'_>, control: &Control, kind: Kind, path: &str) {
    let model = &checker.config.name;
    let kind = kind.as_str_name();
    let given: Vec<_> = pairs(control).into_iter().filter(|(_, count)| *count > 0).collect();
    match given.as_slice() {
        [] => {
            let reason = format!(
                "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for \
                 {kind} for {model}"
            );
            checker.fail_with_hint(path, reason, "write `int32_false_true: [ 0, 1 ]`");
        }
        [(_, 2)] => {}
        [(pair, _)] => {
            let reason = format!(
                "sequence batching control '{pair}' must have exactly 2 entries for {kind} for {model}"
            );
            checker.fail_with_hint(format!("{path}.{pair}"), reason, "the values for false and for true");
        }
        _ => {
            let reason = format!(
                "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and \
                 'bool_false_true' for {kind} for {model}"
            );
            checker.fail(path, reason);
        }
    }
}

/// CORRID has a data type and no pair.
fn correlation_id(checker: &mut Checker<'_>, control: &Control, path: &str) {
    let model = &checker.config.name;
    let kind = Kind::ControlSequenceCorrid.as_str_name();
    if pairs(control).iter().any(|(_, count)| *count > 0) {
        let reason = format!(
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for \
             {kind} for {model}"
        );
        checker.fail(path, reason);
    }
    let allowed = [
        DataType::TypeUint64,
        DataType::TypeInt64,
        DataType::TypeUint32,
        DataType::TypeInt32,
        DataType::TypeString,
    ];
    if !DataType::try_from(control.data_type).is_ok_and(|data_type| allowed.contains(&data_type)) {
        let reason = format!(
            "unexpected data type for control {kind} for {model}. Allowed data types are TYPE_UINT64, TYPE_INT64, \
             TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
        );
        checker.fail(format!("{path}.data_type"), reason);
    }
}
