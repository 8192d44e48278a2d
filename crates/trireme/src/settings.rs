//! What the flags mean: the settings of a server, checked against one another.
//!
//! Nothing that was typed is ignored in silence: a value that cannot be read, a flag whose feature is not built and
//! flags that contradict one another are refused by name; a flag that changes nothing here is reported as such.

mod cache;
mod instances;
mod latencies;
mod shared_memory;
mod value;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use trireme_core::{BackendSetting, LogFormat, LogSettings, ModelControlMode, ServerOptions, SingleModel};
use trireme_frontend::forward::HeaderForward;
use trireme_frontend::grpc::{CompressionLevel, GrpcOptions};
use trireme_frontend::http::HttpOptions;
use trireme_frontend::restricted::{RestrictionFlag, Restrictions};

pub(crate) use self::cache::cache_settings;
use self::value::{boolean, number, port};
use crate::flags::{Fate, Flags};

/// Where a service listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) address: String,
    pub(crate) port: u16,
    pub(crate) reuse_port: bool,
}

/// Everything that `serve` needs to know.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) server: ServerOptions,
    pub(crate) http: Option<(Endpoint, HttpOptions)>,
    pub(crate) grpc: Option<(Endpoint, GrpcOptions)>,
    pub(crate) metrics: Option<Endpoint>,
    pub(crate) log: LogSettings,
    pub(crate) exit_timeout: Duration,
    pub(crate) exit_on_error: bool,
    pub(crate) onnxruntime_library: Option<PathBuf>,
    /// Flags that were given and change nothing, with the reason.
    pub(crate) without_effect: Vec<String>,
    /// What works but should be written differently.
    pub(crate) warnings: Vec<String>,
}

impl Settings {
    /// Reads the flags.
    ///
    /// # Errors
    /// The first flag, or pair of flags, that cannot be followed, by name.
    pub(crate) fn of(flags: &Flags) -> Result<Self> {
        let without_effect = refuse_later(flags)?;
        let mut warnings = Vec::from_iter(vertex_ai(std::env::var("AIP_MODE").ok().as_deref()));
        let http = http(flags)?;
        let grpc = grpc(flags)?;
        let metrics = metrics(flags, http.as_ref().map(|(endpoint, _)| endpoint))?;
        distinct_ports(&[
            ("HTTP", "--http-port", http.as_ref().map(|(endpoint, _)| endpoint)),
            ("GRPC", "--grpc-port", grpc.as_ref().map(|(endpoint, _)| endpoint)),
            ("metrics", "--metrics-port", metrics.as_ref()),
        ])?;
        if http.is_none() && grpc.is_none() {
            warnings.push(
                "no client can ask this server: --allow-http and --allow-grpc are both false".to_owned(),
            );
        }
        Ok(Self {
            server: server(flags, &mut warnings)?,
            http,
            grpc,
            metrics,
            log: log(flags)?,
            exit_timeout: Duration::from_secs(number(flags, "exit-timeout-secs", 30, 0, 1 << 31)?),
            exit_on_error: boolean(flags, "exit-on-error", true)?,
            onnxruntime_library: flags.last("onnxruntime-library").map(PathBuf::from),
            without_effect,
            warnings,
        })
    }
}

/// Values that switch off what is not there, besides the defaults.
const OFF: &[(&str, &str)] = &[("trace-config", "level=OFF")];

/// What to say where the environment asks for the Vertex AI endpoint, as Triton lets it.
fn vertex_ai(aip_mode: Option<&str>) -> Option<String> {
    (aip_mode == Some("PREDICTION")).then(|| {
        "AIP_MODE=PREDICTION asks for the Vertex AI endpoint, which is not available yet in this version of trireme; HTTP \
         and gRPC are served as without it"
            .to_owned()
    })
}

