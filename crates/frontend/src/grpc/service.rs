//! From the path of a call to its handler. Every RPC of the protocol is in one table, with the protocol under which
//! it can be restricted.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use tonic::Status;
use trireme_core::Server;
use trireme_proto::health::HealthCheckRequest;
use trireme_proto::inference as pb;
use trireme_types::{Error, Result};

use super::body::{self, ResponseBody};
use super::message::{Framed, Messages};
use super::{
    Frontend, admin, compression, deadline, health, infer, log_settings, shared_memory, shutting_down,
    status, stream,
};
use crate::restricted::Category;

type Reply = Result<Response<ResponseBody>, Status>;

/// One connection's handle on the frontend.
#[derive(Clone)]
pub(super) struct Service(pub(super) Arc<Frontend>);

impl hyper::service::Service<Request<Incoming>> for Service {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let received = Instant::now();
        let frontend = Arc::clone(&self.0);
        Box::pin(async move { Ok(answer(frontend, request, received).await) })
    }
}

async fn answer(
    frontend: Arc<Frontend>,
    request: Request<Incoming>,
    received: Instant,
) -> Response<ResponseBody> {
    if let Some(refusal) = not_grpc(&request) {
        return refusal;
    }
    if let Some(reflection) = frontend.reflection.service(request.uri().path()) {
        let answer = reflection.reflect(request);
        return answer.await;
    }
    let (parts, body) = request.into_parts();
    let deadline = deadline::deadline(&parts.headers, received);
    let call = Call { frontend, headers: parts.headers, body, received, deadline };
    let reply = match (deadline::check(deadline), deadline) {
        (Err(exceeded), _) => Err(exceeded),
        (Ok(()), None) => dispatch(parts.uri.path(), call).await,
        (Ok(()), Some(at)) => tokio::time::timeout_at(at, dispatch(parts.uri.path(), call))
            .await
            .unwrap_or_else(|_| Err(deadline::exceeded())),
    };
    reply.unwrap_or_else(Status::into_http)
}

/// The answer to a request that is not a gRPC call at all. A missing `te: trailers` is not held against it.
fn not_grpc(request: &Request<Incoming>) -> Option<Response<ResponseBody>> {
    let content_type = request.headers().get(header::CONTENT_TYPE).map(|value| value.as_bytes());
    let is_grpc = content_type.is_none_or(|value| {
        let rest = value.strip_prefix(b"application/grpc");
        rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';' | b' ')))
    });
    let refused = if request.method() != Method::POST {
        StatusCode::METHOD_NOT_ALLOWED
    } else if !is_grpc {
        StatusCode::UNSUPPORTED_MEDIA_TYPE
    } else {
        return None;
    };
    let mut response = Response::new(ResponseBody::Empty);
    *response.status_mut() = refused;
    Some(response)
}

/// A call before its messages are read.
struct Call {
    frontend: Arc<Frontend>,
    headers: HeaderMap,
    body: Incoming,
    received: Instant,
    deadline: Option<tokio::time::Instant>,
}

async fn dispatch(path: &str, call: Call) -> Reply {
    use Category::{
        Health, Logging, Metadata, ModelConfig, ModelRepository, SharedMemory, Statistics, Trace,
    };
    let method = match path {
        "/grpc.health.v1.Health/Check" => {
            return call.unary(Health, |server, _: HealthCheckRequest| Ok(health::check(server))).await;
        }
        "/grpc.health.v1.Health/Watch" => return call.watch().await,
        _ => path.strip_prefix("/inference.GRPCInferenceService/").unwrap_or_default(),
    };
    match method {
        "ModelInfer" => call.infer().await,
        "ModelStreamInfer" => call.infer_stream(),
        "ServerLive" => {
            let answer = |server: &Server, _: pb::ServerLiveRequest| {
                Ok(pb::ServerLiveResponse { live: server.is_live() })
            };
            call.unary(Health, answer).await
        }
        "ServerReady" => {
            let answer = |server: &Server, _: pb::ServerReadyRequest| {
                Ok(pb::ServerReadyResponse { ready: server.is_ready() })
            };
            call.unary(Health, answer).await
        }
        "ModelReady" => call.unary(Health, admin::model_ready).await,
        "ServerMetadata" => {
            call.unary(Metadata, |server, _: pb::ServerMetadataRequest| Ok(admin::server_metadata(server)))
                .await
        }
        "ModelMetadata" => call.unary(Metadata, admin::model_metadata).await,
        "ModelConfig" => call.unary(ModelConfig, admin::model_config).await,
        "ModelStatistics" => call.unary(Statistics, admin::model_statistics).await,
        "RepositoryIndex" => {
            call.blocking(ModelRepository, |server, request| admin::repository_index(server, request)).await
        }
        "RepositoryModelLoad" => call.blocking(ModelRepository, admin::load).await,
        "RepositoryModelUnload" => call.blocking(ModelRepository, admin::unload).await,
        "SystemSharedMemoryStatus" => call.unary(SharedMemory, shared_memory::system_status).await,
        "SystemSharedMemoryRegister" => call.blocking(SharedMemory, shared_memory::system_register).await,
        "SystemSharedMemoryUnregister" => call.unary(SharedMemory, shared_memory::system_unregister).await,
        "CudaSharedMemoryStatus" => call.unary(SharedMemory, shared_memory::cuda_status).await,
        "CudaSharedMemoryRegister" => call.blocking(SharedMemory, shared_memory::cuda_register).await,
        "CudaSharedMemoryUnregister" => call.unary(SharedMemory, shared_memory::cuda_unregister).await,
        "TraceSetting" => call.missing::<pb::TraceSettingRequest>(Trace, "the trace extension").await,
        "LogSettings" => call.unary(Logging, log_settings::answer).await,
        _ => Err(Status::unimplemented(format!("the server has no RPC '{path}'"))),
    }
}

