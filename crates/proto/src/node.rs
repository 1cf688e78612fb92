//! What control and node say to each other, over HTTP on a Unix socket or TCP. Not a public API: both sides are one
//! program of one version.
//!
//! ```text
//! PUT    /sandboxes/{id}            SandboxSpec      -> 201 SandboxView, answered when the guest is ready; idempotent
//! GET    /sandboxes                                  -> 200 [SandboxView]
//! GET    /sandboxes/{id}                             -> 200 SandboxView | 404
//! DELETE /sandboxes/{id}                             -> 204 | 404, from every state
//! PUT    /sandboxes/{id}/deadline   Deadline         -> 204 | 404
//! GET    /sandboxes/{id}/metrics?start&end           -> 200 [api::SandboxMetric] | 404
//! GET    /sandboxes/{id}/logs                        -> 200 [LogLine] | 404
//! GET    /templates                                  -> 200 [TemplateView]
//! GET    /events                                     -> 200 a JSON object per line, for as long as the client reads
//! ```
//! Errors are [`crate::api::ErrorBody`].

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{SandboxId, Secret, TemplateId};

/// A validated request for a sandbox: control has checked quota, template and fields, the node acts on it as it is.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SandboxSpec {
    /// The sandbox to be.
    pub id: SandboxId,
    /// The template it is a copy of.
    pub template: TemplateId,
    /// Environment of every command.
    pub env: BTreeMap<String, String>,
    /// The token the agent demands.
    pub access_token: Secret,
    /// When the node kills it.
    pub end_at: Timestamp,
    /// Whether anything beyond the guest's link may be reached.
    pub internet: bool,
}

/// Where a sandbox is in its life (design, section 6). Pause and snapshot states come with their operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxState {
    /// The machine is being made; the guest has not yet said who it is.
    Creating,
    /// The guest serves.
    Running,
    /// The machine is being taken down.
    Killing,
    /// Nothing of it is left on the node.
    Gone,
}

/// Why a sandbox is gone, or was never there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// Its owner asked.
    Killed,
    /// Its time was up.
    TimedOut,
    /// The machine's process ended by itself.
    MachineDied,
    /// It could not be created.
    CreateFailed,
    /// The node shut down.
    NodeStopped,
}

impl EndReason {
    /// For people.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Killed => "it was killed",
            Self::TimedOut => "its timeout was reached",
            Self::MachineDied => "its virtual machine ended unexpectedly",
            Self::CreateFailed => "it could not be created",
            Self::NodeStopped => "the node was shut down",
        }
    }
}

/// A sandbox as the node sees it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxView {
    /// The sandbox.
    pub id: SandboxId,
    /// Its state.
    pub state: SandboxState,
    /// When the guest was ready.
    pub started_at: Timestamp,
    /// When the node kills it.
    pub end_at: Timestamp,
}

/// Body of `PUT /sandboxes/{id}/deadline`.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Deadline {
    /// When the node kills the sandbox; a past time kills it now.
    pub end_at: Timestamp,
}

/// Something happened to a sandbox.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// When.
    pub at: Timestamp,
    /// To which sandbox.
    pub sandbox: SandboxId,
    /// The state it is in now.
    pub state: SandboxState,
    /// From [`SandboxState::Killing`] on: why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<EndReason>,
}

/// A line the machine or the agent wrote.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LogLine {
    /// When the node read it.
    pub at: Timestamp,
    /// `console` for the guest's console, `node` for what the node has to say.
    pub source: String,
    /// The line, without its end.
    pub text: String,
}

/// A template that sandboxes can be made from on this node.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TemplateView {
    /// Everything the manifest says.
    pub manifest: crate::manifest::Manifest,
    /// Bytes its files take on disk, holes not counted.
    pub bytes: u64,
}
