//! HTTP to one server: an endpoint, a request with a JSON body, an answer or a typed error.

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use proto::api::ErrorBody;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

/// Answers that are read whole may be this long.
const ANSWER_LIMIT: usize = 64 << 20;
/// Connections kept for the next requests, and for how long.
const IDLE_CONNECTIONS: usize = 8;
const IDLE: Duration = Duration::from_secs(30);

/// A request body: whole or streamed.
pub type Body = BoxBody<Bytes, std::io::Error>;

/// What can go wrong with a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The server said no.
    #[error("{}", .body.message)]
    Refused {
        /// The HTTP status.
        status: StatusCode,
        /// What it said.
        body: ErrorBody,
    },
    /// The server cannot be reached, or broke off.
    #[error("cannot reach {endpoint}; is `pando serve` running?")]
    Connect {
        /// Where.
        endpoint: String,
        /// Why not.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The answer broke off.
    #[error("the answer of {endpoint} broke off")]
    Broken {
        /// From where.
        endpoint: String,
        /// How.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The answer is not what the protocol says.
    #[error("{endpoint} sent an answer that cannot be read: {problem}")]
    Malformed {
        /// From where.
        endpoint: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The request cannot be formed.
    #[error("the request to {endpoint} cannot be formed")]
    Request {
        /// Whither.
        endpoint: String,
        /// Why not.
        source: http::Error,
    },
}

/// Where a server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// `http://host:port`, without a path.
    Tcp(String),
    /// A Unix socket.
    Unix(PathBuf),
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(origin) => f.write_str(origin),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// A pool of connections to one server. Clones share it.
#[derive(Clone)]
pub struct Http {
    endpoint: Endpoint,
    headers: HeaderMap,
    client: Client<Connector, Body>,
}

impl Http {
    /// A client of `endpoint` that sends `headers` with every request.
    pub fn new(endpoint: Endpoint, headers: HeaderMap) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(IDLE_CONNECTIONS)
            .build(Connector(endpoint.clone()));
        Self { endpoint, headers, client }
    }

    /// The server, for messages.
    pub fn endpoint(&self) -> String {
        self.endpoint.to_string()
    }

    /// Sends a request and returns the answer whatever its status.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Body,
    ) -> Result<Response<Incoming>, ClientError> {
        let origin = match &self.endpoint {
            Endpoint::Tcp(origin) => origin.as_str(),
            Endpoint::Unix(_) => "http://node",
        };
        let mut request = Request::builder().method(method).uri(format!("{origin}{path}"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut request = request
            .body(body)
            .map_err(|source| ClientError::Request { endpoint: self.endpoint(), source })?;
        for (name, value) in &self.headers {
            request.headers_mut().insert(name, value.clone());
        }
        self.client
            .request(request)
            .await
            .map_err(|source| ClientError::Connect { endpoint: self.endpoint(), source: Box::new(source) })
    }

    /// Sends `body` as JSON and reads the answer whole; an answer that is no success becomes an error.
    pub async fn json<B: Serialize>(
        &self,
        method: Method,
        path: &str,
        body: Option<&B>,
    ) -> Result<(HeaderMap, Bytes), ClientError> {
        let body = match body {
            Some(body) => serde_json::to_vec(body).map_err(|error| self.malformed(&error))?,
            None => Vec::new(),
        };
        let response = self.send(method, path, &[("content-type", "application/json")], whole(body)).await?;
        let headers = response.headers().clone();
        let response = self.success(response).await?;
        Ok((headers, self.whole_body(response).await?))
    }

    /// As [`Http::json`], and reads the answer as `T`.
    pub async fn call<B: Serialize, T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&B>,
    ) -> Result<T, ClientError> {
        let (_, bytes) = self.json(method, path, body).await?;
        serde_json::from_slice(&bytes).map_err(|error| self.malformed(&error))
    }

    /// The answer, or the error it stands for.
    pub async fn success(&self, response: Response<Incoming>) -> Result<Response<Incoming>, ClientError> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let bytes = self.whole_body(response).await?;
        let body =
            serde_json::from_slice::<ErrorBody>(&bytes).unwrap_or_else(|_| loose_error(status, &bytes));
        Err(ClientError::Refused { status, body })
    }

    /// Reads an answer whole.
    pub async fn whole_body(&self, response: Response<Incoming>) -> Result<Bytes, ClientError> {
        let collected = Limited::new(response.into_body(), ANSWER_LIMIT).collect().await;
        collected
            .map(|body| body.to_bytes())
            .map_err(|source| ClientError::Broken { endpoint: self.endpoint(), source })
    }

    pub(crate) fn malformed(&self, problem: &dyn std::fmt::Display) -> ClientError {
        ClientError::Malformed { endpoint: self.endpoint(), problem: problem.to_string() }
    }

    pub(crate) fn broken(&self, source: impl std::error::Error + Send + Sync + 'static) -> ClientError {
        ClientError::Broken { endpoint: self.endpoint(), source: Box::new(source) }
    }
}

/// Errors of the agent and of Connect have no `error_code`, or a word where we have the status.
fn loose_error(status: StatusCode, bytes: &[u8]) -> ErrorBody {
    let value: serde_json::Value = serde_json::from_slice(bytes).unwrap_or_default();
    let text = |name: &str| value.get(name).and_then(serde_json::Value::as_str).map(str::to_owned);
    let message = text("message").unwrap_or_else(|| {
        let plain = String::from_utf8_lossy(&bytes[..bytes.len().min(500)]).into_owned();
        if plain.is_empty() { status.to_string() } else { plain }
    });
    let error_code = text("code").unwrap_or_default();
    ErrorBody { code: status.as_u16(), message, error_code, request_id: None, detail: None }
}

/// A body that is there whole.
pub fn whole(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed()
}

#[derive(Clone)]
struct Connector(Endpoint);

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<Stream>;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let endpoint = self.0.clone();
        Box::pin(async move {
            let stream = match endpoint {
                Endpoint::Tcp(_) => {
                    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
                    let stream = TcpStream::connect((host, uri.port_u16().unwrap_or(80))).await?;
                    stream.set_nodelay(true)?;
                    Stream::Tcp(stream)
                }
                Endpoint::Unix(path) => Stream::Unix(UnixStream::connect(path).await?),
            };
            Ok(TokioIo::new(stream))
        })
    }
}

/// A connection of either kind.
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Self::Unix(stream) => Pin::new(stream).poll_flush(cx),
        }
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
