//! What is valid in a `sequence_batching` and yet does nothing, or harm.

use trireme_proto::inference::model_config::SchedulingChoice;
use trireme_proto::inference::model_sequence_batching::StrategyChoice;
use trireme_proto::inference::model_sequence_batching::control::Kind;
use trireme_proto::inference::{ModelConfig, ModelSequenceBatching};

use crate::error::Note;

/// Warnings about a configuration that has been validated.
pub(super) fn notes(config: &ModelConfig) -> Vec<Note> {
    let Some(SchedulingChoice::SequenceBatching(batching)) = &config.scheduling_choice else {
        return Vec::new();
    };
    let mut notes = Vec::new();
    let mut warn = |path: &str, message: String, hint: &str| {
        notes.push(Note::warning(format!("sequence_batching{path}"), message).with_hint(hint));
    };
    let name = &config.name;
    let has = |kind| {
        let mut controls = batching.control_input.iter().flat_map(|input| &input.control);
        controls.any(|control| control.kind() == kind)
    };
    let is_direct = !matches!(batching.strategy_choice, Some(StrategyChoice::Oldest(_)));
    if batching.control_input.is_empty() && batching.state.is_empty() {
        warn(
            "",
            format!(
                "model '{name}' has neither control_input nor state, so it cannot tell its sequences apart"
            ),
            "add control inputs for START and CORRID, or a state, or remove sequence_batching",
        );
    } else if is_direct && config.max_batch_size > 1 && !has(Kind::ControlSequenceReady) {
        warn(
            ".control_input",
            format!(
                "model '{name}' uses the direct strategy without a control input for READY, so it takes rows without a \
                 request for requests"
            ),
            "add a control input for CONTROL_SEQUENCE_READY, or use `oldest { }`",
        );
    }
    strategy(config, batching, &mut warn);
    notes
}

fn strategy(
    config: &ModelConfig,
    batching: &ModelSequenceBatching,
    warn: &mut dyn FnMut(&str, String, &str),
) {
    let name = &config.name;
    let max = config.max_batch_size;
    match &batching.strategy_choice {
        Some(StrategyChoice::Oldest(oldest)) => {
            let candidates = oldest.max_candidate_sequences;
            let largest = oldest.preferred_batch_size.iter().max().copied().unwrap_or(0);
            // A lone preferred size of max_batch_size is what is filled in for none.
            let is_chosen = oldest.preferred_batch_size != [max];
            let delay = oldest.max_queue_delay_microseconds;
            if candidates > 0 && largest > candidates && (is_chosen || delay > 0) {
                warn(
                    ".oldest.preferred_batch_size",
                    format!(
                        "model '{name}' prefers batches of {largest} but has at most {candidates} sequences at a time, \
                         one request of each, so no batch is that large"
                    ),
                    "raise max_candidate_sequences, or prefer smaller batches",
                );
            }
            if max <= 1 && delay > 0 {
                warn(
                    ".oldest.max_queue_delay_microseconds",
                    format!("model '{name}' runs one request at a time, so there is nothing to wait for"),
                    "raise max_batch_size, or remove max_queue_delay_microseconds",
                );
            }
        }
        Some(StrategyChoice::Direct(direct)) => {
            let (delay, share) = (direct.max_queue_delay_microseconds, direct.minimum_slot_utilization);
            if delay > 0 && share == 0.0 {
                warn(
                    ".direct.max_queue_delay_microseconds",
                    format!("model '{name}' has no minimum_slot_utilization, so its batches never wait"),
                    "set minimum_slot_utilization, as 0.5, or remove max_queue_delay_microseconds",
                );
            } else if share > 0.0 && delay == 0 {
                warn(
                    ".direct.minimum_slot_utilization",
                    format!("model '{name}' has no max_queue_delay_microseconds, so its batches never wait"),
                    "set max_queue_delay_microseconds, or remove minimum_slot_utilization",
                );
            }
        }
        None => {}
    }
}
