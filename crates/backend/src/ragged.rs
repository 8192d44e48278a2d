//! Ragged batches: requests whose inputs have different shapes in one run of a model.
//!
//! The model gets such an input as one flat tensor, and from the server further tensors that tell where each request
//! begins: the batch inputs. A batch output is a flat tensor that goes back in pieces, each as large as the request's
//! input. Values and shapes are those of Triton's backends (`BackendInputCollector`, `BackendOutputResponder`).
//!
//! *Invariant:* shapes here are what the engine sees of a request, the batch dimension in front, of tensors that exist in
//! memory; a batch of `n` requests gives exactly `n` of them, in order.

use std::ops::Range;
use std::sync::Arc;

use trireme_types::{DataType, Error, HostBuffer, Result, Shape, TensorSpec};

/// What a batch input tells of its source input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchInputKind {
    /// Elements of each request, shape `[requests]`.
    ElementCount,
    /// Elements of each request and those before it together, shape `[requests]`.
    AccumulatedElementCount,
    /// The same with a zero in front, shape `[requests + 1]`.
    AccumulatedElementCountWithZero,
    /// Zeros; the shape `[n]` is the message, `n` the elements of the largest request.
    MaxElementCountAsShape,
    /// Shape of each row without the batch dimension, shape `[rows, rank - 1]`.
    ItemShape,
    /// The same numbers in one dimension, shape `[rows * (rank - 1)]`.
    ItemShapeFlatten,
}

/// A tensor that the server makes for each batch (`batch_input`).
#[derive(Clone, Debug, PartialEq)]
pub struct BatchInput {
    pub kind: BatchInputKind,
    /// Inputs of the model that get it.
    pub targets: Vec<Arc<str>>,
    /// INT32 or FP32.
    pub data_type: DataType,
    /// The input that it tells of.
    pub source: Arc<str>,
}

/// Outputs that go back in pieces of their source input's shapes (`batch_output`, `BATCH_SCATTER_WITH_INPUT_SHAPE`).
#[derive(Clone, Debug, PartialEq)]
pub struct BatchOutput {
    pub targets: Vec<Arc<str>>,
    pub source: Arc<str>,
}

/// The part of a scattered output that belongs to one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// What the engine would have made for this request alone, the batch dimension in front.
    pub shape: Shape,
    /// Its elements in the flat output.
    pub elements: Range<usize>,
}

