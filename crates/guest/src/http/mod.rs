//! The agent's HTTP server (`e2b-protocol` 3.4).
//!
//! Owns: routes, who may use them, and the form of errors. Does not own: what a route does.
//!
//! Contract: with a token set, every route but `/health`, `/files` and `/init` needs it; `/files` takes a signature instead;
//! `/init` and `/shutdown` are for the gateway alone. Errors are `{"code":N,"message":"…"}`, those of RPCs are Connect's.

pub(crate) mod accept;
pub(crate) mod files;
pub(crate) mod init;
pub(crate) mod metrics;
pub(crate) mod range;
pub(crate) mod signature;
pub(crate) mod upload;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, BodyDataStream, HttpBody as _};
use axum::extract::{ConnectInfo, DefaultBodyLimit, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use connectrpc::{CompressionPolicy, ConnectRpcService, Limits};
use futures::StreamExt as _;
use http::{HeaderName, HeaderValue, StatusCode, header};
use proto::rpc::filesystem::FilesystemExt as _;
use proto::rpc::process::ProcessExt as _;
use tower_http::cors::{Any, CorsLayer};

use crate::agent::{Agent, CallerError};
use crate::errors::chain;
use crate::files::FileError;
use crate::files::rpc::FilesystemService;
use crate::process::rpc::ProcessService;
use crate::users::UserError;

/// The largest RPC message: input is sent as base64 in JSON.
const MESSAGE_MAX: usize = 64 << 20;

/// What is read of a body that nobody wants, as Go's server does.
const DRAIN_MAX: usize = 256 << 10;
/// How long that may take.
const DRAIN_LIMIT: Duration = Duration::from_millis(500);

/// An answer that is not a success.
#[derive(Debug)]
pub(crate) struct HttpError {
    status: StatusCode,
    message: String,
}

impl HttpError {
    /// An error with a text for the client.
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    /// 400.
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// 401.
    pub(crate) fn unauthorised(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message)
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let body = serde_json::json!({ "code": self.status.as_u16(), "message": self.message });
        (self.status, Json(body)).into_response()
    }
}

impl From<FileError> for HttpError {
    fn from(error: FileError) -> Self {
        Self::new(error.status(), chain(&error))
    }
}

impl From<CallerError> for HttpError {
    fn from(error: CallerError) -> Self {
        match error {
            CallerError::User(error) => error.into(),
            CallerError::Header => Self::unauthorised(chain(&error)),
        }
    }
}

impl From<UserError> for HttpError {
    fn from(error: UserError) -> Self {
        match &error {
            UserError::Unknown(name) => {
                Self::unauthorised(format!("error looking up user '{name}': no such user"))
            }
            UserError::Database { .. } => Self::new(StatusCode::INTERNAL_SERVER_ERROR, chain(&error)),
        }
    }
}

/// Everything on the agent's port.
pub(crate) fn router(agent: &Arc<Agent>) -> Router {
    let rpc = Arc::new(ProcessService(Arc::clone(agent))).register(connectrpc::Router::new());
    let rpc = Arc::new(FilesystemService(Arc::clone(agent))).register(rpc);
    let limits = Limits::default().with_max_request_body_size(MESSAGE_MAX).with_max_message_size(MESSAGE_MAX);
    let rpc = ConnectRpcService::new(rpc)
        .with_limits(limits)
        .with_compression_policy(CompressionPolicy::disabled());
    let cors = CorsLayer::new()
        .allow_origin(Any)
        .allow_methods(Any)
        .allow_headers(Any)
        .expose_headers(Any)
        .max_age(Duration::from_secs(7200));
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics::metrics))
        .route("/envs", get(envs))
        .route("/init", post(init::init))
        .route("/shutdown", post(init::shutdown))
        .route("/files", get(files::download).post(upload::upload))
        .route("/files/compose", post(upload::compose))
        .layer(DefaultBodyLimit::disable())
        .route_service("/process.Process/{method}", rpc.clone())
        .route_service("/filesystem.Filesystem/{method}", rpc)
        .fallback(|| async { HttpError::new(StatusCode::NOT_FOUND, "no such route") })
        .method_not_allowed_fallback(|| async {
            HttpError::new(StatusCode::METHOD_NOT_ALLOWED, "method not allowed")
        })
        .layer(middleware::from_fn_with_state(Arc::clone(agent), authorise))
        .layer(middleware::from_fn(read_to_the_end))
        .layer(cors)
        .with_state(Arc::clone(agent))
}

async fn authorise(State(agent): State<Arc<Agent>>, request: Request, next: Next) -> Response {
    let open = matches!(request.uri().path(), "/health" | "/files" | "/init" | "/shutdown");
    if !open && !agent.authorised(request.headers()) {
        return HttpError::unauthorised(
            "unauthorized access, please provide a valid access token or method signing if supported",
        )
        .into_response();
    }
    next.run(request).await
}

/// An error is often answered before the request's body was read, and an upload before its very end (a form's last boundary
/// comes before the body's last chunk), and a connection can only be used again after the whole of it. So a short rest is read, and of a long one the client is told that the connection ends here. Without either, its
/// next request could go out on a connection that is just being closed, and be lost.
async fn read_to_the_end(request: Request, next: Next) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let is_files = request.uri().path().starts_with("/files");
    let (head, body) = request.into_parts();
    let body = Arc::new(parking_lot::Mutex::new(body.into_data_stream()));
    let shared = Arc::clone(&body);
    let stream = futures::stream::poll_fn(move |context| shared.lock().poll_next_unpin(context));
    let mut response = next.run(Request::from_parts(head, Body::from_stream(stream))).await;
    let failed = response.status().is_client_error() || response.status().is_server_error();
    // A stream that succeeds may still be reading: only errors and files are over when they are answered.
    if (failed || is_files) && !drain(&body).await {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Reads what is left of a body and throws it away; false when that is too much, or does not come.
async fn drain(body: &parking_lot::Mutex<BodyDataStream>) -> bool {
    let rest = async {
        let mut read = 0;
        loop {
            match futures::future::poll_fn(|context| body.lock().poll_next_unpin(context)).await {
                None => return true,
                Some(Ok(piece)) => read += piece.len(),
                Some(Err(_)) => return false,
            }
            if read > DRAIN_MAX {
                return false;
            }
        }
    };
    tokio::time::timeout(DRAIN_LIMIT, rest).await.unwrap_or(false)
}

/// Whether the request comes from the host. In the guest only root could use the gateway's address, and root needs no
/// route of ours to do as it likes.
pub(crate) fn from_gateway(agent: &Agent, peer: &ConnectInfo<SocketAddr>) -> Result<(), HttpError> {
    if peer.ip() == agent.gateway {
        return Ok(());
    }
    Err(HttpError::new(StatusCode::FORBIDDEN, "only the host may do this"))
}

async fn health() -> impl IntoResponse {
    (StatusCode::NO_CONTENT, [(header::CACHE_CONTROL, "no-store")])
}

async fn envs(State(agent): State<Arc<Agent>>) -> impl IntoResponse {
    ([(header::CACHE_CONTROL, "no-store")], Json(agent.settings.read().env.clone()))
}

/// Name of the header that carries the version.
pub(crate) const VERSION_HEADER: HeaderName = HeaderName::from_static("x-envd-version");
