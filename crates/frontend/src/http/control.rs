//! Everything but inference: health, metadata, configuration, statistics, the repository.

use std::sync::Arc;

use bytes::Bytes;
use http::StatusCode;
use trireme_core::{ModelStatistics, Server, parse_version};
use trireme_types::{Error, Result, TensorSpec};

use super::blocking;
use super::load_request::{read_index, read_load, read_unload};
use super::reply::{Refusal, Reply, empty_json, health, json_reply};
use crate::json::Writer;

/// What live and ready say while the server stops.
fn exiting(server: &Server) -> Result<(), Refusal> {
    if server.is_stopping() { Err(Refusal::from(Error::unavailable("Server exiting"))) } else { Ok(()) }
}

pub(super) fn live(server: &Server) -> Result<Reply, Refusal> {
    exiting(server)?;
    Ok(health(if server.is_live() { StatusCode::OK } else { StatusCode::BAD_REQUEST }))
}

pub(super) fn ready(server: &Server) -> Result<Reply, Refusal> {
    exiting(server)?;
    Ok(health(if server.is_ready() { StatusCode::OK } else { StatusCode::BAD_REQUEST }))
}

pub(super) fn server_metadata(server: &Server) -> Reply {
    let metadata = server.metadata();
    let mut json = Writer::with_capacity(512);
    json.raw(b"{\"name\":");
    json.string(&metadata.name);
    json.raw(b",\"version\":");
    json.string(&metadata.version);
    json.raw(b",\"extensions\":[");
    for extension in metadata.extensions {
        json.string(extension);
        json.raw(b",");
    }
    json.drop_comma();
    json.raw(b"]}");
    json_reply(json.into_bytes())
}

/// A model that is unknown or not ready is "not ready", as in Triton.
pub(super) fn model_ready(server: &Server, name: &str, version: &str) -> Result<Reply, Refusal> {
    match server.model_is_ready(name, parse_version(version)?) {
        Ok(true) => Ok(health(StatusCode::OK)),
        Ok(false) | Err(_) => Err(Refusal::from(Error::invalid_arg("Model version not ready"))),
    }
}

pub(super) fn model_metadata(server: &Server, name: &str, version: &str) -> Result<Reply, Refusal> {
    let model = server.model(name, parse_version(version)?)?;
    let mut json = Writer::with_capacity(1024);
    json.raw(b"{\"name\":");
    json.string(model.name().as_bytes());
    json.raw(b",\"versions\":[");
    if version.is_empty() {
        for ready in server.ready_versions(name) {
            json.raw(b"\"");
            json.integer(ready);
            json.raw(b"\",");
        }
        json.drop_comma();
    } else {
        json.string(model.version_str());
    }
    json.raw(b"],\"platform\":");
    json.string(model.platform());
    let batching = model.max_batch_size() > 0;
    json.raw(b",\"inputs\":[");
    tensors(&mut json, model.inputs(), batching);
    json.raw(b"],\"outputs\":[");
    tensors(&mut json, model.outputs(), batching);
    json.raw(b"]}");
    Ok(json_reply(json.into_bytes()))
}

fn tensors(json: &mut Writer, specs: &[TensorSpec], batching: bool) {
    for spec in specs {
        json.raw(b"{\"name\":");
        json.string(spec.name.as_bytes());
        json.raw(b",\"datatype\":\"");
        json.raw(spec.data_type.wire_name());
        json.raw(b"\",\"shape\":[");
        if batching {
            json.raw(b"-1,");
        }
        for dim in &*spec.dims {
            json.integer(*dim);
            json.raw(b",");
        }
        json.drop_comma();
        json.raw(b"]},");
    }
    json.drop_comma();
}

pub(super) fn model_config(server: &Server, name: &str, version: &str) -> Result<Reply, Refusal> {
    let model = server.model(name, parse_version(version)?)?;
    Ok(json_reply(model.config_json().clone()))
}

/// Statistics of one version, of all versions of a model, or of all models (the empty name).
pub(super) fn statistics(server: &Server, name: &str, version: &str) -> Result<Reply, Refusal> {
    let statistics = server.statistics(name, parse_version(version)?)?;
    let mut json = Writer::with_capacity(32 + 768 * statistics.len());
    json.raw(b"{\"model_stats\":[");
    for model in &statistics {
        model_statistics(&mut json, model);
        json.raw(b",");
    }
    json.drop_comma();
    json.raw(b"]}");
    Ok(json_reply(json.into_bytes()))
}

