//! Padding: requests of different lengths share a batch.
//!
//! A model opts in with parameters of its configuration that begin with `padding.` ([`PaddingPlan::read`]). Before a run
//! the inputs of every request are filled up to one length, and the mask input says which elements are real; after it the
//! outputs are cut back. [`padded`] puts this around a model, so that neither schedulers nor backends know of it.
//!
//! *Invariant:* padded inputs of one request have one length on their padded axes; the server checks that with
//! [`PaddingPlan::check`] before a request is queued.

mod cut;
mod element;
mod fill;
mod read;

use std::sync::Arc;

use smallvec::SmallVec;
use trireme_types::{DataType, Error, InferRequest, MemoryUsage, Result};

use crate::{Batch, InstanceContext, Model, ModelInstance};
use element::Element;

/// Requests share a batch whatever their lengths are up to this one, if no buckets are given and a row of each of their
/// inputs takes up to `SHORT_ROW` bytes.
const SHORT: usize = 1024;
const SHORT_ROW: usize = 1 << 20;
/// Bytes up to which an input may grow however small it was. Above, padding may double it.
const MAX_GROWTH: usize = 256 << 20;

/// How a model's variable dimension is padded.
#[derive(Clone, Debug, PartialEq)]
pub struct PaddingPlan {
    inputs: Vec<PaddedInput>,
    outputs: Vec<PaddedOutput>,
    mask: Option<PaddedInput>,
    /// Ascending; empty: up to the longest of the batch.
    buckets: Vec<usize>,
}

/// An input that is filled up.
#[derive(Clone, Debug, PartialEq)]
struct PaddedInput {
    name: Arc<str>,
    data_type: DataType,
    /// In `dims`, without the batch dimension.
    axis: usize,
    /// Dimensions without the batch dimension.
    rank: usize,
    /// What stands where nothing is.
    filler: Element,
    /// What stands where something is; for the mask only.
    real: Element,
}

/// An output that is cut back.
#[derive(Clone, Debug, PartialEq)]
struct PaddedOutput {
    name: Arc<str>,
    /// In `dims`, without the batch dimension.
    axis: usize,
}

/// What [`PaddingPlan::pad`] did to a batch.
#[derive(Debug)]
pub struct Padded {
    /// The length of every request now.
    to: usize,
    /// Their lengths before.
    from: SmallVec<[usize; 8]>,
}

impl PaddingPlan {
    /// The axis on which an input is padded, without the batch dimension; `None`: it is not padded.
    pub fn axis(&self, input: &str) -> Option<usize> {
        self.inputs.iter().find(|padded| &*padded.name == input).map(|padded| padded.axis)
    }

    /// The input that tells which elements are real, and that clients need not send.
    pub fn mask(&self) -> Option<&str> {
        self.mask.as_ref().map(|mask| &*mask.name)
    }

    /// Checks a request before it is queued: its padded inputs have one length and are not made too large.
    ///
    /// # Errors
    /// INVALID_ARG
    pub fn check(&self, request: &InferRequest) -> Result<()> {
        let length = self.length(request)?;
        let to = self.target(length);
        if to > length {
            for padded in &self.inputs {
                let Some(input) = request.input(&padded.name) else { continue };
                padded.grown(input, to)?;
            }
        }
        Ok(())
    }

    /// Requests of one class, whose other dimensions are the same, may share a batch. The class is the bucket, or the
    /// length itself beyond the last; without buckets all short requests are one class and the lengths of longer ones
    /// are rounded up to a power of two, so that one long request does not make a hundred short ones as long.
    pub fn class(&self, request: &InferRequest) -> i64 {
        let length = self.length(request).unwrap_or(0);
        let class = if self.buckets.is_empty() {
            let rows = request.batch_size.max(1);
            let mut inputs = self.inputs.iter().filter_map(|padded| request.input(&padded.name));
            let short = length <= SHORT && inputs.all(|input| input.data.len() / rows <= SHORT_ROW);
            if short { 0 } else { length.checked_next_power_of_two().unwrap_or(usize::MAX) }
        } else {
            self.target(length)
        };
        i64::try_from(class).unwrap_or(i64::MAX)
    }

    /// Length of a request: what all of its padded inputs have on their padded axes.
    fn length(&self, request: &InferRequest) -> Result<usize> {
        let mut first: Option<(&str, usize)> = None;
        for padded in self.inputs.iter().chain(&self.mask) {
            let Some(input) = request.input(&padded.name) else { continue };
            let length = input.shape.get(padded.axis + 1).and_then(|&dim| usize::try_from(dim).ok());
            let length = length.ok_or_else(|| {
                Error::invalid_arg(format!(
                    "input '{}' has the shape {}, which cannot be padded",
                    input.name, input.shape
                ))
            })?;
            match first {
                None => first = Some((&padded.name, length)),
                Some((name, other)) if other != length => {
                    return Err(Error::invalid_arg(format!(
                        "inputs that are padded together must have one length: '{name}' has {other}, and '{}' of shape \
                         {} has {length}",
                        padded.name, input.shape
                    )));
                }
                Some(_) => {}
            }
        }
        first
            .map(|(_, length)| length)
            .ok_or_else(|| Error::invalid_arg("none of the padded inputs is there"))
    }

    /// The length to which a request of that length alone is padded.
    fn target(&self, length: usize) -> usize {
        self.buckets.iter().copied().find(|&bucket| bucket >= length).unwrap_or(length)
    }
}

/// A model whose instances pad each batch before and cut its answers after the run.
pub fn padded(model: Arc<dyn Model>, plan: Arc<PaddingPlan>) -> Arc<dyn Model> {
    Arc::new(PaddedModel { model, plan })
}

struct PaddedModel {
    model: Arc<dyn Model>,
    plan: Arc<PaddingPlan>,
}

impl Model for PaddedModel {
    fn instance(&self, context: &InstanceContext) -> Result<Box<dyn ModelInstance>> {
        let instance = self.model.instance(context)?;
        Ok(Box::new(PaddedInstance { instance, plan: Arc::clone(&self.plan) }))
    }

    fn memory_usage(&self) -> Vec<MemoryUsage> {
        self.model.memory_usage()
    }
}

struct PaddedInstance {
    instance: Box<dyn ModelInstance>,
    plan: Arc<PaddingPlan>,
}

impl ModelInstance for PaddedInstance {
    fn execute(&mut self, batch: &mut Batch) -> Result<()> {
        let padded = self.plan.pad(batch)?;
        let result = self.instance.execute(batch);
        self.plan.cut(batch, &padded);
        result
    }

    fn is_ready(&self) -> bool {
        self.instance.is_ready()
    }
}

#[cfg(test)]
mod tests;
