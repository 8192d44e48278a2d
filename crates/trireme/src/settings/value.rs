//! Values of flags: booleans, numbers, ports, with messages that name the flag.

use anyhow::{Result, anyhow, bail};

use crate::flags::Flags;

/// `true`, `on`, `1`, `false`, `off`, `0` in any case, as Triton reads them.
pub(super) fn parse_boolean(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "on" | "1" => Some(true),
        "false" | "off" | "0" => Some(false),
        _ => None,
    }
}

pub(super) fn boolean(flags: &Flags, name: &str, default: bool) -> Result<bool> {
    let Some(text) = flags.last(name) else { return Ok(default) };
    parse_boolean(text)
        .ok_or_else(|| anyhow!("--{name} expects true or false (or on, off, 1, 0), got '{text}'"))
}

/// A whole number from `least` to `most`.
pub(super) fn number(flags: &Flags, name: &str, default: i64, least: i64, most: i64) -> Result<u64> {
    let number = match flags.last(name) {
        None => default,
        Some(text) => match text.parse::<i64>() {
            Ok(number) if (least..=most).contains(&number) => number,
            _ => bail!("--{name} expects a whole number from {least} to {most}, got '{text}'"),
        },
    };
    Ok(u64::try_from(number)?)
}

/// A port; 0 lets the system choose.
pub(super) fn port(flags: &Flags, name: &str, default: u16) -> Result<u16> {
    Ok(u16::try_from(number(flags, name, default.into(), 0, u16::MAX.into())?)?)
}