/// Refuses flags of features that are not built, unless they say what would happen anyway. Returns the remarks on
/// those that are accepted without effect.
fn refuse_later(flags: &Flags) -> Result<Vec<String>> {
    let mut remarks = Vec::new();
    for (flag, values) in flags.given() {
        match flag.fate {
            Fate::Used => {}
            Fate::NoEffect(why) => {
                remarks.push(format!("--{} is accepted and has no effect: {why}", flag.name));
            }
            Fate::Later(feature) => {
                let harmless = |value: &String| {
                    OFF.contains(&(flag.name, value.as_str()))
                        || value.eq_ignore_ascii_case(flag.default)
                        || (flag.default == "false"
                            && matches!(value.to_ascii_lowercase().as_str(), "off" | "0"))
                };
                if let Some(value) = values.iter().find(|value| !harmless(value)) {
                    bail!(
                        "--{}={value} cannot be followed: {feature} is not available yet in this version of trireme; \
                         leave the flag out",
                        flag.name
                    );
                }
            }
        }
    }
    Ok(remarks)
}

fn endpoint(flags: &Flags, service: &str, default_port: u16) -> Result<Endpoint> {
    let reuse = format!("reuse-{service}-port");
    Ok(Endpoint {
        address: flags.last(&format!("{service}-address")).unwrap_or("0.0.0.0").to_owned(),
        port: port(flags, &format!("{service}-port"), default_port)?,
        reuse_port: if service == "metrics" { false } else { boolean(flags, &reuse, false)? },
    })
}

fn header_forward(flags: &Flags, name: &str) -> Result<HeaderForward> {
    Ok(HeaderForward::parse(&format!("--{name}"), flags.last(name).unwrap_or_default())?)
}

fn http(flags: &Flags) -> Result<Option<(Endpoint, HttpOptions)>> {
    if !boolean(flags, "allow-http", true)? {
        return Ok(None);
    }
    let max_input_size = number(flags, "http-max-input-size", 64 << 20, 1, i64::MAX)?;
    let options = HttpOptions {
        max_input_size: usize::try_from(max_input_size)?,
        header_forward: header_forward(flags, "http-header-forward-pattern")?,
        restricted: Restrictions::parse(&RestrictionFlag::HTTP, flags.all("http-restricted-api"))?,
    };
    Ok(Some((endpoint(flags, "http", 8000)?, options)))
}

fn grpc(flags: &Flags) -> Result<Option<(Endpoint, GrpcOptions)>> {
    if !boolean(flags, "allow-grpc", true)? {
        return Ok(None);
    }
    let milliseconds = |name: &str, default: i64| -> Result<Duration> {
        Ok(Duration::from_millis(number(flags, name, default, 0, i64::MAX)?))
    };
    let given = |name: &str| -> Result<Option<Duration>> {
        if flags.last(name).is_none() { Ok(None) } else { milliseconds(name, 0).map(Some) }
    };
    let compression_level = match flags.last("grpc-infer-response-compression-level").unwrap_or("none") {
        "none" => CompressionLevel::None,
        "low" => CompressionLevel::Low,
        "medium" => CompressionLevel::Medium,
        "high" => CompressionLevel::High,
        other => {
            bail!("--grpc-infer-response-compression-level expects none, low, medium or high, got '{other}'")
        }
    };
    let options = GrpcOptions {
        compression_level,
        keepalive_time: Some(milliseconds("grpc-keepalive-time", 7_200_000)?),
        keepalive_timeout: milliseconds("grpc-keepalive-timeout", 20_000)?,
        max_connection_age: given("grpc-max-connection-age")?,
        max_connection_age_grace: given("grpc-max-connection-age-grace")?,
        restricted: Restrictions::parse(&RestrictionFlag::GRPC, flags.all("grpc-restricted-protocol"))?,
        header_forward: header_forward(flags, "grpc-header-forward-pattern")?,
        max_response_pool_size: usize::try_from(number(
            flags,
            "grpc-max-response-pool-size",
            i32::MAX.into(),
            1,
            i32::MAX.into(),
        )?)?,
    };
    Ok(Some((endpoint(flags, "grpc", 8001)?, options)))
}

