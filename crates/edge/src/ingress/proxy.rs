//! Forwards one request to a port of a sandbox.
//!
//! Owns: the request's way through: checks, headers, connection, answer, upgrade. Does not own: where to
//! ([`super::route`]).
//!
//! Contract: nothing is buffered beyond one frame of a body; nothing has a size limit or a time limit of its own. The
//! connection ends when the caller drops the future or the answer's body.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE,
};
use http::uri::PathAndQuery;
use http::{Method, Request, Response, StatusCode, Uri, Version};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt, Empty};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use proto::{SandboxId, guest};

use super::answer::{self, Form};
use super::pool::{Connection, Pool, Task};
use super::{Body, BoxError, ClientAddress, Inner, OpenError, Target};

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const FORWARDED_PREFIX: HeaderName = HeaderName::from_static("x-forwarded-prefix");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Routes of the agent for the node alone: those of envd's, and ours. The agent takes the host's word for them without a
/// token, and to it whatever comes through here is the host's.
const INTERNAL: [&str; 8] =
    ["init", "shutdown", "freeze", "unfreeze", "collapse", "fsfreeze", "fsthaw", "upgrade"];

pub(super) async fn serve<B>(inner: &Inner, target: Target, mut request: Request<B>) -> Response<Body>
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let form = answer::form(request.headers());
    if let Some(refusal) = refuse(&target, &request, form) {
        return refusal;
    }
    let upgrade = wanted_upgrade(&target, &request);
    let client = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
    let version = request.version();
    let (request, uploaded) = watch(prepare(inner, &target, request, upgrade));
    let (connection, mut response) = match send(inner, &target, request).await {
        Ok(answer) => answer,
        Err(Failure::Open(error)) => {
            if let OpenError::Unavailable(cause) = &error {
                tracing::warn!(sandbox = %target.sandbox, port = target.port, cause, "a sandbox does not answer");
            }
            return answer::open_error(&error, &target.sandbox, target.port, form);
        }
        Err(Failure::Broken(error)) => {
            tracing::debug!(sandbox = %target.sandbox, port = target.port, %error, "no answer");
            return answer::broken(&target.sandbox, target.port, form);
        }
    };
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return match client {
            Some(client) => switch(client, connection, response),
            // Nobody asked for it.
            None => answer::broken(&target.sandbox, target.port, form),
        };
    }
    strip(response.headers_mut());
    if version == Version::HTTP_11 && !uploaded.load(Ordering::Relaxed) {
        // Answered before the request was read: what is left of it cannot be told from the next request on this
        // connection, so the server will close it, and the client must know.
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    let pool = (target.port == guest::ENVD_PORT).then(|| (inner.pool.clone(), target.sandbox));
    response.map(|body| Answer::new(body, connection, pool).boxed_unsync())
}

/// Refuses what must never reach a sandbox.
fn refuse<B>(target: &Target, request: &Request<B>, form: Form) -> Option<Response<Body>> {
    let headers = request.headers();
    if headers.contains_key(CONTENT_LENGTH) && headers.contains_key(TRANSFER_ENCODING) {
        return Some(answer::bad_request("the request has both Content-Length and Transfer-Encoding"));
    }
    if headers.get_all(HOST).iter().count() > 1 {
        return Some(answer::bad_request("the request has two Host headers"));
    }
    if request.version() == Version::HTTP_11 && !headers.contains_key(HOST) {
        return Some(answer::bad_request("the request has no Host header"));
    }
    if request.method() == Method::CONNECT {
        return Some(answer::bad_request("CONNECT is not forwarded"));
    }
    if target.port == guest::RELAY_PORT {
        return Some(answer::open_error(&OpenError::PortClosed, &target.sandbox, target.port, form));
    }
    let path = target.path.as_ref().map_or(request.uri().path(), PathAndQuery::path);
    if target.port == guest::ENVD_PORT && is_internal(path) {
        return Some(answer::not_found(&target.sandbox, form));
    }
    None
}

/// Whether any reading of this path, strict or lenient, is one of the agent's internal routes.
fn is_internal(path: &str) -> bool {
    let mut plain = Vec::with_capacity(path.len());
    let mut bytes = path.bytes();
    while let Some(byte) = bytes.next() {
        let digits = bytes.next_escaped(byte);
        plain.push(digits.unwrap_or(byte).to_ascii_lowercase());
    }
    let plain = String::from_utf8_lossy(&plain).into_owned();
    let mut segments: Vec<&str> = Vec::new();
    for segment in plain.split(['/', '\\']) {
        match segment {
            "" | "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment),
        }
    }
    segments.first().is_some_and(|first| INTERNAL.contains(&first.trim()))
}

/// Reads `%xx` where it stands.
trait Percent {
    fn next_escaped(&mut self, byte: u8) -> Option<u8>;
}

