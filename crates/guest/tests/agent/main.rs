//! Drives the agent in its test mode over HTTP, as the SDKs do: the bug reports that need no virtual machine.
//!
//! Each test starts an agent of its own on a free port. Tests about other users' rights need root and say so when they are
//! left out.

mod files;
mod harness;
mod processes;
mod watchers;
