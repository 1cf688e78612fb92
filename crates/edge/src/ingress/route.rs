//! Finds the sandbox and port in the head of a request.
//!
//! Owns: a pure function. In this order: the host label `<port>-<sandboxID>[-suffix].<domain>`, the headers
//! `E2b-Sandbox-Id` and `E2b-Sandbox-Port`, the path `/sandbox/<id>/<port>/…`. A label and headers that disagree, one
//! header without the other, two hosts: an error, never a guess.

use http::header::HOST;
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName};
use proto::SandboxId;

use super::{RouteError, Target};

pub(super) const SANDBOX_ID: HeaderName = HeaderName::from_static("e2b-sandbox-id");
pub(super) const SANDBOX_PORT: HeaderName = HeaderName::from_static("e2b-sandbox-port");

const fn error(message: &'static str) -> RouteError {
    RouteError { message }
}

pub(super) fn route(head: &Parts, domain: Option<&str>) -> Option<Result<Target, RouteError>> {
    let (host, agreed) = host(head);
    let by_label = host.as_deref().and_then(|host| label(host, domain));
    let by_headers = headers(&head.headers);
    if by_label.is_none() && by_headers.is_none() {
        return path(head);
    }
    if !agreed {
        return Some(Err(error("the request names two hosts")));
    }
    Some(match (by_label, by_headers) {
        (Some(Err(error)), _) | (_, Some(Err(error))) => Err(error),
        (Some(Ok(label)), Some(Ok(headers))) if label != headers => {
            Err(error("the host and the E2b-Sandbox headers name different sandboxes or ports"))
        }
        (Some(Ok((sandbox, port))), _) | (_, Some(Ok((sandbox, port)))) => Ok(Target::new(sandbox, port)),
        (None, None) => return None,
    })
}

/// The host's name without a port.
pub(super) fn host_name(host: &str) -> &str {
    match host.rfind(':') {
        // A colon inside brackets belongs to an IPv6 address.
        Some(at) if !host[at..].contains(']') => &host[..at],
        _ => host,
    }
}

/// The host a request is for, and whether everything in it that names one agrees.
fn host(head: &Parts) -> (Option<String>, bool) {
    let authority = head.uri.authority().map(|authority| authority.as_str().to_ascii_lowercase());
    let named = head.headers.get_all(HOST).iter();
    let mut all = authority.into_iter().chain(named.map(|value| match value.to_str() {
        Ok(host) => host.trim().to_ascii_lowercase(),
        Err(_) => String::new(),
    }));
    let first = all.next();
    // Two Host headers are refused even when equal.
    let agreed =
        head.headers.get_all(HOST).iter().count() <= 1 && all.all(|host| Some(&host) == first.as_ref());
    (first, agreed)
}

fn label(host: &str, domain: Option<&str>) -> Option<Result<(SandboxId, u16), RouteError>> {
    let (label, rest) = host_name(host).split_once('.')?;
    if !matches!(domain, None | Some("")) && Some(rest) != domain && rest != "localhost" {
        return None;
    }
    let (port, rest) = label.split_once('-')?;
    if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let sandbox = SandboxId::parse_lenient(rest).ok()?;
    Some(match parse_port(port) {
        Some(port) => Ok((sandbox, port)),
        None => Err(error("the host names a port that does not exist")),
    })
}

fn headers(headers: &HeaderMap) -> Option<Result<(SandboxId, u16), RouteError>> {
    let mut sandboxes = headers.get_all(SANDBOX_ID).iter();
    let mut ports = headers.get_all(SANDBOX_PORT).iter();
    let (sandbox, port) = (sandboxes.next(), ports.next());
    if sandboxes.next().is_some() || ports.next().is_some() {
        return Some(Err(error("a header E2b-Sandbox-Id or E2b-Sandbox-Port is there twice")));
    }
    let (sandbox, port) = match (sandbox, port) {
        (None, None) => return None,
        (Some(_), None) => return Some(Err(error("missing header E2b-Sandbox-Port"))),
        (None, Some(_)) => return Some(Err(error("missing header E2b-Sandbox-Id"))),
        (Some(sandbox), Some(port)) => (sandbox.to_str().unwrap_or(""), port.to_str().unwrap_or("")),
    };
    Some(match (SandboxId::parse_lenient(sandbox), parse_port(port)) {
        (Ok(sandbox), Some(port)) => Ok((sandbox, port)),
        (Err(_), _) => Err(error("header E2b-Sandbox-Id is not a sandbox ID")),
        (_, None) => Err(error("header E2b-Sandbox-Port is not a port")),
    })
}

