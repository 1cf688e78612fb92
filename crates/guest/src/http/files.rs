//! `GET /files`: downloads.
//!
//! Owns: opening with the caller's rights, ranges, conditions, gzip. Contract: constant memory; a FIFO, socket or device is
//! refused and not opened; files of `/proc` and `/sys`, which have no size, are read to their end.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use futures::Stream;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use jiff::Timestamp;
use serde::Deserialize;

use super::HttpError;
use super::accept;
use super::range::{self, Part};
use super::signature::{self, Claim};
use crate::agent::Agent;
use crate::files::{self, FileError};
use crate::paths;
use crate::users::User;

/// Bytes read from a file at once.
const CHUNK: usize = 128 << 10;

/// The query of `/files`.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct FilesQuery {
    /// Which file; for uploads the single one.
    pub(crate) path: Option<String>,
    /// Whose path and rights.
    pub(crate) username: Option<String>,
    /// Stands for the token.
    pub(crate) signature: Option<String>,
    /// Part of what is signed.
    pub(crate) signature_expiration: Option<String>,
}

impl FilesQuery {
    /// Whether the request may read or write this path: by token or by signature.
    ///
    /// # Errors
    /// 401 when it may not.
    pub(crate) fn authorise(
        &self,
        agent: &Agent,
        headers: &HeaderMap,
        operation: &'static str,
    ) -> Result<(), HttpError> {
        if agent.authorised(headers) {
            return Ok(());
        }
        // A wrong token is not made good by a signature, nor the reverse: with a header, the header counts.
        if headers.contains_key("x-access-token") && self.signature.is_none() {
            return Err(HttpError::unauthorised("invalid access token"));
        }
        let token = agent.settings.read().token.clone();
        let Some(token) = token else { return Ok(()) };
        let expiration = match self.signature_expiration.as_deref() {
            None | Some("") => None,
            Some(text) => {
                Some(text.parse().map_err(|_| HttpError::bad_request("invalid signature_expiration"))?)
            }
        };
        let claim = Claim {
            path: self.path.as_deref().unwrap_or(""),
            operation,
            user: self.username.as_deref().unwrap_or(""),
            expiration,
        };
        let now = Timestamp::now().as_second();
        signature::verify(claim, self.signature.as_deref(), &token, now)
            .map_err(|error| HttpError::unauthorised(error.to_string()))
    }

    /// Who it acts as.
    ///
    /// # Errors
    /// 401 when there is no such user.
    pub(crate) async fn user(&self, agent: &Arc<Agent>, headers: &HeaderMap) -> Result<User, HttpError> {
        let (agent, name, headers) = (Arc::clone(agent), self.username.clone(), headers.clone());
        let found = tokio::task::spawn_blocking(move || match name.as_deref() {
            Some(name) if !name.is_empty() => agent.user(Some(name)).map_err(HttpError::from),
            _ => agent.caller(&headers).map_err(HttpError::from),
        });
        found.await.map_err(|_| HttpError::from(FileError::Interrupted))?
    }
}

struct Source {
    file: File,
    size: u64,
    modified: Option<Timestamp>,
    // A file of a kernel file system: its size says nothing.
    unsized_file: bool,
}

fn is_kernel_file_system(file: &File) -> bool {
    const PROC: u64 = 0x9fa0;
    const SYSFS: u64 = 0x6265_6572;
    const CGROUP2: u64 = 0x6367_7270;
    const DEBUGFS: u64 = 0x6462_6720;
    const TRACEFS: u64 = 0x7472_6163;
    rustix::fs::fstatfs(file).is_ok_and(|found| {
        [PROC, SYSFS, CGROUP2, DEBUGFS, TRACEFS].contains(&(found.f_type as u64 & 0xffff_ffff))
    })
}

/// Opens a regular file. Looking first keeps devices from being opened at all, which for some is an effect in itself.
fn open(path: &Path) -> Result<Source, FileError> {
    let check = |found: &std::fs::Metadata| match found {
        found if found.is_dir() => Err(FileError::IsDirectory(path.to_owned())),
        found if !found.is_file() => Err(FileError::NotRegular(path.to_owned())),
        _ => Ok(()),
    };
    check(&std::fs::metadata(path).map_err(|error| FileError::at(path, error))?)?;
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|error| FileError::at(path, error))?;
    let found = file.metadata().map_err(|error| FileError::at(path, error))?;
    check(&found)?;
    let modified = found.modified().ok().and_then(|time| Timestamp::try_from(time).ok());
    let unsized_file = found.len() == 0 || is_kernel_file_system(&file);
    Ok(Source { file, size: found.len(), modified, unsized_file })
}

