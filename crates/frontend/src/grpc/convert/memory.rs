//! Parameters that put a tensor into shared memory.

use trireme_types::{Error, Result};

use super::request::{WireParameter, WireParameters};
use super::wrong_kind;

/// Bytes of a registered region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemorySlice {
    pub region: String,
    pub offset: u64,
    pub byte_size: u64,
}

/// The slice that an input or output of that name is in; `None` if it is in no region.
///
/// # Errors
/// `INVALID_ARG` for values of another kind, below 0, or without the parameters that belong to them.
pub(super) fn slice(tensor: &str, parameters: &WireParameters<'_>) -> Result<Option<MemorySlice>> {
    let (mut region, mut offset, mut byte_size) = (None, None, None);
    for &(name, value) in parameters {
        match (name, value) {
            ("shared_memory_region", WireParameter::Text(name)) => region = Some(name),
            ("shared_memory_region", _) => return Err(wrong_kind(name, "string_param")),
            ("shared_memory_offset", _) => offset = Some(number(name, value)?),
            ("shared_memory_byte_size", _) => byte_size = Some(number(name, value)?),
            _ => {}
        }
    }
    match (region, byte_size, offset) {
        (None, None, None) => Ok(None),
        (None, size, _) => {
            let given = if size.is_some() { "shared_memory_byte_size" } else { "shared_memory_offset" };
            Err(Error::invalid_arg(format!(
                "'{given}' can not be specified without 'shared_memory_region' parameter for tensor '{tensor}'"
            )))
        }
        (Some(_), None, _) => Err(Error::invalid_arg(format!(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor \
             '{tensor}'"
        ))),
        (Some(region), Some(byte_size), offset) => {
            Ok(Some(MemorySlice { region: region.to_owned(), offset: offset.unwrap_or_default(), byte_size }))
        }
    }
}

fn number(name: &str, value: WireParameter<'_>) -> Result<u64> {
    match value {
        WireParameter::Uint(value) => Ok(value),
        WireParameter::Int(value) => u64::try_from(value)
            .map_err(|_| Error::invalid_arg(format!("invalid value for '{name}' parameter, expected >= 0"))),
        _ => Err(wrong_kind(name, "int64_param")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGION: (&str, WireParameter<'_>) = ("shared_memory_region", WireParameter::Text("r"));
    const SIZE: (&str, WireParameter<'_>) = ("shared_memory_byte_size", WireParameter::Int(64));

    fn read(parameters: &[(&'static str, WireParameter<'static>)]) -> Result<Option<MemorySlice>> {
        slice("X", &parameters.iter().copied().collect())
    }

    #[test]
    fn reads_the_three_parameters() {
        assert_eq!(read(&[("classification", WireParameter::Int(1))]), Ok(None));
        let wanted = |offset| Ok(Some(MemorySlice { region: "r".into(), offset, byte_size: 64 }));
        assert_eq!(read(&[REGION, SIZE]), wanted(0));
        assert_eq!(read(&[("shared_memory_offset", WireParameter::Uint(8)), SIZE, REGION]), wanted(8));
    }

    #[test]
    fn names_what_is_wrong() {
        for (parameters, says) in [
            (vec![REGION], "'shared_memory_byte_size' must be specified along with 'shared_memory_region'"),
            (vec![SIZE], "'shared_memory_byte_size' can not be specified without 'shared_memory_region'"),
            (
                vec![("shared_memory_offset", WireParameter::Int(1))],
                "'shared_memory_offset' can not be specified without 'shared_memory_region'",
            ),
            (
                vec![("shared_memory_region", WireParameter::Int(1)), SIZE],
                "invalid value type for 'shared_memory_region' parameter, expected string_param.",
            ),
            (
                vec![REGION, ("shared_memory_byte_size", WireParameter::Text("1"))],
                "invalid value type for 'shared_memory_byte_size' parameter, expected int64_param.",
            ),
            (
                vec![REGION, SIZE, ("shared_memory_offset", WireParameter::Int(-1))],
                "invalid value for 'shared_memory_offset' parameter, expected >= 0",
            ),
        ] {
            let error = read(&parameters).expect_err(says);
            assert!(error.message().starts_with(says), "{error}");
        }
    }
}