impl Percent for std::str::Bytes<'_> {
    fn next_escaped(&mut self, byte: u8) -> Option<u8> {
        if byte != b'%' {
            return None;
        }
        let mut ahead = self.clone();
        let high = char::from(ahead.next()?).to_digit(16)?;
        let low = char::from(ahead.next()?).to_digit(16)?;
        *self = ahead;
        u8::try_from(high * 16 + low).ok()
    }
}

/// The protocol the client wants to switch to. The agent has none, and an unknown protocol would carry requests past
/// the checks here.
fn wanted_upgrade<B>(target: &Target, request: &Request<B>) -> Option<HeaderValue> {
    if target.port == guest::ENVD_PORT || request.version() != Version::HTTP_11 {
        return None;
    }
    let asked = tokens(request.headers(), &CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"));
    request.headers().get(UPGRADE).filter(|_| asked).cloned()
}

fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    headers.get_all(name).iter().filter_map(|v| v.to_str().ok()).flat_map(|v| v.split(',')).map(str::trim)
}

/// Makes the request that goes to the port.
fn prepare<B>(
    inner: &Inner,
    target: &Target,
    request: Request<B>,
    upgrade: Option<HeaderValue>,
) -> Request<Body>
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let (mut head, body) = request.into_parts();
    let headers = &mut head.headers;
    let trailers = tokens(headers, &TE).any(|token| token.eq_ignore_ascii_case("trailers"));
    strip(headers);
    headers.remove(EXPECT);
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    if !headers.contains_key(HOST) {
        headers.insert(HOST, host(inner, target, &head.uri));
    }
    forwarded(headers, head.extensions.get::<ClientAddress>(), target);
    if let Some(protocol) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol);
    }
    let path = target.path.clone().or_else(|| head.uri.path_and_query().cloned());
    let uri = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
    let mut out = Request::new(body.map_err(Into::into).boxed_unsync());
    *out.method_mut() = head.method;
    *out.uri_mut() = uri;
    *out.headers_mut() = head.headers;
    out
}

/// The host of a request without the header: that of its URI (HTTP/2), else the name by which the port can be reached
/// (HTTP/1.0, which knows no hosts; the port's HTTP/1.1 demands one).
fn host(inner: &Inner, target: &Target, uri: &Uri) -> HeaderValue {
    let named = uri.authority().and_then(|authority| HeaderValue::from_str(authority.as_str()).ok());
    named.unwrap_or_else(|| {
        let domain = inner.domain.as_deref().unwrap_or("localhost");
        let name = format!("{}-{}.{domain}", target.port, target.sandbox);
        HeaderValue::from_str(&name).unwrap_or_else(|_| HeaderValue::from_static("localhost"))
    })
}

fn forwarded(headers: &mut HeaderMap, client: Option<&ClientAddress>, target: &Target) {
    if let Some(ClientAddress(address)) = client {
        let before: Vec<&str> = tokens(headers, &FORWARDED_FOR).collect();
        let mut chain = before.join(", ");
        if !chain.is_empty() {
            chain.push_str(", ");
        }
        chain.push_str(&address.to_string());
        if let Ok(chain) = HeaderValue::from_str(&chain) {
            headers.insert(FORWARDED_FOR, chain);
        }
    }
    if let Some(host) = headers.get(HOST).cloned() {
        headers.entry(FORWARDED_HOST).or_insert(host);
    }
    headers.entry(FORWARDED_PROTO).or_insert(HeaderValue::from_static("http"));
    if target.path.is_some()
        && let Ok(prefix) = HeaderValue::from_str(&format!("/sandbox/{}/{}", target.sandbox, target.port))
    {
        headers.insert(FORWARDED_PREFIX, prefix);
    }
}

/// Removes what concerns one hop only, and what `Connection` names.
fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> =
        tokens(headers, &CONNECTION).filter_map(|token| token.parse().ok()).collect();
    for name in named.iter().filter(|name| **name != HOST && **name != CONTENT_LENGTH) {
        headers.remove(name);
    }
    for name in [
        CONNECTION,
        KEEP_ALIVE,
        PROXY_CONNECTION,
        PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION,
        TE,
        TRANSFER_ENCODING,
        UPGRADE,
    ] {
        headers.remove(name);
    }
}

enum Failure {
    Open(OpenError),
    Broken(hyper::Error),
}

/// Sends the request, over an idle connection when there is one. A request that an idle connection lost before any of
/// it was sent, or that can be repeated as it is, goes out again on a fresh one.
async fn send(
    inner: &Inner,
    target: &Target,
    mut request: Request<Body>,
) -> Result<(Connection, Response<hyper::body::Incoming>), Failure> {
    if target.port == guest::ENVD_PORT {
        while let Some(mut idle) = inner.pool.take(&target.sandbox) {
            let copy = repeatable(&request);
            match idle.sender.try_send_request(request).await {
                Ok(response) => return Ok((idle, response)),
                Err(mut error) => match error.take_message().or(copy) {
                    Some(again) => request = again,
                    None => return Err(Failure::Broken(error.into_error())),
                },
            }
        }
    }
    let mut fresh = connect(inner, target).await?;
    match fresh.sender.send_request(request).await {
        Ok(response) => Ok((fresh, response)),
        Err(error) => Err(Failure::Broken(error)),
    }
}

