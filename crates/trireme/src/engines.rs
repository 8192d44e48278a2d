//! The engines of this binary. None needs its library before a model asks for it.

use std::path::PathBuf;
use std::sync::Arc;

use trireme_backend::Backend;
use trireme_backend_onnxruntime::OnnxRuntimeBackend;
use trireme_backend_python::PythonBackend;

/// Every backend. `onnxruntime` is the library to load, if one was named.
pub(crate) fn all(onnxruntime: Option<PathBuf>) -> Vec<Arc<dyn Backend>> {
    let mut backends = trireme_backend_testing::backends();
    backends.push(Arc::new(OnnxRuntimeBackend::new(onnxruntime)));
    backends.push(Arc::new(PythonBackend::default()));
    backends
}
