//! Files: transfer, operations, rights.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt, symlink};
use std::path::Path;

use base64::Engine as _;
use futures::future::join_all;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::harness::{Agent, is_root};

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

const MULTIPART: &str = "multipart/form-data; boundary=XX";

fn part(file_name: Option<&str>, data: &str) -> String {
    let file_name = file_name.map(|name| format!("; filename=\"{name}\"")).unwrap_or_default();
    format!("--XX\r\nContent-Disposition: form-data; name=\"file\"{file_name}\r\n\r\n{data}\r\n")
}

#[tokio::test]
async fn b35_every_size_arrives_whole() {
    let agent = Agent::start();
    let dir = tempfile::tempdir().unwrap();
    for size in [0, 1, 4095, 17 << 10, 18 << 10, 19 << 10, 65_535, 65_536, 65_537, 1 << 20, 64 << 20] {
        let path = dir.path().join(format!("f{size}"));
        let data: Vec<u8> = (0..size).map(|at: usize| (at * 31 % 251) as u8).collect();
        let answer = agent.put(path.to_str().unwrap(), data.clone()).await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.json(), json!([{"name": format!("f{size}"), "path": path, "type": "file"}]));
        assert!(std::fs::read(&path).unwrap() == data);
        let read = agent.get(&format!("/files?path={}", path.display())).await;
        assert!(read.status == 200 && read.body == data);
    }
}

#[tokio::test]
async fn multipart_names_come_from_the_part_or_the_query() {
    let agent = Agent::start();
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let headers = [("content-type", MULTIPART)];
    let body = format!("{}{}--XX--\r\n", part(Some(&at("x/1")), "one"), part(Some(&at("x/2")), "two"));
    let answer = agent.request("POST", "/files", &headers, body).await;
    assert_eq!(answer.json()[1]["path"], at("x/2"));
    assert_eq!(std::fs::read(at("x/2")).unwrap(), b"two");
    let body = format!("{}--XX--\r\n", part(None, "text"));
    let answer = agent.request("POST", &format!("/files?path={}", at("y")), &headers, body.clone()).await;
    assert_eq!(answer.json(), json!([{"name": "y", "path": at("y"), "type": "file"}]));
    assert_eq!(agent.request("POST", "/files", &headers, body).await.status, 400);
    let twice = format!("{}{}--XX--\r\n", part(Some(&at("z")), "1"), part(Some(&at("z")), "2"));
    assert_eq!(agent.request("POST", "/files", &headers, twice).await.status, 400);
    let other = [("content-type", "text/plain")];
    assert_eq!(agent.request("POST", &format!("/files?path={}", at("y")), &other, "x").await.status, 400);
    let is_dir = agent.put(dir.path().to_str().unwrap(), "x").await;
    assert_eq!((is_dir.status, is_dir.json()["code"].clone()), (400, json!(400)));
}

#[tokio::test]
async fn b40_parallel_uploads_into_a_new_directory() {
    let agent = Agent::start();
    let dir = tempfile::tempdir().unwrap();
    let uploads = (0..32).map(|i| {
        let path = dir.path().join(format!("a/b/c/d/f{i}")).display().to_string();
        let agent = &agent;
        async move { agent.put(&path, "x").await.status }
    });
    assert!(join_all(uploads).await.iter().all(|status| *status == 200));
}

#[tokio::test]
async fn b41_only_new_directories_get_the_callers_ownership() {
    if !is_root() {
        eprintln!("left out: needs root");
        return;
    }
    let agent = Agent::start();
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let path = dir.path().join("x/y/z");
    let url = format!("{}&username=nobody", path.display());
    assert_eq!(agent.put(&url, "x").await.status, 200);
    let nobody = std::fs::metadata(&path).unwrap().uid();
    assert_ne!(nobody, 0);
    assert_eq!(std::fs::metadata(dir.path()).unwrap().uid(), 0);
    for name in ["x", "x/y"] {
        let found = std::fs::metadata(dir.path().join(name)).unwrap();
        assert_eq!((found.uid(), found.mode() & 0o7777), (nobody, 0o755));
    }
    // A root-owned directory is not nobody's to write into, and a link to it does not help.
    let private = tempfile::tempdir().unwrap();
    symlink(private.path(), dir.path().join("link")).unwrap();
    for target in [private.path().join("f"), dir.path().join("link/f")] {
        assert_eq!(agent.put(&format!("{}&username=nobody", target.display()), "x").await.status, 403);
        assert!(!target.exists());
    }
}

