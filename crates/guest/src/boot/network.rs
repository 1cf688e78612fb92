//! The guest's one link: fixed addresses, the same in every guest (`proto::guest`).

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use proto::guest::{ADDRESS, GATEWAY, GATEWAY_MAC, PREFIX};

use super::{optional, say};
use crate::sys::ioctl::{default_route, interface_up, permanent_neighbour, set_address};

/// How long the card may take to appear.
const CARD_WAIT: Duration = Duration::from_secs(3);

/// The only interface that is not the loopback, whatever its name.
fn card() -> Option<String> {
    let start = Instant::now();
    loop {
        let found = fs::read_dir("/sys/class/net").ok()?.flatten().find(|entry| {
            // Real cards have a device; tunnels and the like that some kernels make do not.
            entry.file_name() != "lo" && entry.path().join("device").exists()
        });
        if let Some(found) = found {
            return found.file_name().into_string().ok();
        }
        if start.elapsed() > CARD_WAIT {
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Brings the loopback and the card up. Without a card there is a console message and no network.
pub(super) fn up() {
    optional("bring lo up", interface_up("lo"));
    let Some(name) = card() else {
        say("pando-guest: no network card");
        return;
    };
    // The link is IPv4; router solicitations would only be noise on it. The loopback keeps ::1.
    let ipv6 = format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6");
    if Path::new(&ipv6).exists() {
        optional("disable IPv6 on the card", fs::write(ipv6, "1"));
    }
    optional("set the address", set_address(&name, ADDRESS, PREFIX));
    optional("bring the card up", interface_up(&name));
    optional("set the default route", default_route(GATEWAY));
    optional("enter the gateway's MAC", permanent_neighbour(&name, GATEWAY, GATEWAY_MAC));
}
