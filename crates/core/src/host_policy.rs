//! Host policies: which cores the instances of a group run on (`--host-policy`).
//!
//! Threads are shared by all instances, so it is an execution that is bound, not a thread: an instance under a policy
//! moves its thread to the policy's cores before it runs and back afterwards. Models without a policy pay nothing.
//! Threads of an engine's own are made while the model is opened and inherit the cores of the thread that opens it,
//! which is bound for that time.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use trireme_backend::{Batch, ModelInstance};
use trireme_config::{InstanceGroup, InstanceKind};
use trireme_types::{Error, Result};

/// One `--host-policy`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPolicy {
    pub name: String,
    pub setting: HostPolicySetting,
}

/// What a host policy binds to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostPolicySetting {
    /// The cores of a NUMA node; memory that is first used there is the node's.
    NumaNode(usize),
    /// These cores, by number.
    CpuCores(Vec<usize>),
}

/// Where the kernel says which cores a NUMA node has.
const NODES: &str = "/sys/devices/system/node";

/// The policies of a server, by name.
#[derive(Debug, Default)]
pub(crate) struct HostPolicies(BTreeMap<String, Arc<Cores>>);

/// Cores that this process may use; at least one.
#[derive(Clone)]
pub(crate) struct Cores(CpuSet);

impl HostPolicies {
    /// Settings of one name count together: cores of that NUMA node among those cores.
    ///
    /// # Errors
    /// `INVALID_ARG` for a core or node that does not exist or that this process may not use.
    pub(crate) fn new(policies: &[HostPolicy]) -> Result<Self> {
        let mut found = BTreeMap::new();
        if policies.is_empty() {
            return Ok(Self::default());
        }
        let allowed = sched_getaffinity(None)
            .map_err(|error| Error::internal(format!("cannot read the scheduler affinity: {error}")))?;
        for policy in policies {
            let cores = match &policy.setting {
                HostPolicySetting::CpuCores(cores) => named_cores(&policy.name, cores, &allowed)?,
                HostPolicySetting::NumaNode(node) => node_cores(&policy.name, *node, &allowed)?,
            };
            let cores = match found.get(&policy.name) {
                Some(before) => cores.common(before),
                None => cores,
            };
            if cores.count() == 0 {
                return Err(Error::invalid_arg(format!(
                    "--host-policy={}: its cpu-cores are not on its numa-node; name cores of that node, or only one of the \
                     two",
                    policy.name
                )));
            }
            found.insert(policy.name.clone(), cores);
        }
        Ok(Self(found.into_iter().map(|(name, cores)| (name, Arc::new(cores))).collect()))
    }

    /// The policy of a group: the one that it names, or that of its kind.
    pub(crate) fn of_group(&self, group: &InstanceGroup) -> Option<&Arc<Cores>> {
        let name = match group.kind {
            _ if !group.host_policy.is_empty() => group.host_policy.as_str(),
            InstanceKind::Model => "model",
            InstanceKind::Cpu | InstanceKind::Auto => "cpu",
            InstanceKind::Gpu => "gpu",
        };
        self.0.get(name)
    }

    /// The cores of all groups together; `None` if one of them may run anywhere.
    pub(crate) fn of_groups<'a>(&self, groups: impl Iterator<Item = &'a InstanceGroup>) -> Option<Cores> {
        if self.0.is_empty() {
            return None;
        }
        let mut all: Option<Cores> = None;
        for group in groups.filter(|group| !group.passive) {
            let cores = self.of_group(group)?;
            all = Some(all.map_or_else(|| Cores::clone(cores), |all| all.union(cores)));
        }
        all
    }

    /// Names of policies that groups ask for and the command line does not define.
    pub(crate) fn undefined<'a>(
        &self,
        groups: impl Iterator<Item = &'a InstanceGroup>,
    ) -> impl Iterator<Item = &'a InstanceGroup> {
        groups.filter(|group| !group.host_policy.is_empty() && !self.0.contains_key(&group.host_policy))
    }
}

fn named_cores(policy: &str, cores: &[usize], allowed: &CpuSet) -> Result<Cores> {
    let mut set = CpuSet::new();
    for &core in cores {
        if core >= CpuSet::MAX_CPU || !allowed.is_set(core) {
            return Err(Error::invalid_arg(format!(
                "--host-policy={policy},cpu-cores: core {core} does not exist or is not allowed for this process; it may \
                 use {}",
                Cores(*allowed)
            )));
        }
        set.set(core);
    }
    Ok(Cores(set))
}