#[tokio::test]
async fn b43_gzip_is_decoded_and_offered() {
    let agent = Agent::start();
    let dir = tempfile::tempdir().unwrap();
    let text = "hello ".repeat(5000);
    let path = dir.path().join("g").display().to_string();
    let url = format!("/files?path={path}");
    for (kind, body) in [
        ("application/octet-stream", text.clone().into_bytes()),
        (MULTIPART, format!("{}--XX--\r\n", part(Some("g"), &text)).into_bytes()),
    ] {
        let headers = [("content-type", kind), ("content-encoding", "gzip")];
        assert_eq!(agent.request("POST", &url, &headers, gzip(&body)).await.status, 200);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }
    let headers = [("content-type", "application/octet-stream"), ("content-encoding", "br")];
    assert_eq!(agent.request("POST", &url, &headers, "x").await.status, 400);
    let headers = [("content-type", "application/octet-stream"), ("content-encoding", "gzip")];
    assert_eq!(agent.request("POST", &url, &headers, "not gzip").await.status, 400);

    std::fs::write(&path, &text).unwrap();
    let answer = agent.request("GET", &url, &[("accept-encoding", "gzip, deflate")], "").await;
    assert_eq!(answer.headers["content-encoding"], "gzip");
    let mut read = String::new();
    flate2::read::GzDecoder::new(&answer.body[..]).read_to_string(&mut read).unwrap();
    assert_eq!(read, text);
    let answer = agent.request("GET", &url, &[("accept-encoding", "identity;q=0")], "").await;
    assert_eq!(answer.status, 406);
}

#[tokio::test]
async fn b44_empty_files_are_files() {
    let agent = Agent::start();
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().display().to_string();
    assert_eq!(agent.put(&path, "").await.status, 200);
    let read = agent.get(&format!("/files?path={path}")).await;
    assert_eq!((read.status, read.body.len()), (200, 0));
    let stat = agent.call("filesystem.Filesystem/Stat", json!({"path": path})).await.json();
    assert_eq!(stat["entry"]["type"], "FILE_TYPE_FILE");
    assert!(stat["entry"]["size"].is_null());
}

#[tokio::test]
async fn ranges_and_conditions() {
    let agent = Agent::start();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "0123456789").unwrap();
    let url = format!("/files?path={}", file.path().display());
    let get = async |headers: &[(&str, &str)]| agent.request("GET", &url, headers, "").await;
    let whole = get(&[]).await;
    assert_eq!((whole.status, &whole.body[..]), (200, &b"0123456789"[..]));
    assert_eq!(whole.headers["content-length"], "10");
    let date = whole.headers["last-modified"].to_str().unwrap().to_owned();
    let some = get(&[("range", "bytes=2-4"), ("accept-encoding", "gzip")]).await;
    assert_eq!((some.status, &some.body[..]), (206, &b"234"[..]));
    assert_eq!(some.headers["content-range"], "bytes 2-4/10");
    assert_eq!(get(&[("range", "bytes=10-")]).await.status, 416);
    assert_eq!(get(&[("if-modified-since", &date)]).await.status, 304);
    let old = "Sun, 06 Nov 1994 08:49:37 GMT";
    assert_eq!(get(&[("if-modified-since", old)]).await.status, 200);
    assert_eq!(get(&[("if-unmodified-since", old)]).await.status, 412);
    assert_eq!(get(&[("range", "bytes=2-4"), ("if-range", old)]).await.status, 200);
    assert_eq!(get(&[("range", "bytes=2-4"), ("if-range", &date)]).await.status, 206);
}

#[tokio::test]
async fn files_without_a_size_are_read_to_their_end() {
    let agent = Agent::start();
    for headers in [&[][..], &[("range", "bytes=0-3")][..]] {
        let answer = agent.request("GET", "/files?path=/proc/sys/kernel/random/boot_id", headers, "").await;
        assert_eq!((answer.status, answer.body.len()), (200, 37));
    }
    let missing = agent.get("/files?path=/no/such").await;
    assert_eq!(
        (missing.status, missing.json()),
        (404, json!({"code": 404, "message": "path '/no/such' does not exist"}))
    );
    assert_eq!(agent.get("/files?path=/tmp").await.json()["message"], "path '/tmp' is a directory");
    assert_eq!(agent.get("/files?path=/tmp&username=ghost").await.status, 401);
}

