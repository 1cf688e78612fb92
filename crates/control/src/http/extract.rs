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
    ApiError::invalid(format!(
        "the request body is not what this route takes: {}",
        with_path.unwrap_or_else(|| error.to_string())
    ))
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
            ApiError::invalid(format!("the query is not what this route takes: {cause}"))
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
