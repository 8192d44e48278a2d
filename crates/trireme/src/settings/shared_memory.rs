//! Memory that clients may share with the server: `--allow-client-shm` and its limits.

use std::path::PathBuf;

use anyhow::Result;
use trireme_core::SharedMemorySettings;

use super::value::{boolean, number};
use crate::flags::Flags;

/// Names the CUDA driver to open instead of the system's `libcuda.so.1`.
const CUDA_DRIVER: &str = "TRIREME_CUDA_DRIVER";

/// Who may share how much. Without a limit on bytes it is the memory of the machine, for more cannot be there.
pub(super) fn shared_memory(flags: &Flags) -> Result<SharedMemorySettings> {
    let defaults = SharedMemorySettings::default();
    let default_regions = i64::try_from(defaults.max_regions)?;
    let max_bytes = match flags.last("shm-max-bytes") {
        Some(_) => number(flags, "shm-max-bytes", 0, 1, i64::MAX)?,
        None => memory_of_machine().unwrap_or(defaults.max_bytes),
    };
    Ok(SharedMemorySettings {
        allowed: boolean(flags, "allow-client-shm", false)?,
        max_regions: usize::try_from(number(flags, "shm-max-regions", default_regions, 1, i32::MAX.into())?)?,
        max_bytes,
        cuda_driver: std::env::var_os(CUDA_DRIVER).filter(|path| !path.is_empty()).map(PathBuf::from),
    })
}

fn memory_of_machine() -> Option<u64> {
    let text = fs_err::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_has_memory() {
        assert!(memory_of_machine().is_some_and(|bytes| bytes > 1 << 20));
    }
}
