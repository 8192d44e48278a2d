//! The RPCs around inference: health, metadata, configuration, statistics, repository, and those of features that
//! are not built yet, which say so.

use std::sync::Arc;

use trireme_core::{
    BatchStatistics, DurationCount, InferStatistics, LoadOverrides, ModelStatistics, ModelVersion,
    ResponseStatistics, Server, parse_version,
};
use trireme_proto::inference as pb;
use trireme_proto::inference::model_metadata_response::TensorMetadata;
use trireme_proto::inference::model_repository_parameter::ParameterChoice;
use trireme_types::{Error, Result, TensorSpec};

pub(super) fn model_ready(server: &Server, request: pb::ModelReadyRequest) -> Result<pb::ModelReadyResponse> {
    let ready = server.model_is_ready(&request.name, parse_version(&request.version)?)?;
    Ok(pb::ModelReadyResponse { ready })
}

pub(super) fn server_metadata(server: &Server) -> pb::ServerMetadataResponse {
    let metadata = server.metadata();
    pb::ServerMetadataResponse {
        name: metadata.name.clone(),
        version: metadata.version.clone(),
        extensions: metadata.extensions.iter().map(|&extension| extension.to_owned()).collect(),
    }
}

pub(super) fn model_metadata(
    server: &Server,
    request: pb::ModelMetadataRequest,
) -> Result<pb::ModelMetadataResponse> {
    let version = parse_version(&request.version)?;
    let model = server.model(&request.name, version)?;
    let versions = match version {
        Some(version) => vec![version],
        None => server.ready_versions(&request.name),
    };
    let tensors = |specs: &[TensorSpec]| specs.iter().map(|spec| tensor_metadata(&model, spec)).collect();
    Ok(pb::ModelMetadataResponse {
        name: model.name().to_string(),
        versions: versions.iter().map(ToString::to_string).collect(),
        platform: model.platform().to_owned(),
        inputs: tensors(model.inputs()),
        outputs: tensors(model.outputs()),
    })
}

fn tensor_metadata(model: &ModelVersion, spec: &TensorSpec) -> TensorMetadata {
    let batch = (model.max_batch_size() > 0 && !spec.shape_tensor).then_some(-1);
    TensorMetadata {
        name: spec.name.to_string(),
        datatype: spec.data_type.wire_name().to_owned(),
        shape: batch.into_iter().chain(spec.dims.iter().copied()).collect(),
    }
}

pub(super) fn model_config(
    server: &Server,
    request: pb::ModelConfigRequest,
) -> Result<pb::ModelConfigResponse> {
    let model = server.model(&request.name, parse_version(&request.version)?)?;
    Ok(pb::ModelConfigResponse { config: Some(model.config().clone()) })
}

pub(super) fn model_statistics(
    server: &Server,
    request: pb::ModelStatisticsRequest,
) -> Result<pb::ModelStatisticsResponse> {
    let statistics = server.statistics(&request.name, parse_version(&request.version)?)?;
    Ok(pb::ModelStatisticsResponse { model_stats: statistics.into_iter().map(statistics_message).collect() })
}

fn statistics_message(statistics: ModelStatistics) -> pb::ModelStatistics {
    pb::ModelStatistics {
        name: statistics.name,
        version: statistics.version.to_string(),
        last_inference: statistics.last_inference_ms,
        inference_count: statistics.inference_count,
        execution_count: statistics.execution_count,
        inference_stats: Some(infer_statistics(&statistics.inference_stats)),
        batch_stats: statistics.batch_stats.iter().map(batch_statistics).collect(),
        memory_usage: statistics
            .memory_usage
            .into_iter()
            .map(|usage| pb::MemoryUsage {
                r#type: usage.kind.to_owned(),
                id: usage.id,
                byte_size: usage.byte_size,
            })
            .collect(),
        response_stats: statistics
            .response_stats
            .iter()
            .map(|(index, response)| (index.clone(), response_statistics(response)))
            .collect(),
    }
}

#[expect(clippy::unnecessary_wraps, reason = "every field of these messages is a message, hence optional")]
fn duration(duration: DurationCount) -> Option<pb::StatisticDuration> {
    Some(pb::StatisticDuration { count: duration.count, ns: duration.ns })
}

