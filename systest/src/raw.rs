//! Requests as a test wants them, malformed ones included: a method, a path, headers, a body; an answer read whole.

use anyhow::Result;
use bytes::Bytes;
use client::Endpoint;
use client::http::{Http, whole};
use http::{HeaderMap, Method, StatusCode};
use serde_json::Value;

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// Status.
    pub status: StatusCode,
    /// Headers.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
}

impl Answer {
    /// The body as JSON; null if it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Sends bytes to `url` as they are, and reads what comes until the server closes the connection.
pub async fn bytes(url: &str, request: &str) -> Result<String> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(url.trim_start_matches("http://")).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Sends a request to `url` and reads the answer whole.
pub async fn request(
    url: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Result<Answer> {
    let http = Http::new(Endpoint::Tcp(url.to_owned()), HeaderMap::new());
    let response = http.send(Method::from_bytes(method.as_bytes())?, path, headers, whole(body)).await?;
    let (status, headers) = (response.status(), response.headers().clone());
    Ok(Answer { status, headers, body: http.whole_body(response).await? })
}
