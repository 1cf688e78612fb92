//! What control asks of a node; the routes are in [`proto::node`].

use bytes::Bytes;
use futures::Stream;
use futures::stream;
use http::{HeaderMap, Method};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use jiff::Timestamp;
use proto::SandboxId;
use proto::api::SandboxMetric;
use proto::node::{Deadline, Event, LogLine, SandboxSpec, SandboxView, TemplateView};

use crate::http::{ClientError, Endpoint, Http, whole};

/// One line of the event stream may be this long.
const LINE_LIMIT: usize = 64 << 10;

/// A node.
#[derive(Clone)]
pub struct NodeClient(Http);

const NO_BODY: Option<&()> = None;

impl NodeClient {
    /// The node at `endpoint`.
    pub fn new(endpoint: Endpoint) -> Self {
        Self(Http::new(endpoint, HeaderMap::new()))
    }

    /// Makes a sandbox; returns when its guest is ready.
    pub async fn ensure(&self, spec: &SandboxSpec) -> Result<SandboxView, ClientError> {
        self.0.call(Method::PUT, &format!("/sandboxes/{}", spec.id), Some(spec)).await
    }

    /// Ends a sandbox; returns when nothing of it is left.
    pub async fn kill(&self, id: &SandboxId) -> Result<(), ClientError> {
        self.0.json(Method::DELETE, &format!("/sandboxes/{id}"), NO_BODY).await.map(|_| ())
    }

    /// Sets when a sandbox ends.
    pub async fn set_deadline(&self, id: &SandboxId, end_at: Timestamp) -> Result<(), ClientError> {
        let body = Deadline { end_at };
        self.0.json(Method::PUT, &format!("/sandboxes/{id}/deadline"), Some(&body)).await.map(|_| ())
    }

    /// All sandboxes of the node.
    pub async fn sandboxes(&self) -> Result<Vec<SandboxView>, ClientError> {
        self.0.call(Method::GET, "/sandboxes", NO_BODY).await
    }

    /// What a sandbox used between two Unix times in seconds.
    pub async fn metrics(
        &self,
        id: &SandboxId,
        start: Option<i64>,
        end: Option<i64>,
    ) -> Result<Vec<SandboxMetric>, ClientError> {
        let mut path = format!("/sandboxes/{id}/metrics?");
        for (name, value) in [("start", start), ("end", end)] {
            if let Some(value) = value {
                path.push_str(&format!("{name}={value}&"));
            }
        }
        self.0.call(Method::GET, &path, NO_BODY).await
    }

    /// What a sandbox's machine said.
    pub async fn logs(&self, id: &SandboxId) -> Result<Vec<LogLine>, ClientError> {
        self.0.call(Method::GET, &format!("/sandboxes/{id}/logs"), NO_BODY).await
    }

    /// The templates on the node.
    pub async fn templates(&self) -> Result<Vec<TemplateView>, ClientError> {
        self.0.call(Method::GET, "/templates", NO_BODY).await
    }

    /// What happens from now on, until the node ends the stream.
    pub async fn events(
        &self,
    ) -> Result<impl Stream<Item = Result<Event, ClientError>> + Send + use<>, ClientError> {
        let response = self.0.send(Method::GET, "/events", &[], whole(Bytes::new())).await?;
        let response = self.0.success(response).await?;
        let lines = Lines { http: self.0.clone(), body: response.into_body(), kept: Vec::new() };
        Ok(stream::unfold(lines, |mut lines| async move { lines.next().await.map(|event| (event, lines)) }))
    }
}

struct Lines {
    http: Http,
    body: Incoming,
    kept: Vec<u8>,
}

impl Lines {
    async fn next(&mut self) -> Option<Result<Event, ClientError>> {
        loop {
            if let Some(end) = self.kept.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.kept.drain(..=end).collect();
                return Some(serde_json::from_slice(&line).map_err(|error| self.http.malformed(&error)));
            }
            if self.kept.len() > LINE_LIMIT {
                return Some(Err(self.http.malformed(&"a line without end")));
            }
            match self.body.frame().await? {
                Ok(frame) => self.kept.extend(frame.data_ref().into_iter().flatten()),
                Err(error) => return Some(Err(self.http.broken(error))),
            }
        }
    }
}