fn path(head: &Parts) -> Option<Result<Target, RouteError>> {
    let whole = head.uri.path_and_query().map_or("/", PathAndQuery::as_str);
    let (path, query) = match whole.find('?') {
        Some(at) => whole.split_at(at),
        None => (whole, ""),
    };
    let mut parts = path.strip_prefix("/sandbox/")?.splitn(3, '/');
    let (sandbox, port) = (parts.next()?, parts.next()?);
    let rest = parts.next().unwrap_or_default();
    Some(match (SandboxId::parse_lenient(sandbox), parse_port(port)) {
        (Ok(sandbox), Some(port)) => match format!("/{rest}{query}").parse() {
            Ok(path) => Ok(Target { sandbox, port, path: Some(path) }),
            Err(_) => Err(error("the path is malformed")),
        },
        (Err(_), _) => Err(error("the path does not name a sandbox ID")),
        (_, None) => Err(error("the path does not name a port")),
    })
}

/// A port as digits alone; 0 is none.
fn parse_port(text: &str) -> Option<u16> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok().filter(|port| *port != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Answer = Option<Result<(String, u16, Option<String>), ()>>;

    fn ask(uri: &str, headers: &[(&str, &str)], domain: Option<&str>) -> Answer {
        let mut request = http::Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (head, ()) = request.body(()).unwrap().into_parts();
        route(&head, domain).map(|answer| {
            answer
                .map(|t| (t.sandbox.to_string(), t.port, t.path.map(|path| path.to_string())))
                .map_err(|_| ())
        })
    }

    fn found(port: u16) -> Answer {
        Some(Ok(("iabc".into(), port, None)))
    }

    #[test]
    fn labels() {
        let domain = Some("pando.test");
        assert_eq!(ask("/x", &[("host", "49983-iabc.pando.test")], domain), found(49983));
        assert_eq!(ask("/x", &[("host", "49983-IABC-00000000.Pando.Test:3000")], domain), found(49983));
        assert_eq!(ask("/x", &[("host", "80-iabc.localhost:3000")], domain), found(80));
        assert_eq!(ask("/x", &[("host", "80-iabc.other.test")], domain), None);
        assert_eq!(ask("/x", &[("host", "80-iabc.other.test")], None), found(80));
        assert_eq!(ask("/x", &[("host", "api.pando.test")], domain), None);
        assert_eq!(ask("/x", &[("host", "[::1]:3000")], None), None);
        assert_eq!(ask("/x", &[("host", "99999-iabc.pando.test")], domain), Some(Err(())));
        assert_eq!(ask("/x", &[("host", "0-iabc.pando.test")], domain), Some(Err(())));
        assert_eq!(ask("https://80-iabc.pando.test/x", &[], domain), found(80));
        assert_eq!(ask("/", &[], domain), None);
    }

    #[test]
    fn routing_headers() {
        let both = [("host", "127.0.0.1:3000"), ("e2b-sandbox-id", "iabc"), ("e2b-sandbox-port", "80")];
        assert_eq!(ask("/x", &both, None), found(80));
        assert_eq!(ask("/sandbox/iother/81/", &both, None), found(80));
        assert_eq!(ask("/x", &both[..2], None), Some(Err(())));
        assert_eq!(ask("/x", &both[2..], None), Some(Err(())));
        for (id, port) in [("iabc", "0"), ("iabc", "+80"), ("iabc", "65536"), ("../x", "80"), ("", "80")] {
            let headers = [("e2b-sandbox-id", id), ("e2b-sandbox-port", port)];
            assert_eq!(ask("/x", &headers, None), Some(Err(())), "{id} {port}");
        }
    }

    #[test]
    fn contradictions_are_refused() {
        let headers = |host, id, port| [("host", host), ("e2b-sandbox-id", id), ("e2b-sandbox-port", port)];
        assert_eq!(ask("/", &headers("80-iabc.a.test", "iabc", "80"), None), found(80));
        assert_eq!(ask("/", &headers("80-iabc.a.test", "iother", "80"), None), Some(Err(())));
        assert_eq!(ask("/", &headers("80-iabc.a.test", "iabc", "81"), None), Some(Err(())));
        let twice = [("host", "80-iabc.a.test"), ("host", "80-iabc.a.test")];
        assert_eq!(ask("/", &twice, None), Some(Err(())));
        assert_eq!(ask("http://80-iabc.a.test/", &[("host", "81-iabc.a.test")], None), Some(Err(())));
    }

    #[test]
    fn paths() {
        let with = |path: &str| Some(Ok(("iabc".into(), 80, Some(path.to_owned()))));
        assert_eq!(ask("/sandbox/iabc/80/a/b?c=d?e", &[], None), with("/a/b?c=d?e"));
        assert_eq!(ask("/sandbox/iabc/80", &[], None), with("/"));
        assert_eq!(ask("/sandbox/iabc/80?x=/1/", &[], None), with("/?x=/1/"));
        assert_eq!(ask("/sandbox/iabc", &[], None), None);
        assert_eq!(ask("/sandboxes/iabc/80/", &[], None), None);
        assert_eq!(ask("/sandbox/i%2fbc/80/", &[], None), Some(Err(())));
        assert_eq!(ask("/sandbox/iabc/http/", &[], None), Some(Err(())));
    }
}
