//! Routes about sandboxes (`e2b-protocol` 2.2).

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use proto::api::{
    Connect, ErrorBody, Lifecycle, ListedSandbox, NewSandbox, Refresh, Sandbox, SandboxDetail, SandboxLog,
    SandboxLogEntry, SandboxLogs, SandboxLogsV2, SandboxMetric, SetTimeout,
};
use proto::node::LogLine;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::NEXT_TOKEN;
use super::extract::{Body, Id, Params};
use crate::app::sandbox::{check, listed};
use crate::app::{Caller, Control, detached};
use crate::error::ApiError;
use crate::keys;
use crate::listing::{ListQuery, Listing};

const V1_TIMEOUT: i64 = 15;
const V2_TIMEOUT: i64 = 300;
const MAX_LOG_LINES: usize = 1000;
const MAX_METRIC_IDS: usize = 100;

/// Creates a sandbox; answers when its agent does.
#[utoipa::path(post, path = "/v2/sandboxes", tag = "sandboxes", request_body = NewSandbox,
    params(("Idempotency-Key" = Option<String>, Header, description = "The same key and body make one sandbox")),
    responses((status = 201, body = Sandbox), (status = "default", body = ErrorBody)))]
pub(crate) async fn create_v2(
    State(control): State<Control>,
    caller: Caller,
    headers: HeaderMap,
    body: Body<NewSandbox>,
) -> Result<Response, ApiError> {
    create(control, caller, &headers, body, V2_TIMEOUT).await
}

/// As `POST /v2/sandboxes`, with a default timeout of 15 seconds.
#[utoipa::path(post, path = "/sandboxes", tag = "sandboxes", request_body = NewSandbox,
    responses((status = 201, body = Sandbox), (status = "default", body = ErrorBody)))]
pub(crate) async fn create_v1(
    State(control): State<Control>,
    caller: Caller,
    headers: HeaderMap,
    body: Body<NewSandbox>,
) -> Result<Response, ApiError> {
    create(control, caller, &headers, body, V1_TIMEOUT).await
}

async fn create(
    control: Control,
    caller: Caller,
    headers: &HeaderMap,
    body: Body<NewSandbox>,
    default_timeout: i64,
) -> Result<Response, ApiError> {
    let new = body.value;
    let timeout = check(&new, default_timeout, control.config.max_timeout)?;
    let key = headers.get("idempotency-key").map(|value| value.to_str().unwrap_or_default().to_owned());
    let body_hash = keys::hash(&String::from_utf8_lossy(&body.bytes));
    let sandbox = detached(async move {
        match key {
            Some(key) => control.create_once(caller.team, key, body_hash, new, timeout).await,
            None => control.create(caller.team, new, timeout).await,
        }
    })
    .await?;
    Ok((StatusCode::CREATED, Json(sandbox)).into_response())
}

/// The running sandboxes, newest first unless asked otherwise.
#[utoipa::path(get, path = "/v2/sandboxes", tag = "sandboxes",
    params(("metadata" = Option<String>, Query), ("state" = Option<String>, Query), ("order" = Option<String>, Query),
        ("startedAfter" = Option<String>, Query), ("template" = Option<String>, Query),
        ("limit" = Option<u32>, Query), ("nextToken" = Option<String>, Query)),
    responses((status = 200, body = [ListedSandbox], headers(("x-next-token" = String))),
        (status = "default", body = ErrorBody)))]
pub(crate) async fn list(
    State(control): State<Control>,
    caller: Caller,
    Params(query): Params<ListQuery>,
) -> Result<Response, ApiError> {
    let (page, next) = control.list(&caller.team, &Listing::try_from(query)?).await?;
    let mut response = Json(page).into_response();
    if let Some(token) = next.and_then(|token| HeaderValue::from_str(&token).ok()) {
        response.headers_mut().insert(NEXT_TOKEN, token);
    }
    Ok(response)
}

/// The running sandboxes, whole.
#[utoipa::path(get, path = "/sandboxes", tag = "sandboxes", params(("metadata" = Option<String>, Query)),
    responses((status = 200, body = [ListedSandbox]), (status = "default", body = ErrorBody)))]
pub(crate) async fn list_v1(
    State(control): State<Control>,
    caller: Caller,
    Params(query): Params<ListQuery>,
) -> Result<Json<Vec<ListedSandbox>>, ApiError> {
    let (page, _) = control.list(&caller.team, &Listing::try_from(query)?).await?;
    Ok(Json(page))
}

/// One running sandbox.
#[utoipa::path(get, path = "/sandboxes/{sandboxID}", tag = "sandboxes", params(("sandboxID" = String, Path)),
    responses((status = 200, body = SandboxDetail), (status = "default", body = ErrorBody)))]
pub(crate) async fn get(
    State(control): State<Control>,
    caller: Caller,
    Id(id): Id,
) -> Result<Json<SandboxDetail>, ApiError> {
    let row = control.running(&caller.team, &id).await?;
    Ok(Json(SandboxDetail {
        listed: listed(&row),
        envd_access_token: control.sandbox(&row).envd_access_token,
        allow_internet_access: Some(row.internet),
        domain: control.config.domain.clone(),
        lifecycle: Lifecycle { auto_resume: false, on_timeout: "kill".to_owned() },
    }))
}

