//! The deadline of a call, from its `grpc-timeout` header.

use std::time::Duration;

use http::HeaderMap;
use tokio::time::Instant;
use tonic::Status;

/// When the client of a call that was received then stops waiting; `None` without the header and when it cannot be
/// read.
pub(super) fn deadline(headers: &HeaderMap, received: std::time::Instant) -> Option<Instant> {
    let timeout = parse(headers.get("grpc-timeout")?.to_str().ok()?)?;
    Instant::from_std(received).checked_add(timeout)
}

/// Refuses work for a client that has stopped waiting.
///
/// # Errors
/// `DEADLINE_EXCEEDED` once the deadline has passed.
pub(super) fn check(deadline: Option<Instant>) -> Result<(), Status> {
    match deadline {
        Some(at) if at <= Instant::now() => Err(exceeded()),
        _ => Ok(()),
    }
}

/// Up to 8 digits and a unit.
fn parse(text: &str) -> Option<Duration> {
    let (last, unit) = text.char_indices().next_back()?;
    let digits = text.get(..last).filter(|digits| (1..=8).contains(&digits.len()))?;
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count = digits.parse().ok()?;
    Some(match unit {
        'H' => Duration::from_secs(count * 3600),
        'M' => Duration::from_secs(count * 60),
        'S' => Duration::from_secs(count),
        'm' => Duration::from_millis(count),
        'u' => Duration::from_micros(count),
        'n' => Duration::from_nanos(count),
        _ => return None,
    })
}

pub(super) fn exceeded() -> Status {
    Status::deadline_exceeded("Deadline Exceeded")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_grpc_timeouts() {
        let table = [
            ("1H", Some(Duration::from_secs(3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("3S", Some(Duration::from_secs(3))),
            ("49999m", Some(Duration::from_millis(49_999))),
            ("0u", Some(Duration::ZERO)),
            ("99999999n", Some(Duration::from_nanos(99_999_999))),
            ("100000000S", None),
            ("S", None),
            ("", None),
            ("+1S", None),
            ("1x", None),
            ("1\u{e4}", None),
        ];
        for (text, expected) in table {
            assert_eq!(parse(text), expected, "{text}");
        }
    }
}
