//! From the instance groups of a configuration to instances: names, kinds, host policies, rate limits.
//!
//! Instances of passive groups get no requests, and nothing else here could use them, so none are made.

use std::sync::Arc;

use trireme_backend::{InstanceContext, Model, ModelInstance};
use trireme_config::{InstanceGroup, InstanceKind, ModelSpec, RateLimiterSpec};
use trireme_types::{Error, Result};

use crate::host_policy::{BoundInstance, Cores, HostPolicies};
use crate::scheduler::Remake;

/// The instances that a version is to have, in the order of the configuration.
pub(super) struct InstancePlan(Vec<Planned>);

struct Planned {
    context: InstanceContext,
    cores: Option<Arc<Cores>>,
    limits: RateLimiterSpec,
}

impl InstancePlan {
    pub(super) fn of(spec: &ModelSpec, policies: &HostPolicies) -> Self {
        for group in policies.undefined(spec.instance_groups.iter()) {
            tracing::warn!(
                "instance group {} of model '{}' names the host_policy '{}', which no --host-policy defines; it runs on \
                 any core",
                group.name,
                spec.name,
                group.host_policy
            );
        }
        let working = spec.instance_groups.iter().filter(|group| !group.passive);
        Self(working.flat_map(|group| planned(group, policies)).collect())
    }

    /// Makes every instance.
    pub(super) fn make(&self, model: &dyn Model) -> Result<Vec<Box<dyn ModelInstance>>> {
        self.0.iter().map(|planned| planned.make(model)).collect()
    }

    pub(super) fn names(&self) -> Vec<&str> {
        self.0.iter().map(|planned| planned.context.name.as_str()).collect()
    }

    /// What each instance needs of the rate limiter, and on which device it runs.
    pub(super) fn limits(&self) -> impl Iterator<Item = (&RateLimiterSpec, i32)> {
        self.0.iter().map(|planned| (&planned.limits, planned.context.device_id))
    }

    /// What makes an instance anew.
    pub(super) fn remake(self, model: Arc<dyn Model>) -> Remake {
        Box::new(move |index| {
            let planned = self.0.get(index).ok_or_else(|| Error::internal("no such instance"))?;
            planned.make(model.as_ref())
        })
    }
}

impl Planned {
    fn make(&self, model: &dyn Model) -> Result<Box<dyn ModelInstance>> {
        Ok(BoundInstance::around(model.instance(&self.context)?, self.cores.as_ref()))
    }
}

/// The instances of one group; of a GPU group, `count` for each GPU.
fn planned<'a>(group: &'a InstanceGroup, policies: &'a HostPolicies) -> impl Iterator<Item = Planned> + 'a {
    let kind = match group.kind {
        InstanceKind::Gpu => trireme_backend::InstanceKind::Gpu,
        InstanceKind::Model => trireme_backend::InstanceKind::Model,
        InstanceKind::Cpu | InstanceKind::Auto => trireme_backend::InstanceKind::Cpu,
    };
    let devices = match group.kind {
        InstanceKind::Gpu if !group.gpus.is_empty() => group.gpus.as_slice(),
        _ => &[0],
    };
    let each = devices.iter().flat_map(|device| (0..group.count).map(move |_| *device));
    each.enumerate().map(move |(index, device_id)| Planned {
        context: InstanceContext {
            name: format!("{}_{index}", group.name),
            kind,
            device_id,
            profiles: group.profiles.clone(),
        },
        cores: policies.of_group(group).cloned(),
        limits: group.rate_limiter.clone(),
    })
}
