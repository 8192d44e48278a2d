//! The thread budget: how many cores this process may use, and how they are shared out.

use std::thread;

/// Cores that this process may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadBudget {
    cores: usize,
}

impl ThreadBudget {
    /// The given number of cores, or what the scheduler affinity and the cgroup CPU quota allow.
    pub fn new(cores: Option<usize>) -> Self {
        let allowed = || thread::available_parallelism().map_or(1, usize::from);
        Self { cores: cores.unwrap_or_else(allowed).max(1) }
    }

    pub fn cores(self) -> usize {
        self.cores
    }

    /// Threads for one execution of a model with that many instances, the calling thread included: when all
    /// instances of the model run at once they fill the cores and no more.
    pub fn per_instance(self, instances: usize) -> usize {
        (self.cores / instances.max(1)).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_share_the_cores() {
        let budget = ThreadBudget::new(Some(8));
        assert_eq!(budget.per_instance(1), 8);
        assert_eq!(budget.per_instance(2), 4);
        assert_eq!(budget.per_instance(3), 2);
        assert_eq!(budget.per_instance(20), 1);
        assert_eq!(ThreadBudget::new(Some(0)).cores(), 1);
    }
}
