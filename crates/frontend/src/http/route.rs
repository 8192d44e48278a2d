//! Which route a path is.
//!
//! The rules are Triton's: a path matches as a whole, `/v2/` and doubled slashes match nothing, versions are digits,
//! `/v2/models/stats` is the statistics of all models and so hides the metadata of a model named `stats`. Unlike
//! Triton, names are percent-decoded, once, so that every folder name can be asked for.

use std::borrow::Cow;

use http::Method;
use percent_encoding::percent_decode_str;
use trireme_core::MemoryKind;
use trireme_types::{Error, Result};

use crate::restricted::Category;

/// What a path asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Route<'a> {
    Live,
    Ready,
    ServerMetadata,
    AllStatistics,
    Model {
        name: Cow<'a, str>,
        /// Empty if the path has none.
        version: &'a str,
        action: ModelAction,
    },
    Index,
    Load(Cow<'a, str>),
    Unload(Cow<'a, str>),
    /// Load and unload with a repository name, which Triton has not either.
    NamedRepository,
    SharedMemory {
        kind: MemoryKind,
        region: Option<Cow<'a, str>>,
        action: MemoryAction,
    },
    TraceSetting,
    Logging,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ModelAction {
    Metadata,
    Ready,
    Config,
    Statistics,
    Infer,
    Generate,
    GenerateStream,
    TraceSetting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryAction {
    Status,
    Register,
    Unregister,
}

impl Route<'_> {
    /// Whether the route takes requests of that method.
    pub(crate) fn allows(&self, method: &Method) -> bool {
        let (get, post) = (*method == Method::GET, *method == Method::POST);
        match self {
            Self::Live | Self::Ready | Self::ServerMetadata | Self::AllStatistics => get,
            Self::Model { action, .. } => match action {
                ModelAction::Metadata
                | ModelAction::Ready
                | ModelAction::Config
                | ModelAction::Statistics => get,
                ModelAction::Infer | ModelAction::Generate | ModelAction::GenerateStream => post,
                ModelAction::TraceSetting => get || post,
            },
            Self::Index | Self::Load(_) | Self::Unload(_) | Self::NamedRepository => post,
            Self::SharedMemory { action: MemoryAction::Status, .. } => get,
            Self::SharedMemory { .. } => post,
            Self::TraceSetting | Self::Logging => get || post,
        }
    }

    /// The group of routes that `--http-restricted-api` may close.
    pub(crate) fn category(&self) -> Category {
        match self {
            Self::Live | Self::Ready => Category::Health,
            Self::ServerMetadata => Category::Metadata,
            Self::AllStatistics => Category::Statistics,
            Self::Model { action, .. } => match action {
                ModelAction::Metadata => Category::Metadata,
                ModelAction::Ready => Category::Health,
                ModelAction::Config => Category::ModelConfig,
                ModelAction::Statistics => Category::Statistics,
                ModelAction::Infer | ModelAction::Generate | ModelAction::GenerateStream => {
                    Category::Inference
                }
                ModelAction::TraceSetting => Category::Trace,
            },
            Self::Index | Self::Load(_) | Self::Unload(_) | Self::NamedRepository => {
                Category::ModelRepository
            }
            Self::SharedMemory { .. } => Category::SharedMemory,
            Self::TraceSetting => Category::Trace,
            Self::Logging => Category::Logging,
        }
    }
}

/// The route of a path without its query; `None` if there is none.
///
/// # Errors
/// `INVALID_ARG` for a name that no model can have: broken percent-encoding of UTF-8, a slash, `..`.
pub(crate) fn route(path: &str) -> Result<Option<Route<'_>>> {
    let Some(path) = path.strip_prefix("/v2") else { return Ok(None) };
    if let Some(rest) = path.strip_prefix("/models/") {
        return model(rest);
    }
    Ok(match path {
        "" => Some(Route::ServerMetadata),
        "/health/live" => Some(Route::Live),
        "/health/ready" => Some(Route::Ready),
        "/logging" => Some(Route::Logging),
        "/trace/setting" => Some(Route::TraceSetting),
        _ => {
            if let Some(rest) = path.strip_prefix("/repository/") {
                return repository(rest);
            }
            if let Some(rest) = path.strip_prefix("/systemsharedmemory/") {
                return shared_memory(MemoryKind::System, rest);
            }
            if let Some(rest) = path.strip_prefix("/cudasharedmemory/") {
                return shared_memory(MemoryKind::Cuda, rest);
            }
            None
        }
    })
}

/// `{m}[/versions/{v}][/action]`
fn model(path: &str) -> Result<Option<Route<'_>>> {
    if path == "stats" {
        return Ok(Some(Route::AllStatistics));
    }
    let (name, rest) = path.split_once('/').unwrap_or((path, ""));
    let (version, rest) = match rest.strip_prefix("versions/") {
        Some(rest) => {
            let (version, rest) = rest.split_once('/').unwrap_or((rest, ""));
            if version.is_empty() || !version.bytes().all(|b| b.is_ascii_digit()) {
                return Ok(None);
            }
            (version, rest)
        }
        None => ("", rest),
    };
    let action = match rest {
        "" if !path.ends_with('/') => ModelAction::Metadata,
        "infer" => ModelAction::Infer,
        "ready" => ModelAction::Ready,
        "config" => ModelAction::Config,
        "stats" => ModelAction::Statistics,
        "generate" => ModelAction::Generate,
        "generate_stream" => ModelAction::GenerateStream,
        "trace/setting" if version.is_empty() => ModelAction::TraceSetting,
        _ => return Ok(None),
    };
    Ok(decode(name)?.map(|name| Route::Model { name, version, action }))
}

