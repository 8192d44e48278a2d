//! Request headers that become parameters of an inference request (`--grpc-header-forward-pattern`).

use http::HeaderMap;
use regex::Regex;
use trireme_types::{Error, Result};

/// Parameters with a meaning of their own, which a header must not take.
const RESERVED: [&str; 7] =
    ["sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"];

/// Headers whose name matches the pattern, with their values.
///
/// # Errors
/// `INVALID_ARG` for a header with the name of a reserved parameter.
pub(super) fn forwarded(pattern: Option<&Regex>, headers: &HeaderMap) -> Result<Vec<(String, String)>> {
    let Some(pattern) = pattern else { return Ok(Vec::new()) };
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

/// Headers of gRPC itself, which an application does not see.
fn is_transport(name: &str) -> bool {
    matches!(name, "te" | "content-type" | "content-length")
        || name.starts_with("grpc-")
        || name.ends_with("-bin")
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn only_matching_headers_are_forwarded() {
        let headers = HeaderMap::from_iter(
            [
                ("x-tenant", "a"),
                ("x-trace", "b"),
                ("content-type", "application/grpc"),
                ("grpc-timeout", "1S"),
            ]
            .map(|(name, value)| (name.parse().expect("a name"), HeaderValue::from_static(value))),
        );
        assert!(forwarded(None, &headers).expect("none").is_empty());
        let pattern = Regex::new("(?i)X-T.*").expect("a pattern");
        let mut found = forwarded(Some(&pattern), &headers).expect("allowed");
        found.sort();
        assert_eq!(found, [("x-tenant".into(), "a".into()), ("x-trace".into(), "b".into())]);
        let all = Regex::new(".*").expect("a pattern");
        assert_eq!(forwarded(Some(&all), &headers).expect("allowed").len(), 2);
    }

    #[test]
    fn reserved_names_are_refused() {
        let pattern = Regex::new(".*").expect("a pattern");
        for name in ["priority", "triton_x"] {
            let headers =
                HeaderMap::from_iter([(name.parse().expect("a name"), HeaderValue::from_static("1"))]);
            let error = forwarded(Some(&pattern), &headers).expect_err("reserved");
            let expected = format!("Header '{name}' is reserved for Triton usage and cannot be forwarded.");
            assert_eq!(error.message(), expected);
        }
    }
}
