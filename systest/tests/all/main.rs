//! Tests of the whole: each starts a server of its own and looks at what its clients see and what the host has.

// A test's way to fail.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod api;
mod cli;
mod clients;
mod isolation;
mod life;
mod network;
