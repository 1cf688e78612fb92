//! The public API at its edges: keys, malformed requests, limits, what is said of what is not there.

use std::collections::BTreeMap;

use proto::api::NewSandbox;
use serde_json::json;
use systest::raw::{Answer, bytes, request};
use systest::{Server, eventually};

async fn call(server: &Server, method: &str, path: &str, body: &str) -> Answer {
    request(&server.url, method, path, &[("x-api-key", &server.key)], body.to_owned()).await.unwrap()
}

/// Every error is JSON with the status repeated, a stable word and a request ID.
fn assert_error(answer: &Answer, status: u16, word: &str, names: &str) {
    let body = answer.json();
    assert_eq!(answer.status, status, "{}", answer.text());
    assert_eq!(answer.headers["content-type"], "application/json");
    assert_eq!(body["code"], status, "{body}");
    assert_eq!(body["error_code"], word, "{body}");
    assert!(body["message"].as_str().unwrap().contains(names), "{body} names {names}");
    assert_eq!(body["requestID"].as_str().unwrap(), answer.headers["x-request-id"]);
}

#[tokio::test]
async fn keys_are_required_everywhere_but_for_health() {
    let server = Server::start().unwrap();
    let wrong = format!("e2b_{}", "0".repeat(40));
    for (method, path) in [
        ("POST", "/v2/sandboxes"),
        ("POST", "/sandboxes"),
        ("GET", "/v2/sandboxes"),
        ("GET", "/sandboxes"),
        ("GET", "/sandboxes/iabc"),
        ("DELETE", "/sandboxes/iabc"),
        ("POST", "/sandboxes/iabc/connect"),
        ("POST", "/v2/sandboxes/iabc/connect"),
        ("POST", "/sandboxes/iabc/timeout"),
        ("POST", "/sandboxes/iabc/refreshes"),
        ("GET", "/sandboxes/iabc/metrics"),
        ("GET", "/sandboxes/metrics?sandbox_ids=iabc"),
        ("GET", "/sandboxes/iabc/logs"),
        ("GET", "/v2/sandboxes/iabc/logs"),
        ("GET", "/templates"),
        ("GET", "/templates/aliases/base"),
        ("GET", "/teams"),
    ] {
        for headers in [vec![], vec![("x-api-key", wrong.as_str())], vec![("x-api-key", "")]] {
            let answer = request(&server.url, method, path, &headers, "{}").await.unwrap();
            assert_error(&answer, 401, "unauthenticated", "key");
        }
    }
    assert_eq!(request(&server.url, "GET", "/health", &[], "").await.unwrap().status, 200);
    let bearer = format!("Bearer {}", server.key);
    let answer =
        request(&server.url, "GET", "/v2/sandboxes", &[("authorization", &bearer)], "").await.unwrap();
    assert_eq!(answer.status, 200);
    assert!(!server.log().contains(&server.key[8..]) || server.log().matches(&server.key).count() == 1);
}