fn node_cores(policy: &str, node: usize, allowed: &CpuSet) -> Result<Cores> {
    let list = fs_err::read_to_string(format!("{NODES}/node{node}/cpulist")).map_err(|_| {
        let nodes: Vec<String> = fs_err::read_dir(NODES)
            .into_iter()
            .flatten()
            .filter_map(|entry| Some(entry.ok()?.file_name().to_str()?.strip_prefix("node")?.to_owned()))
            .filter(|node| node.parse::<usize>().is_ok())
            .collect();
        let found = match nodes.is_empty() {
            true => "this machine tells of no NUMA nodes".to_owned(),
            false => format!("this machine has {}", nodes.join(", ")),
        };
        Error::invalid_arg(format!("--host-policy={policy},numa-node={node}: there is no such node, {found}"))
    })?;
    let mut set = CpuSet::new();
    for core in parse_cores(list.trim()).unwrap_or_default() {
        if core < CpuSet::MAX_CPU && allowed.is_set(core) {
            set.set(core);
        }
    }
    let cores = Cores(set);
    if cores.count() == 0 {
        return Err(Error::invalid_arg(format!(
            "--host-policy={policy},numa-node={node}: the node has the cores '{}', and this process may use {}",
            list.trim(),
            Cores(*allowed)
        )));
    }
    Ok(cores)
}

/// Cores as the kernel writes them: `0-3`, `5`, `0-3,8-11`. `None` if the text is not that.
pub fn parse_cores(text: &str) -> Option<Vec<usize>> {
    /// More cores than any machine has; a wrong number must not fill memory.
    const MOST: usize = 4096;
    let mut cores = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<usize>().ok()?, last.trim().parse::<usize>().ok()?);
        if last < first || last >= MOST {
            return None;
        }
        cores.extend(first..=last);
    }
    Some(cores)
}

impl Cores {
    pub(crate) fn count(&self) -> usize {
        self.0.count() as usize
    }

    fn numbers(&self) -> impl Iterator<Item = usize> {
        (0..CpuSet::MAX_CPU).filter(|core| self.0.is_set(*core))
    }

    fn common(&self, other: &Self) -> Self {
        let mut set = CpuSet::new();
        self.numbers().filter(|core| other.0.is_set(*core)).for_each(|core| set.set(core));
        Self(set)
    }

    fn union(&self, other: &Self) -> Self {
        let mut set = self.0;
        other.numbers().for_each(|core| set.set(core));
        Self(set)
    }

    /// Moves the calling thread to these cores until the guard is dropped.
    pub(crate) fn bind(&self) -> Bound {
        let before = sched_getaffinity(None).and_then(|before| {
            sched_setaffinity(None, &self.0)?;
            Ok(before)
        });
        if let Err(error) = &before {
            tracing::warn!("cannot run on the cores {self} of a host policy: {error}");
        }
        Bound { before: before.ok(), _thread: PhantomData }
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut numbers = self.numbers().peekable();
        let mut comma = "";
        while let Some(first) = numbers.next() {
            let mut last = first;
            while let Some(next) = numbers.next_if_eq(&(last + 1)) {
                last = next;
            }
            match first == last {
                true => write!(f, "{comma}{first}")?,
                false => write!(f, "{comma}{first}-{last}")?,
            }
            comma = ",";
        }
        Ok(())
    }
}

impl fmt::Debug for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cores({self})")
    }
}

/// The thread is on the cores of a policy.
#[must_use]
pub(crate) struct Bound {
    before: Option<CpuSet>,
    /// It is about the thread that made it.
    _thread: PhantomData<*const ()>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(before) = &self.before
            && let Err(error) = sched_setaffinity(None, before)
        {
            tracing::warn!("a thread stays on the cores of a host policy: {error}");
        }
    }
}

/// An instance that runs on the cores of a policy.
pub(crate) struct BoundInstance {
    inner: Box<dyn ModelInstance>,
    cores: Arc<Cores>,
}

impl BoundInstance {
    /// The instance itself if it may run anywhere.
    pub(crate) fn around(
        inner: Box<dyn ModelInstance>,
        cores: Option<&Arc<Cores>>,
    ) -> Box<dyn ModelInstance> {
        match cores {
            Some(cores) => Box::new(Self { inner, cores: Arc::clone(cores) }),
            None => inner,
        }
    }
}

