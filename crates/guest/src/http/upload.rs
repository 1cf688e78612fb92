//! `POST /files` and `POST /files/compose`: uploads.
//!
//! Owns: multipart and raw bodies, gzip, metadata. Contract: bodies stream to disk in constant memory; what is reported as
//! written was written, and any failure is an error status. To those who watch the directory, a new small file is exactly a
//! create, a change of owner and one write: no temporary file, no rename.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{FromRequest, Multipart, Query, Request, State};
use bytes::{Bytes, BytesMut};
use flate2::write::MultiGzDecoder;
use futures::{Stream, StreamExt};
use http::{HeaderMap, header};
use rustix::fs::{Gid, Uid, XattrFlags};
use serde::{Deserialize, Serialize};

use super::HttpError;
use super::files::{FilesQuery, target};
use crate::agent::Agent;
use crate::errors::chain;
use crate::files::entry::METADATA_PREFIX;
use crate::files::{self, FileError};
use crate::paths;
use crate::users::User;

/// Bytes gathered before a write: small files are written at once.
const GATHER: usize = 256 << 10;
/// Compressed bytes expanded at once: bounds what one step can blow up to (gzip gives at most about 1000 to 1).
const INFLATE: usize = 4 << 10;
/// Longest metadata key.
const KEY_MAX: usize = 246;
/// All metadata of a file.
const METADATA_MAX: usize = 4096;

/// One written file, in E2B's words.
#[derive(Debug, Serialize)]
pub(crate) struct Written {
    name: String,
    path: String,
    r#type: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

impl Written {
    fn new(path: &Path, metadata: &BTreeMap<String, String>) -> Self {
        Self {
            name: paths::name(path),
            path: path.to_string_lossy().into_owned(),
            r#type: "file",
            metadata: metadata.clone(),
        }
    }
}

/// `X-Metadata-<key>` headers.
fn metadata(headers: &HeaderMap) -> Result<BTreeMap<String, String>, HttpError> {
    let mut found = BTreeMap::new();
    let mut total = 0;
    for (name, value) in headers {
        // Header names arrive in lower case.
        let Some(key) = name.as_str().strip_prefix("x-metadata-") else { continue };
        let valid = value.as_bytes().iter().all(|byte| (0x20..0x7f).contains(byte));
        let value = value.to_str().ok().filter(|_| valid);
        let value = value.ok_or_else(|| {
            HttpError::bad_request(format!("metadata '{key}': the value must be printable ASCII"))
        })?;
        if key.is_empty() || key.len() > KEY_MAX {
            return Err(HttpError::bad_request(format!(
                "metadata '{key}': a key has 1 to {KEY_MAX} characters"
            )));
        }
        total += key.len() + value.len();
        if total > METADATA_MAX {
            return Err(HttpError::bad_request(format!(
                "metadata '{key}': keys and values together exceed {METADATA_MAX} bytes"
            )));
        }
        found.insert(key.to_owned(), value.to_owned());
    }
    Ok(found)
}

/// Opens the target of an upload: parents made, the file created or emptied, and the caller's.
fn create(path: &Path, user: &User, metadata: &BTreeMap<String, String>) -> Result<File, FileError> {
    let refuse = |found: &std::fs::Metadata| match found {
        found if found.is_dir() => Err(FileError::IsDirectory(path.to_owned())),
        found if !found.is_file() => Err(FileError::NotRegular(path.to_owned())),
        _ => Ok(()),
    };
    match std::fs::metadata(path) {
        Ok(found) => refuse(&found)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if let Some(parent) = path.parent() {
                files::make_parents(parent)?;
            }
        }
        Err(error) => return Err(FileError::at(path, error)),
    }
    let file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|error| FileError::at(path, error))?;
    refuse(&file.metadata().map_err(|error| FileError::at(path, error))?)?;
    let (uid, gid) = (Uid::from_raw(user.credentials.uid), Gid::from_raw(user.credentials.gid));
    // Refused for a file of another owner that the caller may write: it stays theirs.
    let _ = rustix::fs::fchown(&file, Some(uid), Some(gid));
    replace_metadata(path, &file, metadata)?;
    Ok(file)
}

fn replace_metadata(path: &Path, file: impl AsFd, new: &BTreeMap<String, String>) -> Result<(), FileError> {
    let failed = |error: rustix::io::Errno| FileError::Io { path: path.to_owned(), source: error.into() };
    let mut names = vec![0; 64 << 10];
    let length = rustix::fs::flistxattr(&file, &mut names[..]).unwrap_or(0);
    for name in names[..length].split(|byte| *byte == 0).filter_map(|name| std::str::from_utf8(name).ok()) {
        if name.starts_with(METADATA_PREFIX) {
            rustix::fs::fremovexattr(&file, name).map_err(failed)?;
        }
    }
    for (key, value) in new {
        let name = format!("{METADATA_PREFIX}{key}");
        rustix::fs::fsetxattr(&file, name, value.as_bytes(), XattrFlags::empty()).map_err(failed)?;
    }
    Ok(())
}

