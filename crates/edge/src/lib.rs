//! Every byte that crosses a sandbox's border.
//!
//! * [`link`]: the virtual network. Frames of a guest come in over a stream socket; TCP is terminated here and spliced to
//!   host sockets, UDP and ping are relayed, and the host opens connections into the guest.
//! * [`egress`]: what a guest may reach: the policy, the floor that no policy opens, and DNS.
//! * [`ingress`]: HTTP from outside to a port of a sandbox.
//!
//! Owns: routing, relaying, limits of one sandbox's traffic. Does not own: which sandboxes exist, who may call them (the
//! caller of [`ingress`] does), machines (the node gives [`link`] a socket).

pub mod egress;
pub mod ingress;
pub mod link;
mod sys;
