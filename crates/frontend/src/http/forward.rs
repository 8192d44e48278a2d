//! `--http-header-forward-pattern`: request headers that become string parameters of an inference request.
//!
//! The pattern matches any part of a header name, whatever its case. Parameters have the name in lower case, since
//! proxies and HTTP/2 do not keep another.

use http::HeaderMap;
use regex::{Regex, RegexBuilder};
use trireme_types::{Error, ParameterValue, Parameters, Result};

/// Names that mean something to the server.
const RESERVED: [&str; 7] =
    ["sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"];

/// Which headers are forwarded; none by default.
#[derive(Clone, Debug, Default)]
pub struct HeaderForward(Option<Regex>);

impl HeaderForward {
    /// Reads the value of the flag; the empty one forwards nothing.
    ///
    /// # Errors
    /// `INVALID_ARG` if it is no regular expression.
    pub fn parse(pattern: &str) -> Result<Self> {
        if pattern.is_empty() {
            return Ok(Self(None));
        }
        let regex = RegexBuilder::new(pattern).case_insensitive(true).build().map_err(|error| {
            Error::invalid_arg(format!(
                "--http-header-forward-pattern '{pattern}' is no regular expression: {error}"
            ))
        })?;
        Ok(Self(Some(regex)))
    }

    /// Adds the headers that match to the parameters.
    ///
    /// # Errors
    /// `INVALID_ARG` for a header with a reserved name.
    pub(crate) fn add(&self, headers: &HeaderMap, parameters: &mut Parameters) -> Result<()> {
        let Some(pattern) = &self.0 else { return Ok(()) };
        for (name, value) in headers {
            let name = name.as_str();
            if !pattern.is_match(name) {
                continue;
            }
            if RESERVED.contains(&name) || name.starts_with("triton_") {
                return Err(Error::invalid_arg(format!(
                    "Header '{name}' is reserved for Triton usage and cannot be forwarded."
                )));
            }
            let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
            parameters.insert(name, ParameterValue::String(value));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn forwards_what_matches() {
        let forward = HeaderForward::parse("^X-Trace|user").expect("a pattern");
        let mut headers = HeaderMap::new();
        headers.insert("x-trace-id", HeaderValue::from_static("7"));
        headers.insert("my-user-name", HeaderValue::from_static("u"));
        headers.insert("not-x-trace", HeaderValue::from_static("n"));
        let mut parameters = Parameters::default();
        forward.add(&headers, &mut parameters).expect("allowed names");
        assert_eq!(parameters.len(), 2);
        assert_eq!(parameters.get("x-trace-id"), Some(&ParameterValue::String("7".into())));

        headers.insert("triton_user", HeaderValue::from_static("1"));
        assert!(forward.add(&headers, &mut parameters).is_err());
        assert!(HeaderForward::parse("(").is_err());
        HeaderForward::default().add(&headers, &mut Parameters::default()).expect("nothing is forwarded");
    }
}