async fn secure(agent: &Agent, token: &str) {
    let answer = agent.request("POST", "/init", &[], json!({"accessToken": token}).to_string()).await;
    assert_eq!(answer.status, 204);
    assert_eq!(answer.headers["x-envd-version"], "0.6.13");
}

#[tokio::test]
async fn b46_signatures_expire_and_cannot_be_bent() {
    let agent = Agent::start();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "secret").unwrap();
    let path = file.path().display().to_string();
    secure(&agent, "tok").await;
    let signed = |path: &str, operation: &str, user: &str, expiration: Option<i64>| {
        let mut text = format!("{path}:{operation}:{user}:tok");
        if let Some(at) = expiration {
            text.push_str(&format!(":{at}"));
        }
        let signature = base64::engine::general_purpose::STANDARD_NO_PAD.encode(Sha256::digest(text));
        let signature = format!("v1_{signature}").replace('+', "%2B").replace('/', "%2F");
        let expiration = expiration.map(|at| format!("&signature_expiration={at}")).unwrap_or_default();
        format!("&signature={signature}{expiration}")
    };
    let now = i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_secs()).unwrap();
    let get = async |query: String| agent.get(&format!("/files?path={path}{query}")).await;
    assert_eq!(get(signed(&path, "read", "", None)).await.body, "secret");
    assert_eq!(get(signed(&path, "read", "", Some(now + 60))).await.status, 200);
    for expired in [0, now - 1] {
        let answer = get(signed(&path, "read", "", Some(expired))).await;
        assert_eq!(answer.status, 401);
        assert_eq!(answer.json(), json!({"code": 401, "message": "signature is already expired"}));
    }
    for (query, message) in [
        (signed("/other", "read", "", None), "invalid signature"),
        (signed(&path, "write", "", None), "invalid signature"),
        (format!("{}&username=root", signed(&path, "read", "", None)), "invalid signature"),
        (String::new(), "missing signature query parameter"),
    ] {
        assert_eq!(get(query).await.json()["message"], message);
    }
    let token = [("x-access-token", "tok")];
    assert_eq!(agent.request("GET", &format!("/files?path={path}"), &token, "").await.status, 200);
}

#[tokio::test]
async fn s54_every_route_asks_for_the_token() {
    let agent = Agent::start();
    secure(&agent, "tok").await;
    let refused = json!({"code": 401, "message": "unauthorized access, please provide a valid access token or method signing if supported"});
    for (method, path) in [
        ("GET", "/metrics"),
        ("GET", "/envs"),
        ("POST", "/files/compose"),
        ("POST", "/process.Process/List"),
        ("POST", "/process.Process/Start"),
        ("POST", "/filesystem.Filesystem/Stat"),
        ("GET", "/no-such-route"),
    ] {
        for headers in [&[][..], &[("x-access-token", "wrong")][..]] {
            let answer = agent.request(method, path, headers, "{}").await;
            assert_eq!((answer.status, answer.json()), (401, refused.clone()), "{path}");
        }
    }
    for (method, path) in [("GET", "/files?path=/etc/passwd"), ("POST", "/files?path=/tmp/x")] {
        assert_eq!(agent.request(method, path, &[("x-access-token", "wrong")], "").await.status, 401);
        assert_eq!(agent.request(method, path, &[], "").await.status, 401);
    }
    assert_eq!(agent.get("/health").await.status, 204);
    let envs = agent.request("GET", "/envs", &[("x-access-token", "tok")], "").await;
    assert_eq!(envs.json()["E2B_SANDBOX"], "true");
    let preflight = agent
        .request(
            "OPTIONS",
            "/files",
            &[("origin", "http://x"), ("access-control-request-method", "POST")],
            "",
        )
        .await;
    assert_eq!(
        (preflight.status, &preflight.headers["access-control-allow-origin"]),
        (200, &"*".parse().unwrap())
    );
}

