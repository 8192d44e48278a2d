//! Before the run: inputs are filled up to one length and masks are made.

use trireme_types::{DataType, Error, HostBuffer, InferInput, InferRequest, Result, Shape, TensorBuffer};

use super::{MAX_GROWTH, Padded, PaddedInput, PaddingPlan};
use crate::Batch;

impl PaddingPlan {
    /// Fills the inputs of every request up to one length: the longest of the batch, or its bucket. An input that is
    /// that long already is left where it is.
    ///
    /// # Errors
    /// INVALID_ARG: the inputs of a request have different lengths, or too many bytes once they are filled up. Nothing
    /// may have been changed or some requests have been padded; the batch is not to be run.
    pub fn pad(&self, batch: &mut Batch) -> Result<Padded> {
        let lengths = batch.requests.iter().map(|request| self.length(&request.request));
        let from: smallvec::SmallVec<[usize; 8]> = lengths.collect::<Result<_>>()?;
        let to = from.iter().map(|&length| self.target(length)).max().unwrap_or(0);
        for (request, &length) in batch.requests.iter_mut().zip(&from) {
            let request = &mut request.request;
            if length < to {
                for padded in self.inputs.iter().chain(&self.mask) {
                    if let Some(input) = request.inputs.iter_mut().find(|input| input.name == padded.name) {
                        padded.fill(input, to)?;
                    }
                }
            }
            if let Some(mask) = &self.mask
                && request.input(&mask.name).is_none()
            {
                let input = mask.mask(request, length, to)?;
                request.inputs.push(input);
            }
        }
        Ok(Padded { to, from })
    }
}

impl PaddedInput {
    /// Shape and bytes of an input once it is filled up.
    pub(super) fn grown(&self, input: &InferInput, to: usize) -> Result<(Shape, usize)> {
        let mut shape = input.shape.clone();
        let Some(place) = shape.get_mut(self.axis + 1) else {
            return Err(Error::internal(format!("input '{}' has no axis {}", input.name, self.axis)));
        };
        *place = i64::try_from(to).unwrap_or(i64::MAX);
        let size = self.size(&shape)?;
        if size > MAX_GROWTH && size / 2 > input.data.len() {
            return Err(Error::invalid_arg(format!(
                "input '{}' of shape {} would take {size} bytes padded to the length {to}; padding makes an input at most \
                 twice as large above {MAX_GROWTH} bytes",
                input.name, input.shape
            )));
        }
        Ok((shape, size))
    }

    fn fill(&self, input: &mut InferInput, to: usize) -> Result<()> {
        let (shape, size) = self.grown(input, to)?;
        let outer =
            shape.get(..=self.axis).and_then(|before| Shape::new(before).element_count().ok()).unwrap_or(0);
        let mut filled = HostBuffer::zeroed(size);
        if outer > 0 && size > 0 {
            let (row, given) = (size / outer, input.data.len() / outer);
            for (index, row) in filled.as_mut_slice().chunks_exact_mut(row).enumerate() {
                let from = input.data.as_slice().get(index * given..(index + 1) * given);
                if let Some((from, (real, rest))) = from.zip(row.split_at_mut_checked(given)) {
                    real.copy_from_slice(from);
                    write(rest, &self.filler);
                }
            }
        }
        input.data = TensorBuffer::from(filled);
        input.shape = shape;
        Ok(())
    }

    /// The mask of a request that brings none.
    fn mask(&self, request: &InferRequest, length: usize, to: usize) -> Result<InferInput> {
        let rows = request.batch_size;
        let dim = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let dims = (0..self.rank).map(|axis| if axis == self.axis { dim(to) } else { 1 });
        let shape: Shape = std::iter::once(dim(rows)).chain(dims).collect();
        let size = self.size(&shape)?;
        let mut made = HostBuffer::zeroed(size);
        let element = self.real.len().max(1);
        let width = to.saturating_mul(element);
        if width > 0 {
            for row in made.as_mut_slice().chunks_exact_mut(width) {
                let (real, rest) = row.split_at_mut_checked(length * element).unwrap_or_default();
                write(real, &self.real);
                write(rest, &self.filler);
            }
        }
        Ok(InferInput { name: self.name.clone(), data_type: self.data_type, shape, data: made.into() })
    }

    fn size(&self, shape: &Shape) -> Result<usize> {
        shape.byte_size(self.data_type).ok().flatten().ok_or_else(|| {
            Error::invalid_arg(format!(
                "input '{}' padded to the shape {shape} of {} takes more bytes than can be addressed",
                self.name,
                DataType::config_name(self.data_type)
            ))
        })
    }
}

/// Writes an element again and again. What is there is zero.
fn write(place: &mut [u8], element: &[u8]) {
    if element.iter().all(|byte| *byte == 0) {
        return;
    }
    for place in place.chunks_exact_mut(element.len().max(1)) {
        place.copy_from_slice(element);
    }
}