/// Writes a stream to a file, in pieces of [`GATHER`].
async fn write<E: std::fmt::Display>(
    path: &Path,
    file: File,
    mut body: impl Stream<Item = Result<Bytes, E>> + Unpin,
) -> Result<(), HttpError> {
    let file = Arc::new(file);
    let mut gathered = BytesMut::new();
    loop {
        let next = body.next().await;
        let last = next.is_none();
        if let Some(chunk) = next {
            let chunk =
                chunk.map_err(|error| HttpError::bad_request(format!("cannot read the body: {error}")))?;
            gathered.extend_from_slice(&chunk);
        }
        if gathered.len() >= GATHER || (last && !gathered.is_empty()) {
            let (out, piece) = (Arc::clone(&file), gathered.split().freeze());
            let written = tokio::task::spawn_blocking(move || (&*out).write_all(&piece)).await;
            written.map_err(|_| FileError::Interrupted)?.map_err(|error| FileError::at(path, error))?;
        }
        if last {
            return Ok(());
        }
    }
}

/// A body, expanded if it is compressed.
fn decoded(headers: &HeaderMap, body: Body) -> Result<Body, HttpError> {
    let encoding =
        headers.get(header::CONTENT_ENCODING).and_then(|value| value.to_str().ok()).unwrap_or("identity");
    match encoding.trim().to_ascii_lowercase().as_str() {
        "" | "identity" => Ok(body),
        "gzip" | "x-gzip" => Ok(Body::from_stream(inflate(body))),
        other => Err(HttpError::bad_request(format!("content encoding '{other}' is not supported"))),
    }
}

fn inflate(body: Body) -> impl Stream<Item = io::Result<Bytes>> {
    let state = Some((body.into_data_stream(), MultiGzDecoder::new(Vec::new()), Bytes::new()));
    futures::stream::try_unfold(state, |state| async move {
        let Some((mut body, mut decoder, mut input)) = state else { return Ok(None) };
        loop {
            if input.is_empty() {
                match body.next().await {
                    Some(chunk) => input = chunk.map_err(io::Error::other)?,
                    None => return Ok(Some((Bytes::from(decoder.finish()?), None))),
                }
            }
            let piece = input.split_to(input.len().min(INFLATE));
            decoder.write_all(&piece)?;
            if !decoder.get_ref().is_empty() {
                let out = Bytes::from(std::mem::take(decoder.get_mut()));
                return Ok(Some((out, Some((body, decoder, input)))));
            }
        }
    })
}

/// A file name as it stands in `Content-Disposition`: a backslash before a special character is an escape.
fn unescape(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    let mut chars = name.chars().peekable();
    while let Some(c) = chars.next() {
        if c == '\\' && chars.peek().is_some_and(|next| r#"()<>@,;:\"/[]?="#.contains(*next)) {
            out.extend(chars.next());
        } else {
            out.push(c);
        }
    }
    out
}

/// The route.
pub(crate) async fn upload(
    State(agent): State<Arc<Agent>>,
    query: Result<Query<FilesQuery>, axum::extract::rejection::QueryRejection>,
    request: Request,
) -> Result<Json<Vec<Written>>, HttpError> {
    let Query(query) = query.map_err(|error| HttpError::bad_request(error.body_text()))?;
    let headers = request.headers().clone();
    query.authorise(&agent, &headers, "write")?;
    let user = query.user(&agent, &headers).await?;
    let metadata = metadata(&headers)?;
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let kind = kind.split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    let (mut parts, body) = request.into_parts();
    let body = decoded(&headers, body)?;
    let upload = Upload { agent: &agent, user: &user, metadata: &metadata };
    let written = match kind.as_str() {
        "multipart/form-data" => {
            parts.headers.remove(header::CONTENT_LENGTH);
            let multipart = Multipart::from_request(Request::from_parts(parts, body), &())
                .await
                .map_err(|error| HttpError::bad_request(error.body_text()))?;
            upload.parts(multipart, query.path.as_deref()).await?
        }
        "application/octet-stream" => {
            let path = query.path.as_deref().filter(|path| !path.is_empty());
            let path = path.ok_or_else(|| HttpError::bad_request("missing path"))?;
            vec![upload.one(target(path, &user, &agent)?, body.into_data_stream()).await?]
        }
        other => return Err(HttpError::bad_request(format!("content type '{other}' is not supported"))),
    };
    // New directories must be watched before the client goes on.
    agent.watchers.settle().await;
    Ok(Json(written))
}

struct Upload<'a> {
    agent: &'a Agent,
    user: &'a User,
    metadata: &'a BTreeMap<String, String>,
}