#[tokio::test]
async fn b47_metadata_is_checked_kept_and_replaced() {
    let agent = Agent::start();
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("m").display().to_string();
    let upload = async |headers: &[(&str, &str)]| {
        let mut all = vec![("content-type", "application/octet-stream")];
        all.extend(headers);
        agent.request("POST", &format!("/files?path={path}"), &all, "x").await
    };
    let long = "a".repeat(8 << 10);
    for value in ["é", long.as_str()] {
        let answer = upload(&[("x-metadata-author", value)]).await;
        assert_eq!(answer.status, 400);
        assert!(answer.json()["message"].as_str().unwrap().contains("'author'"));
    }
    let answer = upload(&[("X-Metadata-Author", "x")]).await;
    assert_eq!(answer.json()[0]["metadata"], json!({"author": "x"}));
    let stat = async |path: &str| {
        agent.call("filesystem.Filesystem/Stat", json!({"path": path})).await.json()["entry"]["metadata"]
            .clone()
    };
    assert_eq!(stat(&path).await, json!({"author": "x"}));
    let moved = format!("{path}2");
    let rename = json!({"source": path, "destination": moved});
    assert_eq!(
        agent.call("filesystem.Filesystem/Move", rename).await.json()["entry"]["metadata"],
        json!({"author": "x"})
    );
    let list = agent.call("filesystem.Filesystem/ListDir", json!({"path": dir.path()})).await.json();
    assert_eq!(list["entries"][0]["metadata"], json!({"author": "x"}));
    std::fs::rename(&moved, &path).unwrap();
    upload(&[]).await;
    assert_eq!(stat(&path).await, Value::Null);
}

#[tokio::test]
async fn b56_odd_files_behave_as_posix_says_and_never_block() {
    let agent = Agent::start();
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    std::fs::write(at("file"), "content").unwrap();
    symlink("file", at("link")).unwrap();
    symlink("made", at("dangling")).unwrap();
    symlink("loop", at("loop")).unwrap();
    let fifo = std::process::Command::new("mkfifo").arg(at("fifo")).status().unwrap();
    assert!(fifo.success());
    let stat =
        async |path: String| agent.call("filesystem.Filesystem/Stat", json!({"path": path})).await.json();

    assert_eq!(agent.put(&at("link"), "new").await.status, 200);
    assert_eq!(std::fs::read(at("file")).unwrap(), b"new");
    assert!(std::fs::symlink_metadata(at("link")).unwrap().is_symlink());
    assert_eq!(
        stat(at("link")).await["entry"]["symlinkTarget"].as_str().map(Path::new),
        Some(Path::new(&at("file")))
    );
    assert_eq!(agent.put(&at("dangling"), "made").await.status, 200);
    assert_eq!(std::fs::read(at("made")).unwrap(), b"made");
    assert_eq!(stat(at("loop")).await["code"], "failed_precondition");
    assert_eq!(agent.put(&at("loop"), "x").await.status, 400);
    for path in [at("fifo"), "/dev/zero".into(), "/dev/null".into()] {
        assert_eq!(agent.get(&format!("/files?path={path}")).await.status, 400);
        assert_eq!(agent.put(&path, "x").await.status, 400);
    }
    assert_eq!(agent.call("filesystem.Filesystem/ListDir", json!({"path": dir.path()})).await.status, 200);
    for name in ["link", "loop", "fifo"] {
        let remove = json!({"path": at(name)});
        assert_eq!(agent.call("filesystem.Filesystem/Remove", remove).await.status, 200);
        assert!(std::fs::symlink_metadata(at(name)).is_err());
    }
    assert!(Path::new(&at("file")).exists());
}

#[tokio::test]
async fn b56_operations_have_the_callers_rights() {
    if !is_root() {
        eprintln!("left out: needs root");
        return;
    }
    let agent = Agent::start();
    let private = tempfile::tempdir().unwrap();
    std::fs::set_permissions(private.path(), PermissionsExt::from_mode(0o700)).unwrap();
    std::fs::write(private.path().join("f"), "secret").unwrap();
    let path = private.path().join("f");
    for (method, body) in [
        ("Stat", json!({"path": path})),
        ("ListDir", json!({"path": private.path()})),
        ("Remove", json!({"path": path})),
        ("MakeDir", json!({"path": private.path().join("d")})),
        ("Move", json!({"source": path, "destination": "/tmp/stolen"})),
        ("CreateWatcher", json!({"path": private.path()})),
    ] {
        let answer = agent.call_as(&format!("filesystem.Filesystem/{method}"), "nobody", body).await;
        assert_eq!(answer.json()["code"], "permission_denied", "{method}");
    }
    assert_eq!(agent.get(&format!("/files?path={}&username=nobody", path.display())).await.status, 403);
    // The same threads serve root again.
    let answer = agent.call_as("filesystem.Filesystem/Stat", "root", json!({"path": path})).await;
    assert_eq!(answer.status, 200);
    let groups = agent.call_as("filesystem.Filesystem/Stat", "ghost", json!({"path": path})).await;
    assert_eq!((groups.status, groups.json()["code"].clone()), (401, json!("unauthenticated")));
}

