//! `--http-restricted-api` and `--grpc-restricted-protocol`: groups of routes or RPCs that want a header with a secret.
//!
//! The same groups and the same form of flag for both protocols; they differ in how the header is called.

use http::{HeaderMap, HeaderName, HeaderValue};
use trireme_types::{Error, Result};

/// A group of routes or RPCs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Category {
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

impl Category {
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

    /// The name that flags use.
    pub const fn as_str(self) -> &'static str {
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

/// Which flag restricts, and how its headers are called.
#[derive(Debug)]
pub struct RestrictionFlag {
    name: &'static str,
    /// What Triton calls a group there.
    noun: &'static str,
    /// In front of the key that the flag gives.
    header_prefix: &'static str,
}

impl RestrictionFlag {
    pub const HTTP: Self = Self { name: "--http-restricted-api", noun: "api", header_prefix: "" };
    pub const GRPC: Self =
        Self { name: "--grpc-restricted-protocol", noun: "protocol", header_prefix: "triton-grpc-protocol-" };
}

/// Which groups want which header.
#[derive(Clone, Debug, Default)]
pub struct Restrictions {
    keys: [Option<Key>; 9],
}

#[derive(Clone, Debug)]
struct Key {
    /// The header as the flag spells it, for messages.
    spelled: String,
    header: HeaderName,
    value: HeaderValue,
}

impl Restrictions {
    /// Reads the values of a flag, each `category,category:key=value`.
    ///
    /// # Errors
    /// `INVALID_ARG` for another form, an unknown category, or a category in two groups.
    pub fn parse<T: AsRef<str>>(flag: &RestrictionFlag, values: impl IntoIterator<Item = T>) -> Result<Self> {
        let mut restrictions = Self::default();
        for value in values {
            restrictions.add(flag, value.as_ref())?;
        }
        Ok(restrictions)
    }

    fn add(&mut self, flag: &RestrictionFlag, text: &str) -> Result<()> {
        let RestrictionFlag { name: flag, noun, header_prefix } = flag;
        let form = || {
            Error::invalid_arg(format!("{flag} '{text}' is not of the form <{noun}>,<{noun}>:<key>=<value>"))
        };
        let (names, pair) = text.split_once(':').ok_or_else(form)?;
        let (key, value) = pair.split_once('=').ok_or_else(form)?;
        let (key, value) = (key.trim(), value.trim());
        if key.is_empty() || value.is_empty() {
            return Err(form());
        }
        let spelled = format!("{header_prefix}{key}");
        let header = spelled.parse().map_err(|_| form())?;
        let value = HeaderValue::from_str(value).map_err(|_| form())?;
        let key = Key { spelled, header, value };
        for name in names.split(',').map(str::trim) {
            let found =
                Category::ALL.into_iter().zip(&mut self.keys).find(|(category, _)| category.as_str() == name);
            let Some((_, slot)) = found else {
                let known = Category::ALL.map(Category::as_str).join(", ");
                return Err(Error::invalid_arg(format!(
                    "unknown restricted {noun} '{name}' in {flag}, expected one of {known}"
                )));
            };
            if slot.is_some() {
                return Err(Error::invalid_arg(format!(
                    "restricted {noun} '{name}' can not be specified in multiple {flag} groups"
                )));
            }
            *slot = Some(key.clone());
        }
        Ok(())
    }

    /// Whether a request may use a group.
    ///
    /// # Errors
    /// The name of the header that is missing or has another value.
    pub(crate) fn check(&self, category: Category, headers: &HeaderMap) -> Result<(), &str> {
        match self.keys.get(category as usize) {
            Some(Some(key)) if !key.is_given(headers) => Err(&key.spelled),
            _ => Ok(()),
        }
    }
}

impl Key {
    /// Compares in a time that does not tell where the first difference is.
    fn is_given(&self, headers: &HeaderMap) -> bool {
        let wanted = self.value.as_bytes();
        let Some(given) = headers.get(&self.header).map(HeaderValue::as_bytes) else { return false };
        given.len() == wanted.len()
            && given.iter().zip(wanted).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_wants_its_header() {
        let texts = ["model-repository,model-config:X-Admin=secret", "health:probe=a=b"];
        let http = Restrictions::parse(&RestrictionFlag::HTTP, texts).expect("two groups");
        let grpc = Restrictions::parse(&RestrictionFlag::GRPC, texts).expect("two groups");
        let mut headers = HeaderMap::new();
        assert_eq!(http.check(Category::Inference, &headers), Ok(()));
        assert_eq!(http.check(Category::ModelConfig, &headers), Err("X-Admin"));
        assert_eq!(grpc.check(Category::ModelConfig, &headers), Err("triton-grpc-protocol-X-Admin"));
        headers.insert("x-admin", HeaderValue::from_static("wrong!"));
        assert!(http.check(Category::ModelRepository, &headers).is_err());
        headers.insert("x-admin", HeaderValue::from_static("secret"));
        assert_eq!(http.check(Category::ModelRepository, &headers), Ok(()));
        assert!(http.check(Category::Health, &headers).is_err());
        assert!(grpc.check(Category::ModelRepository, &headers).is_err());
        headers.insert("triton-grpc-protocol-x-admin", HeaderValue::from_static("secret"));
        headers.insert("triton-grpc-protocol-probe", HeaderValue::from_static("a=b"));
        assert_eq!(grpc.check(Category::ModelRepository, &headers), Ok(()));
        assert_eq!(grpc.check(Category::Health, &headers), Ok(()));
    }

    #[test]
    fn refuses_wrong_flags() {
        for (bad, says) in [
            ("", "is not of the form"),
            ("health", "is not of the form"),
            ("health:key", "is not of the form"),
            ("health:=v", "is not of the form"),
            ("health:k=", "is not of the form"),
            ("health:k y=v", "is not of the form"),
            ("nope:k=v", "unknown restricted api 'nope' in --http-restricted-api"),
            ("health,health:k=v", "multiple --http-restricted-api groups"),
        ] {
            let error = Restrictions::parse(&RestrictionFlag::HTTP, [bad]).expect_err(bad);
            assert!(error.message().contains(says), "{error}");
        }
        let error = Restrictions::parse(&RestrictionFlag::GRPC, ["nope:k=v"]).expect_err("unknown");
        assert!(
            error.message().starts_with("unknown restricted protocol 'nope' in --grpc-restricted-protocol")
        );
    }
}
