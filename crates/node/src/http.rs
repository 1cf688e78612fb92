//! The node's own API; its routes are listed in [`proto::node`]. A handler parses, calls, maps the error.

use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use axum::{Json, Router};
use edge::link::LinkError;
use proto::SandboxId;
use proto::api::ErrorBody;
use proto::node::{Deadline, SandboxSpec};
use serde::Deserialize;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::BroadcastStream;

use crate::machine::MachineError;
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

/// For what only the log may tell in full.
const SEE_LOG: &str = "something went wrong on the node; the server's log says what";

impl NodeError {
    /// The HTTP status, the stable word for it, and what a client may be told: never a place on the host, nor the words
    /// of a program on it.
    fn told(&self) -> (StatusCode, &'static str, String) {
        const FULL: StatusCode = StatusCode::SERVICE_UNAVAILABLE;
        const FAILED: StatusCode = StatusCode::INTERNAL_SERVER_ERROR;
        let own = || self.to_string();
        match self {
            Self::Shared(error) => error.told(),
            Self::NotFound => (StatusCode::NOT_FOUND, "sandbox_not_found", own()),
            Self::UnknownTemplate(_) => (StatusCode::NOT_FOUND, "template_not_found", own()),
            Self::Ended(_) => (StatusCode::CONFLICT, "sandbox_ended", own()),
            Self::Busy(_) | Self::NoUids { .. } => (FULL, "sandbox_capacity_unavailable", own()),
            Self::Stopping | Self::Link(LinkError::Shutdown) => (FULL, "node_stopping", own()),
            Self::DiskFull { .. } => (FULL, "node_disk_full", own()),
            _ if is_disk_full(self) => (FULL, "node_disk_full", "the host's disk is full".to_owned()),
            Self::Machine(MachineError::Deadline { .. } | MachineError::OtherMachine { .. }) => {
                (FAILED, "sandbox_create_failed", own())
            }
            Self::Machine(MachineError::Died(_)) => {
                let message = "the machine ended while it started; the server's log has its last words";
                (FAILED, "sandbox_create_failed", message.to_owned())
            }
            Self::Guest(error) => (FAILED, "sandbox_create_failed", error.to_string()),
            Self::Machine(_) | Self::Store(_) | Self::Link(_) | Self::Io { .. } | Self::OwnerLost => {
                (FAILED, "node_failed", SEE_LOG.to_owned())
            }
        }
    }
}

/// Whether the first cause of it is that no byte or file more fits on the disk, whatever was being written.
fn is_disk_full(error: &(dyn std::error::Error + 'static)) -> bool {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    std::iter::successors(Some(error), |error| error.source())
        .filter_map(|error| error.downcast_ref::<std::io::Error>())
        .any(|error| matches!(error.kind(), StorageFull | QuotaExceeded))
}

impl IntoResponse for NodeError {
    fn into_response(self) -> Response {
        let (status, word, message) = self.told();
        // Control is the only reader, and writes it to the log beside the request's ID.
        let detail = Some(proto::chain(&self)).filter(|detail| *detail != message);
        let (code, error_code) = (status.as_u16(), word.to_owned());
        (status, Json(ErrorBody { code, message, error_code, request_id: None, detail })).into_response()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::GuestError;
    use std::io::{Error, ErrorKind};
    use std::path::PathBuf;
    use std::sync::Arc;

    fn store(kind: ErrorKind) -> store::Error {
        store::Error::Io { verb: "write", path: PathBuf::from("/secret/delta.qcow2"), source: kind.into() }
    }

    fn node(kind: ErrorKind) -> NodeError {
        NodeError::Io { verb: "create", path: PathBuf::from("/secret/iabc"), source: kind.into() }
    }

    #[test]
    fn a_full_disk_is_told_as_such_wherever_it_was_noticed() {
        for kind in [ErrorKind::StorageFull, ErrorKind::QuotaExceeded] {
            for error in [
                node(kind),
                store(kind).into(),
                MachineError::Store(store(kind)).into(),
                MachineError::Io { verb: "receive the device state", source: kind.into() }.into(),
                NodeError::Shared(Arc::new(MachineError::Store(store(kind)).into())),
            ] {
                let (status, word, message) = error.told();
                assert_eq!((status.as_u16(), word), (503, "node_disk_full"), "{error:?}");
                assert!(!message.contains('/'), "{message}");
            }
        }
    }

    #[test]
    fn no_client_is_told_a_place_on_the_host() {
        let words = || "qemu: could not open /secret/x".to_owned();
        let errors = [
            node(ErrorKind::NotFound),
            store(ErrorKind::PermissionDenied).into(),
            store::Error::Damaged { path: "/secret/disk.raw".into(), problem: "/secret/other".into() }.into(),
            MachineError::Store(store(ErrorKind::NotFound)).into(),
            MachineError::Died(words()).into(),
            MachineError::Refused { command: "cont", message: words() }.into(),
            MachineError::Control(Error::other(words())).into(),
            MachineError::Io { verb: "make a link", source: Error::other(words()) }.into(),
            MachineError::Start { program: "/secret/qemu", package: "q", source: Error::other(words()) }
                .into(),
            LinkError::Io { what: "/secret", source: Error::other(words()) }.into(),
            NodeError::Shared(Arc::new(MachineError::Died(words()).into())),
            GuestError::Deadline { path: "/init", seconds: 20 }.into(),
            NodeError::OwnerLost,
        ];
        for error in errors {
            let (status, _, message) = error.told();
            assert_eq!(status, 500, "{error:?}");
            assert!(!message.contains("/secret"), "{message}");
        }
    }
}
