//! `trireme serve`: load, listen, serve, stop.
//!
//! Ports are opened before models are loaded, so that a port in use is told at once, and connections are accepted
//! when the models are ready, as with Triton.

mod example;
mod stop;

use std::net::TcpListener;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow};
use tokio::runtime::Runtime;
use trireme_core::{LoadRow, Server, ServerOptions};
use trireme_frontend::listen::{ListenOptions, listen};
use trireme_frontend::shutdown::Shutdown;
use trireme_frontend::{grpc, http, metrics};

use crate::flags::Flags;
use crate::settings::{Endpoint, Settings};
use crate::{engines, logging, tables};

/// Network threads; engines need the other cores.
const MAX_NETWORK_THREADS: usize = 2;

/// Serves until a signal ends it.
///
/// # Errors
/// Flags that cannot be followed, a port in use, a repository that is not there.
pub(crate) fn run(flags: &Flags) -> Result<ExitCode> {
    let mut settings = Settings::of(flags)?;
    settings.server.log = Some(logging::start(&settings.log)?);
    for warning in &settings.warnings {
        tracing::warn!("{warning}");
    }
    for remark in &settings.without_effect {
        tracing::info!("{remark}");
    }
    let listeners = Listeners::open(&settings)?;
    let runtime = runtime()?;
    let signals = {
        let _inside = runtime.enter();
        stop::Signals::listen()?
    };
    let Some(server) = load(&runtime, &signals, &settings)? else {
        leave(Outcome::Stopped);
    };
    let rows = server.load_report();
    tell(&server, &settings, &rows);
    if settings.exit_on_error && rows.iter().any(|row| row.failed) {
        return Err(anyhow!(
            "creating server: Internal - failed to load all models; mend the models named above, or serve the others with \
             --exit-on-error=false"
        ));
    }
    let shutdown = Shutdown::new();
    let http_address = listeners.http.as_ref().and_then(|listener| listener.local_addr().ok());
    let outcome = runtime.block_on(async {
        serve(&server, listeners, &settings, &shutdown);
        if let Some(address) = http_address {
            example::tell(&server, address);
        }
        signals.wait().await;
        stop::stop(&server, &shutdown, settings.exit_timeout).await
    });
    leave(outcome);
}

/// How a server that was started ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Stopped,
    /// Not everything inside was answered in time.
    TimedOut,
}

/// Ends the process as it stands. An engine may still be inside a load or an execution, which nothing can call off:
/// waiting for it would hold the process, and the libraries' own clean-up under its feet would crash it.
fn leave(outcome: Outcome) -> ! {
    signal_hook::low_level::exit(match outcome {
        Outcome::Stopped => 0,
        Outcome::TimedOut => 1,
    })
}

fn runtime() -> Result<Runtime> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(cores.min(MAX_NETWORK_THREADS))
        .thread_name("trireme-net")
        .enable_all()
        .build()
        .context("cannot start the network threads")
}

/// Ports that are open and not served yet.
struct Listeners {
    http: Option<TcpListener>,
    grpc: Option<TcpListener>,
    metrics: Option<TcpListener>,
}

impl Listeners {
    fn open(settings: &Settings) -> Result<Self> {
        let open = |endpoint: &Endpoint, port_flag, address_flag| {
            let Endpoint { address, port, reuse_port } = endpoint;
            listen(&ListenOptions { address, port: *port, reuse_port: *reuse_port, port_flag, address_flag })
        };
        let http =
            settings.http.as_ref().map(|(endpoint, _)| open(endpoint, "--http-port", "--http-address"));
        let grpc =
            settings.grpc.as_ref().map(|(endpoint, _)| open(endpoint, "--grpc-port", "--grpc-address"));
        let metrics =
            settings.metrics.as_ref().map(|endpoint| open(endpoint, "--metrics-port", "--metrics-address"));
        Ok(Self { http: http.transpose()?, grpc: grpc.transpose()?, metrics: metrics.transpose()? })
    }
}

