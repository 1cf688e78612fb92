//! What the node says to the agent in a guest: who it is now, and how it does.
//!
//! The agent speaks HTTP on its port; each call is a connection of its own through the link. A guest is hostile: answers
//! are bounded in size and time.

use std::time::Duration;

use bytes::Bytes;
use edge::link::{DialError, Dialer};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use proto::Secret;
use proto::guest::{ENVD_PORT, Init, Metrics};

const ANSWER_LIMIT: usize = 64 << 10;
/// An agent that does not take its identity in this time fails the create.
const INIT_LIMIT: Duration = Duration::from_secs(20);
const METRICS_LIMIT: Duration = Duration::from_secs(4);

/// What can go wrong between node and agent.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// It cannot be reached.
    #[error("the agent in the guest cannot be reached")]
    Dial(#[from] DialError),
    /// It broke off.
    #[error("the agent in the guest broke off")]
    Http(#[from] hyper::Error),
    /// It refused.
    #[error("the agent in the guest answered {status} to {path}: {body}")]
    Refused {
        /// What was asked.
        path: &'static str,
        /// What it answered.
        status: StatusCode,
        /// And said.
        body: String,
    },
    /// It said something that is not its protocol.
    #[error("the agent in the guest sent a malformed answer to {0}")]
    Malformed(&'static str),
    /// It took too long.
    #[error("the agent in the guest did not answer {path} within {seconds} s")]
    Deadline {
        /// What was asked.
        path: &'static str,
        /// The limit.
        seconds: u64,
    },
}

/// The agent of one guest.
#[derive(Clone)]
pub struct Agent {
    dialer: Dialer,
    token: Secret,
}

impl Agent {
    /// The agent at the far end of `dialer`, which demands `token` once it has been told so.
    pub fn new(dialer: Dialer, token: Secret) -> Self {
        Self { dialer, token }
    }

    /// Tells the guest who it is; when this returns, it is that.
    pub async fn init(&self, init: &Init) -> Result<(), GuestError> {
        let body = serde_json::to_vec(init).map_err(|_| GuestError::Malformed("/init"))?;
        self.call(Method::POST, "/init", body, INIT_LIMIT).await.map(|_| ())
    }

    /// What the guest uses.
    pub async fn metrics(&self) -> Result<Metrics, GuestError> {
        let body = self.call(Method::GET, "/metrics", Vec::new(), METRICS_LIMIT).await?;
        serde_json::from_slice(&body).map_err(|_| GuestError::Malformed("/metrics"))
    }

    async fn call(
        &self,
        method: Method,
        path: &'static str,
        body: Vec<u8>,
        limit: Duration,
    ) -> Result<Bytes, GuestError> {
        tokio::time::timeout(limit, self.exchange(method, path, body))
            .await
            .unwrap_or(Err(GuestError::Deadline { path, seconds: limit.as_secs() }))
    }

    async fn exchange(&self, method: Method, path: &'static str, body: Vec<u8>) -> Result<Bytes, GuestError> {
        let stream = self.dialer.dial(ENVD_PORT).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "guest")
            .header("content-type", "application/json")
            .header("x-access-token", self.token.expose())
            .body(Full::new(Bytes::from(body)))
            .map_err(|_| GuestError::Malformed(path))?;
        let answer = async {
            let response = sender.send_request(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), ANSWER_LIMIT)
                .collect()
                .await
                .map_err(|_| GuestError::Malformed(path))?
                .to_bytes();
            if status.is_success() {
                return Ok(body);
            }
            Err(GuestError::Refused { path, status, body: String::from_utf8_lossy(&body).into_owned() })
        };
        // The connection is driven here and ends with this call, whatever its outcome.
        tokio::pin!(connection);
        tokio::pin!(answer);
        tokio::select! {
            biased;
            answer = &mut answer => answer,
            result = &mut connection => {
                result?;
                answer.await
            }
        }
    }
}
