//! UDP flows and pings of one guest, each with a connected socket of the host.
//!
//! Owns: the flows and their expiry. Does not own: decisions, limits, DNS at the gateway.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;

use proto::guest;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto};
use smoltcp::time::Instant;

use super::budget::Slot;
use super::frame::{self, Unreachable};
use super::tcp::is_own_address;
use super::wire::Outbox;
use crate::egress::{Floor, Protocol};

/// Datagrams read of one flow in one turn.
const PER_TURN: usize = 32;

/// A flow's name: its kind, the guest's port (or echo identifier), the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) protocol: Protocol,
    pub(super) guest_port: u16,
    pub(super) peer: SocketAddrV4,
}

struct Flow {
    key: Key,
    socket: OwnedFd,
    active: Instant,
    _slot: Slot,
}

/// The flows of one guest.
#[derive(Default)]
pub(super) struct Flows {
    by_key: HashMap<Key, u32>,
    flows: HashMap<u32, Flow>,
    next: u32,
}

impl Flows {
    pub(super) fn len(&self) -> usize {
        self.flows.len()
    }

    /// The flow of this name, if it exists.
    pub(super) fn find(&self, key: &Key) -> Option<u32> {
        self.by_key.get(key).copied()
    }

    /// Ends the flow that was silent longest; false if there is none.
    pub(super) fn end_oldest(&mut self) -> bool {
        let oldest = self.flows.iter().min_by_key(|(_, flow)| flow.active).map(|(id, _)| *id);
        oldest.into_iter().for_each(|id| self.remove(id));
        oldest.is_some()
    }

    /// Opens a flow.
    pub(super) fn open(
        &mut self,
        key: Key,
        slot: Slot,
        epoll: &OwnedFd,
        token: impl Fn(u32) -> u64,
        floor: &Floor,
        now: Instant,
    ) -> Result<u32, Errno> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let protocol = match key.protocol {
            Protocol::Ping => Some(ipproto::ICMP),
            Protocol::Udp | Protocol::Tcp => None,
        };
        let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, protocol)?;
        rustix::net::connect(&socket, &key.peer)?;
        if is_own_address(&socket, *key.peer.ip()) && !floor.is_opened(*key.peer.ip()) {
            return Err(Errno::ACCESS);
        }
        while self.flows.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        epoll::add(epoll, &socket, EventData::new_u64(token(id)), EventFlags::IN)?;
        self.by_key.insert(key, id);
        self.flows.insert(id, Flow { key, socket, active: now, _slot: slot });
        Ok(id)
    }

    /// Sends a datagram (for a ping: a whole ICMP message) of the guest. `original` is its packet.
    pub(super) fn send(&mut self, id: u32, payload: &[u8], original: &[u8], out: &mut Outbox, now: Instant) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        flow.active = now;
        let mut result = rustix::net::send(&flow.socket, payload, SendFlags::NOSIGNAL);
        if result == Err(Errno::CONNREFUSED) {
            // That was about an earlier datagram; this one has not been sent.
            result = rustix::net::send(&flow.socket, payload, SendFlags::NOSIGNAL);
        }
        match result {
            Ok(_) => {}
            Err(Errno::MSGSIZE) => unreachable(Unreachable::TooBig(1500), original, &flow.key, out),
            Err(Errno::CONNREFUSED) => unreachable(Unreachable::Port, original, &flow.key, out),
            Err(Errno::HOSTUNREACH | Errno::NETUNREACH) => {
                unreachable(Unreachable::Host, original, &flow.key, out)
            }
            // A full queue loses the datagram, as any network does.
            Err(_) => {}
        }
    }

    /// Passes on what the world sent. `scratch` takes the largest datagram.
    pub(super) fn receive(&mut self, id: u32, scratch: &mut [u8], out: &mut Outbox, now: Instant) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        for _ in 0..PER_TURN {
            let got = match rustix::net::recv(&flow.socket, &mut *scratch, RecvFlags::empty()) {
                Ok((got, _)) => got,
                Err(Errno::CONNREFUSED) => {
                    unreachable(Unreachable::Port, &stand_in(&flow.key), &flow.key, out);
                    continue;
                }
                Err(_) => return,
            };
            flow.active = now;
            let to = SocketAddrV4::new(guest::ADDRESS, flow.key.guest_port);
            let packet = match flow.key.protocol {
                Protocol::Ping => frame::echo(&scratch[..got], 0).and_then(|echo| {
                    // The kernel had put its own identifier in.
                    let message = frame::build_echo(0, flow.key.guest_port, echo.sequence, echo.payload);
                    frame::build_icmp(*flow.key.peer.ip(), guest::ADDRESS, &message)
                }),
                Protocol::Udp | Protocol::Tcp => frame::build_udp(flow.key.peer, to, &scratch[..got]),
            };
            match packet {
                Some(packet) => out.push(frame::TYPE_IPV4, &packet),
                None => out.dropped += 1,
            }
        }
    }

    /// Ends flows that were silent since `before`.
    pub(super) fn expire(&mut self, before: Instant) {
        self.retain(|flow| flow.active >= before);
    }

    /// Ends the flows that `allowed` no longer allows.
    pub(super) fn recheck(&mut self, allowed: impl Fn(&Key) -> bool) {
        self.retain(|flow| allowed(&flow.key));
    }

    fn retain(&mut self, keep: impl Fn(&Flow) -> bool) {
        let gone: Vec<u32> = self.flows.iter().filter(|(_, flow)| !keep(flow)).map(|(id, _)| *id).collect();
        gone.into_iter().for_each(|id| self.remove(id));
    }

    fn remove(&mut self, id: u32) {
        if let Some(flow) = self.flows.remove(&id) {
            self.by_key.remove(&flow.key);
        }
    }
}

fn unreachable(why: Unreachable, original: &[u8], key: &Key, out: &mut Outbox) {
    // Too big and closed ports are the far end's words, a missing route is ours.
    let from = match why {
        Unreachable::Host => guest::GATEWAY,
        Unreachable::Port | Unreachable::TooBig(_) => *key.peer.ip(),
    };
    if let Some(packet) = frame::build_unreachable(why, original, from, guest::ADDRESS) {
        out.push(frame::TYPE_IPV4, &packet);
    }
}

/// The head of some packet of this flow: enough for an ICMP error about one that was not kept.
fn stand_in(key: &Key) -> Vec<u8> {
    let from = SocketAddrV4::new(guest::ADDRESS, key.guest_port);
    frame::build_udp(from, key.peer, &[]).unwrap_or_default()
}

/// A refusal of a datagram that no flow was opened for.
pub(super) fn refuse(original: &[u8], destination: Ipv4Addr, out: &mut Outbox) {
    if let Some(packet) = frame::build_unreachable(Unreachable::Port, original, destination, guest::ADDRESS) {
        out.push(frame::TYPE_IPV4, &packet);
    }
}
