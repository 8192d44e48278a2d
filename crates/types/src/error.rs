//! The one error that crosses crate borders: a code of the Triton C API and a message for a person.

use std::borrow::Cow;
use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

/// Error codes, one to one with `TRITONSERVER_Error_Code`. How a protocol shows them is decided in the frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    Unknown,
    Internal,
    NotFound,
    InvalidArg,
    Unavailable,
    Unsupported,
    AlreadyExists,
    Cancelled,
}

impl Code {
    /// The word that Triton prints in front of a message, as `Invalid argument`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "Unknown",
            Self::Internal => "Internal",
            Self::NotFound => "Not found",
            Self::InvalidArg => "Invalid argument",
            Self::Unavailable => "Unavailable",
            Self::Unsupported => "Unsupported",
            Self::AlreadyExists => "Already exists",
            Self::Cancelled => "Cancelled",
        }
    }
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A code and a message that says what was expected, what came, where, and what to do.
#[derive(Clone, PartialEq, Eq)]
pub struct Error {
    code: Code,
    /// Fits beside the code, so that the hint costs an error no room.
    retry_after_ms: Option<NonZeroU32>,
    message: Cow<'static, str>,
}

impl Error {
    pub fn new(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self { code, retry_after_ms: None, message: message.into() }
    }

    pub fn internal(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::Internal, message)
    }

    pub fn not_found(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::NotFound, message)
    }

    pub fn invalid_arg(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::InvalidArg, message)
    }

    pub fn unavailable(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::Unavailable, message)
    }

    pub fn unsupported(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::Unsupported, message)
    }

    pub fn code(&self) -> Code {
        self.code
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    /// The same error with text in front of its message.
    #[must_use]
    pub fn prefixed(self, prefix: impl fmt::Display) -> Self {
        Self { message: format!("{prefix}{}", self.message).into(), ..self }
    }

    /// The same error, telling the client to come again after this time: what a server does that is too busy now.
    /// Counted in milliseconds, rounded up, at least one.
    #[must_use]
    pub fn retry_after(self, time: Duration) -> Self {
        let ms = time.as_nanos().div_ceil(1_000_000).max(1);
        Self { retry_after_ms: NonZeroU32::new(u32::try_from(ms).unwrap_or(u32::MAX)), ..self }
    }

    /// After what time the client may try again, if the server can tell.
    pub fn retry_hint(&self) -> Option<Duration> {
        self.retry_after_ms.map(|ms| Duration::from_millis(ms.get().into()))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} - {}", self.code.as_str(), self.message)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_costs_no_room_and_stays_with_its_error() {
        assert!(size_of::<Error>() <= 4 * size_of::<usize>());
        let busy = Error::unavailable("Exceeds maximum queue size");
        assert_eq!(busy.retry_hint(), None);
        for (time, hint) in [
            (Duration::ZERO, Duration::from_millis(1)),
            (Duration::from_micros(1500), Duration::from_millis(2)),
            (Duration::from_secs(3), Duration::from_secs(3)),
            (Duration::MAX, Duration::from_millis(u32::MAX.into())),
        ] {
            let told = busy.clone().retry_after(time).prefixed("[request id: 1] ");
            assert_eq!(told.retry_hint(), Some(hint));
            assert_eq!(told.message(), "[request id: 1] Exceeds maximum queue size");
        }
    }
}
