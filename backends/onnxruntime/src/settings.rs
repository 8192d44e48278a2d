//! What a configuration and the command line say about running a model, read and checked before the library is
//! asked for anything.
//!
//! No setting is ignored in silence: a bad value is an error with the key, the value and what is allowed, and a
//! parameter that nothing here knows is named in a warning.

use trireme_backend::{BackendSettings, ModelContext};
use trireme_types::{Error, Result};

/// Keys that the library itself takes as session configuration entries.
const ENTRY_PREFIXES: [&str; 4] = ["session.", "optimization.", "ep.", "mlas."];
/// Parameters of a run, passed to every run.
const ARENA_SHRINKAGE: &str = "memory.enable_memory_arena_shrinkage";
const INTRA_SPINNING: &str = "session.intra_op.allow_spinning";
const INTER_SPINNING: &str = "session.inter_op.allow_spinning";
/// Parameters of the CUDA provider that Triton has deprecated.
const DEPRECATED: [&str; 4] =
    ["cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream"];
/// Settings of the command line that this backend reads, and those that the server reads for every backend.
const KNOWN_SETTINGS: [&str; 8] = [
    "library-path",
    "enable-global-threadpool",
    "intra_op_thread_count",
    "inter_op_thread_count",
    "default-max-batch-size",
    "auto-complete-config",
    "min-compute-capability",
    "backend-directory",
];
/// Most threads that a setting may ask for.
const MAX_THREADS: i32 = 4096;

/// Sizes of the thread pools that all sessions share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GlobalThreads {
    /// 0 leaves the number to the library.
    pub(crate) intra_op: i32,
    pub(crate) inter_op: i32,
}

impl GlobalThreads {
    /// What the command line asks for; `None` unless `enable-global-threadpool` is set.
    pub(crate) fn read(settings: &BackendSettings) -> Result<Option<Self>> {
        for (key, _) in settings.iter().filter(|(key, _)| !KNOWN_SETTINGS.contains(key)) {
            tracing::warn!(
                "--backend-config=onnxruntime,{key} is not known to the backend and has no effect"
            );
        }
        let read =
            |key: &str| settings.get(key).map(|value| (format!("--backend-config=onnxruntime,{key}"), value));
        let enabled = match read("enable-global-threadpool") {
            Some((key, value)) => flag(&key, value)?,
            None => false,
        };
        let threads = |key| read(key).map_or(Ok(0), |(key, value)| thread_count(&key, value));
        let pools =
            Self { intra_op: threads("intra_op_thread_count")?, inter_op: threads("inter_op_thread_count")? };
        if !enabled && (pools.intra_op > 0 || pools.inter_op > 0) {
            tracing::warn!(
                "--backend-config=onnxruntime,intra_op_thread_count and inter_op_thread_count size the global \
                 thread pools, which are off; add --backend-config=onnxruntime,enable-global-threadpool=1"
            );
        }
        Ok(enabled.then_some(pools))
    }
}

/// How far a graph is rewritten before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GraphLevel {
    Disabled,
    Basic,
    Extended,
    All,
}

/// A provider of kernels other than the processor's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Accelerator {
    /// Name in `execution_accelerators`.
    pub(crate) name: &'static str,
    /// Name in the library's list of providers.
    pub(crate) provider: &'static str,
    /// Name that the generic call for adding a provider takes.
    pub(crate) short: &'static str,
    pub(crate) options: Vec<(String, String)>,
}

const ACCELERATORS: [(&str, &str, &str); 3] = [
    ("cuda", "CUDAExecutionProvider", "CUDA"),
    ("tensorrt", "TensorrtExecutionProvider", "TensorRT"),
    ("openvino", "OpenVINOExecutionProvider", "OpenVINO"),
];

/// Everything that shapes the session of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SessionSettings {
    /// Threads of one execution, the calling one included.
    pub(crate) intra_op: i32,
    pub(crate) inter_op: i32,
    pub(crate) parallel: bool,
    pub(crate) arena: bool,
    pub(crate) memory_pattern: bool,
    pub(crate) graph: GraphLevel,
    /// Session configuration entries.
    pub(crate) entries: Vec<(String, String)>,
    /// Run configuration entries.
    pub(crate) run_entries: Vec<(String, String)>,
    pub(crate) accelerators: Vec<Accelerator>,
}

