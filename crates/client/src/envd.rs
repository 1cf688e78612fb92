//! What the command line asks of the agent in a sandbox: commands and files.
//!
//! Connect with the JSON codec (`e2b-protocol` 3.1): a stream is frames of one byte of flags, a 32-bit big-endian
//! length, and that many bytes; flag 2 is the end, with the error if there was one.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use proto::SandboxId;
use proto::api::ErrorBody;
use proto::guest::ENVD_PORT;
use serde_json::{Value, json};

use crate::http::{Body, ClientError, Endpoint, Http, whole};

const FRAME_HEAD: usize = 5;
const FRAME_LIMIT: usize = 64 << 20;
const END_OF_STREAM: u8 = 2;

/// The agent of one sandbox.
#[derive(Clone)]
pub struct Envd {
    http: Http,
}

/// A command to start.
#[derive(Debug, Clone, Default)]
pub struct StartCommand {
    /// The program.
    pub program: String,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Variables on top of the sandbox's.
    pub env: Vec<(String, String)>,
    /// Working directory; the user's home if none.
    pub cwd: Option<String>,
    /// Terminal size (columns, rows), for a command with a terminal.
    pub terminal: Option<(u16, u16)>,
    /// Whether input will be sent.
    pub stdin: bool,
    /// The user; the template's if none.
    pub user: Option<String>,
}

/// What a command does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandEvent {
    /// It runs under this process ID.
    Started(u32),
    /// It wrote to standard output, or to its terminal.
    Stdout(Bytes),
    /// It wrote to standard error.
    Stderr(Bytes),
    /// It ended.
    Ended {
        /// Exit code; -1 when a signal ended it.
        code: i32,
        /// In words: `exit status 3`, `signal: killed`.
        status: String,
    },
}

impl Envd {
    pub(crate) fn new(endpoint: Endpoint, id: &SandboxId, token: Option<&str>) -> Result<Self, ClientError> {
        let mut headers = HeaderMap::new();
        let port = ENVD_PORT.to_string();
        let wanted = [
            ("e2b-sandbox-id", Some(id.as_str())),
            ("e2b-sandbox-port", Some(&port)),
            ("x-access-token", token),
        ];
        for (name, value) in wanted {
            let Some(value) = value else { continue };
            let value = HeaderValue::from_str(value).map_err(|error| ClientError::Request {
                endpoint: endpoint.to_string(),
                source: error.into(),
            })?;
            headers.insert(HeaderName::from_static(name), value);
        }
        Ok(Self { http: Http::new(endpoint, headers) })
    }

    /// Starts a command and follows it.
    pub async fn start(&self, command: &StartCommand) -> Result<CommandStream, ClientError> {
        let env: serde_json::Map<String, Value> =
            command.env.iter().map(|(name, value)| (name.clone(), Value::from(value.as_str()))).collect();
        let mut request = json!({
            "process": { "cmd": command.program, "args": command.arguments, "envs": env },
            "stdin": command.stdin,
        });
        if let Some(cwd) = &command.cwd {
            request["process"]["cwd"] = cwd.as_str().into();
        }
        if let Some((columns, rows)) = command.terminal {
            request["pty"] = json!({ "size": { "cols": columns, "rows": rows } });
        }
        let payload = request.to_string();
        let mut frame = vec![0u8];
        frame.extend((payload.len() as u32).to_be_bytes());
        frame.extend(payload.bytes());
        let authorization =
            command.user.as_ref().map(|user| format!("Basic {}", STANDARD.encode(format!("{user}:"))));
        let mut headers =
            vec![("content-type", "application/connect+json"), ("connect-protocol-version", "1")];
        if let Some(authorization) = &authorization {
            headers.push(("authorization", authorization));
        }
        let response = self.http.send(Method::POST, "/process.Process/Start", &headers, whole(frame)).await?;
        let response = self.http.success(response).await?;
        Ok(CommandStream { http: self.http.clone(), body: response.into_body(), kept: BytesMut::new() })
    }

    /// Sends input to a command; to its terminal when it has one.
    pub async fn send_input(&self, pid: u32, terminal: bool, bytes: &[u8]) -> Result<(), ClientError> {
        let field = if terminal { "pty" } else { "stdin" };
        let input = json!({ field: STANDARD.encode(bytes) });
        self.unary("SendInput", json!({ "process": { "pid": pid }, "input": input })).await
    }

    /// Tells a command that there is no more input.
    pub async fn close_stdin(&self, pid: u32) -> Result<(), ClientError> {
        self.unary("CloseStdin", json!({ "process": { "pid": pid } })).await
    }

    /// Tells a command's terminal its size.
    pub async fn resize(&self, pid: u32, columns: u16, rows: u16) -> Result<(), ClientError> {
        let size = json!({ "size": { "cols": columns, "rows": rows } });
        self.unary("Update", json!({ "process": { "pid": pid }, "pty": size })).await
    }

    /// Ends a command: `kill` at once, else as SIGTERM.
    pub async fn signal(&self, pid: u32, kill: bool) -> Result<(), ClientError> {
        let signal = if kill { "SIGNAL_SIGKILL" } else { "SIGNAL_SIGTERM" };
        self.unary("SendSignal", json!({ "process": { "pid": pid }, "signal": signal })).await
    }