impl BatchInput {
    /// The tensor for requests with these shapes of the source input.
    ///
    /// # Errors
    /// INVALID_ARG: a number is too large for INT32, or a shape has no batch dimension.
    pub fn build<'a>(&self, shapes: impl Iterator<Item = &'a [i64]> + Clone) -> Result<(Shape, HostBuffer)> {
        let counts = || shapes.clone().map(|shape| self.count(shape));
        let requests = shapes.clone().count();
        match self.kind {
            BatchInputKind::ElementCount => self.vector(requests, counts()),
            BatchInputKind::AccumulatedElementCount => self.vector(requests, self.accumulated(counts())),
            BatchInputKind::AccumulatedElementCountWithZero => {
                let zero = std::iter::once(Ok(0));
                self.vector(requests.saturating_add(1), zero.chain(self.accumulated(counts())))
            }
            BatchInputKind::MaxElementCountAsShape => {
                let max = counts().try_fold(0, |max: i64, count| Ok::<_, Error>(max.max(count?)))?;
                let len = usize::try_from(max).map_err(|_| self.too_large(max))?;
                self.vector(len, std::iter::empty())
            }
            BatchInputKind::ItemShape | BatchInputKind::ItemShapeFlatten => self.item_shapes(shapes),
        }
    }

    fn item_shapes<'a>(
        &self,
        shapes: impl Iterator<Item = &'a [i64]> + Clone,
    ) -> Result<(Shape, HostBuffer)> {
        let no_batch = || {
            Error::invalid_arg(format!(
                "input '{}' has no batch dimension, and its shape cannot be told a row at a time",
                self.source
            ))
        };
        let (mut rows, mut rank) = (0_usize, 0_usize);
        for shape in shapes.clone() {
            let (batch, dims) = shape.split_first().ok_or_else(no_batch)?;
            let batch = usize::try_from(*batch).map_err(|_| no_batch())?;
            rows = rows.checked_add(batch).ok_or_else(|| self.too_large(i64::MAX))?;
            rank = dims.len();
        }
        let numbers = shapes.flat_map(|shape| {
            let (batch, dims) = shape.split_first().map_or((0, shape), |(batch, dims)| (*batch, dims));
            let batch = usize::try_from(batch).unwrap_or(0);
            std::iter::repeat_n(dims, batch).flatten().map(|dim| Ok(*dim))
        });
        let len = rows.checked_mul(rank).ok_or_else(|| self.too_large(i64::MAX))?;
        let (flat, data) = self.vector(len, numbers)?;
        if self.kind == BatchInputKind::ItemShapeFlatten {
            return Ok((flat, data));
        }
        Ok((Shape::new(&[to_dim(rows), to_dim(rank)]), data))
    }

    /// A tensor of `len` numbers; those that are not given are zero.
    fn vector(&self, len: usize, numbers: impl Iterator<Item = Result<i64>>) -> Result<(Shape, HostBuffer)> {
        let bytes = len
            .checked_mul(4)
            .filter(|&n| i64::try_from(n).is_ok())
            .ok_or_else(|| self.too_large(to_dim(len)))?;
        let mut data = HostBuffer::zeroed(bytes);
        for (place, number) in data.as_mut_slice().chunks_exact_mut(4).zip(numbers) {
            let number = number?;
            let word = match self.data_type {
                DataType::Fp32 => to_fp32(number).to_le_bytes(),
                _ => i32::try_from(number).map_err(|_| self.too_large(number))?.to_le_bytes(),
            };
            place.copy_from_slice(&word);
        }
        Ok((Shape::new(&[to_dim(len)]), data))
    }

    fn accumulated(&self, counts: impl Iterator<Item = Result<i64>>) -> impl Iterator<Item = Result<i64>> {
        counts.scan(0_i64, |sum, count| {
            Some(count.and_then(|count| {
                *sum = sum.checked_add(count).ok_or_else(|| self.too_large(i64::MAX))?;
                Ok(*sum)
            }))
        })
    }

    fn count(&self, shape: &[i64]) -> Result<i64> {
        let count = Shape::new(shape).element_count().ok().and_then(|count| i64::try_from(count).ok());
        count.ok_or_else(|| self.too_large(i64::MAX))
    }

    fn too_large(&self, number: i64) -> Error {
        let targets: Vec<&str> = self.targets.iter().map(|target| &**target).collect();
        Error::invalid_arg(format!(
            "the batch input '{}' of type {} cannot hold {number}, which input '{}' of this batch makes of it; send \
             smaller inputs",
            targets.join(", "),
            self.data_type.config_name(),
            self.source
        ))
    }
}

/// Cuts a scattered output into the pieces of the requests with these shapes of the source input.
///
/// # Shapes
/// A piece has the output's `engine_dims`; where these are open, the dimension of the source input in the same place.
///
/// # Errors
/// INTERNAL: the output has fewer elements than the pieces take, or the source input has too few dimensions. More
/// elements are left over without an error, as Triton leaves them.
pub fn scatter<'a>(
    output: &TensorSpec,
    batching: bool,
    shapes: impl Iterator<Item = &'a [i64]>,
    elements: usize,
) -> Result<Vec<Piece>> {
    let dims = output.engine_dims();
    let open = if batching { Shape::with_leading(-1, dims) } else { dims.clone() };
    let mut start = 0_usize;
    let pieces = shapes.map(|source| {
        let filled = open.iter().enumerate().map(|(axis, &dim)| match dim {
            -1 => source.get(axis).copied(),
            dim => Some(dim),
        });
        let shape: Option<Shape> = filled.collect();
        let shape = shape.ok_or_else(|| {
            Error::internal(format!(
                "output '{}' is scattered with dims {open}, for which the shape {} of its source input has too few \
                 dimensions",
                output.name,
                Shape::new(source)
            ))
        })?;
        let end = shape.element_count().ok().and_then(|count| start.checked_add(count));
        let end = end.filter(|&end| end <= elements).ok_or_else(|| {
            Error::internal(format!(
                "output '{}' has {elements} elements for the whole batch, and the request that takes {shape} from \
                 element {start} on finds too few; a scattered output has as many elements as its source input asks \
                 for",
                output.name
            ))
        })?;
        let piece = Piece { shape, elements: start..end };
        start = end;
        Ok(piece)
    });
    pieces.collect()
}

fn to_dim(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// As C converts: to the nearest number that the type has.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "FP32 batch inputs are rounded"
)]
fn to_fp32(number: i64) -> f32 {
    number as f32
}

#[cfg(test)]
mod tests;
