//! Rows of a batch: which part of a joined tensor belongs to which request.

use std::ops::Range;

use trireme_types::{InferRequest, Shape, TensorSpec};

use crate::Batch;

/// Row ranges of the requests of a batch, in order.
#[derive(Debug)]
pub struct BatchRows<'a> {
    requests: std::slice::Iter<'a, crate::BatchRequest>,
    next: usize,
}

impl<'a> BatchRows<'a> {
    pub fn new(batch: &'a Batch) -> Self {
        Self { requests: batch.requests.iter(), next: 0 }
    }
}

impl<'a> Iterator for BatchRows<'a> {
    type Item = (Range<usize>, &'a InferRequest);

    fn next(&mut self) -> Option<Self::Item> {
        let request = &self.requests.next()?.request;
        let rows = self.next..self.next + request.batch_size;
        self.next = rows.end;
        Some((rows, request))
    }
}

/// Shape that the engine sees for a tensor that a client sent with the shape `wire`: the configuration's `reshape`
/// put in place of `dims`, open dimensions filled from the wire in order, the batch dimension kept.
///
/// # Shapes
/// `wire` is `[batch, dims...]` when `batching`, else `[dims...]`, and has been checked against `spec`.
pub fn engine_shape(spec: &TensorSpec, batching: bool, wire: &[i64]) -> Shape {
    let Some(reshape) = &spec.reshape else { return Shape::new(wire) };
    let (batch, dims) = match wire.split_first() {
        Some((first, rest)) if batching => (Some(*first), rest),
        _ => (None, wire),
    };
    let mut open = spec.dims.iter().zip(dims).filter(|(want, _)| **want < 0).map(|(_, got)| *got);
    let filled = reshape.iter().map(|&d| if d < 0 { open.next().unwrap_or(d) } else { d });
    batch.into_iter().chain(filled).collect()
}

/// Shape that clients see for an output that the engine made with the shape `engine`: the reverse of
/// [`engine_shape`].
///
/// # Shapes
/// `engine` is `[batch, reshape...]` when `batching`, else `[reshape...]`.
pub fn wire_shape(spec: &TensorSpec, batching: bool, engine: &[i64]) -> Shape {
    let Some(reshape) = &spec.reshape else { return Shape::new(engine) };
    let (batch, dims) = match engine.split_first() {
        Some((first, rest)) if batching => (Some(*first), rest),
        _ => (None, engine),
    };
    let mut open = reshape.iter().zip(dims).filter(|(want, _)| **want < 0).map(|(_, got)| *got);
    let filled = spec.dims.iter().map(|&d| if d < 0 { open.next().unwrap_or(d) } else { d });
    batch.into_iter().chain(filled).collect()
}

#[cfg(test)]
mod tests {
    use trireme_types::DataType;

    use super::*;

    fn spec(dims: &[i64], reshape: &[i64]) -> TensorSpec {
        TensorSpec {
            reshape: Some(Shape::new(reshape)),
            ..TensorSpec::new("X", DataType::Fp32, Shape::new(dims))
        }
    }

    #[test]
    fn reshape_keeps_the_batch_dimension() {
        assert_eq!(&*engine_shape(&spec(&[1], &[]), true, &[3, 1]), &[3]);
        assert_eq!(&*engine_shape(&spec(&[4, -1], &[2, 2, -1]), true, &[3, 4, 9]), &[3, 2, 2, 9]);
        assert_eq!(&*engine_shape(&spec(&[1], &[]), false, &[1]), &[] as &[i64]);
    }

    #[test]
    fn wire_shape_reverses_engine_shape() {
        for (dims, reshape, wire) in [
            (&[1][..], &[][..], &[3, 1][..]),
            (&[4, -1], &[2, 2, -1], &[3, 4, 9]),
            (&[-1, 6, -1], &[-1, 2, 3, -1], &[1, 5, 6, 7]),
        ] {
            let spec = spec(dims, reshape);
            assert_eq!(&*wire_shape(&spec, true, &engine_shape(&spec, true, wire)), wire);
        }
    }
}