    async fn unary(&self, method: &str, request: Value) -> Result<(), ClientError> {
        self.http.json(Method::POST, &format!("/process.Process/{method}"), Some(&request)).await.map(|_| ())
    }

    /// Reads a file; the body streams.
    pub async fn read_file(&self, path: &str) -> Result<http::Response<Incoming>, ClientError> {
        let response = self.http.send(Method::GET, &files_path(path), &[], whole(Bytes::new())).await?;
        self.http.success(response).await
    }

    /// Writes a file from a streaming body.
    pub async fn write_file(&self, path: &str, body: Body) -> Result<(), ClientError> {
        let headers = [("content-type", "application/octet-stream")];
        let response = self.http.send(Method::POST, &files_path(path), &headers, body).await?;
        self.http.success(response).await.map(|_| ())
    }
}

/// `/files?path=` with everything escaped that is not plainly safe in a query.
fn files_path(path: &str) -> String {
    let mut out = "/files?path=".to_owned();
    for byte in path.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'_' | b'-' | b'~' => {
                out.push(byte as char)
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

/// The events of one command. Dropping it leaves the command running.
pub struct CommandStream {
    http: Http,
    body: Incoming,
    kept: BytesMut,
}

impl CommandStream {
    /// The next event; None at the end of the stream.
    pub async fn next(&mut self) -> Result<Option<CommandEvent>, ClientError> {
        loop {
            let Some((flags, payload)) = self.frame().await? else { return Ok(None) };
            let message: Value =
                serde_json::from_slice(&payload).map_err(|error| self.http.malformed(&error))?;
            if flags & END_OF_STREAM != 0 {
                return match message.get("error") {
                    Some(error) => Err(stream_error(error)),
                    None => Ok(None),
                };
            }
            if let Some(event) = event(&message) {
                return Ok(Some(event));
            }
        }
    }

    async fn frame(&mut self) -> Result<Option<(u8, Bytes)>, ClientError> {
        loop {
            if let Some(head) = self.kept.first_chunk::<FRAME_HEAD>() {
                let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
                if length > FRAME_LIMIT {
                    return Err(self.http.malformed(&"a frame over 64 MiB"));
                }
                if self.kept.len() >= FRAME_HEAD + length {
                    let flags = head[0];
                    self.kept.advance(FRAME_HEAD);
                    return Ok(Some((flags, self.kept.split_to(length).freeze())));
                }
            }
            match self.body.frame().await {
                Some(Ok(frame)) => self.kept.extend_from_slice(frame.data_ref().map_or(&[], |data| data)),
                Some(Err(error)) => return Err(self.http.broken(error)),
                None if self.kept.is_empty() => return Ok(None),
                None => return Err(self.http.malformed(&"a frame cut short")),
            }
        }
    }
}

fn stream_error(error: &Value) -> ClientError {
    let text = |name: &str| error.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let body = ErrorBody {
        code: 200,
        message: text("message"),
        error_code: text("code"),
        request_id: None,
        detail: None,
    };
    ClientError::Refused { status: http::StatusCode::OK, body }
}

/// An event of a `StartResponse`; None for a keepalive or what is not known.
fn event(message: &Value) -> Option<CommandEvent> {
    let event = message.get("event")?;
    if let Some(start) = event.get("start") {
        return Some(CommandEvent::Started(start.get("pid")?.as_u64()?.try_into().ok()?));
    }
    if let Some(data) = event.get("data") {
        let bytes =
            |name: &str| data.get(name).and_then(Value::as_str).and_then(|text| STANDARD.decode(text).ok());
        if let Some(bytes) = bytes("stdout").or_else(|| bytes("pty")) {
            return Some(CommandEvent::Stdout(bytes.into()));
        }
        return bytes("stderr").map(|bytes| CommandEvent::Stderr(bytes.into()));
    }
    let end = event.get("end")?;
    // A zero exit code is left out on the wire.
    let code = end.get("exitCode").and_then(Value::as_i64).unwrap_or(0);
    let status = end.get("status").and_then(Value::as_str).unwrap_or_default().to_owned();
    Some(CommandEvent::Ended { code: code.try_into().ok()?, status })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_as_the_agent_writes_them() {
        let read = |text: &str| event(&serde_json::from_str(text).unwrap());
        assert_eq!(read(r#"{"event":{"start":{"pid":7}}}"#), Some(CommandEvent::Started(7)));
        assert_eq!(read(r#"{"event":{"data":{"stdout":"aGk="}}}"#), Some(CommandEvent::Stdout("hi".into())));
        assert_eq!(
            read(r#"{"event":{"end":{"exited":true,"status":"exit status 0"}}}"#),
            Some(CommandEvent::Ended { code: 0, status: "exit status 0".to_owned() })
        );
        assert_eq!(read(r#"{"event":{"keepalive":{}}}"#), None);
        assert_eq!(read(r#"{"event":{"start":{"pid":-1}}}"#), None);
    }

    #[test]
    fn paths_are_escaped() {
        assert_eq!(files_path("/a b/ü&x=1#.txt"), "/files?path=/a%20b/%C3%BC%26x%3D1%23.txt");
    }
}