/// Ends a sandbox; answers when nothing of it is left.
#[utoipa::path(delete, path = "/sandboxes/{sandboxID}", tag = "sandboxes", params(("sandboxID" = String, Path)),
    responses((status = 204), (status = "default", body = ErrorBody)))]
pub(crate) async fn kill(
    State(control): State<Control>,
    caller: Caller,
    Id(id): Id,
) -> Result<StatusCode, ApiError> {
    detached(async move { control.kill(caller.team, id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A handle to a running sandbox; its time to live is never shortened.
#[utoipa::path(post, path = "/v2/sandboxes/{sandboxID}/connect", tag = "sandboxes", request_body = Connect,
    params(("sandboxID" = String, Path)),
    responses((status = 200, body = Sandbox), (status = "default", body = ErrorBody)))]
pub(crate) async fn connect_v2(
    State(control): State<Control>,
    caller: Caller,
    Id(id): Id,
    body: Body<Connect>,
) -> Result<Json<Sandbox>, ApiError> {
    let timeout = body.value.timeout.unwrap_or(V2_TIMEOUT);
    detached(async move { control.connect(caller.team, id, timeout).await }).await.map(Json)
}

/// As `POST /v2/sandboxes/{sandboxID}/connect`, with `timeout` required.
#[utoipa::path(post, path = "/sandboxes/{sandboxID}/connect", tag = "sandboxes", request_body = Connect,
    params(("sandboxID" = String, Path)),
    responses((status = 200, body = Sandbox), (status = "default", body = ErrorBody)))]
pub(crate) async fn connect_v1(
    State(control): State<Control>,
    caller: Caller,
    Id(id): Id,
    body: Body<Connect>,
) -> Result<Json<Sandbox>, ApiError> {
    let timeout = body.value.timeout.ok_or_else(|| ApiError::invalid("timeout: is required"))?;
    detached(async move { control.connect(caller.team, id, timeout).await }).await.map(Json)
}

/// Sets the time to live, in seconds from now; zero or less ends the sandbox now.
#[utoipa::path(post, path = "/sandboxes/{sandboxID}/timeout", tag = "sandboxes", request_body = SetTimeout,
    params(("sandboxID" = String, Path)), responses((status = 204), (status = "default", body = ErrorBody)))]
pub(crate) async fn set_timeout(
    State(control): State<Control>,
    caller: Caller,
    Id(id): Id,
    body: Body<SetTimeout>,
) -> Result<StatusCode, ApiError> {
    detached(async move { control.set_timeout(caller.team, id, body.value.timeout).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Makes the time to live at least `duration` seconds from now, and at least 15.
#[utoipa::path(post, path = "/sandboxes/{sandboxID}/refreshes", tag = "sandboxes", request_body = Refresh,
    params(("sandboxID" = String, Path)), responses((status = 204), (status = "default", body = ErrorBody)))]
pub(crate) async fn refresh(
    State(control): State<Control>,
    caller: Caller,
    Id(id): Id,
    body: Body<Refresh>,
) -> Result<StatusCode, ApiError> {
    detached(async move { control.refresh(caller.team, id, body.value.duration).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A window of Unix seconds.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Window {
    start: Option<i64>,
    end: Option<i64>,
}

/// What a sandbox used, a sample every five seconds, kept for an hour.
#[utoipa::path(get, path = "/sandboxes/{sandboxID}/metrics", tag = "sandboxes",
    params(("sandboxID" = String, Path), ("start" = Option<i64>, Query), ("end" = Option<i64>, Query)),
    responses((status = 200, body = [SandboxMetric]), (status = "default", body = ErrorBody)))]
pub(crate) async fn metrics(
    State(control): State<Control>,
    caller: Caller,
    Id(id): Id,
    Params(window): Params<Window>,
) -> Result<Json<Vec<SandboxMetric>>, ApiError> {
    control.running(&caller.team, &id).await?;
    if let (Some(start), Some(end)) = (window.start, window.end)
        && start > end
    {
        return Err(ApiError::invalid("start: must not be after end"));
    }
    Ok(Json(control.config.node.metrics(&id, window.start, window.end).await?))
}

/// Names of several sandboxes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ManyIds {
    sandbox_ids: String,
}

/// The latest sample of each sandbox asked for.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ManyMetrics {
    sandboxes: BTreeMap<String, SandboxMetric>,
}

/// The latest sample of several sandboxes; those that do not run are left out.
#[utoipa::path(get, path = "/sandboxes/metrics", tag = "sandboxes", params(("sandbox_ids" = String, Query)),
    responses((status = 200, body = ManyMetrics), (status = "default", body = ErrorBody)))]
