//! The public HTTP API: E2B's names and shapes (`e2b-protocol` section 2). Field names are E2B's to the letter.
//!
//! A request type knows every field of E2B's. What Pando does not do yet is an `Option<Value>` that control refuses by
//! name when present; what nobody knows is refused by `deny_unknown_fields`. Nothing is accepted and ignored, save what
//! E2B itself documents as ignored.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::SandboxId;

/// Body of every answer that is not a success. `code` repeats the HTTP status: the JavaScript SDK reads it there.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// The HTTP status.
    pub code: u16,
    /// What went wrong and what to do next, for people.
    pub message: String,
    /// A stable word for programs; see `docs/errors.md`.
    pub error_code: String,
    /// Quote this when asking for help; the log has it.
    #[serde(rename = "requestID", default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// From a node to control only: the causes, for the log. They name places on the host, so no client is told them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(ignore)]
    pub detail: Option<String>,
}

/// Body of `POST /sandboxes` and `POST /v2/sandboxes`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NewSandbox {
    /// Template ID or name.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Seconds to live. Default 300 (v2) or 15 (v1).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// Free key and value pairs, to filter lists by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Environment of every command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
    /// Whether the internet can be reached. Default true.
    #[serde(rename = "allow_internet_access", skip_serializing_if = "Option::is_none")]
    pub allow_internet_access: Option<bool>,
    /// Ignored, as in E2B: a sandbox is always secured with a token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secure: Option<bool>,
    /// Only `false` is supported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto_pause: Option<bool>,
    /// Not supported: refused by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto_pause_memory: Option<Value>,
    /// Only `{"enabled": false}` is supported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto_resume: Option<Value>,
    /// Not supported: refused by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<Value>,
    /// Not supported: refused by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iam: Option<Value>,
    /// E2B's server stores nothing of it either; the SDK starts the gateway itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mcp: Option<Value>,
    /// Not supported: refused by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_mounts: Option<Value>,
}

/// Answer to create and connect.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sandbox {
    /// The template's ID.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// The sandbox's ID.
    #[serde(rename = "sandboxID")]
    #[schema(value_type = String)]
    pub sandbox_id: SandboxId,
    /// E2B's legacy constant; here the node's name.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// The envd version whose behaviour the agent has.
    pub envd_version: String,
    /// The name it was created by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// `X-Access-Token` for the agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// Always null: ports are public.
    pub traffic_access_token: Option<String>,
    /// The domain of `<port>-<sandboxID>.<domain>`; null when the server has none.
    pub domain: Option<String>,
}

/// `running`: the only state yet that a client can see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It serves.
    Running,
    /// It is stopped with its memory kept.
    Paused,
}

/// An element of `GET /v2/sandboxes`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ListedSandbox {
    /// The template's ID.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// The name it was created by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// The sandbox's ID.
    #[serde(rename = "sandboxID")]
    #[schema(value_type = String)]
    pub sandbox_id: SandboxId,
    /// The node's name.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// When it started.
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
    /// When it will be killed.
    #[schema(value_type = String, format = DateTime)]
    pub end_at: Timestamp,
    /// vCPUs.
    pub cpu_count: u32,
    /// Memory in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// Root disk in MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// As given at create.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Its state.
    pub state: State,
    /// The envd version whose behaviour the agent has.
    pub envd_version: String,
}

/// Answer to `GET /sandboxes/{id}`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxDetail {
    /// What a list shows.
    #[serde(flatten)]
    pub listed: ListedSandbox,
    /// `X-Access-Token` for the agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// Whether the internet can be reached.
    pub allow_internet_access: Option<bool>,
    /// The domain of `<port>-<sandboxID>.<domain>`; null when the server has none.
    pub domain: Option<String>,
    /// What happens at the end of its time.
    pub lifecycle: Lifecycle,
}

/// What happens at the end of a sandbox's time.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Lifecycle {
    /// Whether traffic wakes it when paused.
    pub auto_resume: bool,
    /// `kill`.
    pub on_timeout: String,
}

