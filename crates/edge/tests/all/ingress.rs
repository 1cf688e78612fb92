//! HTTP into a sandbox, with real servers in place of the guest.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use edge::ingress::{BoxError, ClientAddress, Dial, Ingress, OpenError};
use edge::link::GuestStream;
use futures::FutureExt;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use proto::{SandboxId, guest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};

type Body = http_body_util::combinators::UnsyncBoxBody<Bytes, BoxError>;

fn text(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).map_err(|never| match never {}).boxed_unsync()
}

/// A guest whose ports are functions.
#[derive(Default)]
struct Fake {
    dials: AtomicUsize,
    /// Streams to the agent end after this many requests.
    closed: Arc<AtomicUsize>,
}

async fn app(port: u16, mut request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let path = request.uri().path().to_owned();
    Ok(match path.as_str() {
        "/stream" => {
            let (send, receive) = tokio::sync::mpsc::channel::<Result<_, BoxError>>(1);
            tokio::spawn(async move {
                for number in 0..5 {
                    let frame = http_body::Frame::data(Bytes::from(format!("data: {number}\n\n")));
                    if send.send(Ok(frame)).await.is_err() {
                        return;
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            });
            let stream = futures::stream::unfold(receive, |mut receive| async {
                receive.recv().await.map(|frame| (frame, receive))
            });
            Response::builder()
                .header("content-type", "text/event-stream")
                .body(StreamBody::new(stream).boxed_unsync())
                .unwrap()
        }
        "/forever" => std::future::pending().await,
        "/echo" => Response::new(request.into_body().map_err(Into::into).boxed_unsync()),
        "/ws" => {
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let mut stream = TokioIo::new(upgrade.await.unwrap());
                let mut bytes = [0; 64];
                while let Ok(got) = stream.read(&mut bytes).await {
                    if got == 0 || stream.write_all(&bytes[..got]).await.is_err() {
                        break;
                    }
                }
            });
            Response::builder()
                .status(101)
                .header("connection", "Upgrade")
                .header("upgrade", "websocket")
                .header("sec-websocket-accept", "yes")
                .body(text(""))
                .unwrap()
        }
        _ => {
            let mut lines = format!("{port} {} {}\n", request.method(), request.uri());
            for (name, value) in request.headers() {
                lines.push_str(&format!("{name}: {}\n", value.to_str().unwrap()));
            }
            Response::builder()
                .header("connection", "x-gone")
                .header("x-gone", "1")
                .body(text(lines))
                .unwrap()
        }
    })
}

impl Dial for Fake {
    fn dial(&self, sandbox: &SandboxId, port: u16) -> BoxFuture<'_, Result<GuestStream, OpenError>> {
        let running = sandbox.as_str() == "irunning";
        async move {
            if !running {
                return Err(OpenError::NotFound);
            }
            match port {
                1 => return Err(OpenError::PortClosed),
                2 => return Err(OpenError::Transition),
                _ => {}
            }
            self.dials.fetch_add(1, Ordering::SeqCst);
            let (ours, theirs) = UnixStream::pair().unwrap();
            let closed = Arc::clone(&self.closed);
            tokio::spawn(async move {
                if port == 3 {
                    // Takes the request and hangs up.
                    let mut theirs = theirs;
                    let _ = theirs.read(&mut [0; 1024]).await;
                    return;
                }
                let service = hyper::service::service_fn(move |request| app(port, request));
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(theirs), service)
                    .with_upgrades();
                let _ = connection.await;
                closed.fetch_add(1, Ordering::SeqCst);
            });
            Ok(GuestStream::from_unix(ours))
        }
        .boxed()
    }
}

/// An ingress on a real port, for HTTP/1.1 and HTTP/2.
async fn start() -> (SocketAddr, Arc<Fake>) {
    let fake = Arc::new(Fake::default());
    let ingress = Ingress::new(Arc::clone(&fake) as Arc<dyn Dial>, Some("pando.test".into()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, client)) = listener.accept().await {
            let ingress = ingress.clone();
            tokio::spawn(async move {
                let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
                    let ingress = ingress.clone();
                    request.extensions_mut().insert(ClientAddress(client.ip()));
                    async move {
                        let (head, body) = request.into_parts();
                        let target = ingress.route(&head);
                        let request = Request::from_parts(head, body);
                        Ok::<_, Infallible>(match target {
                            None => Response::new(text("api")),
                            Some(Err(error)) => error.response(),
                            Some(Ok(target)) => ingress.serve(target, request).await,
                        })
                    }
                });
                let _ = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new())
                    .serve_connection_with_upgrades(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    (address, fake)
}

/// Sends bytes, and reads what comes until the end.
async fn raw(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut answer)).await.unwrap().unwrap();
    String::from_utf8(answer).unwrap()
}

