//! The stream of a guest's frame socket, read as the link reads it: framing, Ethernet, ARP, IPv4, TCP, UDP, ICMP.
#![no_main]

use std::net::Ipv4Addr;

use edge::link::frame;
use libfuzzer_sys::fuzz_target;

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);

fn packet(bytes: &[u8]) {
    let _ = frame::arp_reply(bytes, GUEST, [2; 6]);
    frame::lower_window(&mut bytes.to_vec());
    let Ok(ip) = frame::ipv4(bytes) else { return };
    assert!(ip.packet.len() <= bytes.len() && ip.payload.len() < ip.packet.len());
    let _ = frame::tcp(ip.payload);
    let _ = frame::udp(&ip);
    if let Some(echo) = frame::echo(ip.payload, 8) {
        let reply = frame::build_echo(0, echo.ident, echo.sequence, echo.payload);
        assert!(frame::echo(&reply, 0).is_some());
    }
    for why in [frame::Unreachable::Port, frame::Unreachable::TooBig(1500)] {
        let error = frame::build_unreachable(why, ip.packet, ip.destination, GUEST);
        assert!(error.is_some_and(|error| frame::ipv4(&error).is_ok()));
    }
}

fuzz_target!(|data: &[u8]| {
    packet(data);
    let mut rest = data;
    while let Ok(Some((bytes, used))) = frame::split(rest) {
        assert!(used > 0);
        rest = &rest[used..];
        if let Some(ethernet) = frame::ethernet(bytes) {
            packet(ethernet.payload);
        }
    }
});
