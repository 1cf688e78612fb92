//! The public listener: accepts connections and serves HTTP/1.1, HTTP/2 without TLS, and upgrades on each.
//!
//! Owns: how many connections may be open, how long one may be idle, how all of them end. Does not own: what a request
//! is answered (that is the service).
//!
//! Contract: a connection costs one of [`Limits::connections`] from its acceptance until its socket is closed, an
//! upgraded one too; at the limit new ones wait in the system's queue, unaccepted. A connection on which no request is
//! being answered is closed after [`Limits::head`] once the head of a request has begun, or if none ever did, and after
//! [`Limits::idle`] between requests. A request that is being answered has no time limit here.

use std::convert::Infallible;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::ConnectInfo;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tower::ServiceExt;

/// After an accept that failed for want of descriptors or memory.
const BREATH: Duration = Duration::from_millis(500);
/// What a connection without a request gets to say goodbye (HTTP/2 does).
const FAREWELL: Duration = Duration::from_millis(100);
/// An HTTP/2 client that does not answer for this long is gone.
const PING: Duration = Duration::from_secs(20);

/// Bounds of the listener.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Open connections.
    pub(crate) connections: usize,
    /// From the first byte of a request's head, or from the connection's begin, to the head's end.
    pub(crate) head: Duration,
    /// Between two requests.
    pub(crate) idle: Duration,
}

/// The listener at work, until it is stopped.
pub(crate) struct Public {
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl Public {
    /// Serves what comes in on `listener`. Call it inside a tokio runtime.
    pub(crate) fn start(listener: TcpListener, service: axum::Router, limits: Limits) -> Self {
        let (stop, stopped) = watch::channel(false);
        Self { stop, task: tokio::spawn(accept(listener, service, limits, stopped)) }
    }

    /// Accepts no more, lets requests end that are being answered, and returns when every connection is closed. Those
    /// without a request are not waited for.
    pub(crate) async fn stop(self) {
        let _ = self.stop.send(true);
        let _ = self.task.await;
        self.stop.closed().await;
    }
}

async fn accept(
    listener: TcpListener,
    service: axum::Router,
    limits: Limits,
    mut stopped: watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(limits.connections));
    loop {
        // The place first: what is not accepted costs no descriptor.
        let next = async {
            let place = match places.clone().try_acquire_owned() {
                Ok(place) => place,
                Err(_) => {
                    tracing::warn!(
                        connections = limits.connections,
                        "as many connections as limits.connections allows; more wait"
                    );
                    // Never closed, so it cannot fail.
                    places.clone().acquire_owned().await.map_err(io::Error::other)?
                }
            };
            let (stream, client) = listener.accept().await?;
            Ok::<_, io::Error>((place, stream, client))
        };
        let accepted = tokio::select! {
            _ = stopped.wait_for(|stopped| *stopped) => return,
            accepted = next => accepted,
        };
        match accepted {
            Ok((place, stream, client)) => {
                // Small frames of streams must not wait for each other's acknowledgement.
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "TCP_NODELAY");
                }
                tokio::spawn(serve(stream, place, client, service.clone(), limits, stopped.clone()));
            }
            // The client was gone again before it was accepted.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::ConnectionAborted
                        | io::ErrorKind::ConnectionReset
                        | io::ErrorKind::Interrupted
                ) => {}
            Err(error) => {
                tracing::error!(%error, "no connection can be accepted");
                tokio::time::sleep(BREATH).await;
            }
        }
    }
}

