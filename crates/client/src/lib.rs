//! The one client for Pando's own APIs, over TCP or a Unix socket.
//!
//! * [`http`]: requests, answers and errors; everything else stands on it.
//! * [`node`]: what control asks of a node.
//! * [`api`]: what the command line asks of the public API.
//! * [`envd`]: what the command line asks of the agent in a sandbox: commands and files.

pub mod api;
pub mod envd;
pub mod http;
pub mod node;

pub use http::{ClientError, Endpoint};
