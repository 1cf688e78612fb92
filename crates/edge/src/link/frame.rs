//! Reading and building what travels on the link: Ethernet, ARP, IPv4, UDP, ICMP and the head of TCP.
//!
//! Owns: pure functions on byte slices. Everything here eats bytes of a hostile guest: lengths are checked before use,
//! and nothing panics whatever the input. Does not own: TCP itself (smoltcp does), sockets, policy.

use std::net::{Ipv4Addr, SocketAddrV4};

/// Length of an Ethernet header.
pub const ETHERNET: usize = 14;
/// The largest IP packet on the link.
pub const MTU: usize = 65520;
/// The longest frame that a sane peer announces; QEMU's own buffers are this big.
pub const MAX_FRAME: usize = 4096 + 65536;
/// Length of the prefix that announces a frame.
pub const PREFIX: usize = 4;
/// Length of an IPv4 header without options.
pub const IPV4: usize = 20;
const UDP: usize = 8;
const ICMP: usize = 8;

/// EtherType of IPv4.
pub const TYPE_IPV4: u16 = 0x0800;
/// EtherType of ARP.
pub const TYPE_ARP: u16 = 0x0806;

/// IP protocol numbers.
pub const ICMP_PROTOCOL: u8 = 1;
/// TCP.
pub const TCP_PROTOCOL: u8 = 6;
/// UDP.
pub const UDP_PROTOCOL: u8 = 17;

/// A frame was announced with a length that no frame has; the stream cannot be trusted after that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a frame of {0} bytes was announced")]
pub struct BadLength(pub usize);

/// Takes the first whole frame of the stream: `(frame, bytes used)`, or `None` when it has not all arrived.
pub fn split(stream: &[u8]) -> Result<Option<(&[u8], usize)>, BadLength> {
    let Some((prefix, rest)) = stream.split_first_chunk::<PREFIX>() else { return Ok(None) };
    let length = u32::from_be_bytes(*prefix) as usize;
    if length > MAX_FRAME || length == 0 {
        return Err(BadLength(length));
    }
    Ok(rest.get(..length).map(|frame| (frame, PREFIX + length)))
}

/// An Ethernet frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ethernet<'a> {
    /// Destination MAC.
    pub destination: [u8; 6],
    /// Source MAC.
    pub source: [u8; 6],
    /// EtherType.
    pub kind: u16,
    /// What follows the header.
    pub payload: &'a [u8],
}

/// Reads an Ethernet header.
pub fn ethernet(frame: &[u8]) -> Option<Ethernet<'_>> {
    let (head, payload) = frame.split_first_chunk::<ETHERNET>()?;
    let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, k0, k1] = *head;
    Some(Ethernet {
        destination: [d0, d1, d2, d3, d4, d5],
        source: [s0, s1, s2, s3, s4, s5],
        kind: u16::from_be_bytes([k0, k1]),
        payload,
    })
}

/// Writes an Ethernet header.
pub fn put_ethernet(head: &mut [u8; ETHERNET], destination: [u8; 6], source: [u8; 6], kind: u16) {
    head[..6].copy_from_slice(&destination);
    head[6..12].copy_from_slice(&source);
    head[12..].copy_from_slice(&kind.to_be_bytes());
}

/// Answers an ARP request for any address but `guest`'s own: `mac` has it. `None` for all else, gratuitous requests
/// and address probes among them (an answer would mean "address in use").
pub fn arp_reply(request: &[u8], guest: Ipv4Addr, mac: [u8; 6]) -> Option<[u8; 28]> {
    let request: &[u8; 28] = request.first_chunk()?;
    // Ethernet, IPv4, 6- and 4-byte addresses, operation 1 (request).
    if request[..8] != [0, 1, 8, 0, 6, 4, 0, 1] {
        return None;
    }
    let target = Ipv4Addr::new(request[24], request[25], request[26], request[27]);
    if target == guest || target.is_unspecified() {
        return None;
    }
    let mut reply = [0; 28];
    reply[..8].copy_from_slice(&[0, 1, 8, 0, 6, 4, 0, 2]);
    reply[8..14].copy_from_slice(&mac);
    reply[14..18].copy_from_slice(&target.octets());
    reply[18..28].copy_from_slice(&request[8..18]);
    Some(reply)
}