async fn get(address: SocketAddr, path: &str, headers: &str) -> String {
    raw(address, &format!("GET {path} HTTP/1.1\r\nconnection: close\r\n{headers}\r\n")).await
}

const AGENT: &str = "host: 127.0.0.1\r\ne2b-sandbox-id: irunning\r\ne2b-sandbox-port: 49983\r\n";

fn to(port: u16) -> String {
    format!("host: {port}-irunning.pando.test\r\n")
}

#[tokio::test]
async fn by_headers_host_and_path() {
    let (address, _) = start().await;
    let answer = get(address, "/health?x=1", AGENT).await;
    assert!(answer.contains("49983 GET /health?x=1\n"), "{answer}");
    assert!(answer.contains("\nhost: 127.0.0.1\n"), "{answer}");
    assert!(answer.contains("x-forwarded-for: 127.0.0.1\n"), "{answer}");
    assert!(!answer.contains("x-gone"), "{answer}");
    let answer =
        get(address, "/a", "host: 8080-irunning-00000000.pando.test:80\r\nx-forwarded-for: 9.9.9.9\r\n")
            .await;
    assert!(answer.contains("8080 GET /a\n"), "{answer}");
    assert!(answer.contains("\nhost: 8080-irunning-00000000.pando.test:80\n"), "{answer}");
    assert!(answer.contains("x-forwarded-for: 9.9.9.9, 127.0.0.1\n"), "{answer}");
    let answer = get(address, "/sandbox/irunning/3000/a/b?c", "host: localhost\r\n").await;
    assert!(
        answer.contains("3000 GET /a/b?c\n") && answer.contains("x-forwarded-prefix: /sandbox/irunning/3000")
    );
    assert!(get(address, "/sandboxes", "host: api.pando.test\r\n").await.ends_with("api"));
}

#[tokio::test]
async fn contradictions_are_400() {
    let (address, fake) = start().await;
    for headers in [
        "host: a\r\ne2b-sandbox-id: irunning\r\n",
        "host: a\r\ne2b-sandbox-port: 80\r\n",
        "host: 80-irunning.pando.test\r\ne2b-sandbox-id: iother\r\ne2b-sandbox-port: 80\r\n",
        "host: 80-irunning.pando.test\r\nhost: 81-irunning.pando.test\r\n",
        "host: a\r\nhost: a\r\ne2b-sandbox-id: irunning\r\ne2b-sandbox-port: 80\r\n",
    ] {
        let answer = get(address, "/", headers).await;
        assert!(answer.starts_with("HTTP/1.1 400"), "{headers}: {answer}");
    }
    assert!(get(address, "/sandbox/irunning/80/", "").await.starts_with("HTTP/1.1 400"), "no host");
    assert_eq!(fake.dials.load(Ordering::SeqCst), 0);
}

/// A request with two lengths is read by one of them, the chunks; what a reader of the other takes for the next request
/// is never read at all, as the connection ends, and the port gets one length.
#[tokio::test]
async fn a_request_with_two_lengths_cannot_hide_another() {
    let (address, fake) = start().await;
    for lengths in [
        "content-length: 60\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked\r\ncontent-length: 60\r\n",
    ] {
        let before = fake.dials.load(Ordering::SeqCst);
        let hidden = "GET /hidden HTTP/1.1\r\nhost: 80-irunning.pando.test\r\n\r\n";
        let request = format!("POST /x HTTP/1.1\r\n{}{lengths}\r\n0\r\n\r\n{hidden}", to(80));
        let answer = raw(address, &request).await;
        assert_eq!(fake.dials.load(Ordering::SeqCst), before + 1, "{answer}");
        assert!(answer.contains("80 POST /x") && !answer.contains("hidden"), "{answer}");
        assert!(
            answer.contains("transfer-encoding: chunked") != answer.contains("content-length: 60"),
            "{answer}"
        );
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
    }
}

/// HTTP/1.0 knows no hosts.
#[tokio::test]
async fn a_request_without_a_host_gets_one() {
    let (address, _) = start().await;
    let routed = "e2b-sandbox-id: irunning\r\ne2b-sandbox-port: 81\r\n";
    for (path, headers, port) in [("/sandbox/irunning/80/x", "", 80), ("/x", routed, 81)] {
        let answer = raw(address, &format!("GET {path} HTTP/1.0\r\n{headers}\r\n")).await;
        assert!(answer.contains(&format!("{port} GET /x\n")), "{answer}");
        assert!(answer.contains(&format!("\nhost: {port}-irunning.pando.test\n")), "{answer}");
    }
}

