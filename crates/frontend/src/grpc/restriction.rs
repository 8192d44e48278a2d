//! Restricted protocols: categories of RPCs that need a header (`--grpc-restricted-protocol`).

use std::fmt;
use std::str::FromStr;

use http::{HeaderMap, HeaderName, HeaderValue};
use tonic::Status;
use trireme_types::{Error, Result};

const HEADER_PREFIX: &str = "triton-grpc-protocol-";

/// A group of RPCs, by the names that the flag uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Health,
    Metadata,
    Inference,
    SharedMemory,
    ModelConfig,
    ModelRepository,
    Statistics,
    Trace,
    Logging,
}

impl Protocol {
    const ALL: [Self; 9] = [
        Self::Health,
        Self::Metadata,
        Self::Inference,
        Self::SharedMemory,
        Self::ModelConfig,
        Self::ModelRepository,
        Self::Statistics,
        Self::Trace,
        Self::Logging,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Health => "health",
            Self::Metadata => "metadata",
            Self::Inference => "inference",
            Self::SharedMemory => "shared-memory",
            Self::ModelConfig => "model-config",
            Self::ModelRepository => "model-repository",
            Self::Statistics => "statistics",
            Self::Trace => "trace",
            Self::Logging => "logging",
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Protocol {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|protocol| protocol.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            Error::invalid_arg(format!("unknown restricted protocol '{name}', expected one of {known}"))
        })
    }
}

/// Which protocols need which header.
#[derive(Clone, Debug, Default)]
pub struct RestrictedProtocols(Vec<Restriction>);

#[derive(Clone, Debug)]
struct Restriction {
    protocol: Protocol,
    header: HeaderName,
    value: HeaderValue,
}

impl RestrictedProtocols {
    /// Adds a group as the flag gives it: `health,metadata:key=value`.
    ///
    /// # Errors
    /// `INVALID_ARG` if the text has another form, or names a protocol that is unknown or already restricted.
    pub fn add(&mut self, text: &str) -> Result<()> {
        let form = || {
            Error::invalid_arg(format!(
                "invalid restricted protocol '{text}', expected '<protocol>[,<protocol>...]:<key>=<value>'"
            ))
        };
        let (protocols, pair) = text.split_once(':').ok_or_else(form)?;
        let (key, value) = pair.split_once('=').ok_or_else(form)?;
        if key.is_empty() || value.is_empty() {
            return Err(form());
        }
        let header = format!("{HEADER_PREFIX}{key}").parse::<HeaderName>().map_err(|_| {
            Error::invalid_arg(format!(
                "the key '{key}' of restricted protocol '{text}' cannot be part of a header name"
            ))
        })?;
        let value = HeaderValue::from_str(value).map_err(|_| {
            Error::invalid_arg(format!("the value of restricted protocol '{text}' cannot be a header value"))
        })?;
        for protocol in protocols.split(',') {
            let protocol = protocol.trim().parse::<Protocol>()?;
            if self.find(protocol).is_some() {
                return Err(Error::invalid_arg(format!(
                    "restricted protocol '{protocol}' can not be specified in multiple restricted protocol groups"
                )));
            }
            self.0.push(Restriction { protocol, header: header.clone(), value: value.clone() });
        }
        Ok(())
    }

    fn find(&self, protocol: Protocol) -> Option<&Restriction> {
        self.0.iter().find(|restriction| restriction.protocol == protocol)
    }

    /// Whether a call may use a protocol.
    pub(super) fn check(&self, protocol: Protocol, headers: &HeaderMap) -> Result<(), Status> {
        match self.find(protocol) {
            Some(restriction) if !same(headers.get(&restriction.header), &restriction.value) => {
                Err(Status::unavailable(format!(
                    "This protocol is restricted, expecting header '{}'",
                    restriction.header
                )))
            }
            _ => Ok(()),
        }
    }
}

/// Compares in a time that does not tell where the first difference is.
fn same(given: Option<&HeaderValue>, wanted: &HeaderValue) -> bool {
    let (given, wanted) = (given.map_or(&[][..], HeaderValue::as_bytes), wanted.as_bytes());
    given.len() == wanted.len()
        && given.iter().zip(wanted).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restricted_protocol_needs_its_header() {
        let mut restricted = RestrictedProtocols::default();
        restricted.add("inference,model-repository:infer-key=infer-value").expect("valid");
        restricted.add("logging:admin=a=b").expect("valid");
        let mut headers = HeaderMap::new();
        assert!(restricted.check(Protocol::Health, &headers).is_ok());
        let status = restricted.check(Protocol::Inference, &headers).expect_err("restricted");
        assert_eq!(status.code(), tonic::Code::Unavailable);
        assert_eq!(
            status.message(),
            "This protocol is restricted, expecting header 'triton-grpc-protocol-infer-key'"
        );
        headers.insert("triton-grpc-protocol-infer-key", HeaderValue::from_static("other"));
        assert!(restricted.check(Protocol::ModelRepository, &headers).is_err());
        headers.insert("triton-grpc-protocol-infer-key", HeaderValue::from_static("infer-value"));
        assert!(restricted.check(Protocol::ModelRepository, &headers).is_ok());
        headers.insert("triton-grpc-protocol-admin", HeaderValue::from_static("a=b"));
        assert!(restricted.check(Protocol::Logging, &headers).is_ok());
    }

    #[test]
    fn wrong_groups_are_refused() {
        let mut restricted = RestrictedProtocols::default();
        restricted.add("health:k=v").expect("valid");
        for text in
            ["", "health", "health:k", "health:=v", "trace:k=", "nope:k=v", "trace:k y=v", "trace,health:k=v"]
        {
            let error = restricted.clone().add(text).expect_err(text);
            assert!(error.message().contains("restricted protocol"), "{error}");
        }
    }
}
