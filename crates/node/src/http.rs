//! The node's own API; its routes are listed in [`proto::node`]. A handler parses, calls, maps the error.

use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use axum::{Json, Router};
use proto::SandboxId;
use proto::api::ErrorBody;
use proto::node::{Deadline, SandboxSpec};
use serde::Deserialize;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::BroadcastStream;

use crate::{Node, NodeError};

/// The node's routes.
pub fn router(node: Node) -> Router {
    Router::new()
        .route("/sandboxes", get(list))
        .route("/sandboxes/{id}", put(ensure).get(view).delete(kill))
        .route("/sandboxes/{id}/deadline", put(set_deadline))
        .route("/sandboxes/{id}/metrics", get(metrics))
        .route("/sandboxes/{id}/logs", get(logs))
        .route("/templates", get(templates))
        .route("/events", get(events))
        .with_state(node)
}

impl NodeError {
    /// The HTTP status and the stable word for it.
    fn status(&self) -> (StatusCode, &'static str) {
        match self {
            Self::NotFound => (StatusCode::NOT_FOUND, "sandbox_not_found"),
            Self::UnknownTemplate(_) => (StatusCode::NOT_FOUND, "template_not_found"),
            Self::Conflict(_) => (StatusCode::CONFLICT, "sandbox_in_transition"),
            Self::Busy(_) => (StatusCode::SERVICE_UNAVAILABLE, "sandbox_capacity_unavailable"),
            Self::Stopping => (StatusCode::SERVICE_UNAVAILABLE, "node_stopping"),
            Self::DiskFull { .. } => (StatusCode::SERVICE_UNAVAILABLE, "node_disk_full"),
            Self::Store(store::Error::Io { source, .. }) | Self::Io { source, .. }
                if source.kind() == std::io::ErrorKind::StorageFull =>
            {
                (StatusCode::SERVICE_UNAVAILABLE, "node_disk_full")
            }
            Self::Shared(error) => error.status(),
            _ => (StatusCode::INTERNAL_SERVER_ERROR, "sandbox_create_failed"),
        }
    }
}

impl IntoResponse for NodeError {
    fn into_response(self) -> Response {
        let (status, word) = self.status();
        // Control is the only reader and logs it; the chain of causes is worth more to it than a short text.
        let message = proto::chain(&self);
        let body =
            ErrorBody { code: status.as_u16(), message, error_code: word.to_owned(), request_id: None };
        (status, Json(body)).into_response()
    }
}

async fn ensure(
    State(node): State<Node>,
    Path(_id): Path<SandboxId>,
    Json(spec): Json<SandboxSpec>,
) -> Result<Response, NodeError> {
    let view = node.ensure(spec).await?;
    Ok((StatusCode::CREATED, Json(view)).into_response())
}

async fn list(State(node): State<Node>) -> Response {
    Json(node.views()).into_response()
}

async fn view(State(node): State<Node>, Path(id): Path<SandboxId>) -> Result<Response, NodeError> {
    Ok(Json(node.view(&id)?).into_response())
}

async fn kill(State(node): State<Node>, Path(id): Path<SandboxId>) -> Result<StatusCode, NodeError> {
    node.kill(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn set_deadline(
    State(node): State<Node>,
    Path(id): Path<SandboxId>,
    Json(deadline): Json<Deadline>,
) -> Result<StatusCode, NodeError> {
    node.set_deadline(&id, deadline.end_at).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize)]
struct Window {
    start: Option<i64>,
    end: Option<i64>,
}

async fn metrics(
    State(node): State<Node>,
    Path(id): Path<SandboxId>,
    Query(window): Query<Window>,
) -> Result<Response, NodeError> {
    let samples = node.samples(&id)?;
    Ok(Json(samples.between(window.start, window.end)).into_response())
}

async fn logs(State(node): State<Node>, Path(id): Path<SandboxId>) -> Result<Response, NodeError> {
    Ok(Json(node.logs(&id)?.lines()).into_response())
}

async fn templates(State(node): State<Node>) -> Result<Response, NodeError> {
    Ok(Json(node.templates()?).into_response())
}

/// A line for each event. The stream ends when the reader falls behind: it must then look at the list again.
async fn events(State(node): State<Node>) -> Response {
    let lines = BroadcastStream::new(node.events()).map(|event| {
        let event = event.map_err(std::io::Error::other)?;
        let mut line = serde_json::to_vec(&event)?;
        line.push(b'\n');
        Ok::<_, std::io::Error>(line)
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], axum::body::Body::from_stream(lines)).into_response()
}
