//! The RPC `LogSettings`: the log settings, read and changed.

use trireme_core::{LogValue, Server};
use trireme_proto::inference as pb;
use trireme_proto::inference::log_settings_request::setting_value::ParameterChoice as Asked;
use trireme_proto::inference::log_settings_response::SettingValue;
use trireme_proto::inference::log_settings_response::setting_value::ParameterChoice as Given;
use trireme_types::{Error, Result};

/// Changes what the message names, if it names any, and answers with all settings.
pub(super) fn answer(server: &Server, request: pb::LogSettingsRequest) -> Result<pb::LogSettingsResponse> {
    let changes: Vec<(String, LogValue)> = request
        .settings
        .into_iter()
        .map(|(name, value)| match value.parameter_choice {
            Some(Asked::BoolParam(value)) => Ok((name, LogValue::Bool(value))),
            Some(Asked::Uint32Param(value)) => Ok((name, LogValue::Number(value))),
            Some(Asked::StringParam(value)) => Ok((name, LogValue::Text(value))),
            None => Err(Error::invalid_arg(format!("log setting '{name}' has no value"))),
        })
        .collect::<Result<_>>()?;
    let settings =
        if changes.is_empty() { server.log_settings()? } else { server.change_log_settings(changes, "")? };
    let values = [
        ("log_file", Given::StringParam(settings.file)),
        ("log_info", Given::BoolParam(settings.info)),
        ("log_warning", Given::BoolParam(settings.warning)),
        ("log_error", Given::BoolParam(settings.error)),
        ("log_verbose_level", Given::Uint32Param(settings.verbose_level)),
        ("log_format", Given::StringParam(settings.format.as_str().to_owned())),
    ];
    let settings = values
        .into_iter()
        .map(|(name, value)| (name.to_owned(), SettingValue { parameter_choice: Some(value) }))
        .collect();
    Ok(pb::LogSettingsResponse { settings })
}
