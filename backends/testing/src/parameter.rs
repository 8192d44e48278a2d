//! Reading the numbers in `parameters` of a configuration.

use trireme_backend::ModelContext;
use trireme_types::{Error, Result};

/// A whole number parameter; 0 if it is not set.
///
/// # Errors
/// The value is not a number of at most `max`.
pub(crate) fn number(context: &ModelContext, key: &str, max: u64) -> Result<u64> {
    let Some(text) = context.parameter(key) else { return Ok(0) };
    match text.trim().parse::<u64>() {
        Ok(value) if value <= max => Ok(value),
        _ => Err(Error::invalid_arg(format!(
            "parameter '{key}' of model '{}' has the value '{text}', expected a whole number from 0 to {max}",
            context.name
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_is_no_number_in_range() {
        let context = |value: &str| ModelContext {
            name: "m".into(),
            parameters: vec![("execute_delay_ms".into(), value.into())],
            ..ModelContext::default()
        };
        assert_eq!(number(&context(" 300 "), "execute_delay_ms", 1000), Ok(300));
        assert_eq!(number(&context("300"), "creation_delay_sec", 1000), Ok(0));
        for bad in ["", "-1", "1.5", "1001", "99999999999999999999"] {
            let error = number(&context(bad), "execute_delay_ms", 1000).expect_err(bad);
            assert!(error.message().contains("'execute_delay_ms' of model 'm'"), "{error}");
        }
    }
}
