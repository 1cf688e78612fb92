//! The floor: addresses that no policy opens.
//!
//! Owns: the fixed ranges and the host's own addresses, which are read again by [`Floor::refresh`]. Does not own: when
//! that happens (the link does, at each attach and every few seconds).
//!
//! The documentation ranges (192.0.2.0/24, 198.51.100.0/24, 203.0.113.0/24) are open on purpose: nothing on a real
//! network has such an address, and tests put their hosts there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use parking_lot::RwLock;

const FIXED: [(Ipv4Addr, u8, &str); 12] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8, "floor:this-network"),
    (Ipv4Addr::new(10, 0, 0, 0), 8, "floor:private"),
    (Ipv4Addr::new(100, 64, 0, 0), 10, "floor:shared"),
    (Ipv4Addr::new(127, 0, 0, 0), 8, "floor:loopback"),
    (Ipv4Addr::new(169, 254, 0, 0), 16, "floor:link-local"),
    (Ipv4Addr::new(172, 16, 0, 0), 12, "floor:private"),
    (Ipv4Addr::new(192, 0, 0, 0), 24, "floor:protocol-assignments"),
    (Ipv4Addr::new(192, 168, 0, 0), 16, "floor:private"),
    (Ipv4Addr::new(198, 18, 0, 0), 15, "floor:benchmarking"),
    (Ipv4Addr::new(224, 0, 0, 0), 4, "floor:multicast"),
    (Ipv4Addr::new(255, 255, 255, 255), 32, "floor:broadcast"),
    (Ipv4Addr::new(240, 0, 0, 0), 4, "floor:reserved"),
];

/// The floor. Cheap to clone; clones share the host's addresses.
#[derive(Debug, Clone, Default)]
pub struct Floor {
    opened: Vec<(Ipv4Addr, u8)>,
    host: Arc<RwLock<Vec<IpAddr>>>,
}

impl Floor {
    /// A floor with a hole, for tests that have only the loopback interface to be "the Internet". Never made from a
    /// user's configuration.
    pub fn with_opened(opened: &[(Ipv4Addr, u8)]) -> Self {
        Self { opened: opened.to_vec(), host: Arc::default() }
    }

    /// Reads the host's own addresses again.
    pub fn refresh(&self) -> std::io::Result<()> {
        let found = crate::sys::host_addresses()?;
        *self.host.write() = found;
        Ok(())
    }

    /// The name of the rule that covers this address, if one does.
    pub fn covers(&self, address: IpAddr) -> Option<&'static str> {
        match address {
            IpAddr::V4(v4) => self.covers_v4(v4),
            IpAddr::V6(v6) => self.covers_v6(v6),
        }
    }

    /// Whether a hole was made for this address.
    pub fn is_opened(&self, address: Ipv4Addr) -> bool {
        self.opened.iter().any(|(base, prefix)| within(address, *base, *prefix))
    }

    fn covers_v4(&self, address: Ipv4Addr) -> Option<&'static str> {
        if self.is_opened(address) {
            return None;
        }
        if let Some((_, _, rule)) = FIXED.iter().find(|(base, prefix, _)| within(address, *base, *prefix)) {
            return Some(rule);
        }
        self.host.read().contains(&IpAddr::V4(address)).then_some("floor:host")
    }

    fn covers_v6(&self, address: Ipv6Addr) -> Option<&'static str> {
        if let Some(inner) = embedded_v4(address) {
            return self.covers_v4(inner);
        }
        // Global unicast is 2000::/3; whatever lies outside is loopback, unique local, link-local, multicast,
        // unspecified or unassigned.
        if address.segments()[0] & 0xe000 != 0x2000 {
            return Some("floor:ipv6");
        }
        self.host.read().contains(&IpAddr::V6(address)).then_some("floor:host")
    }
}

fn within(address: Ipv4Addr, base: Ipv4Addr, prefix: u8) -> bool {
    let mask = u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0);
    u32::from(address) & mask == u32::from(base) & mask
}

/// The IPv4 address that a translation or tunnel address leads to.
fn embedded_v4(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let s = address.segments();
    let low = |high: u16, low: u16| Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
    match s {
        // Mapped, compatible (not :: and ::1, which 2000::/3 leaves out anyway), NAT64 and its local-use prefix.
        [0, 0, 0, 0, 0, 0xffff, a, b] | [0, 0, 0, 0, 0xffff, 0, a, b] => Some(low(a, b)),
        [0x64, 0xff9b, 0, 0, 0, 0, a, b] => Some(low(a, b)),
        [0x2002, a, b, ..] => Some(low(a, b)),
        // Teredo hides the client's address by inverting it.
        [0x2001, 0, _, _, _, _, a, b] => Some(low(!a, !b)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covered(address: &str) -> bool {
        Floor::default().covers(address.parse().unwrap()).is_some()
    }

    #[test]
    fn edges_of_every_range() {
        for address in [
            "0.0.0.0",
            "0.255.255.255",
            "10.0.0.0",
            "10.255.255.255",
            "100.64.0.0",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.255.255",
            "169.254.0.0",
            "169.254.169.254",
            "169.254.255.255",
            "172.16.0.0",
            "172.31.255.255",
            "192.0.0.0",
            "192.0.0.255",
            "192.168.0.0",
            "192.168.255.255",
            "198.18.0.0",
            "198.19.255.255",
            "224.0.0.0",
            "239.255.255.255",
            "240.0.0.0",
            "255.255.255.254",
            "255.255.255.255",
        ] {
            assert!(covered(address), "{address}");
        }
        for address in [
            "1.0.0.0",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "169.253.255.255",
            "169.255.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.0",
            "192.0.2.1",
            "198.51.100.7",
            "203.0.113.9",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
        ] {
            assert!(!covered(address), "{address}");
        }
    }

    #[test]
    fn ipv6_follows_ipv4() {
        for address in [
            "::",
            "::1",
            "fe80::1",
            "fd00::1",
            "fc00::1",
            "ff02::1",
            "::ffff:169.254.169.254",
            "::ffff:10.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::a9fe:a9fe",
            "2002:a9fe:a9fe::1",
            "2002:7f00:1::",
            "2001:0:1:2:3:4:80ff:fffe",
            "::127.0.0.1",
            "100::1",
        ] {
            assert!(covered(address), "{address}");
        }
        assert!(!covered("2606:4700::1111"));
        assert!(!covered("64:ff9b::101:101"));
    }

    #[test]
    fn host_addresses_are_covered_after_a_refresh() {
        let floor = Floor::default();
        floor.refresh().unwrap();
        for address in crate::sys::host_addresses().unwrap() {
            assert!(floor.covers(address).is_some(), "{address}");
        }
    }

    #[test]
    fn a_hole_is_only_as_wide_as_asked() {
        let floor = Floor::with_opened(&[(Ipv4Addr::new(127, 0, 0, 1), 32)]);
        assert_eq!(floor.covers([127, 0, 0, 1].into()), None);
        assert!(floor.covers([127, 0, 0, 2].into()).is_some());
    }
}
