//! Tests of the whole: each starts a server of its own and looks at what its clients see and what the host has.

mod api;
mod cli;
mod clients;
mod isolation;
mod life;
mod network;
