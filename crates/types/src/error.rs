//! The one error that crosses crate borders: a code of the Triton C API and a message for a person.

use std::borrow::Cow;
use std::fmt;

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
    message: Cow<'static, str>,
}

impl Error {
    pub fn new(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self { code, message: message.into() }
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
        Self { code: self.code, message: format!("{prefix}{}", self.message).into() }
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