/// Body of `POST /sandboxes/{id}/timeout`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetTimeout {
    /// Seconds from now. Zero or less: it ends now.
    pub timeout: i64,
}

/// Body of `POST /sandboxes/{id}/refreshes`.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Refresh {
    /// Seconds from now, 0 to 3600. Never shortens.
    pub duration: Option<i64>,
}

/// Body of `POST /sandboxes/{id}/connect` (`timeout` required) and `POST /v2/sandboxes/{id}/connect` (default 300).
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Connect {
    /// Seconds from now. Never shortens.
    pub timeout: Option<i64>,
    /// Whether a paused sandbox resumes with its memory; without effect on a running one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
}

/// One sample of `GET /sandboxes/{id}/metrics`. Sizes in bytes.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxMetric {
    /// When it was taken.
    #[schema(value_type = String, format = DateTime)]
    pub timestamp: Timestamp,
    /// The same in Unix seconds.
    pub timestamp_unix: i64,
    /// vCPUs.
    pub cpu_count: u32,
    /// CPU use in percent of one CPU times `cpuCount`.
    pub cpu_used_pct: f32,
    /// Memory in use.
    pub mem_used: u64,
    /// Memory of the guest.
    pub mem_total: u64,
    /// Page cache.
    pub mem_cache: u64,
    /// Used on the root disk.
    pub disk_used: u64,
    /// Size of the root disk.
    pub disk_total: u64,
}

/// A line of `GET /sandboxes/{id}/logs`, in E2B's first form: `line` is itself JSON.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SandboxLog {
    /// When it was read.
    #[schema(value_type = String, format = DateTime)]
    pub timestamp: Timestamp,
    /// JSON text with `level`, `logger` and `message`.
    pub line: String,
}

/// The same line in E2B's second form.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SandboxLogEntry {
    /// When it was read.
    #[schema(value_type = String, format = DateTime)]
    pub timestamp: Timestamp,
    /// The line.
    pub message: String,
    /// `debug`, `info`, `warn` or `error`.
    pub level: String,
    /// `logger`: who wrote it.
    pub fields: BTreeMap<String, String>,
}

/// Answer to `GET /sandboxes/{id}/logs`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxLogs {
    /// First form.
    pub logs: Vec<SandboxLog>,
    /// Second form, the same lines.
    pub log_entries: Vec<SandboxLogEntry>,
}

/// Answer to `GET /v2/sandboxes/{id}/logs`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SandboxLogsV2 {
    /// The lines.
    pub logs: Vec<SandboxLogEntry>,
}

/// An element of `GET /templates`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Template {
    /// The template's ID.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// The build that sandboxes are made from.
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// vCPUs of a sandbox.
    pub cpu_count: u32,
    /// Memory in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// Root disk in MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// Whether other teams may use it.
    pub public: bool,
    /// Names.
    pub aliases: Vec<String>,
    /// Names with namespace.
    pub names: Vec<String>,
    /// When it was first built.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    /// When it was last built.
    #[schema(value_type = String, format = DateTime)]
    pub updated_at: Timestamp,
    /// The envd version whose behaviour the agent has.
    pub envd_version: String,
    /// `ready`.
    pub build_status: String,
    /// Bytes on the node's disk (Pando's own field).
    pub bytes: u64,
}

/// Answer to `GET /templates/aliases/{alias}`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateAlias {
    /// The template that has the name.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Whether other teams may use it.
    pub public: bool,
}

/// An element of `GET /teams`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Team {
    /// The team's ID.
    #[serde(rename = "teamID")]
    pub team_id: String,
    /// Its name.
    pub name: String,
    /// Empty: a key is shown once, when it is made.
    pub api_key: String,
    /// Whether it is the key's own team.
    pub is_default: bool,
}

/// Answer to `GET /health`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// `ok`.
    pub status: String,
    /// The program's version.
    pub version: String,
}
