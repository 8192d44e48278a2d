//! Floats as text, short and exact: whole numbers without a point, very large and small ones with an exponent.

/// Shortest text that reads back as this value; `None` for infinities and NaN.
pub(crate) fn float64(value: f64) -> Option<String> {
    value.is_finite().then(|| {
        let size = value.abs();
        if size != 0.0 && !(1e-5..1e16).contains(&size) { format!("{value:e}") } else { format!("{value}") }
    })
}

/// Shortest text that reads back as this 32-bit value; `None` for infinities and NaN.
pub(crate) fn float32(value: f32) -> Option<String> {
    value.is_finite().then(|| {
        let size = value.abs();
        if size != 0.0 && !(1e-5..1e16).contains(&size) { format!("{value:e}") } else { format!("{value}") }
    })
}
