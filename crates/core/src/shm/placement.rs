//! Outputs on their way into regions of shared memory.
//!
//! *Invariant:* nothing of a response is written before all its outputs are known to fit, and all of it is written
//! before the response is passed on.

use std::sync::Arc;
use std::task::Waker;

use smallvec::SmallVec;
use trireme_types::{Error, InferResponse, Responder, ResponseSink, Result};

use super::region::Region;

/// Where the outputs of one request are to be put.
#[derive(Clone, Debug, Default)]
pub struct Placements(SmallVec<[Placement; 1]>);

#[derive(Clone, Debug)]
struct Placement {
    output: Arc<str>,
    region: Arc<Region>,
    offset: u64,
    len: usize,
}

impl Placements {
    pub(super) fn push(&mut self, output: Arc<str>, region: Arc<Region>, offset: u64, len: usize) {
        self.0.push(Placement { output, region, offset, len });
    }

    /// Whether the output of that name goes into a region.
    pub fn has(&self, output: &str) -> bool {
        self.0.iter().any(|placement| *placement.output == *output)
    }

    /// A responder that puts outputs where they belong and passes the responses on without their data.
    pub fn before(self, responder: Responder) -> Responder {
        if self.0.is_empty() {
            return responder;
        }
        Responder::new(Box::new(PlacingSink { placements: self, next: Some(responder) }))
    }

    /// Writes the outputs of a response that have a place, and takes their data out of it.
    fn put(&self, response: &mut InferResponse) -> Result<()> {
        for placement in &self.0 {
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
        for placement in &self.0 {
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
