//! Memory that clients share with the server: POSIX objects by name, and memory of GPUs by CUDA's handles.
//!
//! Invariants: every access says how much it wants and is checked against what is really there at that moment, and what
//! is read in place survives that it is taken away, so that a client that makes its object smaller gets an error and the
//! process lives; nothing here knows of regions,
//! requests or protocols. `unsafe` stands in this crate so that the crates above it need none.

mod cuda;
mod mapping;
mod object;

pub use cuda::{CudaDriver, CudaError, DeviceMemory, IPC_HANDLE_LEN};
pub use mapping::Mapping;
pub use object::{ObjectError, SharedObject};