/// `[{repository}/]index` or `[{repository}/]models/{m}/load|unload`
fn repository(path: &str) -> Result<Option<Route<'_>>> {
    let parts: Vec<&str> = path.split('/').collect();
    match parts[..] {
        ["index"] => Ok(Some(Route::Index)),
        [repository, "index"] if !repository.is_empty() => Ok(Some(Route::Index)),
        ["models", name, "load"] => Ok(decode(name)?.map(Route::Load)),
        ["models", name, "unload"] => Ok(decode(name)?.map(Route::Unload)),
        [repository, "models", name, "load" | "unload"] if !repository.is_empty() && !name.is_empty() => {
            Ok(Some(Route::NamedRepository))
        }
        _ => Ok(None),
    }
}

/// `[region/{n}/]status|register|unregister`; only one region can be registered at a time.
fn shared_memory(kind: MemoryKind, path: &str) -> Result<Option<Route<'_>>> {
    let (region, action) = match path.strip_prefix("region/").and_then(|rest| rest.rsplit_once('/')) {
        Some((region, action)) => match decode(region)? {
            Some(region) => (Some(region), action),
            None => return Ok(None),
        },
        None => (None, path),
    };
    let action = match action {
        "status" => MemoryAction::Status,
        "register" if region.is_some() => MemoryAction::Register,
        "unregister" => MemoryAction::Unregister,
        _ => return Ok(None),
    };
    Ok(Some(Route::SharedMemory { kind, region, action }))
}

