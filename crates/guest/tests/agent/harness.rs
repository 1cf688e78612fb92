//! An agent and a client for it.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf, Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Request, Response};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

/// A running agent; killed when dropped.
pub(crate) struct Agent {
    child: Child,
    pub(crate) base: String,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether this test process may become other users.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: hyper::HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("not JSON: {:?}", self.body))
    }
}

impl Agent {
    pub(crate) fn start() -> Self {
        let id = std::process::Command::new("id").arg("-un").output().unwrap();
        let user = String::from_utf8(id.stdout).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_guest"))
            .args(["serve", "--listen", "127.0.0.1:0", "--user", user.trim()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().rsplit(' ').next().unwrap();
        let client = Client::builder(TokioExecutor::new()).build_http();
        Self { base: format!("http://{address}"), child, client }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> Response<Incoming> {
        self.client.request(request).await.unwrap()
    }

    pub(crate) async fn request(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Answer {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = self.send(request.body(Full::new(body.into())).unwrap()).await;
        let (parts, body) = response.into_parts();
        let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        Answer { status: parts.status.as_u16(), headers: parts.headers, body }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.request("GET", path, &[], "").await
    }

    pub(crate) async fn put(&self, path: &str, body: impl Into<Bytes>) -> Answer {
        let path = format!("/files?path={path}");
        self.request("POST", &path, &[("content-type", "application/octet-stream")], body).await
    }

    /// A unary call. `method` is `process.Process/List` and the like.
    pub(crate) async fn call(&self, method: &str, body: Value) -> Answer {
        self.call_as(method, "", body).await
    }

    pub(crate) async fn call_as(&self, method: &str, user: &str, body: Value) -> Answer {
        let authorization = format!("Basic {}", STANDARD.encode(format!("{user}:")));
        let mut headers = vec![("content-type", "application/json"), ("connect-protocol-version", "1")];
        if !user.is_empty() {
            headers.push(("authorization", &authorization));
        }
        self.request("POST", &format!("/{method}"), &headers, body.to_string()).await
    }

    /// A server stream.
    pub(crate) async fn stream(&self, method: &str, headers: &[(&str, &str)], body: Value) -> Events {
        let payload = body.to_string();
        let mut frame = BytesMut::from(&[0][..]);
        frame.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_be_bytes());
        frame.extend_from_slice(payload.as_bytes());
        let mut request = Request::builder()
            .method("POST")
            .uri(format!("{}/{method}", self.base))
            .header("content-type", "application/connect+json")
            .header("connect-protocol-version", "1");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = self.send(request.body(Full::new(frame.freeze())).unwrap()).await;
        assert_eq!(response.status(), 200);
        Events { body: response.into_body(), buffer: BytesMut::new() }
    }

    pub(crate) async fn start_process(&self, headers: &[(&str, &str)], body: Value) -> Events {
        self.stream("process.Process/Start", headers, body).await
    }

    /// Starts `sh -c script` with input, returns its pid and stream.
    pub(crate) async fn shell(&self, script: &str, stdin: bool) -> (u64, Events) {
        let body = json!({"process": {"cmd": "sh", "args": ["-c", script]}, "stdin": stdin});
        let mut events = self.start_process(&[], body).await;
        let pid = events.next().await.unwrap()["event"]["start"]["pid"].as_u64().unwrap();
        (pid, events)
    }

    /// Runs `sh -c script` to its end.
    pub(crate) async fn run(&self, script: &str) -> Done {
        self.shell(script, false).await.1.finish().await
    }

    /// Resident memory of the agent in bytes.
    pub(crate) fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }

    pub(crate) fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().count()
    }
}

/// A stream of messages.
pub(crate) struct Events {
    body: Incoming,
    buffer: BytesMut,
}

/// What a command did in all.
#[derive(Debug, Default)]
pub(crate) struct Done {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) pty: Vec<u8>,
    pub(crate) end: Value,
    pub(crate) error: Value,
}

impl Done {
    pub(crate) fn code(&self) -> i64 {
        assert!(!self.end.is_null(), "no end: {self:?}");
        self.end["exitCode"].as_i64().unwrap_or(0)
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.stdout.clone()).unwrap()
    }
}

impl Events {
    /// The next message; the end of the stream is `None`, or a message with `error`. Never waits longer than a minute.
    pub(crate) async fn next(&mut self) -> Option<Value> {
        tokio::time::timeout(Duration::from_secs(60), self.read()).await.expect("the stream hangs")
    }

    async fn read(&mut self) -> Option<Value> {
        loop {
            if self.buffer.len() >= 5 {
                let length = u32::from_be_bytes(self.buffer[1..5].try_into().unwrap()) as usize;
                if self.buffer.len() >= 5 + length {
                    let flags = self.buffer[0];
                    self.buffer.advance(5);
                    let value: Value = serde_json::from_slice(&self.buffer.split_to(length)).unwrap();
                    return if flags & 2 == 0 || value.get("error").is_some() { Some(value) } else { None };
                }
            }
            match self.body.frame().await {
                Some(Ok(frame)) => self.buffer.extend_from_slice(&frame.into_data().unwrap_or_default()),
                _ => return None,
            }
        }
    }

    pub(crate) async fn finish(mut self) -> Done {
        let mut done = Done::default();
        while let Some(message) = self.next().await {
            let data = &message["event"]["data"];
            for (name, out) in
                [("stdout", &mut done.stdout), ("stderr", &mut done.stderr), ("pty", &mut done.pty)]
            {
                if let Some(text) = data[name].as_str() {
                    assert!(done.end.is_null(), "output after the end");
                    out.extend(STANDARD.decode(text).unwrap());
                }
            }
            if !message["event"]["end"].is_null() {
                done.end = message["event"]["end"].clone();
            }
            if !message["error"].is_null() {
                done.error = message["error"].clone();
            }
        }
        done
    }
}

pub(crate) fn encoded(bytes: impl AsRef<[u8]>) -> String {
    STANDARD.encode(bytes)
}

pub(crate) async fn pause(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}
