//! The shared memory extensions over gRPC: status, register and unregister of system and CUDA regions.

use std::sync::Arc;

use trireme_core::{MemoryKind, RegionPlace, Server};
use trireme_proto::inference as pb;
use trireme_types::{Error, Result};

use pb::cuda_shared_memory_status_response::RegionStatus as CudaStatus;
use pb::system_shared_memory_status_response::RegionStatus as SystemStatus;

pub(super) fn system_status(
    server: &Server,
    request: pb::SystemSharedMemoryStatusRequest,
) -> Result<pb::SystemSharedMemoryStatusResponse> {
    let found = server.shared_memory().status(MemoryKind::System, &request.name)?;
    let regions = found.into_iter().filter_map(|region| match region.place {
        RegionPlace::System { key, offset } => {
            let status = SystemStatus { name: region.name.clone(), key, offset, byte_size: region.byte_size };
            Some((region.name, status))
        }
        RegionPlace::Cuda { .. } => None,
    });
    Ok(pb::SystemSharedMemoryStatusResponse { regions: regions.collect() })
}

pub(super) fn cuda_status(
    server: &Server,
    request: pb::CudaSharedMemoryStatusRequest,
) -> Result<pb::CudaSharedMemoryStatusResponse> {
    let found = server.shared_memory().status(MemoryKind::Cuda, &request.name)?;
    let regions = found.into_iter().filter_map(|region| match region.place {
        RegionPlace::Cuda { device_id } => {
            let device_id = u64::try_from(device_id).unwrap_or_default();
            let status = CudaStatus { name: region.name.clone(), device_id, byte_size: region.byte_size };
            Some((region.name, status))
        }
        RegionPlace::System { .. } => None,
    });
    Ok(pb::CudaSharedMemoryStatusResponse { regions: regions.collect() })
}

pub(super) fn system_register(
    server: &Arc<Server>,
    request: pb::SystemSharedMemoryRegisterRequest,
) -> Result<pb::SystemSharedMemoryRegisterResponse> {
    let pb::SystemSharedMemoryRegisterRequest { name, key, offset, byte_size } = request;
    server.shared_memory().register_system(&name, &key, offset, byte_size)?;
    Ok(pb::SystemSharedMemoryRegisterResponse {})
}

/// The first registration opens the driver, which takes its time.
pub(super) fn cuda_register(
    server: &Arc<Server>,
    request: pb::CudaSharedMemoryRegisterRequest,
) -> Result<pb::CudaSharedMemoryRegisterResponse> {
    let pb::CudaSharedMemoryRegisterRequest { name, raw_handle, device_id, byte_size } = request;
    let handle = raw_handle.as_ref().try_into().map_err(|_| {
        Error::invalid_arg(format!(
            "failed to register CUDA shared memory region '{name}': 'raw_handle' must be the 64 bytes of a \
             cudaIpcMemHandle_t, got {}",
            raw_handle.len()
        ))
    })?;
    server.shared_memory().register_cuda(&name, handle, device_id, byte_size)?;
    Ok(pb::CudaSharedMemoryRegisterResponse {})
}

pub(super) fn system_unregister(
    server: &Server,
    request: pb::SystemSharedMemoryUnregisterRequest,
) -> Result<pb::SystemSharedMemoryUnregisterResponse> {
    unregister(server, MemoryKind::System, &request.name)?;
    Ok(pb::SystemSharedMemoryUnregisterResponse {})
}

pub(super) fn cuda_unregister(
    server: &Server,
    request: pb::CudaSharedMemoryUnregisterRequest,
) -> Result<pb::CudaSharedMemoryUnregisterResponse> {
    unregister(server, MemoryKind::Cuda, &request.name)?;
    Ok(pb::CudaSharedMemoryUnregisterResponse {})
}

/// The empty name is all of them.
fn unregister(server: &Server, kind: MemoryKind, name: &str) -> Result<()> {
    let memory = server.shared_memory();
    if name.is_empty() { memory.unregister_all(kind) } else { memory.unregister(kind, name) }
}
