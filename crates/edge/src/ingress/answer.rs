//! What a client is told when its request does not reach the port. Texts and statuses are E2B's: SDKs look for them.

use bytes::Bytes;
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use proto::SandboxId;

use super::{Body, OpenError};

/// The form of an error that the client prefers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Json,
    Html,
}

/// HTML only for a client that asks for it and ranks it above JSON.
pub(super) fn form(headers: &HeaderMap) -> Form {
    let mut html = 0.0;
    let mut json = 0.0;
    for value in headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()) {
        for range in value.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default();
            let weight = parts.find_map(|part| part.strip_prefix("q=")).map_or(Ok(1.0), str::parse::<f32>);
            let weight = weight.unwrap_or(0.0);
            if kind.eq_ignore_ascii_case("text/html") {
                html = weight;
            } else if kind.eq_ignore_ascii_case("application/json") {
                json = weight;
            }
        }
    }
    if html > json { Form::Html } else { Form::Json }
}

#[derive(serde::Serialize)]
struct Error<'a> {
    #[serde(rename = "sandboxId", skip_serializing_if = "Option::is_none")]
    sandbox: Option<&'a str>,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    code: u16,
}

/// The answer for a port that could not be reached.
pub(super) fn open_error(error: &OpenError, sandbox: &SandboxId, port: u16, form: Form) -> Response<Body> {
    let (status, message, port) = match error {
        OpenError::NotFound => (StatusCode::BAD_GATEWAY, "The sandbox was not found", None),
        OpenError::PortClosed => {
            (StatusCode::BAD_GATEWAY, "The sandbox is running but port is not open", Some(port))
        }
        OpenError::Transition => (StatusCode::CONFLICT, "The sandbox is changing its state, try again", None),
        OpenError::Denied(message) => (StatusCode::FORBIDDEN, message.as_str(), None),
        OpenError::Limit => (StatusCode::TOO_MANY_REQUESTS, "A limit of the sandbox was reached", None),
        OpenError::Unavailable(_) => {
            (StatusCode::BAD_GATEWAY, "The sandbox is running but does not answer", Some(port))
        }
    };
    error_response(status, Some(sandbox), message, port, form)
}

/// The answer for a connection that broke before the port had answered.
pub(super) fn broken(sandbox: &SandboxId, port: u16, form: Form) -> Response<Body> {
    let message = "The sandbox closed the connection before it answered";
    error_response(StatusCode::BAD_GATEWAY, Some(sandbox), message, Some(port), form)
}

/// The answer for a route of the agent that is not for the public.
pub(super) fn not_found(sandbox: &SandboxId, form: Form) -> Response<Body> {
    error_response(StatusCode::NOT_FOUND, Some(sandbox), "Not found", None, form)
}

/// The answer for a request that contradicts itself.
pub(super) fn bad_request(message: &str) -> Response<Body> {
    error_response(StatusCode::BAD_REQUEST, None, message, None, Form::Json)
}

fn error_response(
    status: StatusCode,
    sandbox: Option<&SandboxId>,
    message: &str,
    port: Option<u16>,
    form: Form,
) -> Response<Body> {
    let code = status.as_u16();
    let (kind, text) = match form {
        Form::Json => {
            let error = Error { sandbox: sandbox.map(SandboxId::as_str), message, port, code };
            // Strings and numbers always serialise.
            ("application/json; charset=utf-8", serde_json::to_string(&error).unwrap_or_default())
        }
        Form::Html => ("text/html; charset=utf-8", page(status, sandbox, message, port)),
    };
    let mut response = Response::new(full(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn page(status: StatusCode, sandbox: Option<&SandboxId>, message: &str, port: Option<u16>) -> String {
    let reason = status.canonical_reason().unwrap_or("Error");
    let message = message.replace('&', "&amp;").replace('<', "&lt;");
    let mut about = sandbox.map(|id| format!("<p>Sandbox <code>{id}</code>")).unwrap_or_default();
    if let Some(port) = port {
        about.push_str(&format!(", port <code>{port}</code>"));
    }
    format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width\"><title>{code} {reason}</title><body style=\"font-family:sans-serif;max-width:\
         40em;margin:10vh auto;padding:0 1em\"><h1>{message}</h1>{about}<p>{code} {reason}</body></html>\n",
        code = status.as_u16(),
    )
}

fn full(text: String) -> Body {
    Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed_unsync()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepts(value: &'static str) -> Form {
        form(&HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static(value))]))
    }

    #[test]
    fn html_only_when_preferred() {
        assert_eq!(form(&HeaderMap::new()), Form::Json);
        assert_eq!(accepts("*/*"), Form::Json);
        assert_eq!(accepts("application/json"), Form::Json);
        assert_eq!(accepts("application/json, text/html"), Form::Json);
        assert_eq!(accepts("text/html;q=0.5, application/json"), Form::Json);
        assert_eq!(
            accepts("text/html, application/xhtml+xml, application/json;q=0.9, */*;q=0.8"),
            Form::Html
        );
    }
}
