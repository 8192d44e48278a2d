//! After the run: outputs are cut back to what belongs to real elements.

use trireme_types::{Error, OutputTensor, Result, Shape, TensorBuffer};

use super::{Padded, PaddedOutput, PaddingPlan};
use crate::Batch;

impl PaddingPlan {
    /// Cuts the outputs of every answer back to the request's own length. An answer with an output that has not the
    /// length of the padded inputs becomes an error, because what belongs to the request cannot be told.
    pub fn cut(&self, batch: &mut Batch, padded: &Padded) {
        for (request, &length) in batch.requests.iter_mut().zip(&padded.from) {
            let Some(response) = request.answer_mut() else { continue };
            let mut outputs = response.outputs.iter_mut();
            let cut = outputs.try_for_each(|output| {
                let plan = self.outputs.iter().find(|plan| plan.name == output.name);
                plan.map_or(Ok(()), |plan| plan.cut(output, padded.to, length))
            });
            if let Err(error) = cut {
                request.answer(Err(error));
            }
        }
    }
}

impl PaddedOutput {
    fn cut(&self, output: &mut OutputTensor, from: usize, to: usize) -> Result<()> {
        let axis = self.axis + 1;
        let wrong = |what: &str| {
            Error::internal(format!(
                "output '{}' has the shape {}, and on axis {} without the batch dimension {from} elements were expected, \
                 as many as the padded inputs have{what}; name the outputs that follow the length of the inputs in the \
                 parameter padding.outputs",
                output.name, output.shape, self.axis
            ))
        };
        if output.shape.get(axis).and_then(|&dim| usize::try_from(dim).ok()) != Some(from) {
            return Err(wrong(""));
        }
        if from == to {
            return Ok(());
        }
        let count = |dims: Option<&[i64]>| Shape::new(dims.unwrap_or_default()).element_count().ok();
        let sizes = count(output.shape.get(..axis)).zip(count(output.shape.get(axis + 1..)));
        let Some((outer, inner)) = sizes else { return Err(wrong(" in a shape of a tensor")) };
        let data = match output.data_type.byte_size() {
            Some(size) => fixed(&output.data, outer, from * inner * size, to * inner * size),
            None => strings(&output.data, outer, from * inner, to * inner),
        };
        output.data =
            data.ok_or_else(|| wrong(", and the bytes of the output are not those of its shape"))?;
        if let Some(dim) = output.shape.get_mut(axis) {
            *dim = i64::try_from(to).unwrap_or(i64::MAX);
        }
        Ok(())
    }
}

/// The first `keep` bytes of each of `rows` pieces of `width` bytes. One row is not copied.
fn fixed(data: &TensorBuffer, rows: usize, width: usize, keep: usize) -> Option<TensorBuffer> {
    if data.len() != rows.checked_mul(width)? || keep > width {
        return None;
    }
    if rows <= 1 {
        return Some(data.slice(0..keep.min(data.len())));
    }
    let mut kept = Vec::with_capacity(rows * keep);
    if width > 0 {
        for row in data.as_slice().chunks_exact(width) {
            kept.extend_from_slice(row.get(..keep)?);
        }
    }
    Some(kept.into())
}

/// As [`fixed`] in elements of a BYTES tensor, each with its length in front.
fn strings(data: &TensorBuffer, rows: usize, width: usize, keep: usize) -> Option<TensorBuffer> {
    let bytes = data.as_slice();
    let mut kept = Vec::new();
    let mut at = 0_usize;
    for _ in 0..rows {
        let start = at;
        let mut end = start;
        for index in 0..width {
            let length = bytes.get(at..)?.first_chunk::<4>()?;
            at = at.checked_add(length.len())?.checked_add(u32::from_le_bytes(*length) as usize)?;
            if index < keep {
                end = at;
            }
        }
        let row = bytes.get(start..end)?;
        if rows == 1 {
            return (at == bytes.len()).then(|| data.slice(start..end));
        }
        kept.extend_from_slice(row);
    }
    (at == bytes.len()).then(|| kept.into())
}
