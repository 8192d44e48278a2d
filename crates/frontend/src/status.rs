//! How an error looks in each protocol: the one table from [`Code`] to HTTP status and gRPC code, and when the client
//! may try again.

use std::time::Duration;

use http::{HeaderName, StatusCode};
use trireme_types::Code;

/// Trailer of a call that was refused for now: the milliseconds after which clients with a retry policy try again.
pub(crate) const RETRY_PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

/// HTTP status of an error code.
///
/// Triton answers 500 to JSON that it cannot read, since its parser reports the internal code; Trireme's parser
/// reports `INVALID_ARG`, so that such a request is 400 without an exception here.
pub const fn http_status(code: Code) -> StatusCode {
    match code {
        Code::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::Unsupported => StatusCode::NOT_IMPLEMENTED,
        Code::Unknown | Code::InvalidArg | Code::AlreadyExists | Code::Cancelled => StatusCode::BAD_REQUEST,
    }
}

/// gRPC code of an error code.
pub const fn grpc_code(code: Code) -> tonic::Code {
    match code {
        Code::Unknown => tonic::Code::Unknown,
        Code::Internal => tonic::Code::Internal,
        Code::NotFound => tonic::Code::NotFound,
        Code::InvalidArg => tonic::Code::InvalidArgument,
        Code::Unavailable => tonic::Code::Unavailable,
        Code::Unsupported => tonic::Code::Unimplemented,
        Code::AlreadyExists => tonic::Code::AlreadyExists,
        Code::Cancelled => tonic::Code::Cancelled,
    }
}

/// Value of the header `Retry-After`: whole seconds, rounded up, at least one.
pub(crate) fn retry_after_seconds(hint: Duration) -> u64 {
    (hint.as_secs() + u64::from(hint.subsec_nanos() > 0)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_rounded_up() {
        for (ms, seconds) in [(0, 1), (1, 1), (1000, 1), (1001, 2), (59_999, 60)] {
            assert_eq!(retry_after_seconds(Duration::from_millis(ms)), seconds, "{ms} ms");
        }
    }

    #[test]
    fn every_code_has_its_status() {
        let table = [
            (Code::Unknown, 400, tonic::Code::Unknown),
            (Code::Internal, 500, tonic::Code::Internal),
            (Code::NotFound, 404, tonic::Code::NotFound),
            (Code::InvalidArg, 400, tonic::Code::InvalidArgument),
            (Code::Unavailable, 503, tonic::Code::Unavailable),
            (Code::Unsupported, 501, tonic::Code::Unimplemented),
            (Code::AlreadyExists, 400, tonic::Code::AlreadyExists),
            (Code::Cancelled, 400, tonic::Code::Cancelled),
        ];
        for (code, status, grpc) in table {
            assert_eq!(http_status(code).as_u16(), status, "{code:?}");
            assert_eq!(grpc_code(code), grpc, "{code:?}");
        }
    }
}
