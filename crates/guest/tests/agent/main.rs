//! Drives the agent in its test mode over HTTP, as the SDKs do: the bug reports that need no virtual machine.
//!
//! Each test starts an agent of its own on a free port. Tests about other users' rights need root and say so when they are
//! left out.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]

mod files;
mod harness;
mod processes;
mod watchers;
