//! Server reflection, so that tools as `grpcurl` can ask what the server offers.

use std::convert::Infallible;
use std::pin::Pin;

use http::{Request, Response};
use hyper::body::Incoming;
use tonic::codegen::Service;
use trireme_types::{Error, Result};

use super::body::ResponseBody;

const V1: &str = "/grpc.reflection.v1.ServerReflection/";
const V1_ALPHA: &str = "/grpc.reflection.v1alpha.ServerReflection/";

type Answer = Pin<Box<dyn Future<Output = Response<ResponseBody>> + Send>>;

/// A reflection service, boxed since its type has no name.
pub(super) trait Reflect: Send + Sync {
    fn reflect(&self, request: Request<Incoming>) -> Answer;
}

impl<S> Reflect for S
where
    S: Service<Request<Incoming>, Response = Response<tonic::body::Body>, Error = Infallible>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    fn reflect(&self, request: Request<Incoming>) -> Answer {
        let answer = self.clone().call(request);
        Box::pin(async move {
            match answer.await {
                Ok(response) => response.map(ResponseBody::Tonic),
                Err(never) => match never {},
            }
        })
    }
}

/// Both versions of the reflection service.
pub(super) struct Reflection {
    v1: Box<dyn Reflect>,
    v1_alpha: Box<dyn Reflect>,
}

impl std::fmt::Debug for Reflection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reflection")
    }
}

impl Reflection {
    pub(super) fn new() -> Result<Self> {
        let builder = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(trireme_proto::FILE_DESCRIPTOR_SET)
        };
        let failed =
            |error| Error::internal(format!("the descriptors for reflection are not valid: {error}"));
        Ok(Self {
            v1: Box::new(builder().build_v1().map_err(failed)?),
            v1_alpha: Box::new(builder().build_v1alpha().map_err(failed)?),
        })
    }

    /// The service that a path belongs to, if it is one of reflection.
    pub(super) fn service(&self, path: &str) -> Option<&dyn Reflect> {
        if path.starts_with(V1) {
            Some(&*self.v1)
        } else if path.starts_with(V1_ALPHA) {
            Some(&*self.v1_alpha)
        } else {
            None
        }
    }
}