pub(crate) async fn metrics_of_many(
    State(control): State<Control>,
    caller: Caller,
    Params(many): Params<ManyIds>,
) -> Result<Json<ManyMetrics>, ApiError> {
    let ids: Vec<&str> = many.sandbox_ids.split(',').filter(|id| !id.is_empty()).collect();
    if ids.len() > MAX_METRIC_IDS {
        return Err(ApiError::invalid(format!("sandbox_ids: at most {MAX_METRIC_IDS}")));
    }
    let mut sandboxes = BTreeMap::new();
    for id in ids {
        let Ok(id) = proto::SandboxId::parse_lenient(id) else { continue };
        if control.running(&caller.team, &id).await.is_ok()
            && let Some(latest) = control.config.node.metrics(&id, None, None).await?.pop()
        {
            sandboxes.insert(id.to_string(), latest);
        }
    }
    Ok(Json(ManyMetrics { sandboxes }))
}

/// Which lines of a log.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LogQuery {
    start: Option<i64>,
    limit: Option<usize>,
}

/// What a sandbox's machine and agent wrote: the last thousand lines.
#[utoipa::path(get, path = "/sandboxes/{sandboxID}/logs", tag = "sandboxes",
    params(("sandboxID" = String, Path), ("start" = Option<i64>, Query, description = "Unix milliseconds"),
        ("limit" = Option<u32>, Query)),
    responses((status = 200, body = SandboxLogs), (status = "default", body = ErrorBody)))]
pub(crate) async fn logs(
    State(control): State<Control>,
    caller: Caller,
    Id(id): Id,
    Params(query): Params<LogQuery>,
) -> Result<Json<SandboxLogs>, ApiError> {
    control.running(&caller.team, &id).await?;
    let mut lines = control.config.node.logs(&id).await?;
    lines.retain(|line| query.start.is_none_or(|start| line.at.as_millisecond() >= start));
    lines.truncate(query.limit.unwrap_or(MAX_LOG_LINES).min(MAX_LOG_LINES));
    Ok(Json(SandboxLogs {
        logs: lines.iter().map(line_v1).collect(),
        log_entries: lines.into_iter().map(entry).collect(),
    }))
}

/// Which lines of a log, by cursor.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LogQueryV2 {
    cursor: Option<i64>,
    limit: Option<usize>,
    direction: Option<String>,
    level: Option<String>,
    search: Option<String>,
}

/// The same lines, from a time on or back from it.
#[utoipa::path(get, path = "/v2/sandboxes/{sandboxID}/logs", tag = "sandboxes",
    params(("sandboxID" = String, Path), ("cursor" = Option<i64>, Query, description = "Unix milliseconds"),
        ("limit" = Option<u32>, Query), ("direction" = Option<String>, Query), ("level" = Option<String>, Query),
        ("search" = Option<String>, Query)),
    responses((status = 200, body = SandboxLogsV2), (status = "default", body = ErrorBody)))]
pub(crate) async fn logs_v2(
    State(control): State<Control>,
    caller: Caller,
    Id(id): Id,
    Params(query): Params<LogQueryV2>,
) -> Result<Json<SandboxLogsV2>, ApiError> {
    let backward = match query.direction.as_deref() {
        None | Some("forward") => false,
        Some("backward") => true,
        Some(_) => return Err(ApiError::invalid("direction: must be forward or backward")),
    };
    let rank = |level: &str| ["debug", "info", "warn", "error"].iter().position(|known| *known == level);
    let least = match query.level.as_deref() {
        None => 0,
        Some(level) => {
            rank(level).ok_or_else(|| ApiError::invalid("level: must be debug, info, warn or error"))?
        }
    };
    control.running(&caller.team, &id).await?;
    let mut lines = control.config.node.logs(&id).await?;
    lines.retain(|line| {
        let at = line.at.as_millisecond();
        query.cursor.is_none_or(|cursor| if backward { at <= cursor } else { at >= cursor })
            && query.search.as_ref().is_none_or(|text| line.text.contains(text))
    });
    if backward {
        lines.reverse();
    }
    let mut logs: Vec<_> = lines.into_iter().map(entry).collect();
    logs.retain(|entry| rank(&entry.level).unwrap_or(1) >= least);
    logs.truncate(query.limit.unwrap_or(MAX_LOG_LINES).min(MAX_LOG_LINES));
    Ok(Json(SandboxLogsV2 { logs }))
}

/// The level a line states of itself, when the agent wrote it as JSON; else `info`.
fn level(text: &str) -> String {
    let stated = serde_json::from_str::<serde_json::Value>(text).ok();
    let stated = stated.as_ref().and_then(|value| value.get("level")).and_then(serde_json::Value::as_str);
    stated.filter(|level| ["debug", "info", "warn", "error"].contains(level)).unwrap_or("info").to_owned()
}

fn entry(line: LogLine) -> SandboxLogEntry {
    SandboxLogEntry {
        timestamp: line.at,
        level: level(&line.text),
        message: line.text,
        fields: BTreeMap::from([("logger".to_owned(), line.source)]),
    }
}

fn line_v1(line: &LogLine) -> SandboxLog {
    let json = serde_json::json!({ "level": level(&line.text), "logger": line.source, "message": line.text });
    SandboxLog { timestamp: line.at, line: json.to_string() }
}
