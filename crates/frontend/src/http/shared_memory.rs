//! The shared memory extensions over HTTP: status, register and unregister of system and CUDA regions.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use trireme_core::{MemoryKind, RegionPlace, RegionStatus, Server};
use trireme_types::{Error, Result};

use super::blocking;
use super::reply::{Refusal, Reply, empty_json, json_reply};
use crate::json::{Kind, Reader, Writer};

/// What an encoded handle has to be.
const HANDLE: &str = "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t";

/// The region of that name, or all of that kind.
pub(super) fn status(server: &Server, kind: MemoryKind, region: Option<&str>) -> Result<Reply, Refusal> {
    let regions = server.shared_memory().status(kind, region.unwrap_or_default())?;
    let mut json = Writer::with_capacity(2 + 96 * regions.len());
    json.raw(b"[");
    for region in &regions {
        write_region(&mut json, region);
        json.raw(b",");
    }
    json.drop_comma();
    json.raw(b"]");
    Ok(json_reply(json.into_bytes()))
}

fn write_region(json: &mut Writer, region: &RegionStatus) {
    json.raw(b"{\"name\":");
    json.string(&region.name);
    match &region.place {
        RegionPlace::System { key, offset } => {
            json.raw(b",\"key\":");
            json.string(key);
            json.raw(b",\"offset\":");
            json.integer(*offset);
        }
        RegionPlace::Cuda { device_id } => {
            json.raw(b",\"device_id\":");
            json.integer(*device_id);
        }
    }
    json.raw(b",\"byte_size\":");
    json.integer(region.byte_size);
    json.raw(b"}");
}

/// Registers a region. Opening memory, and the driver of a GPU the first time, may take a while.
pub(super) async fn register(
    server: Arc<Server>,
    kind: MemoryKind,
    region: String,
    body: Bytes,
) -> Result<Reply, Refusal> {
    blocking(move || {
        let members = Members::read(&body)?;
        let memory = server.shared_memory();
        match kind {
            MemoryKind::System => {
                let key = members.key.ok_or_else(|| missing("key"))?;
                let byte_size = members.byte_size.ok_or_else(|| missing("byte_size"))?;
                memory.register_system(&region, &key, members.offset.unwrap_or_default(), byte_size)
            }
            MemoryKind::Cuda => {
                let handle = members.raw_handle.ok_or_else(|| missing("raw_handle"))?;
                let device_id = members.device_id.ok_or_else(|| missing("device_id"))?;
                let byte_size = members.byte_size.ok_or_else(|| missing("byte_size"))?;
                let handle = STANDARD.decode(handle.as_bytes()).ok();
                let handle = handle.and_then(|handle| handle.try_into().ok());
                let handle = handle.ok_or_else(|| Error::invalid_arg(HANDLE))?;
                let device_id = i64::try_from(device_id).unwrap_or(i64::MAX);
                memory.register_cuda(&region, &handle, device_id, byte_size)
            }
        }
    })
    .await??;
    Ok(empty_json())
}

/// Forgets the region of that name, or all of that kind.
pub(super) fn unregister(server: &Server, kind: MemoryKind, region: Option<&str>) -> Result<Reply, Refusal> {
    match region {
        Some(region) => server.shared_memory().unregister(kind, region)?,
        None => server.shared_memory().unregister_all(kind)?,
    }
    Ok(empty_json())
}

fn missing(field: &str) -> Error {
    Error::invalid_arg(format!("Shared memory register request has no '{field}' field"))
}

/// The body of a registration, of both kinds.
#[derive(Default)]
struct Members {
    key: Option<String>,
    offset: Option<u64>,
    byte_size: Option<u64>,
    /// Base64, as it came.
    raw_handle: Option<String>,
    device_id: Option<u64>,
}

impl Members {
    /// # Errors
    /// `INVALID_ARG` for what is no JSON object and for members of another type.
    fn read(body: &[u8]) -> Result<Self> {
        let mut members = Self::default();
        if body.trim_ascii().is_empty() {
            return Ok(members);
        }
        let mut reader = Reader::new(body);
        if reader.kind()? != Kind::Object {
            return Err(Error::invalid_arg("the request body is not a JSON object"));
        }
        reader.object(|reader, key| {
            match &*key {
                "key" => members.key = Some(text(reader, "key")?),
                "offset" => members.offset = Some(unsigned(reader, "offset")?),
                "byte_size" => members.byte_size = Some(unsigned(reader, "byte_size")?),
                "device_id" => members.device_id = Some(unsigned(reader, "device_id")?),
                "raw_handle" => {
                    if reader.kind()? != Kind::Object {
                        return Err(wrong_type("raw_handle", "an object with the member 'b64'"));
                    }
                    reader.object(|reader, key| {
                        if key != "b64" {
                            return reader.skip_value();
                        }
                        members.raw_handle = Some(text(reader, "b64")?);
                        Ok(())
                    })?;
                }
                _ => reader.skip_value()?,
            }
            Ok(())
        })?;
        reader.finish()?;
        Ok(members)
    }
}

fn text(reader: &mut Reader<'_>, member: &str) -> Result<String> {
    if reader.kind()? == Kind::String {
        return Ok(reader.string()?.into_owned());
    }
    Err(wrong_type(member, "a string"))
}

fn unsigned(reader: &mut Reader<'_>, member: &str) -> Result<u64> {
    if reader.kind()? == Kind::Number {
        let number = reader.decimal()?;
        if let Some(value) = number.magnitude().filter(|&value| !number.negative || value == 0) {
            return Ok(value);
        }
    }
    Err(wrong_type(member, "a whole number of at least 0"))
}

fn wrong_type(member: &str, expected: &str) -> Error {
    Error::invalid_arg(format!(
        "Unable to parse '{member}' of the shared memory register request: expected {expected}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_both_kinds() {
        let system = Members::read(br#"{"key":"/k","offset":8,"byte_size":64,"more":[1]}"#).expect("system");
        assert_eq!((system.key.as_deref(), system.offset, system.byte_size), (Some("/k"), Some(8), Some(64)));
        let cuda =
            Members::read(br#"{"raw_handle":{"b64":"AAAA"},"device_id":0,"byte_size":1}"#).expect("CUDA");
        assert_eq!((cuda.raw_handle.as_deref(), cuda.device_id), (Some("AAAA"), Some(0)));
        assert!(Members::read(b" ").expect("nothing").key.is_none());
    }

    #[test]
    fn names_what_is_wrong() {
        for (body, says) in [
            (
                r#"{"key":1}"#,
                "Unable to parse 'key' of the shared memory register request: expected a string",
            ),
            (r#"{"offset":-1}"#, "Unable to parse 'offset'"),
            (r#"{"byte_size":1.5}"#, "Unable to parse 'byte_size'"),
            (r#"{"byte_size":18446744073709551616}"#, "Unable to parse 'byte_size'"),
            (r#"{"raw_handle":"AAAA"}"#, "Unable to parse 'raw_handle'"),
            ("[]", "the request body is not a JSON object"),
        ] {
            let error = Members::read(body.as_bytes()).err().expect(body);
            assert!(error.message().starts_with(says), "{error}");
        }
    }
}
