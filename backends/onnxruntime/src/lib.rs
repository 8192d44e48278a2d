//! trireme-backend-onnxruntime