fn infer_statistics(statistics: &InferStatistics) -> pb::InferStatistics {
    pb::InferStatistics {
        success: duration(statistics.success),
        fail: duration(statistics.fail),
        queue: duration(statistics.queue),
        compute_input: duration(statistics.compute_input),
        compute_infer: duration(statistics.compute_infer),
        compute_output: duration(statistics.compute_output),
        cache_hit: duration(statistics.cache_hit),
        cache_miss: duration(statistics.cache_miss),
    }
}

fn batch_statistics(statistics: &BatchStatistics) -> pb::InferBatchStatistics {
    pb::InferBatchStatistics {
        batch_size: statistics.batch_size,
        compute_input: duration(statistics.compute_input),
        compute_infer: duration(statistics.compute_infer),
        compute_output: duration(statistics.compute_output),
    }
}

fn response_statistics(statistics: &ResponseStatistics) -> pb::InferResponseStatistics {
    pb::InferResponseStatistics {
        compute_infer: duration(statistics.compute_infer),
        compute_output: duration(statistics.compute_output),
        success: duration(statistics.success),
        fail: duration(statistics.fail),
        empty_response: duration(statistics.empty_response),
        cancel: duration(statistics.cancel),
    }
}

fn check_repository_name(name: &str) -> Result<()> {
    if name.is_empty() {
        Ok(())
    } else {
        Err(Error::unsupported("'repository_name' specification is not supported"))
    }
}

pub(super) fn repository_index(
    server: &Server,
    request: pb::RepositoryIndexRequest,
) -> Result<pb::RepositoryIndexResponse> {
    check_repository_name(&request.repository_name)?;
    let models = server
        .repository_index(request.ready)
        .into_iter()
        .map(|entry| pb::repository_index_response::ModelIndex {
            name: entry.name,
            version: entry.version.map(|version| version.to_string()).unwrap_or_default(),
            state: entry.state.map(|state| state.as_str().to_owned()).unwrap_or_default(),
            reason: entry.reason,
        })
        .collect();
    Ok(pb::RepositoryIndexResponse { models })
}

/// Blocks until the model is loaded.
pub(super) fn load(
    server: &Arc<Server>,
    request: pb::RepositoryModelLoadRequest,
) -> Result<pb::RepositoryModelLoadResponse> {
    check_repository_name(&request.repository_name)?;
    let mut overrides = LoadOverrides::default();
    for (name, parameter) in request.parameters {
        match (name.as_str(), parameter.parameter_choice) {
            ("config", Some(ParameterChoice::StringParam(config))) => overrides.config = Some(config),
            ("config", _) => return Err(wrong_load_parameter(&name, "string_param")),
            (file, choice) if file.starts_with("file:") => {
                let Some(ParameterChoice::BytesParam(content)) = choice else {
                    return Err(wrong_load_parameter(&name, "bytes_param"));
                };
                let path = file.trim_start_matches("file:").to_owned();
                overrides.files.push((path, content));
            }
            _ => return Err(Error::invalid_arg(format!("unrecognized load parameter '{name}'."))),
        }
    }
    server.load_model(&request.model_name, overrides)?;
    Ok(pb::RepositoryModelLoadResponse {})
}

fn wrong_load_parameter(name: &str, kind: &str) -> Error {
    Error::invalid_arg(format!("invalid value type for load parameter '{name}', expected {kind}."))
}

/// Blocks until the model is out of service.
pub(super) fn unload(
    server: &Arc<Server>,
    request: pb::RepositoryModelUnloadRequest,
) -> Result<pb::RepositoryModelUnloadResponse> {
    check_repository_name(&request.repository_name)?;
    let mut dependents = false;
    if let Some(parameter) = request.parameters.get("unload_dependents") {
        let Some(ParameterChoice::BoolParam(value)) = parameter.parameter_choice else {
            return Err(Error::invalid_arg(
                "invalid value type for 'unload_dependents' parameter, expected bool_param.",
            ));
        };
        dependents = value;
    }
    server.unload_model(&request.model_name, dependents)?;
    Ok(pb::RepositoryModelUnloadResponse {})
}

/// Answer of an RPC whose feature is not built yet.
pub(super) fn not_available(feature: &str) -> Error {
    Error::unsupported(format!("{feature} is not available in this version of Trireme yet"))
}
