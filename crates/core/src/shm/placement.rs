//! What one request uses of shared memory: inputs that are read in place, and outputs on their way into regions.
//!
//! *Invariant:* nothing of a response is written before all its outputs are known to fit, and all of it is written
//! before the response is passed on. A response that passes on after its inputs were taken away is an error, and no
//! response that passes on lies in memory that a client can change.

use std::sync::Arc;
use std::task::Waker;

use smallvec::SmallVec;
use trireme_shm::Mapping;
use trireme_types::{Error, InferResponse, Responder, ResponseSink, Result, TensorBuffer};

use super::region::Region;

/// Where the outputs of one request are to be put, and which inputs it reads in place.
#[derive(Clone, Debug, Default)]
pub struct Placements {
    outputs: SmallVec<[Placement; 1]>,
    inputs: SmallVec<[Watched; 1]>,
}

/// A mapping that a request reads.
#[derive(Clone, Debug)]
struct Watched {
    region: Arc<Region>,
    mapping: Arc<Mapping>,
}

#[derive(Clone, Debug)]
struct Placement {
    output: Arc<str>,
    region: Arc<Region>,
    offset: u64,
    len: usize,
}

impl Placements {
    pub(super) fn push(&mut self, output: Arc<str>, region: Arc<Region>, offset: u64, len: usize) {
        self.outputs.push(Placement { output, region, offset, len });
    }

    pub(super) fn watch(&mut self, region: Arc<Region>, mapping: Arc<Mapping>) {
        self.inputs.push(Watched { region, mapping });
    }

    /// Whether the output of that name goes into a region.
    pub fn has(&self, output: &str) -> bool {
        self.outputs.iter().any(|placement| *placement.output == *output)
    }

    /// A responder that puts outputs where they belong and passes the responses on without their data.
    pub fn before(self, responder: Responder) -> Responder {
        if self.outputs.is_empty() && self.inputs.is_empty() {
            return responder;
        }
        Responder::new(Box::new(PlacingSink { placements: self, next: Some(responder) }))
    }

    /// Copies outputs that lie in a mapping, as models make them that pass tensors on, and then looks whether what
    /// was read was there.
    fn detach(&self, response: &mut InferResponse) -> Result<()> {
        for watched in &self.inputs {
            let mapped = watched.mapping.as_slice().as_ptr_range();
            for output in &mut response.outputs {
                if mapped.contains(&output.data.as_slice().as_ptr()) {
                    output.data = TensorBuffer::from(output.data.as_slice().to_vec());
                }
            }
        }
        match self.inputs.iter().find(|watched| watched.mapping.is_cut()) {
            Some(watched) => Err(watched.region.cut()),
            None => Ok(()),
        }
    }

    /// Writes the outputs of a response that have a place, and takes their data out of it.
    fn put(&self, response: &mut InferResponse) -> Result<()> {
        self.detach(response)?;
        for placement in &self.outputs {
            let Some(output) = response.output(&placement.output) else { continue };
            let (needed, len) = (output.data.len(), placement.len);
            if needed > len {
                return Err(Error::invalid_arg(format!(
                    "shared memory size specified with the request for output '{}' ({len} bytes) should be at least \
                     {needed} bytes to hold the results",
                    output.name
                )));
            }
        }
        for placement in &self.outputs {
            let found = response.outputs.iter_mut().find(|output| output.name == placement.output);
            if let Some(output) = found {
                let data = std::mem::take(&mut output.data);
                placement.region.write(placement.offset, data.as_slice())?;
            }
        }
        Ok(())
    }
}

/// Stands between a model and the call that waits for its answer.
struct PlacingSink {
    placements: Placements,
    /// `None` after the last response.
    next: Option<Responder>,
}

impl ResponseSink for PlacingSink {
    fn send(&mut self, reply: Option<Result<InferResponse>>, last: bool) {
        let reply = reply.map(|reply| {
            reply.and_then(|mut response| self.placements.put(&mut response).map(|()| response))
        });
        match (reply, last) {
            (Some(reply), false) => {
                if let Some(next) = &mut self.next {
                    next.send(reply);
                }
            }
            (Some(reply), true) => {
                if let Some(next) = self.next.take() {
                    next.finish(reply);
                }
            }
            (None, true) => {
                if let Some(next) = self.next.take() {
                    next.close();
                }
            }
            (None, false) => {}
        }
    }

    fn is_closed(&self) -> bool {
        self.next.as_ref().is_none_or(Responder::is_closed)
    }

    fn watch_closed(&mut self, waker: &Waker) {
        if let Some(next) = &mut self.next {
            next.watch_closed(waker);
        }
    }
}
