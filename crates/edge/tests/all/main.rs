//! Tests of the crate from outside: a guest made of smoltcp on one end of a socket pair, real sockets on the other side.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

mod dns;
mod guest;
mod inbound;
mod ingress;
mod limits;
mod outbound;