/// A copy of a request that has no body and changes nothing.
fn repeatable(request: &Request<Body>) -> Option<Request<Body>> {
    use http_body::Body as _;
    if !matches!(*request.method(), Method::GET | Method::HEAD) || !request.body().is_end_stream() {
        return None;
    }
    let mut copy = Request::new(Empty::new().map_err(|never| match never {}).boxed_unsync());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    Some(copy)
}

async fn connect(inner: &Inner, target: &Target) -> Result<Connection, Failure> {
    let stream = inner.dial.dial(&target.sandbox, target.port).await.map_err(Failure::Open)?;
    let (sender, connection) = hyper::client::conn::http1::Builder::new()
        .handshake(TokioIo::new(stream))
        .await
        .map_err(Failure::Broken)?;
    let task = tokio::spawn(async move {
        // Its error reaches the one who sent the request.
        let _ = connection.with_upgrades().await;
    });
    Ok(Connection { sender, _task: Task::new(&task) })
}

/// Passes on a 101 and splices the two connections.
fn switch(
    client: OnUpgrade,
    connection: Connection,
    mut response: Response<hyper::body::Incoming>,
) -> Response<Body> {
    let guest = hyper::upgrade::on(&mut response);
    let protocol = response.headers().get(UPGRADE).cloned();
    strip(response.headers_mut());
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
    if let Some(protocol) = protocol {
        response.headers_mut().insert(UPGRADE, protocol);
    }
    tokio::spawn(async move {
        let guest = guest.await;
        // The connection's task has handed over its stream, or failed.
        drop(connection);
        if let (Ok(guest), Ok(client)) = (guest, client.await) {
            let (mut guest, mut client) = (TokioIo::new(guest), TokioIo::new(client));
            // Either end closing or failing ends both.
            let _ = tokio::io::copy_bidirectional_with_sizes(&mut client, &mut guest, 65536, 65536).await;
        }
    });
    response.map(|_| Empty::new().map_err(|never| match never {}).boxed_unsync())
}

/// Lets it be seen whether the body of a request has been read to its end.
fn watch(request: Request<Body>) -> (Request<Body>, Arc<AtomicBool>) {
    use http_body::Body as _;
    let ended = Arc::new(AtomicBool::new(request.body().is_end_stream()));
    let seen = ended.clone();
    (request.map(|body| Upload { body, ended: seen }.boxed_unsync()), ended)
}

/// The body of a request on its way.
struct Upload {
    body: Body,
    ended: Arc<AtomicBool>,
}

impl http_body::Body for Upload {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(cx));
        if frame.is_none() || self.body.is_end_stream() {
            self.ended.store(true, Ordering::Relaxed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of an answer. It holds the connection: dropped before its end it closes it, at its end it gives it back.
struct Answer {
    body: hyper::body::Incoming,
    lease: Option<(Connection, Option<(Pool, SandboxId)>)>,
}

impl Answer {
    fn new(body: hyper::body::Incoming, connection: Connection, pool: Option<(Pool, SandboxId)>) -> Self {
        let mut answer = Self { body, lease: Some((connection, pool)) };
        answer.settle();
        answer
    }

    /// Lets the connection go when the body is at its end.
    fn settle(&mut self) {
        use http_body::Body as _;
        if self.body.is_end_stream()
            && let Some((connection, Some((pool, sandbox)))) = self.lease.take()
        {
            pool.put(sandbox, connection);
        }
    }
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(cx));
        match &frame {
            Some(Ok(_)) => self.settle(),
            Some(Err(_)) => self.lease = None,
            None => {
                if let Some((connection, Some((pool, sandbox)))) = self.lease.take() {
                    pool.put(sandbox, connection);
                }
            }
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn internal_routes_in_any_spelling() {
        for path in [
            "/init",
            "/shutdown",
            "//init",
            "/init/",
            "/INIT",
            "/%69nit",
            "/./init",
            "/a/../init",
            "/fsthaw",
            "/init/x",
        ] {
            assert!(is_internal(path), "{path}");
        }
        for path in ["/", "/health", "/files", "/initial", "/x/init", "/files?path=/init", "/%", "/%zz"] {
            assert!(!is_internal(path), "{path}");
        }
    }

    #[test]
    fn hop_by_hop_headers_are_removed() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, X-Secret, host"),
            ("x-secret", "1"),
            ("keep-alive", "5"),
            ("te", "gzip"),
            ("a", "b"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        headers.insert(HOST, HeaderValue::from_static("h"));
        strip(&mut headers);
        assert_eq!(headers.len(), 2);
        assert!(headers.contains_key("a") && headers.contains_key(HOST));
    }
}
