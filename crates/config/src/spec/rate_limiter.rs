//! `instance_group.rate_limiter` as the server uses it.

use trireme_proto::inference::ModelRateLimiter;

/// What an instance needs in order to run, and how it stands among others that wait for the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimiterSpec {
    pub resources: Vec<ResourceNeed>,
    /// An instance of priority 2 gets half as many turns as one of priority 1; at least 1.
    pub priority: u32,
}

/// So much of a resource, held while an instance runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceNeed {
    pub name: String,
    /// There is one such resource for all devices, not one for each.
    pub global: bool,
    pub count: u32,
}

impl Default for RateLimiterSpec {
    fn default() -> Self {
        Self { resources: Vec::new(), priority: 1 }
    }
}

impl RateLimiterSpec {
    pub(super) fn of(limiter: &ModelRateLimiter) -> Self {
        let need = |resource: &trireme_proto::inference::model_rate_limiter::Resource| ResourceNeed {
            name: resource.name.clone(),
            global: resource.global,
            count: resource.count,
        };
        Self { resources: limiter.resources.iter().map(need).collect(), priority: limiter.priority.max(1) }
    }
}
