//! The bodies of the repository extension.
//!
//! More than Triton takes: `config` may be a JSON object as well as JSON in a string. Less: a parameter that nobody
//! knows is refused by its name.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use trireme_core::LoadOverrides;
use trireme_types::{Error, Result};

use crate::json::{Kind, Reader};

/// Body of `index`: whether only models that are ready are wanted.
///
/// # Errors
/// `INVALID_ARG` if it is no object, or `ready` no boolean.
pub(super) fn read_index(body: &[u8]) -> Result<bool> {
    let mut ready_only = false;
    object(body, |reader, key| {
        if key != "ready" {
            return reader.skip_value();
        }
        if reader.kind()? != Kind::Bool {
            return Err(Error::invalid_arg("Invalid value for 'ready': expected a boolean"));
        }
        ready_only = reader.boolean()?;
        Ok(())
    })?;
    Ok(ready_only)
}

/// Body of `unload`: whether the models that only this one uses go as well.
///
/// # Errors
/// `INVALID_ARG` if it is not of the form `{"parameters": {"unload_dependents": bool}}`.
pub(super) fn read_unload(body: &[u8]) -> Result<bool> {
    let mut dependents = false;
    parameters(body, |reader, key| {
        if key != "unload_dependents" {
            return Err(unknown(key, "'unload_dependents'"));
        }
        if reader.kind()? != Kind::Bool {
            return Err(Error::invalid_arg(
                "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean",
            ));
        }
        dependents = reader.boolean()?;
        Ok(())
    })?;
    Ok(dependents)
}

/// Body of `load`: configuration and files that take the place of those on disk.
///
/// # Errors
/// `INVALID_ARG` for an unknown parameter, a value of a wrong type, or files that are not base64.
pub(super) fn read_load(body: &[u8]) -> Result<LoadOverrides> {
    let mut overrides = LoadOverrides::default();
    parameters(body, |reader, key| {
        let kind = reader.kind()?;
        if key == "config" {
            overrides.config = Some(match kind {
                Kind::String => reader.string()?.into_owned(),
                Kind::Object => {
                    let start = reader.offset();
                    reader.skip_value()?;
                    String::from_utf8_lossy(reader.since(start)).into_owned()
                }
                _ => return Err(wrong_type(key, "a string or an object with the model configuration")),
            });
            return Ok(());
        }
        let Some(path) = key.strip_prefix("file:") else {
            return Err(unknown(key, "'config' or 'file:<path>'"));
        };
        if kind != Kind::String {
            return Err(wrong_type(key, "a string with the base64 of the file"));
        }
        let content = STANDARD
            .decode(reader.string()?.as_bytes())
            .map_err(|error| Error::invalid_arg(format!("load parameter '{key}' is not base64: {error}")))?;
        overrides.files.push((path.to_owned(), Bytes::from(content)));
        Ok(())
    })?;
    if overrides.config.is_none() && !overrides.files.is_empty() {
        return Err(Error::invalid_arg("Load parameter 'config' must be specified for model file override"));
    }
    Ok(overrides)
}

fn unknown(key: &str, expected: &str) -> Error {
    Error::invalid_arg(format!("unrecognized parameter '{key}', expected {expected}"))
}

fn wrong_type(key: &str, expected: &str) -> Error {
    Error::invalid_arg(format!("invalid value type for load parameter '{key}', expected {expected}"))
}

/// Reads a body that is empty or an object.
fn object(body: &[u8], mut member: impl FnMut(&mut Reader<'_>, &str) -> Result<()>) -> Result<()> {
    if body.trim_ascii().is_empty() {
        return Ok(());
    }
    let mut reader = Reader::new(body);
    if reader.kind()? != Kind::Object {
        return Err(Error::invalid_arg("the request body is not a JSON object"));
    }
    reader.object(|reader, key| member(reader, &key))?;
    reader.finish()
}

/// Reads the members of `parameters`.
fn parameters(body: &[u8], mut member: impl FnMut(&mut Reader<'_>, &str) -> Result<()>) -> Result<()> {
    object(body, |reader, key| {
        if key != "parameters" {
            return reader.skip_value();
        }
        if reader.kind()? != Kind::Object {
            return Err(Error::invalid_arg(
                "Unable to parse 'parameters': attempt to get members for non-object",
            ));
        }
        reader.object(|reader, key| member(reader, &key))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_bodies() {
        assert_eq!(read_index(b""), Ok(false));
        assert_eq!(read_index(b" {} "), Ok(false));
        assert_eq!(read_index(br#"{"ready": true, "x": [1]}"#), Ok(true));
        assert_eq!(read_unload(b""), Ok(false));
        assert_eq!(read_unload(br#"{"parameters":{"unload_dependents":true}}"#), Ok(true));
        let load = read_load(br#"{"parameters":{"config":"{\"a\":1}","file:1/model.onnx":"AAEC"}}"#)
            .expect("a load");
        assert_eq!(load.config.as_deref(), Some("{\"a\":1}"));
        assert_eq!(load.files, [("1/model.onnx".to_owned(), Bytes::from_static(&[0, 1, 2]))]);
        let load = read_load(br#"{"parameters":{"config": {"max_batch_size": 4} }}"#).expect("a load");
        assert_eq!(load.config.as_deref(), Some("{\"max_batch_size\": 4}"));
    }

    #[test]
    fn refuses_bodies() {
        let deep = format!("{{\"parameters\":{}", "[".repeat(100_000));
        for (body, says) in [
            (r#"{"parameters":{"foo":"x"}}"#, "unrecognized parameter 'foo'"),
            (r#"{"parameters":{"config":5}}"#, "expected a string or an object"),
            (
                r#"{"parameters":{"file:a":"AAAA"}}"#,
                "Load parameter 'config' must be specified for model file override",
            ),
            (r#"{"parameters":{"config":"{}","file:a":"%%"}}"#, "load parameter 'file:a' is not base64"),
            (r#"{"parameters":[]}"#, "non-object"),
            ("{", "Missing a name for object member. at 1"),
            ("[]", "not a JSON object"),
            ("{} x", "must not be followed"),
            (&deep, "non-object"),
        ] {
            let error = read_load(body.as_bytes()).expect_err(body);
            assert!(error.message().contains(says), "{error}");
        }
        assert!(read_index(br#"{"ready":"yes"}"#).is_err());
        assert!(read_unload(br#"{"parameters":{"unload_dependents":1}}"#).is_err());
        assert!(read_index("[".repeat(100_000).as_bytes()).is_err());
    }
}
