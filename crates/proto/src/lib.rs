//! The words Pando's parts use with each other: identifiers, HTTP wire types, specifications, manifests.
//!
//! Owns: every type that crosses a process boundary. Does not own: behaviour. Nothing here does I/O or is async,
//! so that any crate can use it, the guest agent included.
//!
//! * [`id`]: identifiers as types, each with one validated textual form.
//! * [`api`]: the public HTTP API (E2B's names and shapes).
//! * [`node`]: what control and node say to each other.
//! * [`guest`]: what node and the agent in the guest agree on: addresses, ports, the `/init` body.
//! * [`manifest`]: the file that makes a directory a template.
//! * [`vmm`]: what the node and a machine's process say to each other.
//! * [`rpc`]: envd's Connect RPC messages (feature `rpc`).

pub mod api;
mod chain;
pub mod guest;
pub mod id;
pub mod manifest;
pub mod node;
#[cfg(feature = "rpc")]
pub mod rpc;
pub mod secret;
pub mod vmm;

pub use chain::chain;
pub use id::{BuildId, IdError, RequestId, SandboxId, TeamId, TemplateId};
pub use secret::Secret;
