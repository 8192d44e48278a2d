//! What limits the instances of all models: `--rate-limit`, `--rate-limit-resource`, `--host-policy`.

use anyhow::{Result, bail};
use trireme_core::{HostPolicy, HostPolicySetting, RateLimitResource, parse_cores};

use crate::flags::Flags;

/// The resources that `--rate-limit` shares out; `None` if it is off.
pub(super) fn rate_limit(
    flags: &Flags,
    warnings: &mut Vec<String>,
) -> Result<Option<Vec<RateLimitResource>>> {
    let resources: Vec<_> =
        flags.all("rate-limit-resource").iter().map(|text| resource(text)).collect::<Result<_>>()?;
    match flags.last("rate-limit").map(str::to_ascii_lowercase).as_deref() {
        Some("execution_count") => Ok(Some(resources)),
        None | Some("off") => {
            if !resources.is_empty() {
                warnings.push(
                    "--rate-limit-resource has no effect without --rate-limit=execution_count".to_owned(),
                );
            }
            Ok(None)
        }
        Some(other) => bail!("--rate-limit expects execution_count or off, got '{other}'"),
    }
}

/// `NAME:COUNT[:DEVICE]`
fn resource(text: &str) -> Result<RateLimitResource> {
    let mut parts = text.split(':');
    let (name, count, device) = (parts.next(), parts.next(), parts.next());
    let (Some(name), Some(count), None) = (name.filter(|name| !name.is_empty()), count, parts.next()) else {
        bail!("--rate-limit-resource expects NAME:COUNT or NAME:COUNT:DEVICE, got '{text}'");
    };
    let Ok(count) = count.parse::<u32>() else {
        bail!(
            "--rate-limit-resource={text}: COUNT must be a whole number from 0 to {}, got '{count}'",
            u32::MAX
        );
    };
    let device = match device.map(|device| (device, device.parse::<i32>())) {
        None => None,
        Some((_, Ok(device))) if device >= 0 => Some(device),
        Some((device, _)) => {
            bail!("--rate-limit-resource={text}: DEVICE must be a whole number of at least 0, got '{device}'")
        }
    };
    Ok(RateLimitResource { name: name.to_owned(), count, device })
}

pub(super) fn host_policies(flags: &Flags) -> Result<Vec<HostPolicy>> {
    flags.all("host-policy").iter().map(|text| host_policy(text)).collect()
}

/// `NAME,numa-node=N` or `NAME,cpu-cores=A-B`
fn host_policy(text: &str) -> Result<HostPolicy> {
    let pair = text.split_once(',').filter(|(name, _)| !name.is_empty());
    let Some((name, (key, value))) = pair.and_then(|(name, pair)| Some((name, pair.split_once('=')?))) else {
        bail!("--host-policy expects NAME,numa-node=N or NAME,cpu-cores=FIRST-LAST, got '{text}'");
    };
    let setting = match key {
        "numa-node" => match value.parse() {
            Ok(node) => HostPolicySetting::NumaNode(node),
            Err(_) => {
                bail!("--host-policy={text}: numa-node expects a whole number of at least 0, got '{value}'")
            }
        },
        "cpu-cores" => match parse_cores(value) {
            Some(cores) => HostPolicySetting::CpuCores(cores),
            None => bail!("--host-policy={text}: cpu-cores expects cores as 0-3 or 0-3,8-11, got '{value}'"),
        },
        _ => bail!("--host-policy={text}: a policy has numa-node or cpu-cores, got '{key}'"),
    };
    Ok(HostPolicy { name: name.to_owned(), setting })
}