fn model_statistics(json: &mut Writer, model: &ModelStatistics) {
    json.raw(b"{\"name\":");
    json.string(&model.name);
    json.raw(b",\"version\":\"");
    json.integer(model.version);
    json.raw(b"\",\"last_inference\":");
    json.integer(model.last_inference_ms);
    json.raw(b",\"inference_count\":");
    json.integer(model.inference_count);
    json.raw(b",\"execution_count\":");
    json.integer(model.execution_count);
    let infer = &model.inference_stats;
    json.raw(b",\"inference_stats\":{");
    durations(
        json,
        &[
            ("success", infer.success),
            ("fail", infer.fail),
            ("queue", infer.queue),
            ("compute_input", infer.compute_input),
            ("compute_infer", infer.compute_infer),
            ("compute_output", infer.compute_output),
            ("cache_hit", infer.cache_hit),
            ("cache_miss", infer.cache_miss),
        ],
    );
    json.raw(b"},\"response_stats\":{");
    for (index, response) in &model.response_stats {
        json.string(index);
        json.raw(b":{");
        durations(
            json,
            &[
                ("compute_infer", response.compute_infer),
                ("compute_output", response.compute_output),
                ("success", response.success),
                ("fail", response.fail),
                ("empty_response", response.empty_response),
                ("cancel", response.cancel),
            ],
        );
        json.raw(b"},");
    }
    json.drop_comma();
    json.raw(b"},\"batch_stats\":[");
    for batch in &model.batch_stats {
        json.raw(b"{\"batch_size\":");
        json.integer(batch.batch_size);
        json.raw(b",");
        durations(
            json,
            &[
                ("compute_input", batch.compute_input),
                ("compute_infer", batch.compute_infer),
                ("compute_output", batch.compute_output),
            ],
        );
        json.raw(b"},");
    }
    json.drop_comma();
    json.raw(b"],\"memory_usage\":[");
    for usage in &model.memory_usage {
        json.raw(b"{\"type\":");
        json.string(usage.kind);
        json.raw(b",\"id\":");
        json.integer(usage.id);
        json.raw(b",\"byte_size\":");
        json.integer(usage.byte_size);
        json.raw(b"},");
    }
    json.drop_comma();
    json.raw(b"]}");
}

fn durations(json: &mut Writer, named: &[(&str, trireme_core::DurationCount)]) {
    for (name, duration) in named {
        json.string(name);
        json.raw(b":{\"count\":");
        json.integer(duration.count);
        json.raw(b",\"ns\":");
        json.integer(duration.ns);
        json.raw(b"},");
    }
    json.drop_comma();
}

/// Reads the repositories, which takes a while.
pub(super) async fn index(server: Arc<Server>, body: Bytes) -> Result<Reply, Refusal> {
    let ready_only = read_index(&body)?;
    let entries = blocking(move || server.repository_index(ready_only)).await?;
    let mut json = Writer::with_capacity(16 + 80 * entries.len());
    json.raw(b"[");
    for entry in &entries {
        json.raw(b"{\"name\":");
        json.string(&entry.name);
        if let Some(version) = entry.version {
            json.raw(b",\"version\":\"");
            json.integer(version);
            json.raw(b"\"");
        }
        if let Some(state) = entry.state {
            json.raw(b",\"state\":");
            json.string(state.as_str());
        }
        if !entry.reason.is_empty() {
            json.raw(b",\"reason\":");
            json.string(&entry.reason);
        }
        json.raw(b"},");
    }
    json.drop_comma();
    json.raw(b"]");
    Ok(json_reply(json.into_bytes()))
}

pub(super) async fn load(server: Arc<Server>, name: String, body: Bytes) -> Result<Reply, Refusal> {
    change(move || server.load_model(&name, read_load(&body)?)).await
}

pub(super) async fn unload(server: Arc<Server>, name: String, body: Bytes) -> Result<Reply, Refusal> {
    change(move || server.unload_model(&name, read_unload(&body)?)).await
}

/// Changes what is served, which takes its time and goes on when the client stops waiting.
async fn change(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<Reply, Refusal> {
    blocking(work).await??;
    Ok(empty_json())
}
