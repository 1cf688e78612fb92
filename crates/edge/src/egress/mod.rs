//! What a guest may reach.
//!
//! Owns: the policy of one sandbox, the decision on one flow, the [`floor`] below all policies, DNS ([`dns`] reads and
//! builds messages, [`resolver`] forwards them). Does not own: sockets of flows (the link does).
//!
//! Contract: [`decide`] is pure, and is asked before anything of a flow exists on the host.

pub mod dns;
pub mod floor;
pub mod resolver;

use std::net::SocketAddr;

pub use floor::Floor;

/// What one sandbox may reach, above the floor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EgressPolicy {
    /// The Internet: every address the floor leaves open. Without it nothing is reachable and no name resolves.
    pub internet: bool,
}

impl EgressPolicy {
    /// Everything above the floor.
    pub const OPEN: Self = Self { internet: true };
    /// Nothing at all.
    pub const CLOSED: Self = Self { internet: false };
}

/// The kind of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// A TCP connection.
    Tcp,
    /// Datagrams between two ports.
    Udp,
    /// ICMP echo; the destination's port is 0.
    Ping,
}

/// One flow that a guest wants to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// Its kind.
    pub protocol: Protocol,
    /// Where to.
    pub destination: SocketAddr,
}

/// The answer to a [`Flow`], with the name of the rule that gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// Whether the flow may exist.
    pub allow: bool,
    /// The rule that decided.
    pub rule: &'static str,
}

/// Decides on one flow: the floor first, then the policy.
pub fn decide(policy: &EgressPolicy, flow: &Flow, floor: &Floor) -> Decision {
    if !policy.internet {
        return Decision { allow: false, rule: "no-internet" };
    }
    if let Some(rule) = floor.covers(flow.destination.ip()) {
        return Decision { allow: false, rule };
    }
    if flow.protocol != Protocol::Ping && flow.destination.port() == 0 {
        return Decision { allow: false, rule: "port-zero" };
    }
    Decision { allow: true, rule: "internet" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(destination: &str) -> Flow {
        Flow { protocol: Protocol::Tcp, destination: destination.parse().unwrap() }
    }

    #[test]
    fn floor_beats_policy_and_policy_beats_internet() {
        let floor = Floor::default();
        assert!(decide(&EgressPolicy::OPEN, &flow("1.1.1.1:443"), &floor).allow);
        assert_eq!(decide(&EgressPolicy::CLOSED, &flow("1.1.1.1:443"), &floor).rule, "no-internet");
        let denied = decide(&EgressPolicy::OPEN, &flow("169.254.169.254:80"), &floor);
        assert_eq!(denied, Decision { allow: false, rule: "floor:link-local" });
        assert!(!decide(&EgressPolicy::OPEN, &flow("1.1.1.1:0"), &floor).allow);
    }
}
