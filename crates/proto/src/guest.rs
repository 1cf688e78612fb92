//! What the host and the agent in the guest agree on.
//!
//! Every guest has the same address and MAC (design, section 5), so a restored copy needs no new configuration. The
//! edge is the only other station on the link and answers for every address.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use crate::{SandboxId, Secret, TemplateId};

/// The guest's address on the link, with prefix length [`PREFIX`].
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
/// The edge: default gateway, name server, and the source of every connection from the host.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// Prefix length of the link's network.
pub const PREFIX: u8 = 24;
/// The guest's MAC.
pub const MAC: [u8; 6] = [0x02, 0x50, 0x41, 0x4e, 0x44, 0x4f];
/// The edge's MAC.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0x50, 0x41, 0x4e, 0x44, 0x01];

/// envd's HTTP and Connect port (`e2b-protocol` section 3).
pub const ENVD_PORT: u16 = 49983;

/// The relay: reaches ports that listen only on the guest's 127.0.0.1 or ::1.
///
/// The edge connects, sends the port as two bytes, big-endian, and reads one byte, [`RELAY_OK`] or
/// [`RELAY_REFUSED`]; after `RELAY_OK` the connection is the port's. Only [`GATEWAY`] may use it.
pub const RELAY_PORT: u16 = 49982;
/// The relay has connected.
pub const RELAY_OK: u8 = 0;
/// Nothing listens on that port.
pub const RELAY_REFUSED: u8 = 1;

/// The agent writes this line to the console when everything is up and a snapshot may be taken.
pub const READY_LINE: &str = "pando-guest: ready";

/// The version of envd whose behaviour the agent has; SDKs switch features on by it (`e2b-protocol` 2.1).
pub const ENVD_VERSION: &str = "0.6.13";

/// Body of `POST /init`: who this copy of the machine is. Accepted from [`GATEWAY`] alone. E2B's fields, and Pando's
/// own from `sandboxID` on. The agent answers 204 when all of it is in effect, and before that serves no user code.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Init {
    /// Environment of every command; replaces the variables of an earlier `/init` of the same name.
    pub env_vars: BTreeMap<String, String>,
    /// The token that every later request must carry in `X-Access-Token`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub access_token: Option<Secret>,
    /// The wall clock at the host, RFC 3339 with nanoseconds. An older one than the last is ignored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timestamp: Option<jiff::Timestamp>,
    /// User of commands that name none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_user: Option<String>,
    /// Working directory of commands that name none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_workdir: Option<String>,
    /// The new sandbox ID; also the new host name.
    #[serde(rename = "sandboxID", skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<SandboxId>,
    /// The template this is a copy of.
    #[serde(rename = "templateID", skip_serializing_if = "Option::is_none")]
    pub template_id: Option<TemplateId>,
    /// How many copies lie between the template's first boot and this machine; differs between parent and child.
    pub generation: u64,
    /// Base64 of fresh random bytes (at least 32), fed to the kernel's pool, which is then reseeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy: Option<Secret>,
}

/// Body of `GET /metrics` of the agent (`e2b-protocol` 3.4). Sizes in bytes unless the name says otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Unix time in seconds.
    pub ts: i64,
    /// Number of CPUs.
    pub cpu_count: u32,
    /// CPU use since the last sample, percent of one CPU times `cpu_count`.
    pub cpu_used_pct: f32,
    /// Memory of the guest.
    pub mem_total: u64,
    /// Memory in use without the page cache.
    pub mem_used: u64,
    /// Page cache.
    pub mem_cache: u64,
    /// Used on the root disk.
    pub disk_used: u64,
    /// Size of the root disk.
    pub disk_total: u64,
    /// `mem_total` in MiB.
    pub mem_total_mib: u64,
    /// `mem_used` in MiB.
    pub mem_used_mib: u64,
}