fn metrics(flags: &Flags, http: Option<&Endpoint>) -> Result<Option<Endpoint>> {
    if !boolean(flags, "allow-metrics", true)? {
        return Ok(None);
    }
    let mut metrics = endpoint(flags, "metrics", 8002)?;
    if let (None, Some(http)) = (flags.last("metrics-address"), http) {
        metrics.address.clone_from(&http.address);
    }
    Ok(Some(metrics))
}

fn distinct_ports(endpoints: &[(&str, &str, Option<&Endpoint>)]) -> Result<()> {
    for (i, (name, flag, endpoint)) in endpoints.iter().enumerate() {
        for (other_name, other_flag, other) in &endpoints[..i] {
            let (Some(endpoint), Some(other)) = (endpoint, other) else { continue };
            if endpoint.port != 0 && endpoint.port == other.port && endpoint.address == other.address {
                bail!(
                    "the {other_name} service and the {name} service both want {}:{}; choose another port with \
                     {other_flag} or {flag}",
                    endpoint.address,
                    endpoint.port
                );
            }
        }
    }
    Ok(())
}

fn log(flags: &Flags) -> Result<LogSettings> {
    let verbose = match flags.last("log-verbose").map(str::to_ascii_lowercase).as_deref() {
        Some("true" | "on") => 1,
        Some("false" | "off") => 0,
        _ => number(flags, "log-verbose", 0, 0, i64::from(u32::MAX))?,
    };
    let format = flags.last("log-format").unwrap_or("default");
    let Some(format) = LogFormat::parse(format) else {
        bail!("--log-format expects default or ISO8601, got '{format}'")
    };
    Ok(LogSettings {
        verbose_level: u32::try_from(verbose)?,
        info: boolean(flags, "log-info", true)?,
        warning: boolean(flags, "log-warning", true)?,
        error: boolean(flags, "log-error", true)?,
        format,
        file: flags.last("log-file").unwrap_or_default().to_owned(),
    })
}

fn server(flags: &Flags, warnings: &mut Vec<String>) -> Result<ServerOptions> {
    let control_mode = match flags.last("model-control-mode").map(str::to_ascii_lowercase).as_deref() {
        None | Some("none") => ModelControlMode::None,
        Some("explicit") => ModelControlMode::Explicit,
        Some("poll") => ModelControlMode::Poll,
        Some(other) => bail!("--model-control-mode expects none, poll or explicit, got '{other}'"),
    };
    let load_models = flags.all("load-model").to_vec();
    if !load_models.is_empty() && control_mode != ModelControlMode::Explicit {
        bail!(
            "--load-model is only for --model-control-mode=explicit; add that flag, or leave --load-model out"
        );
    }
    if load_models.len() > 1 && load_models.iter().any(|name| name == "*") {
        bail!("--load-model=* loads every model and cannot be combined with other --load-model flags");
    }
    let (repositories, single_models) = places(flags)?;
    let strict_old = boolean(flags, "strict-model-config", false)?;
    let strict_new = flags.last("disable-auto-complete-config").is_some();
    if flags.last("strict-model-config").is_some() {
        let meant = if strict_old { "--disable-auto-complete-config" } else { "leaving it out" };
        warnings.push(format!("--strict-model-config is deprecated; {meant} means the same"));
    }
    let model_config_name =
        flags.last("model-config-name").filter(|name| !name.is_empty()).map(str::to_owned);
    if model_config_name.as_ref().is_some_and(|name| name.chars().any(char::is_whitespace)) {
        bail!("--model-config-name expects a name without blanks");
    }
    let count = |name: &str, default: i64, least: i64| -> Result<usize> {
        Ok(usize::try_from(number(flags, name, default, least, i32::MAX.into())?)?)
    };
    let kept = latencies::kept(flags, boolean(flags, "allow-metrics", true)?)?;
    Ok(ServerOptions {
        id: flags.last("id").unwrap_or("triton").to_owned(),
        repositories,
        single_models,
        control_mode,
        poll_interval: Duration::from_secs(number(flags, "repository-poll-secs", 15, 1, 86_400)?),
        load_models,
        model_config_name,
        strict_config: strict_old || strict_new,
        strict_readiness: boolean(flags, "strict-readiness", true)?,
        load_threads: count("model-load-thread-count", 4, 1)?,
        load_retries: count("model-load-retry-count", 0, 0)?,
        backend_settings: backend_settings(flags)?,
        cache: cache::cache(flags, warnings)?,
        shared_memory: shared_memory::shared_memory(flags)?,
        counter_latencies: kept.counters,
        latencies: kept.latencies,
        rate_limit: instances::rate_limit(flags, warnings)?,
        host_policies: instances::host_policies(flags)?,
        allow_cpu_metrics: boolean(flags, "allow-cpu-metrics", true)?,
        cpu_fallback: boolean(flags, "cpu-fallback", false)?,
        // Known once the log runs.
        log: None,
        cores: flags.last("core-count").map(|_| count("core-count", 1, 1)).transpose()?,
    })
}