async fn serve(
    stream: TcpStream,
    place: OwnedSemaphorePermit,
    client: SocketAddr,
    service: axum::Router,
    limits: Limits,
    mut stopped: watch::Receiver<bool>,
) {
    let activity = Arc::new(Activity(Mutex::new(State::new())));
    let answering = activity.clone();
    let service = tower::service_fn(move |request: axum::http::Request<Incoming>| {
        let guard = answering.begin();
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(ConnectInfo(client));
        let answer = service.clone().oneshot(request);
        async move { Ok::<_, Infallible>(answer.await?.map(|body| Answer { body, _guard: guard })) }
    });
    let mut builder = Builder::new(TokioExecutor::new());
    // The time for a head is kept here, for both versions and from the first byte on, so hyper's own is off.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(None);
    builder.http2().timer(TokioTimer::new()).keep_alive_interval(PING).keep_alive_timeout(PING);
    let stream = Watched { stream, activity: activity.clone(), _place: place };
    let mut connection =
        pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), TowerToHyperService::new(service)));
    let stopping = loop {
        let overdue = activity.overdue(limits);
        tokio::select! {
            outcome = connection.as_mut() => {
                if let Err(error) = outcome {
                    tracing::debug!(%client, error, "a connection broke off");
                }
                return;
            }
            _ = stopped.wait_for(|stopped| *stopped) => break true,
            () = tokio::time::sleep_until(overdue.unwrap_or_else(|| Instant::now() + limits.head).into()) => {
                if activity.overdue(limits).is_some_and(|overdue| overdue <= Instant::now()) {
                    break false;
                }
            }
        }
    };
    connection.as_mut().graceful_shutdown();
    // What is being answered may end; the caller of `stop` has the last word on how long that may take.
    loop {
        tokio::select! {
            _ = connection.as_mut() => return,
            () = tokio::time::sleep(FAREWELL) => if !stopping || activity.is_idle() { return },
        }
    }
}

/// What a connection is doing.
struct Activity(Mutex<State>);

struct State {
    /// Requests that are being answered.
    answering: usize,
    /// The socket takes no more bytes for now: an answer is still on its way.
    blocked: bool,
    /// A request's head has begun, or must: the connection is new.
    head: bool,
    /// Since when no request is being answered, or the head has begun, or the last blocked bytes went out.
    since: Instant,
}

impl State {
    fn new() -> Self {
        Self { answering: 0, blocked: false, head: true, since: Instant::now() }
    }
}

impl Activity {
    fn begin(self: &Arc<Self>) -> Guard {
        let mut state = self.0.lock();
        state.answering += 1;
        state.head = false;
        Guard(self.clone())
    }

    /// When the connection will have waited too long; None while a request is being answered.
    fn overdue(&self, limits: Limits) -> Option<Instant> {
        let state = self.0.lock();
        let limit = if state.head { limits.head } else { limits.idle };
        (state.answering == 0).then(|| state.since + limit)
    }

    fn is_idle(&self) -> bool {
        let state = self.0.lock();
        state.answering == 0 && !state.blocked
    }

    fn has_read(&self) {
        let mut state = self.0.lock();
        if state.answering == 0 && !state.head {
            state.head = true;
            state.since = Instant::now();
        }
    }

    /// Progress of bytes that had to wait counts; others would let a client's pings keep a connection for ever.
    fn has_written(&self, blocked: bool) {
        let mut state = self.0.lock();
        if state.blocked && !blocked {
            state.since = Instant::now();
        }
        state.blocked = blocked;
    }
}

/// A request that is being answered, until the last of its answer has been taken.
struct Guard(Arc<Activity>);

impl Drop for Guard {
    fn drop(&mut self) {
        let mut state = self.0.0.lock();
        state.answering -= 1;
        state.since = Instant::now();
    }
}

/// An answer's body.
struct Answer {
    body: Body,
    _guard: Guard,
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A connection's socket, and its place among those that may be open.
struct Watched {
    stream: TcpStream,
    activity: Arc<Activity>,
    _place: OwnedSemaphorePermit,
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if outcome.is_ready() {
            self.activity.has_read();
        }
        outcome
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.activity.has_written(outcome.is_pending());
        outcome
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.activity.has_written(outcome.is_pending());
        outcome
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const LIMITS: Limits =
        Limits { connections: 3, head: Duration::from_millis(300), idle: Duration::from_millis(900) };
    const GET: &[u8] = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n";