/// A name of the path, decoded; `None` for the empty one.
fn decode(raw: &str) -> Result<Option<Cow<'_, str>>> {
    if raw.is_empty() {
        return Ok(None);
    }
    let name = percent_decode_str(raw).decode_utf8().map_err(|_| {
        Error::invalid_arg(format!("the name '{raw}' in the path is not UTF-8 once it is percent-decoded"))
    })?;
    if name.contains(['/', '\\', '\0']) || name == "." || name == ".." {
        return Err(Error::invalid_arg(format!(
            "invalid model name '{name}', model name must not contain path traversal characters"
        )));
    }
    Ok(Some(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model_route(name: &str, version: &'static str, action: ModelAction) -> Option<Route<'static>> {
        Some(Route::Model { name: name.to_owned().into(), version, action })
    }

    #[test]
    fn matches_every_route() {
        use MemoryAction::{Register, Status, Unregister};
        let memory = |kind, region: Option<&'static str>, action| {
            Some(Route::SharedMemory { kind, region: region.map(Cow::from), action })
        };
        for (path, want) in [
            ("/v2/health/live", Some(Route::Live)),
            ("/v2/health/ready", Some(Route::Ready)),
            ("/v2", Some(Route::ServerMetadata)),
            ("/v2/models/m", model_route("m", "", ModelAction::Metadata)),
            ("/v2/models/m/versions/3", model_route("m", "3", ModelAction::Metadata)),
            ("/v2/models/m/ready", model_route("m", "", ModelAction::Ready)),
            ("/v2/models/m/config", model_route("m", "", ModelAction::Config)),
            ("/v2/models/m/versions/10/stats", model_route("m", "10", ModelAction::Statistics)),
            ("/v2/models/stats", Some(Route::AllStatistics)),
            ("/v2/models/m/infer", model_route("m", "", ModelAction::Infer)),
            ("/v2/models/m/versions/1/infer", model_route("m", "1", ModelAction::Infer)),
            ("/v2/models/m/generate", model_route("m", "", ModelAction::Generate)),
            ("/v2/models/m/generate_stream", model_route("m", "", ModelAction::GenerateStream)),
            ("/v2/models/m/trace/setting", model_route("m", "", ModelAction::TraceSetting)),
            ("/v2/repository/index", Some(Route::Index)),
            ("/v2/repository/r/index", Some(Route::Index)),
            ("/v2/repository/models/m/load", Some(Route::Load("m".into()))),
            ("/v2/repository/models/m/unload", Some(Route::Unload("m".into()))),
            ("/v2/repository/r/models/m/load", Some(Route::NamedRepository)),
            ("/v2/systemsharedmemory/status", memory(MemoryKind::System, None, Status)),
            ("/v2/systemsharedmemory/region/r/status", memory(MemoryKind::System, Some("r"), Status)),
            ("/v2/systemsharedmemory/region/r/register", memory(MemoryKind::System, Some("r"), Register)),
            ("/v2/systemsharedmemory/unregister", memory(MemoryKind::System, None, Unregister)),
            ("/v2/cudasharedmemory/region/r/unregister", memory(MemoryKind::Cuda, Some("r"), Unregister)),
            ("/v2/trace/setting", Some(Route::TraceSetting)),
            ("/v2/logging", Some(Route::Logging)),
        ] {
            assert_eq!(route(path), Ok(want), "{path}");
        }
    }

    #[test]
    fn other_paths_match_nothing() {
        for path in [
            "/",
            "",
            "/nope",
            "/v1/models",
            "/v2/",
            "/v2/health",
            "/v2/health/live/",
            "/v2/models",
            "/v2/models/",
            "/v2/models/m/",
            "/v2/models//infer",
            "/v2/models/m/infer/",
            "/v2/models/m/versions",
            "/v2/models/m/versions/",
            "/v2/models/m/versions/abc",
            "/v2/models/m/versions/abc/infer",
            "/v2/models/m/versions/1/",
            "/v2/models/m/versions/1/trace/setting",
            "/v2/models/m/nope",
            "/v2x",
            "/v2/repository",
            "/v2/repository/",
            "/v2/repository/models/m",
            "/v2/repository/models//load",
            "/v2/repository//index",
            "/v2/systemsharedmemory/register",
            "/v2/systemsharedmemory/region//status",
            "/v2/systemsharedmemory/region/r",
            "/v2/logging/",
            "/v2/trace",
        ] {
            assert_eq!(route(path), Ok(None), "{path}");
        }
    }

    #[test]
    fn names_are_decoded_once() {
        for (path, name) in [
            ("my%20model", "my model"),
            ("%E6%A8%A1%E5%9E%8B", "模型"),
            ("a+b", "a+b"),
            ("a.b-c_d", "a.b-c_d"),
            ("a%2520b", "a%20b"),
            ("100%", "100%"),
        ] {
            let found = route(&format!("/v2/models/{path}/infer"))
                .map(|r| r == model_route(name, "", ModelAction::Infer));
            assert_eq!(found, Ok(true), "{path}");
        }
        for bad in ["%2e%2e", "..", ".", "a%2Fb", "%2F", "a%5cb", "%ff", "a%00b"] {
            assert!(route(&format!("/v2/models/{bad}/infer")).is_err(), "{bad}");
            assert!(route(&format!("/v2/repository/models/{bad}/load")).is_err(), "{bad}");
        }
    }

    #[test]
    fn routes_know_their_methods() {
        let allowed = |path: &str| {
            let route = route(path).expect(path).expect(path);
            [Method::GET, Method::POST, Method::PUT, Method::HEAD, Method::OPTIONS].map(|m| route.allows(&m))
        };
        assert_eq!(allowed("/v2/health/live"), [true, false, false, false, false]);
        assert_eq!(allowed("/v2/models/m/infer"), [false, true, false, false, false]);
        assert_eq!(allowed("/v2/trace/setting"), [true, true, false, false, false]);
        assert_eq!(allowed("/v2/repository/index"), [false, true, false, false, false]);
    }
}