#[tokio::test]
async fn parts_are_composed() {
    let agent = Agent::start();
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    std::fs::write(at("1"), "one ").unwrap();
    std::fs::write(at("2"), "two").unwrap();
    let compose = async |sources: &[String]| {
        let body = json!({"source_paths": sources, "destination": at("d/all")});
        agent
            .request("POST", "/files/compose", &[("content-type", "application/json")], body.to_string())
            .await
    };
    assert_eq!(compose(&[at("1"), at("missing")]).await.status, 404);
    let answer = compose(&[at("1"), at("2")]).await;
    assert_eq!(answer.json(), json!({"name": "all", "path": at("d/all"), "type": "file"}));
    assert_eq!(std::fs::read(at("d/all")).unwrap(), b"one two");
    assert!(!Path::new(&at("1")).exists());
}

#[tokio::test]
async fn errors_of_directories_have_their_codes() {
    let agent = Agent::start();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("f");
    std::fs::write(&file, "").unwrap();
    for (method, body, code) in [
        ("MakeDir", json!({"path": dir.path()}), "already_exists"),
        ("MakeDir", json!({"path": file}), "invalid_argument"),
        ("ListDir", json!({"path": file}), "invalid_argument"),
        ("ListDir", json!({"path": "/no/such"}), "not_found"),
        ("Stat", json!({"path": "/no/such"}), "not_found"),
        ("Stat", json!({"path": "~bob/x"}), "invalid_argument"),
        ("Stat", json!({"path": "/a\u{0}b"}), "invalid_argument"),
        ("Stat", json!({"path": "x".repeat(300)}), "invalid_argument"),
        ("Move", json!({"source": "/no/such", "destination": "/tmp/x"}), "not_found"),
        ("GetWatcherEvents", json!({"watcherId": "nope"}), "not_found"),
    ] {
        let answer = agent.call(&format!("filesystem.Filesystem/{method}"), body).await;
        assert_eq!(answer.json()["code"], code, "{method}");
    }
    assert_eq!(agent.call("filesystem.Filesystem/Remove", json!({"path": "/no/such"})).await.status, 200);
    assert_eq!(agent.request("POST", "/init", &[], "not json").await.status, 400);
}

/// What comes after a refused upload is not lost with the connection.
#[tokio::test]
async fn a_refused_upload_leaves_a_connection_or_says_that_it_does_not() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let agent = Agent::start();
    let dir = tempfile::tempdir().unwrap();
    for (size, kept) in [(1, true), (100_000, true), (8 << 20, false)] {
        let address = agent.base.strip_prefix("http://").unwrap();
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let head = format!(
            "POST /files?path={} HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\nContent-Length: {size}\r\n\r\n",
            dir.path().display()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        // The answer could go out before the body comes in.
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        let _ = stream.write_all(&vec![b'x'; size]).await;
        let mut answer = Vec::new();
        while !answer.windows(4).any(|four| four == b"\r\n\r\n") {
            assert_ne!(stream.read_buf(&mut answer).await.unwrap(), 0);
        }
        let answer = String::from_utf8_lossy(&answer).to_ascii_lowercase();
        assert!(answer.starts_with("http/1.1 400"), "{answer}");
        assert_eq!(answer.contains("connection: close"), !kept, "{size}: {answer}");
        if kept {
            stream.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
            let mut answer = Vec::new();
            while !answer.windows(4).any(|four| four == b" 204") {
                assert_ne!(stream.read_buf(&mut answer).await.unwrap(), 0, "lost after {size}");
            }
        }
    }
}

/// A form's last boundary comes before the body's last chunk; what comes after that is not lost.
#[tokio::test]
async fn a_form_whose_end_is_late_leaves_a_connection() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let agent = Agent::start();
    let dir = tempfile::tempdir().unwrap();
    let address = agent.base.strip_prefix("http://").unwrap();
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let form =
        "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\ntext\r\n--b--\r\n";
    let head = format!(
        "POST /files?path={}/f HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n\
         Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{form}\r\n",
        dir.path().display(),
        form.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    stream.write_all(b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    while !answer.windows(4).any(|four| four == b" 204") {
        assert_ne!(stream.read_buf(&mut answer).await.unwrap(), 0, "{}", String::from_utf8_lossy(&answer));
    }
}