impl SessionSettings {
    /// # Errors
    /// INVALID_ARG: a value that is not allowed, or an accelerator that nobody knows.
    pub(crate) fn read(context: &ModelContext) -> Result<Self> {
        let threads = i32::try_from(context.threads.max(1)).unwrap_or(MAX_THREADS).min(MAX_THREADS);
        let mut settings = Self {
            intra_op: threads,
            inter_op: 0,
            parallel: false,
            arena: true,
            memory_pattern: true,
            graph: graph_level(context.graph_level),
            entries: Vec::new(),
            run_entries: Vec::new(),
            accelerators: Vec::new(),
        };
        for (key, value) in &context.parameters {
            let place = || format!("parameter '{key}' of model '{}'", context.name);
            match key.as_str() {
                // 0 means "as many as fit" to Triton; here that is the model's share of the machine.
                "intra_op_thread_count" => match thread_count(&place(), value)? {
                    0 => {}
                    count => settings.intra_op = count,
                },
                "inter_op_thread_count" => settings.inter_op = thread_count(&place(), value)?,
                "execution_mode" => settings.parallel = flag(&place(), value)?,
                "enable_mem_arena" => settings.arena = flag(&place(), value)?,
                "enable_mem_pattern" => settings.memory_pattern = flag(&place(), value)?,
                ARENA_SHRINKAGE => settings.run_entries.push((key.clone(), value.clone())),
                key if ENTRY_PREFIXES.iter().any(|prefix| key.starts_with(prefix)) => {
                    settings.entries.push((key.to_owned(), value.clone()));
                }
                key if DEPRECATED.contains(&key) => tracing::warn!(
                    "{} is deprecated and has no effect; give it as a parameter of the 'cuda' accelerator in \
                     optimization.execution_accelerators",
                    place()
                ),
                _ => {
                    tracing::warn!("{} is not known to the backend 'onnxruntime' and has no effect", place());
                }
            }
        }
        if settings.inter_op == 0 {
            settings.inter_op = if settings.parallel { settings.intra_op } else { 1 };
        }
        for key in [INTRA_SPINNING, INTER_SPINNING] {
            if !settings.entries.iter().any(|(entry, _)| entry == key) {
                settings.entries.push((key.to_owned(), "0".to_owned()));
            }
        }
        for (name, options) in &context.accelerators {
            settings.accelerators.push(accelerator(&context.name, name, options)?);
        }
        Ok(settings)
    }
}

/// `optimization.graph.level` as Triton's backend reads it: not set and unknown levels are everything.
fn graph_level(level: Option<i32>) -> GraphLevel {
    match level {
        Some(-1) => GraphLevel::Basic,
        Some(1) => GraphLevel::Extended,
        Some(2) => GraphLevel::Disabled,
        _ => GraphLevel::All,
    }
}

fn accelerator(model: &str, name: &str, options: &[(String, String)]) -> Result<Accelerator> {
    let known = ACCELERATORS.into_iter().find(|(known, _, _)| *known == name);
    let Some((name, provider, short)) = known else {
        return Err(Error::invalid_arg(format!(
            "unknown Execution Accelerator '{name}' is requested by model '{model}', expected cuda, tensorrt or \
             openvino"
        )));
    };
    Ok(Accelerator { name, provider, short, options: options.to_vec() })
}

fn flag(place: &str, value: &str) -> Result<bool> {
    match value.trim() {
        "0" | "false" => Ok(false),
        "1" | "true" => Ok(true),
        _ => Err(Error::invalid_arg(format!("{place} has the value '{value}', expected 0 or 1"))),
    }
}