impl ModelInstance for BoundInstance {
    fn execute(&mut self, batch: &mut Batch) -> Result<()> {
        let _bound = self.cores.bind();
        self.inner.execute(batch)
    }

    fn is_ready(&self) -> bool {
        self.inner.is_ready()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(name: &str, setting: HostPolicySetting) -> HostPolicy {
        HostPolicy { name: name.into(), setting }
    }

    /// The first core that the tests may use.
    fn first_core() -> usize {
        Cores(sched_getaffinity(None).unwrap()).numbers().next().unwrap()
    }

    #[test]
    fn lists_of_cores() {
        assert_eq!(parse_cores("0-3"), Some(vec![0, 1, 2, 3]));
        assert_eq!(parse_cores("5"), Some(vec![5]));
        assert_eq!(parse_cores("0-1,8-9"), Some(vec![0, 1, 8, 9]));
        for bad in ["", "a", "3-1", "-1", "0-", "0-99999999999", "1,,2"] {
            assert_eq!(parse_cores(bad), None, "{bad}");
        }
        let mut set = CpuSet::new();
        [0, 1, 2, 5, 8, 9].into_iter().for_each(|core| set.set(core));
        assert_eq!(Cores(set).to_string(), "0-2,5,8-9");
    }

    #[test]
    fn an_execution_is_bound_and_the_thread_is_free_again() {
        struct Look(std::sync::mpsc::Sender<String>);
        impl ModelInstance for Look {
            fn execute(&mut self, _: &mut Batch) -> Result<()> {
                self.0.send(Cores(sched_getaffinity(None).unwrap()).to_string()).unwrap();
                Ok(())
            }
        }
        let before = Cores(sched_getaffinity(None).unwrap()).to_string();
        let core = first_core();
        let policies = HostPolicies::new(&[policy("cpu", HostPolicySetting::CpuCores(vec![core]))]).unwrap();
        let (sender, seen) = std::sync::mpsc::channel();
        let cores = policies.0.get("cpu");
        let mut instance = BoundInstance::around(Box::new(Look(sender)), cores);
        let mut batch = Batch::new(Vec::new(), std::time::Instant::now());
        instance.execute(&mut batch).unwrap();
        assert_eq!(seen.recv().unwrap(), core.to_string());
        assert_eq!(Cores(sched_getaffinity(None).unwrap()).to_string(), before);
    }

    #[test]
    fn cores_that_are_not_there_are_refused() {
        for core in [1000, 5000] {
            let cores = HostPolicySetting::CpuCores(vec![core]);
            let error = HostPolicies::new(&[policy("cpu", cores)]).unwrap_err();
            assert!(
                error.message().starts_with(&format!(
                    "--host-policy=cpu,cpu-cores: core {core} does not exist or is not allowed for this process; it may use "
                )),
                "{error}"
            );
        }
        let error = HostPolicies::new(&[policy("cpu", HostPolicySetting::NumaNode(999))]).unwrap_err();
        assert!(error.message().contains("numa-node=999: there is no such node"), "{error}");
    }

    #[test]
    fn groups_find_their_policy() {
        let cores = || HostPolicySetting::CpuCores(vec![first_core()]);
        let policies = HostPolicies::new(&[policy("cpu", cores()), policy("own", cores())]).unwrap();
        let group = |kind, host_policy: &str| InstanceGroup {
            name: "g".into(),
            kind,
            count: 1,
            gpus: Vec::new(),
            profiles: Vec::new(),
            passive: false,
            host_policy: host_policy.into(),
            rate_limiter: trireme_config::RateLimiterSpec::default(),
        };
        let has = |group: &InstanceGroup| policies.of_group(group).is_some();
        assert!(has(&group(InstanceKind::Cpu, "")) && has(&group(InstanceKind::Model, "own")));
        assert!(!has(&group(InstanceKind::Model, "")) && !has(&group(InstanceKind::Cpu, "absent")));
        let free = [group(InstanceKind::Cpu, ""), group(InstanceKind::Model, "")];
        assert!(policies.of_groups(free.iter()).is_none(), "one of them may run anywhere");
        assert_eq!(policies.of_groups(free[..1].iter()).map(|cores| cores.count()), Some(1));
        assert_eq!(policies.undefined([group(InstanceKind::Cpu, "absent")].iter()).count(), 1);
    }
}