impl Call {
    fn check(&self, protocol: Category) -> Result<(), Status> {
        self.frontend.options.restricted.check(protocol, &self.headers).map_err(|header| {
            Status::unavailable(format!("This protocol is restricted, expecting header '{header}'"))
        })
    }

    /// The request message of a unary call.
    async fn message(self) -> Result<bytes::Bytes, Status> {
        Messages::new(self.body, compression::request_encoding(&self.headers)?).only().await
    }

    async fn request<Q: prost::Message + Default>(self, protocol: Category) -> Result<Q, Status> {
        self.check(protocol)?;
        let message = self.message().await?;
        Q::decode(message)
            .map_err(|error| Status::invalid_argument(format!("the request message cannot be read: {error}")))
    }

    /// A call that is answered at once.
    async fn unary<Q, A>(self, protocol: Category, handler: impl FnOnce(&Server, Q) -> Result<A>) -> Reply
    where
        Q: prost::Message + Default,
        A: prost::Message,
    {
        let frontend = Arc::clone(&self.frontend);
        let request = self.request(protocol).await?;
        let answer = handler(&frontend.server, request).map_err(status)?;
        Ok(body::unary(Framed::of(&answer).map_err(status)?, None))
    }

    /// A call that takes its time; it goes on when the client stops waiting.
    async fn blocking<Q, A>(
        self,
        protocol: Category,
        handler: impl FnOnce(&Arc<Server>, Q) -> Result<A> + Send + 'static,
    ) -> Reply
    where
        Q: prost::Message + Default + 'static,
        A: prost::Message + 'static,
    {
        let frontend = Arc::clone(&self.frontend);
        let request = self.request(protocol).await?;
        let work = tokio::task::spawn_blocking(move || handler(&frontend.server, request));
        let answer = work.await.unwrap_or_else(|_| Err(Error::internal("the call failed inside the server")));
        Ok(body::unary(Framed::of(&answer.map_err(status)?).map_err(status)?, None))
    }

    /// A call of a feature that is not built yet.
    async fn missing<Q: prost::Message + Default>(self, protocol: Category, feature: &str) -> Reply {
        let _: Q = self.request(protocol).await?;
        Err(status(admin::not_available(feature)))
    }

    async fn watch(self) -> Reply {
        let frontend = Arc::clone(&self.frontend);
        let _: HealthCheckRequest = self.request(Category::Health).await?;
        let watch = health::Watch::new(Arc::clone(&frontend.server), &frontend.shutdown);
        Ok(body::stream(watch, None))
    }

    async fn infer(self) -> Reply {
        self.check(Category::Inference)?;
        if self.frontend.is_stopping() {
            return Err(shutting_down());
        }
        let encoding = compression::request_encoding(&self.headers)?;
        let message = Messages::new(self.body, encoding).only().await?;
        // A runtime at its limit may look at the message before it looks at the clock.
        deadline::check(self.deadline)?;
        infer::model_infer(&self.frontend, &self.headers, message, self.received).await
    }

    fn infer_stream(self) -> Reply {
        self.check(Category::Inference)?;
        if self.frontend.is_stopping() {
            return Err(shutting_down());
        }
        stream::model_stream_infer(self.frontend, &self.headers, self.body, self.deadline)
    }
}
