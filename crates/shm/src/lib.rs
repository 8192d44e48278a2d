//! Memory that clients share with the server: POSIX objects by name, and memory of GPUs by CUDA's handles.
//!
//! Invariants: every access says how much it wants and is checked against what is really there at that moment, so
//! that a client that makes its object smaller gets an error and the process lives; nothing here knows of regions,
//! requests or protocols. `unsafe` stands in this crate so that the crates above it need none.

mod cuda;
mod object;

pub use cuda::{CudaDriver, CudaError, DeviceMemory, IPC_HANDLE_LEN};
pub use object::{ObjectError, SharedObject};
