//! envd's Connect RPC messages and services, generated from `proto/process.proto` and `proto/filesystem.proto`.
//!
//! Owns: the words of the two services. Does not own: what they do (crate `guest`). Field names and numbers are
//! E2B's and never change; JSON and binary codecs both read them.
#![allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]

connectrpc::include_generated!();