fn thread_count(place: &str, value: &str) -> Result<i32> {
    match value.trim().parse::<i32>() {
        Ok(count) if (0..=MAX_THREADS).contains(&count) => Ok(count),
        _ => Err(Error::invalid_arg(format!(
            "{place} has the value '{value}', expected a number of threads from 0 to {MAX_THREADS}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(parameters: &[(&str, &str)]) -> ModelContext {
        ModelContext {
            name: "m".into(),
            threads: 3,
            parameters: parameters.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            ..ModelContext::default()
        }
    }

    #[test]
    fn a_model_without_parameters_gets_its_share_and_does_not_spin() {
        let settings = SessionSettings::read(&context(&[])).expect("no parameters");
        assert_eq!((settings.intra_op, settings.inter_op, settings.parallel), (3, 1, false));
        let entry = |key: &str| (key.to_owned(), "0".to_owned());
        assert_eq!(settings.entries, [entry(INTRA_SPINNING), entry(INTER_SPINNING)]);
        assert!(settings.arena && settings.memory_pattern);
    }

    #[test]
    fn parameters_are_taken() {
        let settings = SessionSettings::read(&context(&[
            ("intra_op_thread_count", "2"),
            ("execution_mode", "1"),
            ("enable_mem_arena", "0"),
            ("enable_mem_pattern", "false"),
            (ARENA_SHRINKAGE, "cpu:0"),
            (INTRA_SPINNING, "1"),
            ("session.use_device_allocator_for_initializers", "1"),
            ("somebody_elses", "x"),
        ]))
        .expect("valid parameters");
        assert_eq!((settings.intra_op, settings.inter_op, settings.parallel), (2, 2, true));
        assert!(!settings.arena && !settings.memory_pattern);
        assert_eq!(settings.run_entries, [(ARENA_SHRINKAGE.to_owned(), "cpu:0".to_owned())]);
        let entries: Vec<_> = settings.entries.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        assert_eq!(
            entries,
            [
                (INTRA_SPINNING, "1"),
                ("session.use_device_allocator_for_initializers", "1"),
                (INTER_SPINNING, "0")
            ]
        );
    }

    #[test]
    fn bad_values_name_the_key_the_value_and_what_is_allowed() {
        for (key, value, allowed) in [
            ("intra_op_thread_count", "many", "from 0 to 4096"),
            ("inter_op_thread_count", "-1", "from 0 to 4096"),
            ("intra_op_thread_count", "99999999999", "from 0 to 4096"),
            ("execution_mode", "2", "0 or 1"),
            ("enable_mem_arena", "", "0 or 1"),
        ] {
            let error = SessionSettings::read(&context(&[(key, value)])).expect_err(key);
            for part in [format!("'{key}' of model 'm'"), format!("'{value}'"), allowed.to_owned()] {
                assert!(error.message().contains(&part), "{error}");
            }
        }
    }

    #[test]
    fn graph_levels_are_triton_s() {
        let levels = [None, Some(-1), Some(0), Some(1), Some(2), Some(7)].map(graph_level);
        use GraphLevel::{All, Basic, Disabled, Extended};
        assert_eq!(levels, [All, Basic, All, Extended, Disabled, All]);
    }

    #[test]
    fn accelerators_are_known_or_refused() {
        let mut context = context(&[]);
        context.accelerators =
            vec![("openvino".to_owned(), vec![("device_type".to_owned(), "CPU".to_owned())])];
        let settings = SessionSettings::read(&context).expect("known");
        assert_eq!(settings.accelerators[0].provider, "OpenVINOExecutionProvider");
        context.accelerators = vec![("warp".to_owned(), Vec::new())];
        let error = SessionSettings::read(&context).expect_err("unknown");
        assert!(error.message().contains("unknown Execution Accelerator 'warp'"), "{error}");
    }

    #[test]
    fn global_pools_are_off_unless_asked_for() {
        let settings = |list: &[(&str, &str)]| {
            BackendSettings::new(list.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
        };
        assert_eq!(GlobalThreads::read(&settings(&[("intra_op_thread_count", "4")])), Ok(None));
        let on = settings(&[("enable-global-threadpool", "1"), ("intra_op_thread_count", "4")]);
        assert_eq!(GlobalThreads::read(&on), Ok(Some(GlobalThreads { intra_op: 4, inter_op: 0 })));
        let bad =
            GlobalThreads::read(&settings(&[("enable-global-threadpool", "yes")])).expect_err("no flag");
        assert!(bad.message().contains("enable-global-threadpool has the value 'yes'"), "{bad}");
    }
}
