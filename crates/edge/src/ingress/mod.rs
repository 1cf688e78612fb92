//! HTTP from outside to a port of a sandbox.
//!
//! Owns: finding the sandbox in a request ([`route`]), forwarding it unbuffered both ways ([`proxy`]), what a client is
//! told when that fails ([`answer`]), idle connections to the agents ([`pool`]). Does not own: listening, TLS, who may
//! call a sandbox, waking it ([`Dial`] does that).
//!
//! ```text
//! request ─▶ Ingress::route ─▶ None: the API's
//!                            ─▶ Some(Err): 400
//!                            ─▶ Some(Ok(target)) ─▶ Ingress::serve ─▶ Dial::dial ─▶ the port, HTTP/1.1
//! ```

mod answer;
mod pool;
mod proxy;
mod route;

use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::uri::PathAndQuery;
use proto::SandboxId;

use crate::link::{DialError, GuestStream};
use pool::Pool;

/// Any error of a body.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// The body of an answer.
pub type Body = http_body_util::combinators::UnsyncBoxBody<Bytes, BoxError>;

/// Opens byte streams to ports of sandboxes.
pub trait Dial: Send + Sync + 'static {
    /// Connects to a port. May wait, for example until a paused sandbox runs again.
    fn dial(&self, sandbox: &SandboxId, port: u16) -> BoxFuture<'_, Result<GuestStream, OpenError>>;
}

/// A port of a sandbox could not be reached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// No such sandbox, or it is paused and does not wake by itself. 502.
    #[error("the sandbox was not found")]
    NotFound,
    /// The sandbox runs, and nothing listens on the port. 502.
    #[error("the port is closed")]
    PortClosed,
    /// The sandbox is changing its state. 409.
    #[error("the sandbox is changing its state")]
    Transition,
    /// The caller may not do this. 403 with this text.
    #[error("denied: {0}")]
    Denied(String),
    /// A limit was reached. 429.
    #[error("a limit was reached")]
    Limit,
    /// The sandbox is there and does not answer. 502.
    #[error("the sandbox does not answer")]
    Unavailable(#[source] BoxError),
}

impl From<DialError> for OpenError {
    fn from(error: DialError) -> Self {
        match error {
            DialError::Refused => Self::PortClosed,
            DialError::Gone => Self::NotFound,
            DialError::Limit => Self::Limit,
            DialError::Timeout | DialError::Io(_) => Self::Unavailable(Box::new(error)),
        }
    }
}

/// Where a request goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// Its port.
    pub port: u16,
    /// Path and query without the routing prefix, when there was one.
    path: Option<PathAndQuery>,
}

impl Target {
    /// A target whose request keeps its path.
    pub fn new(sandbox: SandboxId, port: u16) -> Self {
        Self { sandbox, port, path: None }
    }
}

/// A request for a sandbox that cannot be routed; answer it with [`RouteError::response`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RouteError {
    message: &'static str,
}

impl RouteError {
    /// The 400 that says so.
    pub fn response(&self) -> http::Response<Body> {
        answer::bad_request(self.message)
    }
}

/// An extension of a request: the client's address, which becomes the last element of `X-Forwarded-For`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientAddress(pub IpAddr);

/// The way in. Cheap to clone.
#[derive(Clone)]
pub struct Ingress {
    inner: Arc<Inner>,
}

struct Inner {
    dial: Arc<dyn Dial>,
    domain: Option<String>,
    pool: Pool,
}

impl Ingress {
    /// An ingress for `<port>-<sandboxID>.<domain>` (and `.localhost`); without a domain, for that under any domain.
    pub fn new(dial: Arc<dyn Dial>, domain: Option<String>) -> Self {
        let domain = domain.map(|domain| route::host_name(&domain).to_ascii_lowercase());
        Self { inner: Arc::new(Inner { dial, domain, pool: Pool::default() }) }
    }

    /// Where a request goes. `None`: not to a sandbox. `Some(Err)`: to one, but it contradicts itself; that is a 400.
    pub fn route(&self, head: &http::request::Parts) -> Option<Result<Target, RouteError>> {
        route::route(head, self.inner.domain.as_deref())
    }

    /// Forwards a request and gives back the answer, whose body streams. Dropping the future or the body closes the
    /// connection to the sandbox. Call it inside a tokio runtime.
    pub async fn serve<B>(&self, target: Target, request: http::Request<B>) -> http::Response<Body>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        proxy::serve(&self.inner, target, request).await
    }
}