/// Why an IPv4 packet is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bad {
    /// It contradicts itself or is cut.
    Malformed,
    /// It is a fragment; the link's MTU leaves no reason for one.
    Fragment,
}

/// An IPv4 packet whose lengths agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv4<'a> {
    /// Source address.
    pub source: Ipv4Addr,
    /// Destination address.
    pub destination: Ipv4Addr,
    /// Protocol number.
    pub protocol: u8,
    /// The packet without Ethernet padding.
    pub packet: &'a [u8],
    /// What follows the header.
    pub payload: &'a [u8],
}

/// Reads an IPv4 header and checks its checksum.
pub fn ipv4(bytes: &[u8]) -> Result<Ipv4<'_>, Bad> {
    let head: &[u8; IPV4] = bytes.first_chunk().ok_or(Bad::Malformed)?;
    let header = usize::from(head[0] & 0x0f) * 4;
    let total = usize::from(u16::from_be_bytes([head[2], head[3]]));
    if head[0] >> 4 != 4 || header < IPV4 || total < header {
        return Err(Bad::Malformed);
    }
    let packet = bytes.get(..total).ok_or(Bad::Malformed)?;
    if checksum(&[&packet[..header]]) != 0 {
        return Err(Bad::Malformed);
    }
    // More fragments follow, or this is not the first one.
    if u16::from_be_bytes([head[6], head[7]]) & 0x3fff != 0 {
        return Err(Bad::Fragment);
    }
    Ok(Ipv4 {
        source: Ipv4Addr::new(head[12], head[13], head[14], head[15]),
        destination: Ipv4Addr::new(head[16], head[17], head[18], head[19]),
        protocol: head[9],
        packet,
        payload: &packet[header..],
    })
}

/// The part of a TCP header that routing a segment needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpHead {
    /// Source port.
    pub source: u16,
    /// Destination port.
    pub destination: u16,
    /// SYN without ACK: a new connection.
    pub opens: bool,
    /// RST.
    pub reset: bool,
    /// ACK with neither SYN nor RST.
    pub acknowledges: bool,
}

/// Reads a TCP header; smoltcp checks the rest of it.
pub fn tcp(payload: &[u8]) -> Option<TcpHead> {
    let head: &[u8; 20] = payload.first_chunk()?;
    let flags = head[13];
    Some(TcpHead {
        source: u16::from_be_bytes([head[0], head[1]]),
        destination: u16::from_be_bytes([head[2], head[3]]),
        opens: flags & 0x12 == 0x02 && flags & 0x05 == 0,
        reset: flags & 0x04 != 0,
        acknowledges: flags & 0x16 == 0x10,
    })
}

/// Lowers the window that a TCP segment advertises by one unit, and corrects its checksum.
///
/// smoltcp rounds the window down to a multiple of the unit (32 bytes for a ring of 1 MiB) and cuts off what comes
/// beyond. As the acknowledged number moves by any amount, the rounded right edge can move back by up to one unit, over
/// bytes that are on their way; these are lost, and the guest has to send them again after a timeout. With one unit
/// less advertised, the guest never sends what a later rounding could cut off.
pub fn lower_window(packet: &mut [u8]) {
    const WINDOW: usize = 14;
    const SUM: usize = 16;
    let header = usize::from(packet.first().map_or(0, |byte| byte & 0x0f)) * 4;
    let is_tcp = header >= IPV4 && packet.get(9) == Some(&TCP_PROTOCOL);
    let Some(segment) = packet.get_mut(header..).filter(|segment| is_tcp && segment.len() >= 20) else {
        return;
    };
    let window = u16::from_be_bytes([segment[WINDOW], segment[WINDOW + 1]]);
    // The window of a SYN has no unit yet.
    if window == 0 || segment[13] & 0x02 != 0 {
        return;
    }
    segment[WINDOW..WINDOW + 2].copy_from_slice(&(window - 1).to_be_bytes());
    // RFC 1624: the sum without the old word and with the new one.
    let old = u16::from_be_bytes([segment[SUM], segment[SUM + 1]]);
    let mut sum = u32::from(!old) + u32::from(!window) + u32::from(window - 1);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    segment[SUM..SUM + 2].copy_from_slice(&(!(sum as u16)).to_be_bytes());
}