/// Loads the models on a thread of their own; `None` if a signal came before they were ready.
fn load(runtime: &Runtime, signals: &stop::Signals, settings: &Settings) -> Result<Option<Arc<Server>>> {
    let options: ServerOptions = settings.server.clone();
    let backends = engines::all(settings.onnxruntime_library.clone());
    let started = Instant::now();
    let loading = runtime.spawn_blocking(move || Server::start(options, backends));
    let loaded = runtime.block_on(async {
        tokio::select! {
            loaded = loading => Some(loaded),
            () = signals.wait() => None,
        }
    });
    match loaded {
        None => {
            tracing::info!("stopped while models were loading");
            Ok(None)
        }
        Some(joined) => {
            let server = joined.context("loading models was interrupted")?.map_err(|error| {
                anyhow!("creating server: {} - {}", error.code().as_str(), error.message())
            })?;
            tracing::debug!("models were loaded in {:?}", started.elapsed());
            Ok(Some(server))
        }
    }
}

/// The tables, and under it what to do about each model that failed.
fn tell(server: &Server, settings: &Settings, rows: &[LoadRow]) {
    let options = server.options();
    tracing::info!(target: logging::TABLE, "{}\n", tables::backends(server));
    tracing::info!(target: logging::TABLE, "{}\n", tables::models(rows));
    for row in rows {
        if let Some(advice) = &row.advice {
            let version = row.version.map(|version| format!(" version {version}")).unwrap_or_default();
            let model = &row.model;
            tracing::error!(target: logging::TABLE, "Model '{model}'{version} is not served:\n{advice}\n");
        }
    }
    if rows.is_empty() {
        tracing::warn!(target: logging::TABLE, "{}\n", no_models(options));
    }
    tracing::info!(target: logging::TABLE, "{}\n", tables::options(server, options, settings.exit_timeout.as_secs()));
    let budget = server.thread_budget();
    tracing::info!(
        "thread budget: {} cores; {} network threads; an instance of a model with N instances uses {}/N threads, at \
         least 1, and none spins while idle",
        budget.cores(),
        budget.cores().min(MAX_NETWORK_THREADS),
        budget.cores()
    );
}

fn no_models(options: &ServerOptions) -> String {
    let places: Vec<String> =
        options.repositories.iter().map(|path| format!("'{}'", path.display())).collect();
    let places = places.join(", ");
    if options.control_mode == trireme_core::ModelControlMode::Explicit {
        return format!(
            "No model is loaded: in explicit mode only models named with --load-model are loaded at start. Name one, or \
             load one with POST /v2/repository/models/NAME/load. Looked in {places}."
        );
    }
    format!(
        "No model was found in {places}. A repository holds one directory a model, and in it one directory a version: \
         REPOSITORY/my_model/1/model.onnx. Give the directory that holds my_model."
    )
}

/// Starts to accept on every open port.
fn serve(server: &Arc<Server>, listeners: Listeners, settings: &Settings, shutdown: &Shutdown) {
    let told = |result: trireme_types::Result<()>| {
        if let Err(error) = result {
            tracing::error!("a port is no longer served: {error}");
        }
    };
    if let (Some(listener), Some((_, options))) = (listeners.grpc, &settings.grpc) {
        tracing::info!("Started GRPCInferenceService at {}", place(&listener));
        let (server, options, tracker) = (Arc::clone(server), options.clone(), shutdown.clone());
        shutdown.spawn(async move { told(grpc::serve_grpc(listener, server, options, tracker).await) });
    }
    if let (Some(listener), Some((_, options))) = (listeners.http, &settings.http) {
        tracing::info!("Started HTTPService at {}", place(&listener));
        let (server, options, tracker) = (Arc::clone(server), options.clone(), shutdown.clone());
        shutdown.spawn(async move { told(http::serve_http(listener, server, options, tracker).await) });
    }
    if let Some(listener) = listeners.metrics {
        tracing::info!("Started Metrics Service at {}", place(&listener));
        let (server, tracker) = (Arc::clone(server), shutdown.clone());
        shutdown.spawn(async move { told(metrics::serve_metrics(listener, server, tracker).await) });
    }
}

fn place(listener: &TcpListener) -> String {
    listener.local_addr().map_or_else(|_| "an unknown address".to_owned(), |address| address.to_string())
}