/// Repositories and single model files, from `--model-repository` and from what is no flag.
fn places(flags: &Flags) -> Result<(Vec<PathBuf>, Vec<SingleModel>)> {
    let mut repositories: Vec<PathBuf> = Vec::new();
    for path in flags.all("model-repository") {
        if let Some((scheme, _)) = path.split_once("://") {
            bail!(
                "--model-repository={path} cannot be followed: repositories on {scheme}:// are not available yet in this \
                 version of trireme; copy the repository to a local directory"
            );
        }
        repositories.push(path.into());
    }
    let mut models: Vec<SingleModel> = Vec::new();
    for text in &flags.models {
        let (name, path) = match text.split_once('=') {
            Some((name, path)) if !name.contains('/') => (Some(name), PathBuf::from(path)),
            _ => (None, PathBuf::from(text)),
        };
        if !path.exists() {
            bail!(
                "there is no file or directory '{}'; expected a model file, NAME=FILE or a model repository",
                path.display()
            );
        }
        let is_repository = path.is_dir() && name.is_none() && !path.join("model.onnx").exists();
        if is_repository {
            repositories.push(path);
            continue;
        }
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let Some(name) = name.map(str::to_owned).or(stem).filter(|name| !name.is_empty()) else {
            bail!("'{text}' gives the model no name; write NAME={}", path.display());
        };
        if models.iter().any(|model| model.name == name) {
            bail!("two models would be called '{name}'; give one of them another name with NAME=FILE");
        }
        models.push(SingleModel { name, path });
    }
    if repositories.is_empty() && models.is_empty() {
        bail!(
            "--model-repository must be specified: a directory with one folder a model; or name a model file, as in \
             `trireme serve model.onnx`"
        );
    }
    Ok((repositories, models))
}

fn backend_settings(flags: &Flags) -> Result<Vec<BackendSetting>> {
    flags.all("backend-config").iter().map(|text| backend_setting(text)).collect()
}

/// One `--backend-config`.
///
/// # Errors
/// The text is not `[BACKEND,]KEY=VALUE`, or the value cannot be one of the key.
pub(crate) fn backend_setting(text: &str) -> Result<BackendSetting> {
    let (backend, pair) = match text.split_once(',') {
        Some((backend, pair)) => (Some(backend.to_owned()), pair),
        None => (None, text),
    };
    let Some((key, value)) = pair.split_once('=').filter(|(key, _)| !key.is_empty()) else {
        bail!("--backend-config expects [BACKEND,]KEY=VALUE, got '{text}'");
    };
    if key == "default-max-batch-size" && value.parse::<BatchSize>().is_err() {
        bail!("--backend-config {key} expects a whole number of at least 0, got '{value}'");
    }
    Ok(BackendSetting { backend, key: key.to_owned(), value: value.to_owned() })
}

/// A number that fits `max_batch_size`.
struct BatchSize;

impl std::str::FromStr for BatchSize {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        text.parse::<i32>().ok().filter(|number| *number >= 0).map(|_| Self).ok_or(())
    }
}

#[cfg(test)]
mod tests;
