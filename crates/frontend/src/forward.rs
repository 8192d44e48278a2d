//! `--http-header-forward-pattern` and `--grpc-header-forward-pattern`: request headers that become string parameters of
//! an inference request.
//!
//! The pattern matches any part of a header name, whatever its case. Parameters have the name in lower case, since
//! proxies and HTTP/2 do not keep another.

use http::HeaderMap;
use regex::{Regex, RegexBuilder};
use trireme_types::{Error, Result};

/// Names that mean something to the server, which a header must not take.
const RESERVED: [&str; 7] =
    ["sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"];

/// Which headers are forwarded; none by default.
#[derive(Clone, Debug, Default)]
pub struct HeaderForward(Option<Regex>);

impl HeaderForward {
    /// Reads the value of `flag`; the empty one forwards nothing.
    ///
    /// # Errors
    /// `INVALID_ARG` if it is no regular expression.
    pub fn parse(flag: &str, pattern: &str) -> Result<Self> {
        if pattern.is_empty() {
            return Ok(Self(None));
        }
        let regex = RegexBuilder::new(pattern).case_insensitive(true).build().map_err(|error| {
            Error::invalid_arg(format!("{flag} '{pattern}' is no regular expression: {error}"))
        })?;
        Ok(Self(Some(regex)))
    }

    /// Names and values of the headers that match. Those for which `is_transport` holds belong to the protocol itself
    /// and are not looked at.
    ///
    /// # Errors
    /// `INVALID_ARG` for a header with a reserved name.
    pub(crate) fn forwarded(
        &self,
        headers: &HeaderMap,
        is_transport: fn(&str) -> bool,
    ) -> Result<Vec<(String, String)>> {
        let Some(pattern) = &self.0 else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for (name, value) in headers {
            let name = name.as_str();
            if is_transport(name) || !pattern.is_match(name) {
                continue;
            }
            if RESERVED.contains(&name) || name.starts_with("triton_") {
                return Err(Error::invalid_arg(format!(
                    "Header '{name}' is reserved for Triton usage and cannot be forwarded."
                )));
            }
            found.push((name.to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned()));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (name.parse().expect("a name"), HeaderValue::from_static(value))
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn forwards_what_matches() {
        let forward = HeaderForward::parse("--flag", "^X-Trace|user").expect("a pattern");
        let given =
            headers(&[("x-trace-id", "7"), ("my-user-name", "u"), ("not-x-trace", "n"), ("te-user", "t")]);
        let mut found = forward.forwarded(&given, |name| name == "te-user").expect("allowed names");
        found.sort();
        assert_eq!(found, [("my-user-name".into(), "u".into()), ("x-trace-id".into(), "7".into())]);
        let none = HeaderForward::parse("--flag", "").expect("none");
        assert!(none.forwarded(&headers(&[("triton_user", "1")]), |_| false).expect("nothing").is_empty());
        let error = HeaderForward::parse("--flag", "(").expect_err("no pattern");
        assert!(error.message().starts_with("--flag '(' is no regular expression"), "{error}");
    }

    #[test]
    fn reserved_names_are_refused() {
        let forward = HeaderForward::parse("--flag", ".*").expect("a pattern");
        for name in ["priority", "triton_x"] {
            let error = forward.forwarded(&headers(&[(name, "1")]), |_| false).expect_err("reserved");
            let expected = format!("Header '{name}' is reserved for Triton usage and cannot be forwarded.");
            assert_eq!(error.message(), expected);
        }
    }
}
