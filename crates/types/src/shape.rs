//! Tensor shapes and checked arithmetic on them.

use std::fmt;
use std::ops::{Deref, DerefMut};

use smallvec::SmallVec;

use crate::DataType;

/// Dimensions of a tensor; `-1` stands for a dimension that a model leaves open. Up to six live without a heap
/// allocation.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Shape(SmallVec<[i64; 6]>);

/// A shape cannot stand for a tensor in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// A dimension is negative.
    #[error("a dimension is negative")]
    Negative,
    /// The number of elements or bytes does not fit 63 bits.
    #[error("the number of elements or bytes is too large")]
    Overflow,
}

impl Shape {
    pub fn new(dims: &[i64]) -> Self {
        Self(SmallVec::from_slice(dims))
    }

    /// A shape of one more dimension in front.
    pub fn with_leading(first: i64, rest: &[i64]) -> Self {
        let mut dims = SmallVec::with_capacity(rest.len() + 1);
        dims.push(first);
        dims.extend_from_slice(rest);
        Self(dims)
    }

    pub fn push(&mut self, dim: i64) {
        self.0.push(dim);
    }

    /// Product of the dimensions; a scalar (no dimensions) has one element.
    ///
    /// # Errors
    /// A negative dimension, or a product above `i64::MAX`. A zero anywhere gives zero whatever the others are.
    pub fn element_count(&self) -> Result<usize, ShapeError> {
        if self.0.iter().any(|&d| d < 0) {
            return Err(ShapeError::Negative);
        }
        if self.0.contains(&0) {
            return Ok(0);
        }
        let product = self.0.iter().try_fold(1_i64, |n, &d| n.checked_mul(d)).ok_or(ShapeError::Overflow)?;
        usize::try_from(product).map_err(|_| ShapeError::Overflow)
    }

    /// Bytes that a tensor of this shape takes; `None` inside for [`DataType::Bytes`].
    ///
    /// # Errors
    /// As [`Shape::element_count`], and when the byte size is above `i64::MAX`.
    pub fn byte_size(&self, data_type: DataType) -> Result<Option<usize>, ShapeError> {
        let count = self.element_count()?;
        let Some(element) = data_type.byte_size() else { return Ok(None) };
        let bytes = count.checked_mul(element).filter(|&n| i64::try_from(n).is_ok());
        bytes.map(Some).ok_or(ShapeError::Overflow)
    }

    /// Whether every dimension is known.
    pub fn is_fixed(&self) -> bool {
        self.0.iter().all(|&d| d >= 0)
    }

    /// Whether a tensor of shape `actual` may stand where this shape is expected: same rank, and equal
    /// dimensions wherever this one is not `-1`.
    pub fn accepts(&self, actual: &[i64]) -> bool {
        self.0.len() == actual.len()
            && self.0.iter().zip(actual).all(|(&want, &got)| want == -1 || want == got)
    }
}

impl Deref for Shape {
    type Target = [i64];

    fn deref(&self) -> &[i64] {
        &self.0
    }
}

impl DerefMut for Shape {
    fn deref_mut(&mut self) -> &mut [i64] {
        &mut self.0
    }
}

impl From<&[i64]> for Shape {
    fn from(dims: &[i64]) -> Self {
        Self::new(dims)
    }
}

impl FromIterator<i64> for Shape {
    fn from_iter<I: IntoIterator<Item = i64>>(dims: I) -> Self {
        Self(dims.into_iter().collect())
    }
}

/// Prints as Triton does: `[-1,3,224,224]`.
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, dim) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            write!(f, "{dim}")?;
        }
        f.write_str("]")
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_with_checks() {
        assert_eq!(Shape::new(&[]).element_count(), Ok(1));
        assert_eq!(Shape::new(&[2, 3]).element_count(), Ok(6));
        assert_eq!(Shape::new(&[i64::MAX, 0, i64::MAX]).element_count(), Ok(0));
        assert_eq!(Shape::new(&[i64::MAX, 2]).element_count(), Err(ShapeError::Overflow));
        assert_eq!(Shape::new(&[2, -1]).element_count(), Err(ShapeError::Negative));
        assert_eq!(Shape::new(&[1 << 61]).byte_size(DataType::Fp64), Err(ShapeError::Overflow));
        assert_eq!(Shape::new(&[4]).byte_size(DataType::Bytes), Ok(None));
    }

    #[test]
    fn accepts_open_dimensions() {
        let open = Shape::new(&[-1, 16]);
        assert!(open.accepts(&[5, 16]));
        assert!(!open.accepts(&[5, 8]));
        assert!(!open.accepts(&[16]));
    }
}