impl Upload<'_> {
    async fn one<E: std::fmt::Display>(
        &self,
        path: PathBuf,
        body: impl Stream<Item = Result<Bytes, E>> + Unpin,
    ) -> Result<Written, HttpError> {
        let (at, user, metadata) = (path.clone(), self.user.clone(), self.metadata.clone());
        let file = files::run(self.user, move || create(&at, &user, &metadata)).await?;
        write(&path, file, body).await?;
        Ok(Written::new(&path, self.metadata))
    }

    async fn parts(&self, mut multipart: Multipart, path: Option<&str>) -> Result<Vec<Written>, HttpError> {
        let failed =
            |error: axum::extract::multipart::MultipartError| HttpError::bad_request(error.body_text());
        let mut written = Vec::new();
        let mut seen = HashSet::new();
        while let Some(field) = multipart.next_field().await.map_err(failed)? {
            if field.name() != Some("file") {
                continue;
            }
            let name = match path.filter(|path| !path.is_empty()) {
                Some(path) => path.to_owned(),
                None => unescape(field.file_name().unwrap_or("")),
            };
            if name.is_empty() {
                return Err(HttpError::bad_request("missing path: give ?path= or a file name"));
            }
            let target = target(&name, self.user, self.agent)?;
            if !seen.insert(target.clone()) {
                return Err(HttpError::bad_request(format!("path '{}' is given twice", target.display())));
            }
            written.push(self.one(target, field.map(|chunk| chunk.map_err(|e| e.body_text()))).await?);
        }
        Ok(written)
    }
}

/// Body of `POST /files/compose`.
#[derive(Debug, Deserialize)]
pub(crate) struct Compose {
    source_paths: Vec<String>,
    destination: String,
    username: Option<String>,
}

/// The route: joins parts that were uploaded beside each other into one file, and removes them.
pub(crate) async fn compose(
    State(agent): State<Arc<Agent>>,
    headers: HeaderMap,
    body: Result<Json<Compose>, axum::extract::rejection::JsonRejection>,
) -> Result<Json<Written>, HttpError> {
    let Json(body) = body.map_err(|error| HttpError::bad_request(error.body_text()))?;
    if body.source_paths.is_empty() || body.destination.is_empty() {
        return Err(HttpError::bad_request("source_paths and destination are required"));
    }
    let query = FilesQuery { username: body.username, ..FilesQuery::default() };
    let user = query.user(&agent, &headers).await?;
    let metadata = metadata(&headers)?;
    let destination = target(&body.destination, &user, &agent)?;
    let sources =
        body.source_paths.iter().map(|path| target(path, &user, &agent)).collect::<Result<Vec<_>, _>>()?;
    let distinct: HashSet<_> = sources.iter().collect();
    if sources.contains(&destination) || distinct.len() != sources.len() {
        return Err(HttpError::bad_request("a path is given twice"));
    }
    let written = Written::new(&destination, &metadata);
    let caller = user.clone();
    files::run(&user, move || {
        let open = |path: &PathBuf| {
            let failed = |error| FileError::at(path, error);
            match std::fs::metadata(path).map_err(failed)? {
                found if found.is_dir() => Err(FileError::IsDirectory(path.clone())),
                found if !found.is_file() => Err(FileError::NotRegular(path.clone())),
                _ => File::open(path).map_err(failed),
            }
        };
        let parts = sources.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let mut out = create(&destination, &caller, &metadata)?;
        for mut part in parts {
            io::copy(&mut part, &mut out).map_err(|error| FileError::at(&destination, error))?;
        }
        sources.iter().try_for_each(|path| files::remove(path))
    })
    .await
    .map_err(|error| HttpError::new(error.status(), chain(&error)))?;
    agent.watchers.settle().await;
    Ok(Json(written))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::StatusCode;

    fn headers(pairs: &[(&'static str, &[u8])]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| {
                (http::HeaderName::from_static(name), http::HeaderValue::from_bytes(value).unwrap())
            })
            .collect()
    }

    #[test]
    fn metadata_is_checked_and_the_key_named() {
        let good = metadata(&headers(&[("x-metadata-author", b"x"), ("content-type", b"y")])).unwrap();
        assert_eq!(good, BTreeMap::from([("author".to_owned(), "x".to_owned())]));
        let long = vec![b'a'; 8 << 10];
        for value in ["é".as_bytes(), b"a\tb", &long] {
            let error = metadata(&headers(&[("x-metadata-author", value)])).unwrap_err();
            assert_eq!(error.status, StatusCode::BAD_REQUEST);
            assert!(error.message.contains("'author'"), "{}", error.message);
        }
    }

    #[test]
    fn file_names_are_unescaped_as_headers_are() {
        assert_eq!(unescape("/a/b.txt"), "/a/b.txt");
        assert_eq!(unescape(r"a\\b"), r"a\b");
        assert_eq!(unescape(r#"a\"b"#), "a\"b");
        assert_eq!(unescape(r"a\nb\"), r"a\nb\");
    }

    #[tokio::test]
    async fn gzip_bodies_expand_in_bounded_steps() {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        encoder.write_all(&vec![0; 64 << 20]).unwrap();
        let compressed = encoder.finish().unwrap();
        let mut stream = Box::pin(inflate(Body::from(compressed.clone())));
        let (mut total, mut largest) = (0, 0);
        while let Some(chunk) = stream.next().await {
            let length = chunk.unwrap().len();
            total += length;
            largest = largest.max(length);
        }
        assert_eq!(total, 64 << 20);
        assert!(largest <= 8 << 20, "{largest}");
        let cut = Body::from(compressed[..compressed.len() / 2].to_vec());
        assert!(Box::pin(inflate(cut)).any(|chunk| async move { chunk.is_err() }).await);
    }
}
