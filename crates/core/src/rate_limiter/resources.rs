//! How much there is of each resource, and how much of it is taken.
//!
//! Without a `--rate-limit-resource` there is as much of a resource as the instance that needs most of it.

use smallvec::SmallVec;
use trireme_config::ResourceNeed;
use trireme_types::{Error, Result};

use super::RateLimitResource;

/// So much of one resource.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    /// Place in [`Resources`].
    pub(super) resource: usize,
    pub(super) count: u64,
}

/// The resources that registered instances need.
#[derive(Default)]
pub(super) struct Resources {
    given: Vec<RateLimitResource>,
    /// Places stay; one that nobody needs any more is used again.
    known: Vec<Resource>,
}

struct Resource {
    name: String,
    /// `None` for a global resource.
    device: Option<i32>,
    limit: u64,
    taken: u64,
    /// The turn that was given last; whoever comes from idleness enters here.
    clock: u64,
    /// What each instance that needs it needs.
    needs: Vec<u64>,
}

impl Resources {
    pub(super) fn new(given: Vec<RateLimitResource>) -> Self {
        Self { given, known: Vec::new() }
    }

    /// Takes note of what an instance on that device needs.
    ///
    /// # Errors
    /// See [`super::RateLimiter::register`]; nothing has been noted then.
    pub(super) fn register(&mut self, needs: &[ResourceNeed], device: i32) -> Result<SmallVec<[Need; 2]>> {
        for need in needs {
            self.check(need, device)?;
        }
        let mut noted = SmallVec::new();
        for need in needs {
            let device = (!need.global).then_some(device);
            let resource = self.place(&need.name, device);
            let given = self.given(&need.name, device);
            let count = u64::from(need.count);
            if let Some(known) = self.known.get_mut(resource) {
                known.needs.push(count);
                known.renew(given);
            }
            noted.push(Need { resource, count });
        }
        Ok(noted)
    }

    /// Forgets an instance that holds nothing.
    pub(super) fn unregister(&mut self, needs: &[Need]) {
        for need in needs {
            let given = self
                .known
                .get(need.resource)
                .and_then(|resource| self.given(&resource.name, resource.device));
            let Some(resource) = self.known.get_mut(need.resource) else { continue };
            if let Some(place) = resource.needs.iter().position(|count| *count == need.count) {
                resource.needs.swap_remove(place);
            }
            resource.renew(given);
        }
    }

    /// Takes everything, or nothing and says no.
    pub(super) fn take(&mut self, needs: &[Need], turn: u64) -> bool {
        let fits = |need: &Need| {
            self.known.get(need.resource).is_some_and(|r| r.taken.saturating_add(need.count) <= r.limit)
        };
        if !needs.iter().all(fits) {
            return false;
        }
        for need in needs {
            if let Some(resource) = self.known.get_mut(need.resource) {
                resource.taken += need.count;
                resource.clock = resource.clock.max(turn);
            }
        }
        true
    }

    pub(super) fn free(&mut self, needs: &[Need]) {
        for need in needs {
            if let Some(resource) = self.known.get_mut(need.resource) {
                resource.taken = resource.taken.saturating_sub(need.count);
            }
        }
    }

    /// Where an instance with these needs enters the line.
    pub(super) fn clock(&self, needs: &[Need]) -> u64 {
        let clocks = needs.iter().filter_map(|need| self.known.get(need.resource)).map(|r| r.clock);
        clocks.min().unwrap_or(0)
    }

    fn check(&self, need: &ResourceNeed, device: i32) -> Result<()> {
        let device = (!need.global).then_some(device);
        let in_use = |resource: &&Resource| !resource.needs.is_empty() && resource.name == need.name;
        if self.known.iter().filter(in_use).any(|resource| resource.device.is_none() != need.global) {
            return Err(Error::invalid_arg(format!(
                "Resource \"{}\" is present as both global and device-specific resource in the model configuration.",
                need.name
            )));
        }
        match self.given(&need.name, device) {
            Some(limit) if limit < u64::from(need.count) => Err(Error::invalid_arg(format!(
                "Resource count for \"{}\" is limited to {limit} which will prevent scheduling of one or more model \
                 instances, the minimum required count is {}",
                need.name, need.count
            ))),
            _ => Ok(()),
        }
    }

    /// What the command line says: for the device itself, else for every device. A global resource has no device.
    fn given(&self, name: &str, device: Option<i32>) -> Option<u64> {
        let named = || self.given.iter().rev().filter(|given| given.name == name);
        let exact = named().find(|given| given.device == device);
        let found = exact.or_else(|| named().find(|given| device.is_none() || given.device.is_none()));
        found.map(|given| u64::from(given.count))
    }

    fn place(&mut self, name: &str, device: Option<i32>) -> usize {
        let same = |resource: &Resource| resource.name == name && resource.device == device;
        if let Some(place) = self.known.iter().position(same) {
            return place;
        }
        let fresh =
            Resource { name: name.to_owned(), device, limit: 0, taken: 0, clock: 0, needs: Vec::new() };
        let unused = self.known.iter().position(|resource| resource.needs.is_empty());
        match unused.and_then(|place| Some((place, self.known.get_mut(place)?))) {
            Some((place, resource)) => {
                *resource = fresh;
                place
            }
            None => {
                self.known.push(fresh);
                self.known.len() - 1
            }
        }
    }
}

impl Resource {
    fn renew(&mut self, given: Option<u64>) {
        self.limit = given.unwrap_or_else(|| self.needs.iter().copied().max().unwrap_or(0));
    }
}
