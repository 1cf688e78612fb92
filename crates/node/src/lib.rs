//! The sandboxes of one host.
//!
//! Owns: every machine on this host, from its process to its place on disk, and the clock that ends it. Does not own:
//! who may have a sandbox (that is `control`), what crosses its border (`edge`), what its files look like (`store`).
//!
//! * [`machine`]: what a machine can do, and the drivers that make one.
//! * [`sandbox`]: one owner task for each sandbox, and the table of them.
//! * [`guest`]: what is said to the agent in a guest.
//! * [`template`]: booting a disk and parking it as a template.
//! * [`sweep`]: removing what a crash left.
//! * [`cgroup`]: bounds on machines' processes.
//! * [`uids`]: user IDs for machines, no other server's on this host.
//! * [`http`]: the node's own API, for `control`.
//! * [`metrics`], [`logs`]: bounded records of each sandbox.

pub mod cgroup;
pub mod guest;
pub mod http;
pub mod logs;
pub mod machine;
pub mod metrics;
pub mod sandbox;
pub mod sweep;
pub mod template;
pub mod uids;

mod sys;

use std::sync::Arc;

pub use sandbox::{Node, NodeConfig};

/// What can go wrong on a node.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// No such sandbox on this node.
    #[error("there is no such sandbox on this node")]
    NotFound,
    /// No such template on this node.
    #[error("template {0} is not on this node")]
    UnknownTemplate(proto::TemplateId),
    /// The sandbox ended before its create could be answered.
    #[error("the sandbox ended while it was being created: {}", .0.describe())]
    Ended(proto::node::EndReason),
    /// The node has as many sandboxes as it may, or a sandbox's owner has too much to do.
    #[error("this node is full: {0}")]
    Busy(&'static str),
    /// The host's disk is almost full.
    #[error("the host has {free_mib} MiB of disk left, less than the {needed_mib} MiB it keeps free")]
    DiskFull {
        /// What is left.
        free_mib: u64,
        /// What must be.
        needed_mib: u64,
    },
    /// The user IDs that machines are to run under are other servers'.
    #[error(
        "this host has no {count} user IDs free from {base} on: other pando servers or users have them; set \
         limits.uid_base or a lower limits.max_sandboxes"
    )]
    NoUids {
        /// Where the search began.
        base: u32,
        /// How many were wanted.
        count: u32,
    },
    /// The node is shutting down.
    #[error("this node is shutting down")]
    Stopping,
    /// Something on the disk.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// The machine.
    #[error(transparent)]
    Machine(#[from] machine::MachineError),
    /// The network link.
    #[error("the sandbox's network link cannot be made")]
    Link(#[from] edge::link::LinkError),
    /// The agent in the guest.
    #[error(transparent)]
    Guest(#[from] guest::GuestError),
    /// A file operation.
    #[error("cannot {verb} {path}")]
    Io {
        /// What was tried.
        verb: &'static str,
        /// On which file.
        path: std::path::PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// An error that several callers are told.
    #[error(transparent)]
    Shared(#[from] Arc<NodeError>),
    /// A background task ended without an answer: a defect.
    #[error("the sandbox's owner task ended without an answer")]
    OwnerLost,
}