#[tokio::test]
async fn bad_requests_are_told_what_is_wrong() {
    let server = Server::start().unwrap();
    for (body, names) in [
        ("{", "body"),
        ("[]", "must be a JSON object"),
        (r#"["base"]"#, "must be a JSON object"),
        ("", "templateID"),
        (r#"{"templateID":7}"#, "templateID"),
        (r#"{"templateID":"base","timeout":"soon"}"#, "timeout"),
        (r#"{"templateID":"base","timeout":-1}"#, "timeout"),
        (r#"{"templateID":"base","timeout":99999999}"#, "86400"),
        (r#"{"templateID":"base","metadata":{"a":1}}"#, "metadata"),
        (r#"{"templateID":"base","envVars":["A"]}"#, "envVars"),
        (r#"{"templateID":"base","gpu":1}"#, "gpu"),
    ] {
        assert_error(&call(&server, "POST", "/v2/sandboxes", body).await, 400, "invalid_request", names);
    }
    for (body, names) in [
        (r#"{"templateID":"base","autoPause":true}"#, "autoPause"),
        (r#"{"templateID":"base","network":{"denyOut":["0.0.0.0/0"]}}"#, "network"),
        (r#"{"templateID":"base","volumeMounts":[{"name":"v","path":"/v"}]}"#, "volumeMounts"),
        (r#"{"templateID":"base","iam":{"tokens":{"a":{}}}}"#, "iam"),
    ] {
        assert_error(&call(&server, "POST", "/v2/sandboxes", body).await, 400, "unsupported_field", names);
    }
    for template in ["nope", "../base", "base:other", "%2e%2e", "a/b/c"] {
        let body = json!({ "templateID": template }).to_string();
        let answer = call(&server, "POST", "/v2/sandboxes", &body).await;
        assert_error(&answer, 404, "template_not_found", template);
    }
    let large = format!(r#"{{"templateID":"{}"}}"#, "a".repeat(2 << 20));
    assert_error(&call(&server, "POST", "/v2/sandboxes", &large).await, 413, "body_too_large", "1048576");
    for (method, path, status, word) in [
        ("GET", "/nope", 404, "route_not_found"),
        ("GET", "/sandboxes/iabc/nope", 404, "route_not_found"),
        ("PATCH", "/v2/sandboxes", 405, "method_not_allowed"),
        ("GET", "/sandboxes/iabc", 404, "sandbox_not_found"),
        ("GET", "/sandboxes/..%2f..%2fetc", 404, "sandbox_not_found"),
        ("DELETE", "/sandboxes/iabc", 404, "sandbox_not_found"),
        ("GET", "/v2/sandboxes?state=wrong", 400, "invalid_request"),
        ("GET", "/v2/sandboxes?unknown=1", 400, "invalid_request"),
        ("GET", "/v2/sandboxes?metadata=broken", 400, "invalid_request"),
    ] {
        assert_error(&call(&server, method, path, "").await, status, word, "");
    }
    assert!(server.api().list().await.unwrap().is_empty(), "nothing was made on the way");
}

/// HTTP/1.1 demands a Host header, once; HTTP/1.0 knows none and is served all the same, sandboxes too.
#[tokio::test]
async fn hosts_are_demanded_of_who_knows_them() {
    let server = Server::start().unwrap();
    let guest = server.create().await.unwrap();
    for (head, status) in [
        ("GET /health HTTP/1.1\r\nconnection: close\r\n", 400),
        ("GET /health HTTP/1.1\r\nconnection: close\r\nhost: a\r\nhost: b\r\n", 400),
        ("GET /health HTTP/1.1\r\nconnection: close\r\nhost: a\r\n", 200),
        ("GET /health HTTP/1.0\r\n", 200),
    ] {
        let answer = bytes(&server.url, &format!("{head}\r\n")).await.unwrap();
        assert!(answer.contains(&format!(" {status} ")), "{head}: {answer}");
        assert!(status == 200 || answer.contains(r#""error_code":"invalid_request""#), "{head}: {answer}");
    }
    let id = guest.id();
    for head in [
        format!("GET /sandbox/{id}/49983/health HTTP/1.0\r\n"),
        format!("GET /health HTTP/1.0\r\ne2b-sandbox-id: {id}\r\ne2b-sandbox-port: 49983\r\n"),
    ] {
        let answer = bytes(&server.url, &format!("{head}\r\n")).await.unwrap();
        assert!(answer.contains(" 204 "), "{head}: {answer}");
    }
}

#[tokio::test]
async fn what_was_accepted_is_what_is_shown() {
    let server = Server::start().unwrap();
    let metadata = BTreeMap::from([("owner".to_owned(), "a=b&c d/ü".to_owned())]);
    let new = NewSandbox {
        timeout: Some(1800),
        metadata: Some(metadata.clone()),
        env_vars: Some(BTreeMap::from([("FOO".to_owned(), "bar \"'$".to_owned())])),
        allow_internet_access: Some(false),
        ..NewSandbox::default()
    };
    let guest = server.create_with(new).await.unwrap();
    let detail = server.api().get(guest.id()).await.unwrap();
    assert_eq!(detail.listed.metadata, Some(metadata));
    assert_eq!(detail.allow_internet_access, Some(false));
    let lifetime = detail.listed.end_at.duration_since(detail.listed.started_at).as_secs();
    assert!((1790..=1800).contains(&lifetime), "{lifetime}");
    assert_eq!(guest.sh("printf %s \"$FOO\"").await.unwrap().stdout, "bar \"'$");
    assert_eq!(
        guest.sh("hostname; echo $E2B_SANDBOX_ID").await.unwrap().stdout,
        format!("{0}\n{0}\n", guest.id())
    );

    // Connect never shortens, in either version; a timeout sets both ways (B61).
    for path in ["/v2/sandboxes", "/sandboxes"] {
        let answer =
            call(&server, "POST", &format!("{path}/{}/connect", guest.id()), r#"{"timeout":60}"#).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.json()["envdAccessToken"], guest.token());
    }
    assert_eq!(server.api().get(guest.id()).await.unwrap().listed.end_at, detail.listed.end_at);
    server.api().set_timeout(guest.id(), 60).await.unwrap();
    let shorter = server.api().get(guest.id()).await.unwrap().listed.end_at;
    assert!(shorter < detail.listed.end_at);
    let answer =
        call(&server, "POST", &format!("/sandboxes/{}/refreshes", guest.id()), r#"{"duration":600}"#).await;
    assert_eq!(answer.status, 204);
    assert!(server.api().get(guest.id()).await.unwrap().listed.end_at > shorter);

    // An old SDK appends a client ID.
    let answer = call(&server, "GET", &format!("/sandboxes/{}-00000000", guest.id()), "").await;
    assert_eq!(answer.status, 200);

    server.api().kill(guest.id()).await.unwrap();
    let answer = call(&server, "GET", &format!("/sandboxes/{}", guest.id()), "").await;
    assert_error(&answer, 404, "sandbox_not_found", "it was killed");
    let answer = call(&server, "DELETE", &format!("/sandboxes/{}", guest.id()), "").await;
    assert_error(&answer, 404, "sandbox_not_found", "it was killed");
}

#[tokio::test]
async fn an_idempotency_key_makes_one_sandbox() {
    let server = Server::start().unwrap();
    let body = r#"{"templateID":"base","timeout":60}"#;
    let post = async |key: &str, body: &str| {
        let headers = [("x-api-key", server.key.as_str()), ("idempotency-key", key)];
        request(&server.url, "POST", "/v2/sandboxes", &headers, body.to_owned()).await.unwrap()
    };
    let (first, second) = tokio::join!(post("one", body), post("one", body));
    let statuses = [first.status.as_u16(), second.status.as_u16()];
    assert!(statuses == [201, 409] || statuses == [409, 201], "{statuses:?}");
    let again = post("one", body).await;
    let made = if first.status == 201 { &first } else { &second };
    assert_eq!(again.json()["sandboxID"], made.json()["sandboxID"]);
    assert_error(
        &post("one", r#"{"templateID":"base"}"#).await,
        409,
        "idempotency_request_mismatch",
        "new key",
    );
    assert_error(&post("not a key", body).await, 400, "invalid_request", "Idempotency-Key");
    // The key stands for the sandbox it made, even when that has ended.
    let made = made.json()["sandboxID"].as_str().unwrap().to_owned();
    server.api().kill(&made.parse().unwrap()).await.unwrap();
    assert_error(&post("one", body).await, 404, "sandbox_not_found", "it was killed");
    // A create that failed may be tried again.
    assert_eq!(post("two", r#"{"templateID":"nope"}"#).await.status, 404);
    assert_eq!(post("two", r#"{"templateID":"nope"}"#).await.status, 404);
    assert_eq!(server.api().list().await.unwrap().len(), 0);
}

#[tokio::test]
async fn limits_are_told_and_nothing_is_lost() {
    let server = Server::start_with("[limits]\nsandboxes_per_team = 2\nmax_timeout_seconds = 100\n").unwrap();
    let (a, b) = tokio::join!(
        call(&server, "POST", "/v2/sandboxes", r#"{"templateID":"base","timeout":100}"#),
        call(&server, "POST", "/sandboxes", r#"{"templateID":"base"}"#)
    );
    assert_eq!((a.status.as_u16(), b.status.as_u16()), (201, 201), "{} {}", a.text(), b.text());
    let refused = call(&server, "POST", "/v2/sandboxes", r#"{"templateID":"base","timeout":100}"#).await;
    assert_error(&refused, 429, "sandbox_limit_reached", "2 sandboxes");
    assert_eq!(refused.headers["retry-after"], "5");
    let refused = call(&server, "POST", "/v2/sandboxes", r#"{"templateID":"base"}"#).await;
    assert_error(&refused, 400, "invalid_request", "100 seconds");
    // v1 lives 15 seconds unless it says otherwise.
    eventually(std::time::Duration::from_secs(25), "the v1 sandbox times out", async || {
        server.api().list().await.unwrap().len() == 1
    })
    .await;
    assert_eq!(
        call(&server, "POST", "/v2/sandboxes", r#"{"templateID":"base","timeout":9}"#).await.status,
        201
    );
}

#[tokio::test]
async fn browsers_can_read_the_paging_header_and_metrics_have_a_window() {
    let server = Server::start().unwrap();
    let guest = server.create().await.unwrap();
    let headers = [("x-api-key", server.key.as_str()), ("origin", "https://example.test")];
    let answer = request(&server.url, "GET", "/v2/sandboxes?limit=1", &headers, "").await.unwrap();
    assert_eq!(answer.headers["access-control-allow-origin"], "*");
    assert!(answer.headers["access-control-expose-headers"].to_str().unwrap().contains("x-next-token"));
    assert!(!answer.headers.contains_key("x-next-token"), "the last page has no token");

    let metrics = format!("/sandboxes/{}/metrics", guest.id());
    eventually(std::time::Duration::from_secs(20), "a sample is there", async || {
        call(&server, "GET", &metrics, "").await.json().as_array().unwrap().len() >= 2
    })
    .await;
    let sample = call(&server, "GET", &metrics, "").await.json()[0].clone();
    assert!(sample["memTotal"].as_u64().unwrap() > sample["memUsed"].as_u64().unwrap());
    assert!(sample["diskTotal"].as_u64().unwrap() > 1 << 30);
    let past = call(&server, "GET", &format!("{metrics}?start=1000&end=2000"), "").await;
    assert_eq!(past.json(), json!([]));
    assert_eq!(call(&server, "GET", &format!("{metrics}?start=2&end=1"), "").await.status, 400);
    let many =
        call(&server, "GET", &format!("/sandboxes/metrics?sandbox_ids={},inone", guest.id()), "").await;
    assert_eq!(many.json()["sandboxes"].as_object().unwrap().len(), 1);
    let logs = call(&server, "GET", &format!("/sandboxes/{}/logs", guest.id()), "").await;
    assert_eq!(logs.status, 200);
    let document = call(&server, "GET", "/openapi.json", "").await.json();
    assert!(document["paths"]["/v2/sandboxes"]["post"].is_object());
}
