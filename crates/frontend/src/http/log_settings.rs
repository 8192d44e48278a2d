//! `GET` and `POST /v2/logging`: the log settings, read and changed.

use trireme_core::{LogSettings, LogValue, Server};
use trireme_types::{Error, Result};

use super::reply::{Refusal, Reply, json_reply};
use crate::json::{Kind, Reader, Writer};

/// Members that a change may have: far above the number of settings.
const MAX_MEMBERS: usize = 100;

/// Changes what the body names, if it has any, and answers with all settings.
pub(super) fn answer(server: &Server, body: &[u8]) -> Result<Reply, Refusal> {
    let settings = match read(body)? {
        changes if changes.is_empty() => server.log_settings()?,
        changes => server.change_log_settings(changes, "--")?,
    };
    Ok(json_reply(write(&settings)))
}

fn read(body: &[u8]) -> Result<Vec<(String, LogValue)>> {
    let mut changes = Vec::new();
    if body.is_empty() {
        return Ok(changes);
    }
    let mut reader = Reader::new(body);
    if reader.kind()? != Kind::Object {
        return Err(Error::invalid_arg(
            "expected a JSON object with log settings, as {\"log_verbose_level\": 1}",
        ));
    }
    reader.object(|reader, name| {
        let value = match reader.kind()? {
            Kind::Bool => LogValue::Bool(reader.boolean()?),
            Kind::String => LogValue::Text(reader.string()?.into_owned()),
            Kind::Number => {
                let number = reader.decimal()?;
                let whole = number.magnitude().filter(|_| !number.negative && number.integral);
                let whole = whole.and_then(|whole| u32::try_from(whole).ok());
                LogValue::Number(whole.ok_or_else(|| {
                    Error::invalid_arg(format!(
                        "attempt to access JSON non-unsigned-integer as unsigned-integer: '{name}' must be a whole number \
                         from 0 to {}",
                        u32::MAX
                    ))
                })?)
            }
            Kind::Object | Kind::Array | Kind::Null => {
                return Err(Error::invalid_arg(format!(
                    "log setting '{name}' must be a boolean, a number or a string"
                )));
            }
        };
        if changes.len() == MAX_MEMBERS {
            return Err(Error::invalid_arg(format!("a change has {MAX_MEMBERS} log settings at most")));
        }
        changes.push((name.into_owned(), value));
        Ok(())
    })?;
    reader.finish()?;
    Ok(changes)
}

fn write(settings: &LogSettings) -> Vec<u8> {
    let mut json = Writer::with_capacity(160 + settings.file.len());
    json.raw(b"{\"log_file\":");
    json.string(&settings.file);
    for (name, value) in
        [("log_info", settings.info), ("log_warning", settings.warning), ("log_error", settings.error)]
    {
        json.raw(b",");
        json.string(name);
        json.raw(b":");
        json.boolean(value);
    }
    json.raw(b",\"log_verbose_level\":");
    json.integer(settings.verbose_level);
    json.raw(b",\"log_format\":");
    json.string(settings.format.as_str());
    json.raw(b"}");
    json.into_bytes()
}