/// A UDP datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// Source port.
    pub source: u16,
    /// Destination port.
    pub destination: u16,
    /// Its bytes.
    pub payload: &'a [u8],
}

/// Reads a UDP header and checks lengths and, when there is one, the checksum.
pub fn udp<'a>(ip: &Ipv4<'a>) -> Option<Datagram<'a>> {
    let head: &[u8; UDP] = ip.payload.first_chunk()?;
    let length = usize::from(u16::from_be_bytes([head[4], head[5]]));
    let datagram = ip.payload.get(..length)?;
    let payload = datagram.get(UDP..)?;
    if head[6..8] != [0, 0] {
        let pseudo = pseudo_header(ip.source, ip.destination, UDP_PROTOCOL, length as u16);
        if checksum(&[&pseudo, datagram]) != 0 {
            return None;
        }
    }
    Some(Datagram {
        source: u16::from_be_bytes([head[0], head[1]]),
        destination: u16::from_be_bytes([head[2], head[3]]),
        payload,
    })
}

/// An ICMP echo request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Echo<'a> {
    /// Identifier: which process in the guest pings.
    pub ident: u16,
    /// Sequence number.
    pub sequence: u16,
    /// The bytes to be returned.
    pub payload: &'a [u8],
}

/// Reads an ICMP echo message of `kind` (8 request, 0 reply).
pub fn echo(payload: &[u8], kind: u8) -> Option<Echo<'_>> {
    let (head, rest) = payload.split_first_chunk::<ICMP>()?;
    if head[0] != kind || head[1] != 0 || checksum(&[payload]) != 0 {
        return None;
    }
    Some(Echo {
        ident: u16::from_be_bytes([head[4], head[5]]),
        sequence: u16::from_be_bytes([head[6], head[7]]),
        payload: rest,
    })
}

/// Builds an IPv4 packet around an UDP datagram.
pub fn build_udp(source: SocketAddrV4, destination: SocketAddrV4, payload: &[u8]) -> Option<Vec<u8>> {
    let length = u16::try_from(UDP + payload.len()).ok()?;
    let mut packet = build_ipv4(*source.ip(), *destination.ip(), UDP_PROTOCOL, usize::from(length))?;
    packet.extend_from_slice(&source.port().to_be_bytes());
    packet.extend_from_slice(&destination.port().to_be_bytes());
    packet.extend_from_slice(&length.to_be_bytes());
    packet.extend_from_slice(&[0, 0]);
    packet.extend_from_slice(payload);
    let pseudo = pseudo_header(*source.ip(), *destination.ip(), UDP_PROTOCOL, length);
    // A sum of zero is sent as all ones: zero means "none".
    let sum = match checksum(&[&pseudo, &packet[IPV4..]]) {
        0 => 0xffff,
        sum => sum,
    };
    packet[IPV4 + 6..IPV4 + 8].copy_from_slice(&sum.to_be_bytes());
    Some(packet)
}

/// Builds the body of an ICMP echo message of `kind`.
pub fn build_echo(kind: u8, ident: u16, sequence: u16, payload: &[u8]) -> Vec<u8> {
    let mut message = Vec::with_capacity(ICMP + payload.len());
    message.extend_from_slice(&[kind, 0, 0, 0]);
    message.extend_from_slice(&ident.to_be_bytes());
    message.extend_from_slice(&sequence.to_be_bytes());
    message.extend_from_slice(payload);
    seal_icmp(&mut message);
    message
}

