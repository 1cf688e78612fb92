//! The one HTTP error: a status, a stable word for programs, a message for the user, a detail for the log.
//!
//! `docs/errors.md` lists the words. The response is formed in one place, [`crate::http::finish`], which adds the request
//! ID and writes the log line.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use client::ClientError;
use proto::chain;
use proto::node::EndReason;

/// What a request came to that is not a success.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The HTTP status.
    pub status: StatusCode,
    /// The stable word.
    pub code: &'static str,
    /// What went wrong and what to do next, for the user.
    pub message: String,
    /// The chain of causes, for the log alone.
    pub detail: Option<String>,
    /// Seconds after which to try again.
    pub retry_after: Option<u32>,
}

impl ApiError {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), detail: None, retry_after: None }
    }

    /// 400: the request is not what the API takes; the message names the field.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request", message)
    }

    /// 400: a field that is known but not supported.
    pub fn unsupported(field: &str) -> Self {
        let message = format!("{field} is not supported by this version of Pando; leave it out");
        Self::new(StatusCode::BAD_REQUEST, "unsupported_field", message)
    }

    /// 401: no key, or one that is not known.
    pub fn unauthenticated(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthenticated", message)
    }

    /// 404: no such sandbox for this team; `why` says what became of it.
    pub fn sandbox_not_found(id: &str, why: Option<&str>) -> Self {
        let why = why.map(|why| format!(": {why}")).unwrap_or_default();
        Self::new(StatusCode::NOT_FOUND, "sandbox_not_found", format!("sandbox \"{id}\" was not found{why}"))
    }

    /// 404: no such template.
    pub fn template_not_found(name: &str) -> Self {
        let message = format!("template \"{name}\" was not found; `pando template ls` shows those there are");
        Self::new(StatusCode::NOT_FOUND, "template_not_found", message)
    }

    /// 404: no such route.
    pub fn no_route(method: &str, path: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "route_not_found", format!("there is no route {method} {path}"))
    }

    /// 405: the route exists, for other methods.
    pub fn method_not_allowed(method: &str, path: &str) -> Self {
        let message = format!("{path} does not take {method}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
    }

    /// 409: an idempotency key is in use.
    pub fn idempotency(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, code, message)
    }

    /// 413: the body is too large.
    pub fn too_large(limit: usize) -> Self {
        let message = format!("the request body is larger than {limit} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    }

    /// 429: the team has as many sandboxes as it may have.
    pub fn too_many_sandboxes(limit: u64) -> Self {
        let message = format!(
            "your team has {limit} sandboxes, as many as it may have; kill one, or raise sandboxes_per_team"
        );
        Self {
            retry_after: Some(5),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, "sandbox_limit_reached", message)
        }
    }

    /// 409, or 503 when the server ended it: the sandbox ended before its create was answered.
    pub fn ended_in_create(reason: EndReason) -> Self {
        if reason == EndReason::NodeStopped {
            return Self::stopping();
        }
        let message = format!("the sandbox ended while it was being created: {}", reason.describe());
        Self::new(StatusCode::CONFLICT, "sandbox_ended", message)
    }

    /// 503: the server is about to end.
    fn stopping() -> Self {
        let base = Self::new(StatusCode::SERVICE_UNAVAILABLE, "node_stopping", "the server is shutting down");
        Self { retry_after: Some(5), ..base }
    }

    /// 500: a defect or a broken host; the user learns only where to look.
    pub fn internal(error: &(dyn std::error::Error + 'static)) -> Self {
        let message = "something went wrong in the server; its log says what, under this request ID";
        let base = Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_server_error", message);
        Self { detail: Some(chain(error)), ..base }
    }
}

impl From<sqlx::Error> for ApiError {
    fn from(error: sqlx::Error) -> Self {
        Self::internal(&error)
    }
}

/// What a node's refusal is to the user. The words are the node's ([`proto::node`]).
impl From<ClientError> for ApiError {
    fn from(error: ClientError) -> Self {
        let detail = match &error {
            ClientError::Refused { body, .. } if body.detail.is_some() => body.detail.clone(),
            _ => Some(chain(&error)),
        };
        let base = match &error {
            ClientError::Refused { body, .. } => match body.error_code.as_str() {
                "sandbox_not_found" => {
                    Self::new(StatusCode::NOT_FOUND, "sandbox_not_found", body.message.clone())
                }
                "template_not_found" => {
                    Self::new(StatusCode::NOT_FOUND, "template_not_found", body.message.clone())
                }
                "sandbox_ended" => Self::new(StatusCode::CONFLICT, "sandbox_ended", body.message.clone()),
                "sandbox_capacity_unavailable" => Self {
                    retry_after: Some(2),
                    ..Self::new(
                        StatusCode::SERVICE_UNAVAILABLE,
                        "sandbox_capacity_unavailable",
                        body.message.clone(),
                    )
                },
                "node_stopping" => Self::stopping(),
                "node_disk_full" => Self::new(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "node_disk_full",
                    format!("{}; free some space under the data directory", body.message),
                ),
                "sandbox_create_failed" => Self::new(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "sandbox_create_failed",
                    format!("the sandbox could not be created: {}", body.message),
                ),
                // What the node did not say in so many words is for the log.
                _ => Self::internal(&error),
            },
            _ => Self::new(StatusCode::SERVICE_UNAVAILABLE, "node_unreachable", "the node cannot be reached"),
        };
        Self { detail, ..base }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}
