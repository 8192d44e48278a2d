//! `--http-restricted-api`: groups of routes that want a header with a secret.

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use trireme_types::{Error, Result};

use super::reply::Refusal;

/// A group of routes.
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

/// Which groups want which header.
#[derive(Clone, Debug, Default)]
pub struct RestrictedApis {
    keys: [Option<Key>; 9],
}

#[derive(Clone, Debug)]
struct Key {
    /// As the flag spells it, for messages.
    spelled: String,
    header: HeaderName,
    value: HeaderValue,
}

impl RestrictedApis {
    /// Reads the values of the flag, each `category,category:header=value`.
    ///
    /// # Errors
    /// `INVALID_ARG` for another form, an unknown category, or a category in two groups.
    pub fn parse<T: AsRef<str>>(values: impl IntoIterator<Item = T>) -> Result<Self> {
        let mut apis = Self::default();
        for value in values {
            apis.add(value.as_ref())?;
        }
        Ok(apis)
    }

    fn add(&mut self, text: &str) -> Result<()> {
        let form = || {
            Error::invalid_arg(format!(
                "--http-restricted-api '{text}' is not of the form <api>,<api>:<header>=<value>"
            ))
        };
        let (names, pair) = text.split_once(':').ok_or_else(form)?;
        let (spelled, value) = pair.split_once('=').ok_or_else(form)?;
        let key = Key {
            spelled: spelled.trim().to_owned(),
            header: spelled.trim().parse().map_err(|_| form())?,
            value: HeaderValue::from_str(value.trim()).map_err(|_| form())?,
        };
        for name in names.split(',').map(str::trim) {
            let found =
                Category::ALL.into_iter().zip(&mut self.keys).find(|(category, _)| category.as_str() == name);
            let Some((_, slot)) = found else {
                let known = Category::ALL.map(Category::as_str).join(", ");
                return Err(Error::invalid_arg(format!(
                    "unknown restricted api '{name}' in --http-restricted-api, expected one of {known}"
                )));
            };
            if slot.is_some() {
                return Err(Error::invalid_arg(format!(
                    "restricted api '{name}' can not be specified in multiple --http-restricted-api groups"
                )));
            }
            *slot = Some(key.clone());
        }
        Ok(())
    }

    /// Whether a request may use a group.
    pub(crate) fn check(&self, category: Category, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(Some(key)) = self.keys.get(category as usize) else { return Ok(()) };
        if headers.get(&key.header).is_some_and(|given| same(given.as_bytes(), key.value.as_bytes())) {
            return Ok(());
        }
        let message = format!("This API is restricted, expecting header '{}'", key.spelled);
        Err(Refusal::new(StatusCode::FORBIDDEN, message))
    }
}

/// Compares in a time that does not tell where the first difference is.
fn same(given: &[u8], wanted: &[u8]) -> bool {
    given.len() == wanted.len() && given.iter().zip(wanted).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_wants_its_header() {
        let apis = RestrictedApis::parse(["model-repository,model-config:X-Admin=secret", "health:probe=1"])
            .expect("two groups");
        let mut headers = HeaderMap::new();
        assert!(apis.check(Category::Inference, &headers).is_ok());
        let refusal = apis.check(Category::ModelConfig, &headers).expect_err("no header");
        assert_eq!(refusal.status, 403);
        assert_eq!(refusal.message, "This API is restricted, expecting header 'X-Admin'");
        headers.insert("x-admin", HeaderValue::from_static("wrong!"));
        assert!(apis.check(Category::ModelRepository, &headers).is_err());
        headers.insert("x-admin", HeaderValue::from_static("secret"));
        assert!(apis.check(Category::ModelRepository, &headers).is_ok());
        assert!(apis.check(Category::Health, &headers).is_err());
    }

    #[test]
    fn refuses_wrong_flags() {
        for (bad, says) in [
            ("health", "is not of the form"),
            ("health:key", "is not of the form"),
            ("health:k y=v", "is not of the form"),
            ("nope:k=v", "unknown restricted api 'nope'"),
            ("health,health:k=v", "multiple --http-restricted-api groups"),
        ] {
            let error = RestrictedApis::parse([bad]).expect_err(bad);
            assert!(error.message().contains(says), "{error}");
        }
    }
}