/// Builds an IPv4 packet around an ICMP message.
pub fn build_icmp(source: Ipv4Addr, destination: Ipv4Addr, message: &[u8]) -> Option<Vec<u8>> {
    let mut packet = build_ipv4(source, destination, ICMP_PROTOCOL, message.len())?;
    packet.extend_from_slice(message);
    Some(packet)
}

/// What a "destination unreachable" says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unreachable {
    /// Nobody listens, or the policy says so; programs see "connection refused".
    Port,
    /// The network has no route.
    Host,
    /// The datagram is too big for the path, which takes this much.
    TooBig(u16),
}

/// Builds the ICMP error that tells the sender of `original` (an IPv4 packet or its first bytes) that it did not
/// arrive.
pub fn build_unreachable(why: Unreachable, original: &[u8], from: Ipv4Addr, to: Ipv4Addr) -> Option<Vec<u8>> {
    let (code, mtu) = match why {
        Unreachable::Host => (1, 0),
        Unreachable::Port => (3, 0),
        Unreachable::TooBig(mtu) => (4, mtu),
    };
    let mut message = vec![3, code, 0, 0, 0, 0];
    message.extend_from_slice(&mtu.to_be_bytes());
    // The header and eight bytes: enough to name the socket.
    message.extend_from_slice(original.get(..original.len().min(IPV4 + 8))?);
    seal_icmp(&mut message);
    build_icmp(from, to, &message)
}

fn seal_icmp(message: &mut [u8]) {
    let sum = checksum(&[message]);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
}