fn content_type(path: &Path) -> &'static str {
    let extension = path.extension().and_then(|ext| ext.to_str()).unwrap_or("").to_ascii_lowercase();
    match extension.as_str() {
        "txt" | "log" | "py" | "rs" | "md" | "sh" | "csv" => "text/plain; charset=utf-8",
        "html" | "htm" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "json" => "application/json",
        "xml" => "text/xml; charset=utf-8",
        "pdf" => "application/pdf",
        "zip" => "application/zip",
        "gz" | "tgz" => "application/gzip",
        "wasm" => "application/wasm",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "gif" => "image/gif",
        "svg" => "image/svg+xml",
        "webp" => "image/webp",
        "mp3" => "audio/mpeg",
        "mp4" => "video/mp4",
        _ => "application/octet-stream",
    }
}

/// `inline; filename=…`, as RFC 6266 wants it.
fn disposition(path: &Path) -> String {
    let name = paths::name(path);
    if name.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$&+-.^_`|~".contains(&b)) {
        format!("inline; filename={name}")
    } else if name.bytes().all(|b| (0x20..0x7f).contains(&b)) {
        format!("inline; filename=\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\""))
    } else {
        let mut encoded = String::new();
        for byte in name.bytes() {
            if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                encoded.push(char::from(byte));
            } else {
                encoded.push_str(&format!("%{byte:02X}"));
            }
        }
        format!("inline; filename*=utf-8''{encoded}")
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &header::HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// The file's date is the same or older than a header's.
fn not_newer(headers: &HeaderMap, name: &header::HeaderName, modified: Option<Timestamp>) -> Option<bool> {
    let given = range::parse_http_date(text(headers, name)?)?;
    Some(modified?.as_second() <= given.as_second())
}

/// The route.
pub(crate) async fn download(
    State(agent): State<Arc<Agent>>,
    query: Result<Query<FilesQuery>, axum::extract::rejection::QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, HttpError> {
    let Query(query) = query.map_err(|error| HttpError::bad_request(error.body_text()))?;
    query.authorise(&agent, &headers, "read")?;
    let user = query.user(&agent, &headers).await?;
    let asked = query.path.as_deref().unwrap_or("");
    let path = paths::resolve(asked, &user, agent.default_workdir().as_deref()).map_err(FileError::from)?;
    let opened = path.clone();
    let source = files::run(&user, move || open(&opened)).await?;
    respond(&path, source, &headers)
}

fn respond(path: &Path, source: Source, headers: &HeaderMap) -> Result<Response, HttpError> {
    let accepted = accept::parse(text(headers, &header::ACCEPT_ENCODING));
    let plain = [header::RANGE, header::IF_MODIFIED_SINCE, header::IF_UNMODIFIED_SINCE, header::IF_RANGE]
        .iter()
        .any(|name| headers.contains_key(name));
    let mut response = Response::new(Body::empty());
    let out = response.headers_mut();
    out.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    out.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type(path)));
    if let Ok(value) = HeaderValue::from_str(&disposition(path)) {
        out.insert(header::CONTENT_DISPOSITION, value);
    }
    if let Some(date) = source.modified.and_then(range::http_date)
        && let Ok(value) = HeaderValue::from_str(&date)
    {
        out.insert(header::LAST_MODIFIED, value);
    }
    if accepted.gzip && !plain {
        out.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        let limit = if source.unsized_file { u64::MAX } else { source.size };
        *response.body_mut() = Body::from_stream(gzip(source.file, limit));
        return Ok(response);
    }
    if !accepted.identity {
        return Err(HttpError::new(StatusCode::NOT_ACCEPTABLE, "no acceptable encoding available"));
    }
    if not_newer(headers, &header::IF_UNMODIFIED_SINCE, source.modified) == Some(false) {
        *response.status_mut() = StatusCode::PRECONDITION_FAILED;
        return Ok(response);
    }
    if not_newer(headers, &header::IF_MODIFIED_SINCE, source.modified) == Some(true) {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        return Ok(response);
    }
    if source.unsized_file {
        *response.body_mut() = Body::from_stream(identity(source.file, 0, u64::MAX));
        return Ok(response);
    }
    // A range of another version of the file would be a mixture.
    let same = !headers.contains_key(header::IF_RANGE)
        || not_newer(headers, &header::IF_RANGE, source.modified) == Some(true);
    let out = response.headers_mut();
    out.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    let asked = if same { text(headers, &header::RANGE) } else { None };
    let (first, count) = match range::parse(asked, source.size) {
        Part::Whole => (0, source.size),
        Part::Some(first, count) => {
            let value = format!("bytes {first}-{}/{}", first + count - 1, source.size);
            if let Ok(value) = HeaderValue::from_str(&value) {
                out.insert(header::CONTENT_RANGE, value);
            }
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            (first, count)
        }
        Part::Unsatisfiable => {
            let mut response =
                HttpError::new(StatusCode::RANGE_NOT_SATISFIABLE, "invalid range").into_response();
            if let Ok(value) = HeaderValue::from_str(&format!("bytes */{}", source.size)) {
                response.headers_mut().insert(header::CONTENT_RANGE, value);
            }
            return Ok(response);
        }
    };
    response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(count));
    *response.body_mut() = Body::from_stream(identity(source.file, first, count));
    Ok(response)
}

/// A read that is not possible now is the end: nothing here may wait for a kernel buffer to fill.
fn until_blocked(read: io::Result<usize>) -> io::Result<usize> {
    match read {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        other => other,
    }
}

fn interrupted<E>(_: E) -> io::Error {
    io::Error::other("the read was interrupted")
}

/// The bytes from `offset` on, at most `left`.
fn identity(file: File, offset: u64, left: u64) -> impl Stream<Item = io::Result<Bytes>> {
    let state = (Arc::new(file), offset, left);
    futures::stream::try_unfold(state, |(file, offset, left)| async move {
        let want = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
        if want == 0 {
            return Ok(None);
        }
        let source = Arc::clone(&file);
        let read = tokio::task::spawn_blocking(move || {
            let mut buffer = vec![0; want];
            let count = until_blocked(source.read_at(&mut buffer, offset))?;
            buffer.truncate(count);
            io::Result::Ok(buffer)
        });
        let buffer = read.await.map_err(interrupted)??;
        if buffer.is_empty() {
            return Ok(None);
        }
        let count = buffer.len() as u64;
        Ok(Some((Bytes::from(buffer), (file, offset + count, left - count))))
    })
}

/// The file, compressed.
fn gzip(file: File, limit: u64) -> impl Stream<Item = io::Result<Bytes>> {
    let state = Some((file.take(limit), GzEncoder::new(Vec::new(), Compression::fast())));
    futures::stream::try_unfold(state, |state| async move {
        let Some((mut file, mut encoder)) = state else { return Ok(None) };
        let step = tokio::task::spawn_blocking(move || {
            let mut buffer = vec![0; CHUNK];
            loop {
                let count = until_blocked(file.read(&mut buffer))?;
                if count == 0 {
                    return io::Result::Ok((Bytes::from(encoder.finish()?), None));
                }
                encoder.write_all(&buffer[..count])?;
                if encoder.get_ref().len() >= CHUNK / 2 {
                    let out = Bytes::from(std::mem::take(encoder.get_mut()));
                    return Ok((out, Some((file, encoder))));
                }
            }
        });
        Ok(Some(step.await.map_err(interrupted)??))
    })
}

/// Resolves the path of a query for an upload.
///
/// # Errors
/// When it has no meaning.
pub(crate) fn target(path: &str, user: &User, agent: &Agent) -> Result<PathBuf, HttpError> {
    Ok(paths::resolve(path, user, agent.default_workdir().as_deref()).map_err(FileError::from)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_headers() {
        assert_eq!(disposition(Path::new("/x/a.txt")), "inline; filename=a.txt");
        assert_eq!(disposition(Path::new("/x/a b\".txt")), r#"inline; filename="a b\".txt""#);
        assert_eq!(disposition(Path::new("/x/é\n")), "inline; filename*=utf-8''%C3%A9%0A");
    }
}