    /// A listener with a short answer, a slow one, one that outlasts every limit, and an echo behind an upgrade.
    async fn start(limits: Limits) -> (Public, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let slow = || async {
            let ticks = futures::stream::unfold(0, |tick| async move {
                tokio::time::sleep(Duration::from_millis(200)).await;
                (tick < 8).then(|| (Ok::<_, Infallible>(format!("tick {tick}\n")), tick + 1))
            });
            Body::from_stream(ticks)
        };
        let upgrade = |mut request: axum::extract::Request| async move {
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let mut stream = TokioIo::new(upgrade.await.unwrap());
                let mut bytes = [0; 4];
                while stream.read_exact(&mut bytes).await.is_ok() {
                    stream.write_all(&bytes).await.unwrap();
                }
            });
            let headers = [("connection", "upgrade"), ("upgrade", "echo")];
            (axum::http::StatusCode::SWITCHING_PROTOCOLS, headers)
        };
        let large = || async { "x".repeat(16 << 20) };
        let service = axum::Router::new()
            .route("/health", get(|| async { "well" }))
            .route("/slow", get(slow))
            .route("/large", get(large))
            .route("/upgrade", get(upgrade));
        (Public::start(listener, service, limits), address)
    }

    async fn open(address: SocketAddr, first: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(first).await.unwrap();
        stream
    }

    async fn until(stream: &mut TcpStream, end: &str) -> String {
        let mut got = Vec::new();
        while !String::from_utf8_lossy(&got).ends_with(end) {
            got.push(stream.read_u8().await.unwrap());
        }
        String::from_utf8(got).unwrap()
    }

    /// How long the server keeps a connection open.
    async fn closed_after(stream: &mut TcpStream) -> Duration {
        let begun = Instant::now();
        let mut rest = Vec::new();
        let end = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut rest)).await;
        assert!(end.is_ok(), "still open");
        begun.elapsed()
    }

    #[tokio::test]
    async fn a_head_that_does_not_end_is_not_waited_for() {
        let (_public, address) = start(LIMITS).await;
        for head in
            ["", "GET /health HT", "GET /health HTTP/1.1\r\nhost: a\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
        {
            let mut stream = open(address, head.as_bytes()).await;
            let open_for = closed_after(&mut stream).await;
            assert!(open_for >= LIMITS.head && open_for < 3 * LIMITS.head, "{head:?}: {open_for:?}");
        }
        // Neither byte after byte, nor after a whole request.
        let mut stream = open(address, GET).await;
        until(&mut stream, "well").await;
        let begun = Instant::now();
        while stream.write_all(b"x").await.is_ok() && begun.elapsed() < Duration::from_secs(5) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(begun.elapsed() < 3 * LIMITS.head, "{:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn a_connection_between_requests_is_kept_a_while() {
        let (_public, address) = start(LIMITS).await;
        let mut stream = open(address, GET).await;
        until(&mut stream, "well").await;
        tokio::time::sleep(LIMITS.idle * 2 / 3).await;
        stream.write_all(GET).await.unwrap();
        until(&mut stream, "well").await;
        let open_for = closed_after(&mut stream).await;
        assert!(open_for >= LIMITS.idle && open_for < 2 * LIMITS.idle, "{open_for:?}");
    }

    #[tokio::test]
    async fn what_is_being_answered_has_no_limit() {
        let (_public, address) = start(LIMITS).await;
        let mut slow = open(address, b"GET /slow HTTP/1.1\r\nhost: a\r\n\r\n").await;
        let mut upgraded = open(
            address,
            b"GET /upgrade HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n",
        )
        .await;
        until(&mut upgraded, "\r\n\r\n").await;
        assert!(until(&mut slow, "0\r\n\r\n").await.contains("tick 7"));
        upgraded.write_all(b"ping").await.unwrap();
        until(&mut upgraded, "ping").await;
        // Nor is an answer that its reader takes slowly cut short.
        let mut large = open(address, b"GET /large HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await;
        let (mut got, mut bytes) = (0, vec![0; 1 << 20]);
        loop {
            tokio::time::sleep(Duration::from_millis(60)).await;
            match large.read(&mut bytes).await.unwrap() {
                0 => break,
                read => got += read,
            }
        }
        assert!(got > 16 << 20, "{got}");
    }

    #[tokio::test]
    async fn at_the_limit_new_connections_wait_and_none_is_lost() {
        let (_public, address) = start(LIMITS).await;
        let mut halves = Vec::new();
        for _ in 0..LIMITS.connections {
            halves.push(open(address, b"GET / HTTP/1.1\r\n").await);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        let begun = Instant::now();
        let mut waiting = open(address, GET).await;
        until(&mut waiting, "well").await;
        assert!(
            begun.elapsed() > LIMITS.head / 2 && begun.elapsed() < 3 * LIMITS.head,
            "{:?}",
            begun.elapsed()
        );

        // An upgraded connection keeps its place although HTTP is done with it.
        drop((halves, waiting));
        let mut upgraded = Vec::new();
        for _ in 0..LIMITS.connections {
            let request = b"GET /upgrade HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n";
            let mut stream = open(address, request).await;
            until(&mut stream, "\r\n\r\n").await;
            upgraded.push(stream);
        }
        let mut waiting = open(address, GET).await;
        let early = tokio::time::timeout(2 * LIMITS.head, until(&mut waiting, "well")).await;
        assert!(early.is_err(), "served beyond the limit");
        drop(upgraded.pop());
        tokio::time::timeout(2 * LIMITS.head, until(&mut waiting, "well")).await.unwrap();
    }

    #[tokio::test]
    async fn stopping_waits_for_answers_and_for_nothing_else() {
        let patient =
            Limits { connections: 100, head: Duration::from_secs(60), idle: Duration::from_secs(60) };
        let (public, address) = start(patient).await;
        let mut halves = Vec::new();
        for head in ["", "GET /health HT", "GET / HTTP/1.1\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
            halves.push(open(address, head.as_bytes()).await);
        }
        let mut kept = open(address, GET).await;
        until(&mut kept, "well").await;
        let begun = Instant::now();
        public.stop().await;
        assert!(begun.elapsed() < Duration::from_millis(500), "{:?}", begun.elapsed());

        let (public, address) = start(patient).await;
        let mut slow = open(address, b"GET /slow HTTP/1.1\r\nhost: a\r\n\r\n").await;
        until(&mut slow, "tick 0\n\r\n").await;
        let (rest, ()) = tokio::join!(until(&mut slow, "0\r\n\r\n"), public.stop());
        assert!(rest.contains("tick 7"));
        assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");
    }

    #[tokio::test]
    async fn http2_is_served_without_tls_and_told_goodbye() {
        let (_public, address) = start(LIMITS).await;
        let stream = TcpStream::connect(address).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(connection);
        for _ in 0..3 {
            let request = axum::http::Request::get("http://a/health").body(Body::empty()).unwrap();
            let answer: axum::http::Response<Incoming> = sender.send_request(request).await.unwrap();
            assert_eq!(answer.status(), 200);
            tokio::time::sleep(LIMITS.head / 3).await;
        }
        // What the ingress would refuse is not offered: clients open their WebSockets over HTTP/1.1 instead.
        let mut websocket = axum::http::Request::connect("http://a/upgrade").body(Body::empty()).unwrap();
        websocket.extensions_mut().insert(hyper::ext::Protocol::from_static("websocket"));
        assert!(sender.send_request(websocket).await.is_err());
        // An orderly end, not a reset.
        connection.await.unwrap().unwrap();
    }
}
