//! The way from a model to other models of the same server.

use std::fmt;

use trireme_types::{InferRequest, Responder};

/// Runs requests that models make. The server gives one to every backend with [`crate::ModelContext`].
pub trait ModelCaller: Send + Sync + fmt::Debug {
    /// Lets a model run a request; `None` is its latest version. The answer, an error included, goes through the
    /// responder, perhaps before this returns.
    ///
    /// # Errors
    /// Through the responder, beside those of any request: INVALID_ARG when the model, or a model inside it, is among
    /// the request's `callers`, and so would wait for itself.
    fn infer(&self, model: &str, version: Option<i64>, request: InferRequest, responder: Responder);

    /// Whether a model serves.
    fn is_ready(&self, model: &str, version: Option<i64>) -> bool;
}
