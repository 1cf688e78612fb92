//! The control plane: the public HTTP API, keys, and the record of who has which sandbox.
//!
//! Owns: the database, authentication, the meaning of each request. Does not own: machines (it asks a node, over HTTP),
//! nor the bytes of a sandbox's ports (`edge::ingress`, mounted in front of the API).
//!
//! * [`http`]: handlers: parse, call, map the error.
//! * [`app`]: what a request does.
//! * [`db`]: the database.
//! * [`keys`]: API keys and the tokens of sandboxes.
//! * [`listing`]: filters and cursors of a list, pure.
//! * [`follow`]: what nodes report.
//! * [`error`]: the one HTTP error.

pub mod app;
pub mod db;
pub mod error;
pub mod follow;
pub mod http;
pub mod keys;
pub mod listing;

pub use app::{Control, ControlConfig};
pub use error::ApiError;
