//! A response as a flat JSON object: outputs and parameters by name, sorted as in Triton.

use std::collections::BTreeMap;

use trireme_types::{Error, InferResponse, Result};

use crate::http::infer::{write_data, write_parameter};
use crate::json::Writer;

/// Writes a response. An output of one element is a value, any other a flat array.
///
/// # Errors
/// `INTERNAL` if the bytes of an output do not fit its shape.
pub(super) fn write(model: &str, version: &str, response: &InferResponse) -> Result<Vec<u8>> {
    let mut members: BTreeMap<&str, Vec<u8>> = BTreeMap::new();
    let text = |text: &str| {
        let mut json = Writer::with_capacity(text.len() + 2);
        json.string(text);
        json.into_bytes()
    };
    if !response.id.is_empty() {
        members.insert("id", text(&response.id));
    }
    members.insert("model_name", text(model));
    members.insert("model_version", text(version));
    for (name, value) in response.parameters.iter() {
        let mut json = Writer::with_capacity(32);
        write_parameter(&mut json, value);
        members.insert(name, json.into_bytes());
    }
    for output in &response.outputs {
        let is_one = output.shape.element_count() == Ok(1);
        let mut json = Writer::with_capacity(output.data.len() * 3 + 16);
        if !is_one {
            json.raw(b"[");
        }
        write_data(&mut json, output)?;
        if !is_one {
            json.raw(b"]");
        }
        members.insert(&output.name, json.into_bytes());
    }
    let mut json =
        Writer::with_capacity(members.iter().map(|(name, value)| name.len() + value.len() + 4).sum());
    json.raw(b"{");
    for (name, value) in members {
        json.string(name);
        json.raw(b":");
        json.raw(value);
        json.raw(b",");
    }
    json.drop_comma();
    json.raw(b"}");
    Ok(json.into_bytes())
}

/// `{"error": ...}`
pub(super) fn error(error: &Error) -> Vec<u8> {
    let mut json = Writer::with_capacity(error.message().len() + 16);
    json.raw(b"{\"error\":");
    json.string(error.message());
    json.raw(b"}");
    json.into_bytes()
}