#[tokio::test]
async fn errors_are_those_that_sdks_know() {
    let (address, _) = start().await;
    let gone = get(address, "/", "host: 80-igone.pando.test\r\n").await;
    assert!(gone.starts_with("HTTP/1.1 502"), "{gone}");
    assert!(
        gone.ends_with(r#"{"sandboxId":"igone","message":"The sandbox was not found","code":502}"#),
        "{gone}"
    );
    for accept in ["", "accept: */*\r\n", "accept: application/json\r\n"] {
        let closed = get(address, "/", &(to(1) + accept)).await;
        let body = r#"{"sandboxId":"irunning","message":"The sandbox is running but port is not open","port":1,"code":502}"#;
        assert!(closed.starts_with("HTTP/1.1 502") && closed.ends_with(body), "{closed}");
    }
    let page = get(address, "/", &(to(1) + "accept: text/html,*/*;q=0.8\r\n")).await;
    assert!(
        page.starts_with("HTTP/1.1 502") && page.contains("text/html") && page.contains("port is not open")
    );
    assert!(get(address, "/", &to(2)).await.starts_with("HTTP/1.1 409"));
    assert!(get(address, "/", &to(3)).await.starts_with("HTTP/1.1 502"));
    assert!(get(address, "/", &to(guest::RELAY_PORT)).await.contains("port is not open"));
}

#[tokio::test]
async fn internal_routes_of_the_agent_do_not_exist() {
    let (address, fake) = start().await;
    for path in [
        "/init",
        "/shutdown",
        "/freeze",
        "/unfreeze",
        "/collapse",
        "/fsfreeze",
        "/fsthaw",
        "/upgrade",
        "//init",
        "/%69nit",
    ] {
        assert!(get(address, path, AGENT).await.starts_with("HTTP/1.1 404"), "{path}");
        let prefixed = format!("/sandbox/irunning/49983{path}");
        assert!(get(address, &prefixed, "host: a\r\n").await.starts_with("HTTP/1.1 404"), "{path}");
    }
    assert_eq!(fake.dials.load(Ordering::SeqCst), 0);
    assert!(get(address, "/init", &to(8080)).await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn streams_are_not_buffered() {
    let (address, _) = start().await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let begin = Instant::now();
    stream.write_all(format!("GET /stream HTTP/1.1\r\n{}\r\n", to(80)).as_bytes()).await.unwrap();
    let mut got = String::new();
    let mut bytes = [0; 4096];
    while !got.contains("data: 0") {
        let length = stream.read(&mut bytes).await.unwrap();
        got.push_str(std::str::from_utf8(&bytes[..length]).unwrap());
    }
    assert!(begin.elapsed() < Duration::from_millis(300) && !got.contains("data: 4"));
    while !got.ends_with("0\r\n\r\n") {
        let length = stream.read(&mut bytes).await.unwrap();
        assert_ne!(length, 0);
        got.push_str(std::str::from_utf8(&bytes[..length]).unwrap());
    }
    assert!(got.contains("data: 4"));
}

#[tokio::test]
async fn bodies_flow_in_both_directions_at_once() {
    let (address, _) = start().await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("POST /echo HTTP/1.1\r\n{}transfer-encoding: chunked\r\n\r\n", to(80));
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut got = String::new();
    let mut bytes = [0; 4096];
    for number in 0..3 {
        stream.write_all(format!("4\r\nno {number}\r\n").as_bytes()).await.unwrap();
        while !got.contains(&format!("no {number}")) {
            let length = stream.read(&mut bytes).await.unwrap();
            assert_ne!(length, 0);
            got.push_str(std::str::from_utf8(&bytes[..length]).unwrap());
        }
    }
}

/// What is left of a request cannot be told from the next one, so the client must not send another on the connection.
#[tokio::test]
async fn an_answer_before_the_end_of_a_request_says_that_the_connection_closes() {
    let (address, _) = start().await;
    for (body, length, closes) in [("whole", 5, false), ("cut", 8_000_000, true)] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = format!("POST /stream HTTP/1.1\r\n{}content-length: {length}\r\n\r\n{body}", to(80));
        stream.write_all(head.as_bytes()).await.unwrap();
        let (mut got, mut bytes) = (String::new(), [0; 4096]);
        while !got.contains("\r\n\r\n") {
            let length = stream.read(&mut bytes).await.unwrap();
            assert_ne!(length, 0);
            got.push_str(std::str::from_utf8(&bytes[..length]).unwrap());
        }
        assert_eq!(got.to_ascii_lowercase().contains("connection: close"), closes, "{got}");
    }
}

#[tokio::test]
async fn websockets_are_spliced() {
    let (address, _) = start().await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET /ws HTTP/1.1\r\n{}connection: Upgrade\r\nupgrade: websocket\r\n\r\n", to(80));
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
    assert!(head.starts_with("http/1.1 101") && head.contains("upgrade: websocket"), "{head}");
    assert!(head.contains("sec-websocket-accept: yes"), "{head}");
    for word in ["ping", "pong"] {
        stream.write_all(word.as_bytes()).await.unwrap();
        let mut echo = [0; 4];
        stream.read_exact(&mut echo).await.unwrap();
        assert_eq!(&echo, word.as_bytes());
    }
}

#[tokio::test]
async fn the_agent_gets_no_upgrade() {
    let (address, _) = start().await;
    let upgrade = "connection: Upgrade, close\r\nupgrade: h2c\r\n";
    let request = format!("GET /x HTTP/1.1\r\n{AGENT}{upgrade}\r\n");
    let answer = raw(address, &request).await;
    assert!(answer.starts_with("HTTP/1.1 200") && !answer.contains("upgrade"), "{answer}");
}

#[tokio::test]
async fn a_client_that_leaves_takes_the_connection_along() {
    let (address, fake) = start().await;
    for headers in [to(80), AGENT.into()] {
        for path in ["/forever", "/stream"] {
            let before = fake.closed.load(Ordering::SeqCst);
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(format!("GET {path} HTTP/1.1\r\n{headers}\r\n").as_bytes()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(100)).await;
            drop(stream);
            tokio::time::sleep(Duration::from_millis(150)).await;
            assert_eq!(fake.closed.load(Ordering::SeqCst), before + 1, "{path}");
        }
    }
}

#[tokio::test]
async fn only_the_agents_connections_are_kept() {
    let (address, fake) = start().await;
    for _ in 0..5 {
        assert!(get(address, "/health", AGENT).await.starts_with("HTTP/1.1 200"));
    }
    assert_eq!(fake.dials.load(Ordering::SeqCst), 1);
    for _ in 0..5 {
        assert!(get(address, "/", &to(80)).await.starts_with("HTTP/1.1 200"));
    }
    assert_eq!(fake.dials.load(Ordering::SeqCst), 6);
}

/// A guest that answers one request per connection and then hangs up without a word.
struct Fickle(AtomicUsize);

impl Dial for Fickle {
    fn dial(&self, _: &SandboxId, _: u16) -> BoxFuture<'_, Result<GuestStream, OpenError>> {
        self.0.fetch_add(1, Ordering::SeqCst);
        async {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            tokio::spawn(async move {
                let mut bytes = [0; 4096];
                if theirs.read(&mut bytes).await? > 0 {
                    theirs.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await?;
                }
                // The next request is read and lost.
                if theirs.read(&mut bytes).await? > 0 {
                    drop(theirs);
                }
                io::Result::Ok(())
            });
            Ok(GuestStream::from_unix(ours))
        }
        .boxed()
    }
}

#[tokio::test]
async fn a_stale_idle_connection_is_replaced() {
    let fickle = Arc::new(Fickle(AtomicUsize::new(0)));
    let ingress = Ingress::new(Arc::clone(&fickle) as Arc<dyn Dial>, None);
    let ask = |method: &'static str| {
        let ingress = ingress.clone();
        async move {
            let request = Request::builder().method(method).uri("/health").header("host", "a");
            let request = request.body(text("")).unwrap();
            let target = edge::ingress::Target::new("irunning".parse().unwrap(), guest::ENVD_PORT);
            let answer = ingress.serve(target, request).await;
            let status = answer.status();
            let _ = answer.into_body().collect().await;
            status
        }
    };
    assert_eq!(ask("GET").await, 200);
    assert_eq!(ask("GET").await, 200);
    assert_eq!(fickle.0.load(Ordering::SeqCst), 2);
    // What may have been done is not done twice.
    assert_eq!(ask("POST").await, 502);
    assert_eq!(ask("POST").await, 200);
}

#[tokio::test]
async fn http2_in_and_http1_out() {
    let (address, _) = start().await;
    let stream = TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = Request::get("http://8080-irunning.pando.test/x").body(text("")).unwrap();
    let answer = sender.send_request(request).await.unwrap();
    assert_eq!(answer.status(), 200);
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    let body = std::str::from_utf8(&body).unwrap();
    assert!(body.contains("8080 GET /x\n") && body.contains("host: 8080-irunning.pando.test\n"), "{body}");
}