fn build_ipv4(source: Ipv4Addr, destination: Ipv4Addr, protocol: u8, payload: usize) -> Option<Vec<u8>> {
    let total = u16::try_from(IPV4 + payload).ok().filter(|total| usize::from(*total) <= MTU)?;
    let mut packet = Vec::with_capacity(usize::from(total));
    packet.extend_from_slice(&[0x45, 0]);
    packet.extend_from_slice(&total.to_be_bytes());
    // No identifier, don't fragment, 64 hops.
    packet.extend_from_slice(&[0, 0, 0x40, 0, 64, protocol, 0, 0]);
    packet.extend_from_slice(&source.octets());
    packet.extend_from_slice(&destination.octets());
    let sum = checksum(&[&packet]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    Some(packet)
}

fn pseudo_header(source: Ipv4Addr, destination: Ipv4Addr, protocol: u8, length: u16) -> [u8; 12] {
    let mut pseudo = [0; 12];
    pseudo[..4].copy_from_slice(&source.octets());
    pseudo[4..8].copy_from_slice(&destination.octets());
    pseudo[9] = protocol;
    pseudo[10..].copy_from_slice(&length.to_be_bytes());
    pseudo
}

/// The Internet checksum over the parts, each but the last of even length. Zero over data with its sum in place.
pub fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0u64;
    for part in parts {
        let mut words = part.chunks_exact(4);
        for word in &mut words {
            sum += u64::from(u32::from_be_bytes([word[0], word[1], word[2], word[3]]));
        }
        match *words.remainder() {
            [a] => sum += u64::from(a) << 8,
            [a, b] => sum += u64::from(u16::from_be_bytes([a, b])),
            [a, b, c] => sum += u64::from(u16::from_be_bytes([a, b])) + (u64::from(c) << 8),
            _ => {}
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

    proptest! {
        #[test]
        fn no_parser_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = split(&bytes);
            let _ = ethernet(&bytes);
            let _ = arp_reply(&bytes, GUEST, MAC);
            let _ = tcp(&bytes);
            let _ = echo(&bytes, 8);
            lower_window(&mut bytes.clone());
            if let Ok(ip) = ipv4(&bytes) {
                let _ = udp(&ip);
            }
        }

        #[test]
        fn udp_survives_the_round_trip(payload in proptest::collection::vec(any::<u8>(), 0..3000), port in 1u16..) {
            let from = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 53);
            let packet = build_udp(from, SocketAddrV4::new(GUEST, port), &payload).unwrap();
            let ip = ipv4(&packet).unwrap();
            prop_assert_eq!(ip.source, *from.ip());
            let datagram = udp(&ip).unwrap();
            prop_assert_eq!(datagram.payload, &payload[..]);
            prop_assert_eq!((datagram.source, datagram.destination), (53, port));
        }

        #[test]
        fn a_lowered_window_keeps_the_checksum_right(mut segment in proptest::collection::vec(any::<u8>(), 20..60)) {
            segment[13] &= !0x02;
            segment[16..18].copy_from_slice(&[0, 0]);
            let pseudo = pseudo_header(Ipv4Addr::new(1, 1, 1, 1), GUEST, TCP_PROTOCOL, segment.len() as u16);
            let sum = checksum(&[&pseudo, &segment]);
            segment[16..18].copy_from_slice(&sum.to_be_bytes());
            let mut packet = build_ipv4(Ipv4Addr::new(1, 1, 1, 1), GUEST, TCP_PROTOCOL, segment.len()).unwrap();
            packet.extend_from_slice(&segment);
            let before = u16::from_be_bytes([segment[14], segment[15]]);
            lower_window(&mut packet);
            let after = u16::from_be_bytes([packet[34], packet[35]]);
            prop_assert_eq!(after, before.saturating_sub(1));
            prop_assert_eq!(checksum(&[&pseudo, &packet[IPV4..]]), 0);
        }

        #[test]
        fn a_flipped_bit_is_seen(payload in proptest::collection::vec(any::<u8>(), 1..64), at in 0usize..28, bit in 0u8..8) {
            let from = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 53);
            let mut packet = build_udp(from, SocketAddrV4::new(GUEST, 9), &payload).unwrap();
            packet[at] ^= 1 << bit;
            let seen = ipv4(&packet).map(|ip| ip.protocol != UDP_PROTOCOL || udp(&ip).is_none()).unwrap_or(true);
            prop_assert!(seen);
        }

        #[test]
        fn echo_survives_the_round_trip(payload in proptest::collection::vec(any::<u8>(), 0..200), ident: u16) {
            let message = build_echo(8, ident, 7, &payload);
            prop_assert_eq!(echo(&message, 8), Some(Echo { ident, sequence: 7, payload: &payload }));
        }
    }

    #[test]
    fn frames_are_split_only_when_whole() {
        let stream = [0, 0, 0, 2, 7, 8, 0, 0, 0, 1];
        assert_eq!(split(&stream), Ok(Some((&[7, 8][..], 6))));
        assert_eq!(split(&stream[6..]), Ok(None));
        assert_eq!(split(&stream[..3]), Ok(None));
        assert_eq!(split(&[0xff, 0, 0, 0]), Err(BadLength(0xff00_0000)));
    }

    #[test]
    fn arp_answers_all_but_the_guest() {
        let mut request = [0; 28];
        request[..8].copy_from_slice(&[0, 1, 8, 0, 6, 4, 0, 1]);
        request[8..14].copy_from_slice(&[9; 6]);
        request[14..18].copy_from_slice(&GUEST.octets());
        request[24..].copy_from_slice(&[10, 0, 2, 77]);
        let reply = arp_reply(&request, GUEST, MAC).unwrap();
        assert_eq!(reply[8..14], MAC);
        assert_eq!(reply[14..18], [10, 0, 2, 77]);
        assert_eq!(reply[18..28], request[8..18]);
        request[24..].copy_from_slice(&GUEST.octets());
        assert_eq!(arp_reply(&request, GUEST, MAC), None);
    }

    #[test]
    fn fragments_and_lies_about_length_are_refused() {
        let from = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 53);
        let whole = build_udp(from, SocketAddrV4::new(GUEST, 9), b"hello").unwrap();
        assert_eq!(ipv4(&whole[..whole.len() - 1]), Err(Bad::Malformed));
        let mut fragment = whole.clone();
        fragment[6] = 0x20;
        fragment[10..12].copy_from_slice(&[0, 0]);
        let sum = checksum(&[&fragment[..IPV4]]);
        fragment[10..12].copy_from_slice(&sum.to_be_bytes());
        assert_eq!(ipv4(&fragment), Err(Bad::Fragment));
    }
}
