//! The batch dimension on its way between models that have one and models that have none.

use trireme_types::Shape;

/// The shape under which a tensor of `shape` enters where `dims` are promised, with a batch dimension in front if
/// `batching`. A batch dimension of 1 is added, or taken away; a shape that fits neither way stays as it is, and the
/// check of the request says what is wrong with it.
pub(super) fn fit(shape: Shape, dims: &Shape, batching: bool) -> Shape {
    if batching && shape.len() == dims.len() && dims.accepts(&shape) {
        return Shape::with_leading(1, &shape);
    }
    match shape.split_first() {
        Some((1, rest)) if !batching && rest.len() == dims.len() && dims.accepts(rest) => Shape::new(rest),
        _ => shape,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_and_takes_away_one_row() {
        let check = |shape: &[i64], dims: &[i64], batching: bool, expected: &[i64]| {
            let fitted = fit(Shape::new(shape), &Shape::new(dims), batching);
            assert_eq!(fitted, Shape::new(expected), "{shape:?} into {dims:?}");
        };
        check(&[3, 16], &[16], true, &[3, 16]);
        check(&[16], &[16], true, &[1, 16]);
        check(&[5], &[-1], true, &[1, 5]);
        check(&[1, 16], &[16], false, &[16]);
        check(&[2, 16], &[16], false, &[2, 16]);
        check(&[2, 16], &[-1, 16], false, &[2, 16]);
        check(&[1, 16], &[-1, 16], false, &[1, 16]);
        check(&[7, 8], &[16], true, &[7, 8]);
    }
}
