//! What the logging extension reads and changes. The log itself belongs to the process, not to the server: whoever
//! starts both hands a [`LogControl`] to [`crate::ServerOptions`].

use std::fmt;

use trireme_types::{Error, Result};

/// Form of a log line (`log_format`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    #[default]
    Default,
    Iso8601,
}

impl LogFormat {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Iso8601 => "ISO8601",
        }
    }

    /// Reads the name that [`LogFormat::as_str`] gives.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Default, Self::Iso8601].into_iter().find(|format| format.as_str() == text)
    }
}

/// The settings by the names of the logging extension.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogSettings {
    /// `log_file`; empty for standard error.
    pub file: String,
    pub info: bool,
    pub warning: bool,
    pub error: bool,
    pub verbose_level: u32,
    pub format: LogFormat,
}

/// A value that a client gives for a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogValue {
    Bool(bool),
    Number(u32),
    Text(String),
}

impl LogSettings {
    /// Changes one setting. `prefix` stands before the name of the format in messages: HTTP writes flags, gRPC does not.
    ///
    /// # Errors
    /// `INVALID_ARG` for a name that is no setting and a value that is none, `UNSUPPORTED` for the file, which cannot be
    /// changed over the network.
    pub fn set(&mut self, name: &str, value: LogValue, prefix: &str) -> Result<()> {
        let wrong = |expected: &str| Err(Error::invalid_arg(format!("expect {expected} for '{name}'")));
        match (name, value) {
            ("log_file", _) => {
                return Err(Error::unsupported(
                    "log file location can not be updated through network protocol",
                ));
            }
            ("log_info", LogValue::Bool(value)) => self.info = value,
            ("log_warning", LogValue::Bool(value)) => self.warning = value,
            ("log_error", LogValue::Bool(value)) => self.error = value,
            ("log_verbose_level", LogValue::Number(value)) => self.verbose_level = value,
            ("log_format", LogValue::Text(value)) => {
                self.format = LogFormat::parse(&value).ok_or_else(|| {
                    Error::invalid_arg(format!(
                        "invalid argument for {prefix}log_format, got: {value}; the formats are 'default' and 'ISO8601'"
                    ))
                })?;
            }
            ("log_info" | "log_warning" | "log_error", _) => return wrong("a boolean"),
            ("log_verbose_level", _) => return wrong("a number that is not negative"),
            ("log_format", _) => return wrong("a string"),
            _ => {
                return Err(Error::invalid_arg(format!(
                    "unknown log setting '{name}'; the settings are log_info, log_warning, log_error, \
                     log_verbose_level and log_format"
                )));
            }
        }
        Ok(())
    }
}

/// The log of the process.
pub trait LogControl: fmt::Debug + Send + Sync {
    fn settings(&self) -> LogSettings;

    /// Follows new settings from now on; the file stays.
    fn follow(&self, settings: &LogSettings);
}

#[cfg(test)]
mod tests {
    use trireme_types::Code;

    use super::*;

    #[test]
    fn settings_are_changed_by_name_and_kind() {
        let mut settings = LogSettings::default();
        assert_eq!(settings.set("log_info", LogValue::Bool(true), ""), Ok(()));
        assert_eq!(settings.set("log_verbose_level", LogValue::Number(2), ""), Ok(()));
        assert_eq!(settings.set("log_format", LogValue::Text("ISO8601".into()), ""), Ok(()));
        assert_eq!((settings.info, settings.verbose_level, settings.format), (true, 2, LogFormat::Iso8601));
        for (name, value, code) in [
            ("log_file", LogValue::Text("x".into()), Code::Unsupported),
            ("log_info", LogValue::Number(1), Code::InvalidArg),
            ("log_format", LogValue::Text("xml".into()), Code::InvalidArg),
            ("colour", LogValue::Bool(true), Code::InvalidArg),
        ] {
            let error = settings.set(name, value, "--").expect_err(name);
            assert_eq!(error.code(), code, "{error}");
        }
    }
}
