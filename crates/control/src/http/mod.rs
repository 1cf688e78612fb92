//! The public HTTP server: routes, authentication, the form of errors.
//!
//! A request that belongs to a sandbox's port goes to the ingress before any of this; the rest is the API. Handlers
//! parse, call [`crate::app`], and map the error; [`finish`] gives every error its body, request ID and log line.

mod extract;
pub mod openapi;
mod sandboxes;
mod templates;

use std::net::SocketAddr;

use axum::Json;
use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, Version, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use edge::ingress::ClientAddress;
use proto::RequestId;
use proto::api::{ErrorBody, Health};
use tower_http::cors::{Any, CorsLayer};

use crate::app::{Control, SignedUrl};
use crate::error::ApiError;
use crate::keys;

/// Bodies of the API may be this long; files go to sandboxes, not here.
pub const BODY_LIMIT: usize = 1 << 20;
pub(crate) const NEXT_TOKEN: HeaderName = HeaderName::from_static("x-next-token");
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// All routes of the API, and the ingress in front of them.
pub fn router(control: Control) -> Router {
    let api = Router::new()
        .route("/v2/sandboxes", post(sandboxes::create_v2).get(sandboxes::list))
        .route("/sandboxes", post(sandboxes::create_v1).get(sandboxes::list_v1))
        .route("/sandboxes/metrics", get(sandboxes::metrics_of_many))
        .route("/sandboxes/{id}", get(sandboxes::get).delete(sandboxes::kill))
        .route("/v2/sandboxes/{id}/connect", post(sandboxes::connect_v2))
        .route("/sandboxes/{id}/connect", post(sandboxes::connect_v1))
        .route("/sandboxes/{id}/timeout", post(sandboxes::set_timeout))
        .route("/sandboxes/{id}/refreshes", post(sandboxes::refresh))
        .route("/sandboxes/{id}/metrics", get(sandboxes::metrics))
        .route("/sandboxes/{id}/logs", get(sandboxes::logs))
        .route("/v2/sandboxes/{id}/logs", get(sandboxes::logs_v2))
        .route("/templates", get(templates::list))
        .route("/templates/aliases/{alias}", get(templates::alias))
        .route("/teams", get(templates::teams))
        .route("/health", get(health))
        .route("/openapi.json", get(openapi::document))
        .fallback(no_route)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(axum::extract::DefaultBodyLimit::max(BODY_LIMIT))
        .layer(cors())
        .layer(middleware::from_fn(finish));
    api.layer(middleware::from_fn_with_state(control.clone(), to_sandbox)).with_state(control)
}

/// The API may be called from any page that has a key; the paging header is of no use to it unless exposed (B79).
fn cors() -> CorsLayer {
    CorsLayer::new()
        .allow_origin(Any)
        .allow_methods([Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE])
        .allow_headers(Any)
        .expose_headers([NEXT_TOKEN, REQUEST_ID])
}

/// Requests for a port of a sandbox go to the ingress.
async fn to_sandbox(State(control): State<Control>, request: Request, next: Next) -> Response {
    // HTTP/1.1 demands exactly one (RFC 9112, 3.2), of every server, whatever the request is for.
    let hosts = request.headers().get_all(header::HOST).iter().count();
    if hosts > 1 || (hosts == 0 && request.version() == Version::HTTP_11) {
        return told(ApiError::invalid("the request must have one Host header"), &new_request_id());
    }
    let (mut head, body) = request.into_parts();
    if let Some(ConnectInfo(client)) = head.extensions.get::<ConnectInfo<SocketAddr>>().copied() {
        head.extensions.insert(ClientAddress(client.ip()));
    }
    let routed = match control.config.ingress.route(&head) {
        None => match signed_url_target(&control, &head).await {
            Ok(Some(id)) => {
                // The URL names no sandbox; from here on it is as if it did.
                if let Ok(value) = HeaderValue::from_str(id.as_str()) {
                    head.headers.insert("e2b-sandbox-id", value);
                }
                head.headers.insert("e2b-sandbox-port", HeaderValue::from(proto::guest::ENVD_PORT));
                let target = control.config.ingress.route(&head);
                (target, Request::from_parts(head, body))
            }
            Ok(None) => (None, Request::from_parts(head, body)),
            Err(error) => return told(error, &new_request_id()),
        },
        some => (some, Request::from_parts(head, body)),
    };
    match routed {
        (None, request) => next.run(request).await,
        (Some(Ok(target)), request) => control.config.ingress.serve(target, request).await.map(Body::new),
        (Some(Err(refusal)), _) => refusal.response().map(Body::new),
    }
}

/// The sandbox whose signed URL this is, if it is one.
async fn signed_url_target(
    control: &Control,
    head: &axum::http::request::Parts,
) -> Result<Option<proto::SandboxId>, ApiError> {
    if head.uri.path() != "/files" {
        return Ok(None);
    }
    let query: std::collections::BTreeMap<String, String> =
        axum::extract::Query::try_from_uri(&head.uri).map(|query| query.0).unwrap_or_default();
    let part = |name: &str| query.get(name).map(String::as_str);
    let Some(signature) = part("signature") else { return Ok(None) };
    let url = SignedUrl {
        signature,
        path: part("path").unwrap_or_default(),
        operation: if head.method == Method::GET || head.method == Method::HEAD { "read" } else { "write" },
        user: part("username").unwrap_or_default(),
        expiration: part("signature_expiration"),
    };
    control.sandbox_of_signature(&url).await.map(Some)
}

/// Gives an error its body, and everything its request ID.
async fn finish(request: Request, next: Next) -> Response {
    let id = new_request_id();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let started = std::time::Instant::now();
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let detail = error.detail.as_deref().unwrap_or("");
        if error.status.is_server_error() {
            tracing::error!(request = id, %method, path, status = error.status.as_u16(), error.message, detail);
        }
        let headers = std::mem::take(response.headers_mut());
        response = told(error, &id);
        for (name, value) in &headers {
            if name != header::CONTENT_LENGTH && name != header::CONTENT_TYPE {
                response.headers_mut().append(name, value.clone());
            }
        }
    }
    let status = response.status().as_u16();
    tracing::debug!(request = id, %method, path, status, ms = started.elapsed().as_millis() as u64, "request");
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

fn new_request_id() -> String {
    keys::random().map(RequestId::from_random).map(|id| id.to_string()).unwrap_or_default()
}

/// An error as the client is told it.
fn told(error: ApiError, request_id: &str) -> Response {
    let body = ErrorBody {
        code: error.status.as_u16(),
        message: error.message,
        error_code: error.code.to_owned(),
        request_id: Some(request_id.to_owned()),
        detail: None,
    };
    let mut response = (error.status, Json(body)).into_response();
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

async fn no_route(request: Request) -> ApiError {
    ApiError::no_route(request.method().as_str(), request.uri().path())
}

async fn method_not_allowed(request: Request) -> ApiError {
    ApiError::method_not_allowed(request.method().as_str(), request.uri().path())
}

/// Whether the server serves.
#[utoipa::path(get, path = "/health", tag = "server", responses((status = 200, body = Health)))]
pub(crate) async fn health() -> Json<Health> {
    Json(Health { status: "ok".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() })
}
