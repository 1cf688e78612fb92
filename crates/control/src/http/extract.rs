//! What handlers take from a request, with our errors instead of axum's.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, JsonRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use proto::SandboxId;
use serde::de::DeserializeOwned;

use crate::app::{Caller, Control};
use crate::error::ApiError;
use crate::http::BODY_LIMIT;

/// A body, and its JSON. An absent body is read as `{}`: old SDKs send none where every field has a default.
pub(crate) struct Body<T> {
    pub(crate) value: T,
    pub(crate) bytes: Bytes,
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let bytes = Bytes::from_request(request, state).await.map_err(body_error)?;
        let text: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
        // A list would be read as the fields in our order, and its refusal would speak of our types.
        if text.trim_ascii_start().first() != Some(&b'{') {
            return Err(ApiError::invalid("the request body must be a JSON object"));
        }
        let Json(value) = Json::from_bytes(text).map_err(|error: JsonRejection| json_error(&error))?;
        Ok(Self { value, bytes })
    }
}

fn body_error(error: BytesRejection) -> ApiError {
    if error.status() == StatusCode::PAYLOAD_TOO_LARGE {
        return ApiError::too_large(BODY_LIMIT);
    }
    ApiError::invalid("the request body broke off")
}

/// The deepest cause says which field and why; what stands around it is about our types.
fn json_error(error: &JsonRejection) -> ApiError {
    let mut cause: &dyn std::error::Error = error;
    let mut with_path = None;
    while let Some(source) = cause.source() {
        // serde_path_to_error's own display is "field: reason".
        with_path.get_or_insert_with(|| source.to_string());
        cause = source;
    }
    let problem = with_path.unwrap_or_else(|| error.to_string());
    ApiError::invalid(format!("the request body is not what this route takes: {}", in_plain_words(&problem)))
}

/// The names of Rust's types in what serde says, in words of JSON. What the client wrote stands in quotes or backticks.
fn in_plain_words(problem: &str) -> String {
    let plain = |word: &str| {
        match word.trim_end_matches(',') {
            "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
            "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number, not negative",
            "f32" | "f64" => "a number",
            _ => return word.to_owned(),
        }
        .to_owned()
    };
    // Only what was expected names a type.
    match problem.split_once(", expected ") {
        Some((found, expected)) => {
            let expected: Vec<String> = expected.split(' ').map(plain).collect();
            format!("{found}, expected {}", expected.join(" "))
        }
        None => problem.to_owned(),
    }
}

/// A query; an unknown or malformed parameter is named.
pub(crate) struct Params<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Params<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let query: Result<Query<T>, QueryRejection> = Query::from_request_parts(parts, state).await;
        query.map(|Query(value)| Self(value)).map_err(|error| {
            let cause =
                std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            ApiError::invalid(format!("the query is not what this route takes: {}", in_plain_words(&cause)))
        })
    }
}

/// The sandbox in the path. What is no sandbox's ID is a sandbox that does not exist.
pub(crate) struct Id(pub(crate) SandboxId);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path(text): Path<String> = Path::from_request_parts(parts, state)
            .await
            .map_err(|_| ApiError::invalid("sandboxID: not UTF-8"))?;
        let shown: String = text.chars().filter(|c| !c.is_control()).take(60).collect();
        SandboxId::parse_lenient(&text).map(Self).map_err(|_| ApiError::sandbox_not_found(&shown, None))
    }
}

/// `X-API-Key`, or `Authorization: Bearer` as older clients have it.
impl FromRequestParts<Control> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, control: &Control) -> Result<Self, ApiError> {
        let header = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
        let key = header("x-api-key").or_else(|| header("authorization")?.strip_prefix("Bearer "));
        match key {
            Some(key) => control.authenticate(key).await,
            None => Err(ApiError::unauthenticated(
                "this request has no API key; send it as X-API-Key (`pando env` prints the server's first key)",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::api::{Connect, NewSandbox, Refresh, SetTimeout};

    async fn refused<T: DeserializeOwned>(body: &str) -> Option<String> {
        let request = Request::new(axum::body::Body::from(body.to_owned()));
        let error = Body::<T>::from_request(request, &()).await.err()?;
        assert_eq!((error.status, error.code), (StatusCode::BAD_REQUEST, "invalid_request"), "{body}");
        Some(error.message)
    }

    /// Whatever is wrong with a body, the client is told in words of JSON and of the API.
    #[tokio::test]
    async fn refusals_speak_of_json() {
        let values = [
            "null",
            "true",
            "7",
            "-1",
            "1.5",
            "1e99",
            "99999999999999999999",
            "\"x\"",
            "[]",
            "[1]",
            "{}",
            "{\"a\":1}",
        ];
        let fields = [
            "templateID",
            "timeout",
            "duration",
            "memory",
            "metadata",
            "envVars",
            "allow_internet_access",
            "secure",
            "autoPause",
            "unknown",
        ];
        let with = |field: &str, value: &str| format!("{{\"{field}\":{value}}}");
        let bodies = values.iter().flat_map(|value| {
            let inside = fields.iter().map(|field| with(field, value));
            inside.chain([(*value).to_owned(), format!("{{{value}"), format!(" {value} x")])
        });
        let mut refusals = 0;
        for body in bodies {
            let told = [
                refused::<NewSandbox>(&body).await,
                refused::<Connect>(&body).await,
                refused::<Refresh>(&body).await,
                refused::<SetTimeout>(&body).await,
            ];
            for message in told.into_iter().flatten() {
                refusals += 1;
                for word in [
                    "struct",
                    "enum",
                    "tuple",
                    "Option",
                    "i64",
                    "u64",
                    "usize",
                    "NewSandbox",
                    "Connect",
                    "::",
                ] {
                    assert!(!message.contains(word), "{body}: {message}");
                }
            }
        }
        assert!(refusals > 100, "{refusals}");
        for body in ["[]", "7", "null", "x", "[\"base\"]"] {
            let message = refused::<NewSandbox>(body).await.unwrap();
            assert_eq!(message, "the request body must be a JSON object", "{body}");
        }
        let message = refused::<NewSandbox>(r#"{"templateID":"b","timeout":"i64"}"#).await.unwrap();
        assert!(
            message.contains("timeout") && message.contains("\"i64\", expected a whole number"),
            "{message}"
        );
    }
}
