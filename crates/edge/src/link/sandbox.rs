//! One sandbox on its worker: its frames, its connections and flows, its turn.
//!
//! Owns: checking each frame, demultiplexing, decisions at the start of a flow, limits. Does not own: the event loop.
//!
//! Contract: a turn takes at most [`FRAMES_PER_TURN`] frames and serves each connection once, so that a guest that
//! floods delays its neighbours by one turn, not more.

use std::collections::{HashMap, VecDeque};
use std::net::{SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use proto::guest;
use rustix::event::epoll::EventFlags;
use smoltcp::iface::{Config, Interface};
use smoltcp::time::Instant;
use smoltcp::wire::{HardwareAddress, IpCidr};

use super::budget::Slot;
use super::datagram::{self, Flows};
use super::frame::{self, Bad};
use super::tcp::{self, Connection, Fate, Key, Net, Reply, Serve};
use super::wire::{Fill, Inbox, Outbox, Spare, Wire};
use super::worker::{Mailbox, Timers, Token};
use super::{DialError, LinkConfig, LinkStats, Shared};
use crate::egress::resolver::{Answer, Resolver};
use crate::egress::{Decision, EgressPolicy, Flow, Protocol, decide, dns};

/// Frames of one guest in one turn.
const FRAMES_PER_TURN: usize = 64;
const LARGEST_RING: usize = 1024 * 1024;
const SMALLEST_RING: usize = 16 * 1024;
const FIRST_DIAL_PORT: u16 = 1025;

/// What a turn needs of the worker.
pub(super) struct Turn<'a> {
    pub(super) epoll: &'a OwnedFd,
    pub(super) config: &'a LinkConfig,
    pub(super) resolver: &'a Arc<Resolver>,
    pub(super) mailbox: &'a Arc<Mailbox>,
    pub(super) timers: &'a mut Timers,
    pub(super) scratch: &'a mut [u8],
    pub(super) spare: &'a mut Spare,
    pub(super) now: Instant,
}

/// After a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    /// Nothing to do until something happens.
    Idle,
    /// Another turn is due.
    Again,
    /// The machine is gone.
    Gone,
}

/// One sandbox; see the module.
pub(super) struct Sandbox {
    pub(super) key: u32,
    /// It waits for its turn.
    pub(super) queued: bool,
    /// Frames wait in the socket.
    pub(super) readable: bool,
    /// EPOLLOUT is asked for on the frame socket.
    pub(super) armed: bool,
    pub(super) shared: Arc<Shared>,
    policy: EgressPolicy,
    net: Net,
    inbox: Inbox,
    connections: HashMap<u32, Connection>,
    by_key: HashMap<Key, u32>,
    next: u32,
    next_port: u16,
    connecting: usize,
    rings: usize,
    dirty: Vec<u32>,
    stalled: Vec<u32>,
    flows: Flows,
    ready_flows: VecDeque<u32>,
    stats: LinkStats,
}

impl Sandbox {
    pub(super) fn new(
        key: u32,
        frames: OwnedFd,
        policy: EgressPolicy,
        shared: Arc<Shared>,
        now: Instant,
    ) -> Self {
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = random();
        let mut out = Outbox::default();
        let mut iface = Interface::new(config, &mut Wire { packet: None, out: &mut out }, now);
        iface.update_ip_addrs(|addresses| {
            // One address into an empty list of two.
            let _ = addresses.push(IpCidr::new(guest::GATEWAY.into(), guest::PREFIX));
        });
        iface.set_any_ip(true);
        Self {
            key,
            queued: false,
            readable: true,
            armed: false,
            shared,
            policy,
            net: Net { iface, out, frames },
            inbox: Inbox::default(),
            connections: HashMap::new(),
            by_key: HashMap::new(),
            next: random() as u32,
            next_port: (random() as u16).max(FIRST_DIAL_PORT),
            connecting: 0,
            rings: 0,
            dirty: Vec::new(),
            stalled: Vec::new(),
            flows: Flows::default(),
            ready_flows: VecDeque::new(),
            stats: LinkStats::default(),
        }
    }

    pub(super) fn frames(&self) -> &OwnedFd {
        &self.net.frames
    }

    /// The frame socket takes bytes again, or has taken none since.
    pub(super) fn is_blocked(&self) -> bool {
        self.net.out.blocked
    }

    pub(super) fn connection_event(&mut self, id: u32, events: EventFlags) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.note(events);
            self.mark(id);
        }
    }

    /// Whether a timer still means something.
    pub(super) fn has_timer(&self, id: u32, at: Instant) -> bool {
        self.connections.get(&id).is_some_and(|connection| connection.timer == Some(at))
    }

    pub(super) fn connection_timer(&mut self, id: u32) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.timer = None;
            self.mark(id);
        }
    }

    pub(super) fn flow_event(&mut self, id: u32) {
        if !self.ready_flows.contains(&id) {
            self.ready_flows.push_back(id);
        }
    }

    pub(super) fn writable(&mut self) {
        let stalled = std::mem::take(&mut self.stalled);
        stalled.into_iter().for_each(|id| self.mark(id));
    }

    /// Ends datagram flows that were silent too long.
    pub(super) fn sweep(&mut self, turn: &Turn<'_>) {
        let keep = smoltcp::time::Duration::from(turn.config.datagram_timeout);
        if turn.now.total_micros() > keep.total_micros() as i64 {
            self.flows.expire(turn.now - keep);
        }
        self.publish();
    }

    pub(super) fn set_policy(&mut self, policy: EgressPolicy, turn: &Turn<'_>) {
        self.policy = policy;
        let floor = &turn.config.floor;
        let allowed = |protocol, peer: SocketAddrV4| {
            decide(&policy, &Flow { protocol, destination: SocketAddr::V4(peer) }, floor).allow
        };
        self.flows.recheck(|key| allowed(key.protocol, key.peer));
        let mut cut = Vec::new();
        for (id, connection) in &mut self.connections {
            if connection.leads_outside() && !allowed(Protocol::Tcp, connection.key.peer) {
                connection.abort();
                cut.push(*id);
            }
        }
        cut.into_iter().for_each(|id| self.mark(id));
    }

    /// Opens a connection into the guest.
    pub(super) fn dial(&mut self, port: u16, reply: Reply, tries: u8, turn: &mut Turn<'_>) {
        // Ports in turn: the guest remembers a closed connection for a minute, and this comes round later than that.
        let free = (0..64).find_map(|_| {
            self.next_port = self.next_port.checked_add(1).unwrap_or(FIRST_DIAL_PORT);
            let key = Key { guest_port: port, peer: SocketAddrV4::new(guest::GATEWAY, self.next_port) };
            (!self.by_key.contains_key(&key)).then_some(key)
        });
        let Some(key) = free.filter(|_| self.connections.len() < turn.config.limits.connections) else {
            self.stats.limited += 1;
            let _ = reply.send(Err(DialError::Limit));
            return;
        };
        let id = self.new_id();
        let mut cx = self.serve_context(id, turn);
        match Connection::dial(key, reply, tries, &mut cx) {
            Ok(connection) => self.insert(id, connection),
            Err(reply) => drop(reply.send(Err(DialError::Refused))),
        }
    }

    /// Sends a DNS answer that the resolver found.
    pub(super) fn dns_answer(&mut self, port: u16, message: &[u8], turn: &mut Turn<'_>) {
        turn.spare.lend(&mut self.net.out);
        self.send_dns(port, message);
    }

    fn send_dns(&mut self, port: u16, message: &[u8]) {
        let from = SocketAddrV4::new(guest::GATEWAY, dns::PORT);
        if let Some(packet) = frame::build_udp(from, SocketAddrV4::new(guest::ADDRESS, port), message) {
            self.net.out.push(frame::TYPE_IPV4, &packet);
        }
    }

    /// One turn: frames, datagrams, connections, and everything out.
    pub(super) fn turn(&mut self, turn: &mut Turn<'_>) -> After {
        turn.spare.lend(&mut self.net.out);
        let mut after = self.take_frames(turn);
        for _ in 0..self.ready_flows.len() {
            if let Some(id) = self.ready_flows.pop_front() {
                self.flows.receive(id, turn.scratch, &mut self.net.out, turn.now);
            }
        }
        for id in std::mem::take(&mut self.dirty) {
            self.serve(id, turn);
        }
        if self.net.out.flush(&self.net.frames).is_err() {
            after = After::Gone;
        }
        turn.spare.reclaim(&mut self.net.out);
        if after == After::Idle && !self.net.out.blocked && !self.stalled.is_empty() {
            // The flush made room for those that had to stop.
            self.writable();
            after = After::Again;
        }
        self.publish();
        after
    }

    fn take_frames(&mut self, turn: &mut Turn<'_>) -> After {
        if !self.readable && !self.inbox.has_frame() {
            return After::Idle;
        }
        let scratch = std::mem::take(&mut turn.scratch);
        let (filled, fill) = self.inbox.fill(&self.net.frames, scratch);
        self.readable = fill == Fill::More;
        let mut rest = &scratch[..filled];
        let mut broken = false;
        for _ in 0..FRAMES_PER_TURN {
            match frame::split(rest) {
                Ok(Some((bytes, used))) => {
                    rest = &rest[used..];
                    self.frame(bytes, turn);
                }
                Ok(None) => break,
                Err(error) => {
                    tracing::warn!(sandbox = %self.shared.sandbox, %error, "the machine broke the framing");
                    broken = true;
                    break;
                }
            }
        }
        self.inbox.keep(rest);
        turn.scratch = scratch;
        match fill {
            _ if broken => After::Gone,
            Fill::Closed => After::Gone,
            Fill::More => After::Again,
            Fill::Drained if self.inbox.has_frame() => After::Again,
            Fill::Drained => After::Idle,
        }
    }

    fn frame(&mut self, bytes: &[u8], turn: &mut Turn<'_>) {
        self.stats.frames_in += 1;
        self.stats.bytes_in += bytes.len() as u64;
        let Some(ethernet) = frame::ethernet(bytes) else {
            self.stats.dropped += 1;
            return;
        };
        if ethernet.source != guest::MAC {
            self.stats.spoofed += 1;
            return;
        }
        match ethernet.kind {
            frame::TYPE_ARP => self.arp(ethernet.payload),
            // Only what is sent to us: broadcast and multicast lead nowhere.
            frame::TYPE_IPV4 if ethernet.destination == guest::GATEWAY_MAC => self.ip(ethernet.payload, turn),
            _ => self.stats.dropped += 1,
        }
    }

    fn arp(&mut self, request: &[u8]) {
        match frame::arp_reply(request, guest::ADDRESS, guest::GATEWAY_MAC) {
            Some(reply) => self.net.out.push(frame::TYPE_ARP, &reply),
            None => self.stats.dropped += 1,
        }
    }

    fn ip(&mut self, bytes: &[u8], turn: &mut Turn<'_>) {
        let ip = match frame::ipv4(bytes) {
            Ok(ip) => ip,
            Err(Bad::Malformed | Bad::Fragment) => {
                self.stats.dropped += 1;
                return;
            }
        };
        if ip.source != guest::ADDRESS || ip.destination == guest::ADDRESS {
            self.stats.spoofed += 1;
            return;
        }
        match ip.protocol {
            frame::TCP_PROTOCOL => self.segment(&ip, turn),
            frame::UDP_PROTOCOL => self.datagram(&ip, turn),
            frame::ICMP_PROTOCOL => self.ping(&ip, turn),
            _ => self.stats.dropped += 1,
        }
    }

    fn segment(&mut self, ip: &frame::Ipv4<'_>, turn: &mut Turn<'_>) {
        let Some(head) = frame::tcp(ip.payload) else {
            self.stats.dropped += 1;
            return;
        };
        let key = Key { guest_port: head.source, peer: SocketAddrV4::new(ip.destination, head.destination) };
        if let Some(id) = self.by_key.get(&key).copied() {
            let connection = self.connections.get_mut(&id);
            match connection {
                Some(connection) if head.opens && connection.is_over() => self.remove(id),
                Some(connection) => {
                    connection.segment(ip.packet, &mut self.net, turn.now);
                    // An acknowledgement of something else: of a connection that the guest remembers. It was reset.
                    let dial = if head.acknowledges { connection.take_stale_dial() } else { None };
                    if let Some((reply, tries)) = dial {
                        self.remove(id);
                        self.dial(key.guest_port, reply, tries, turn);
                    } else {
                        self.mark(id);
                    }
                    return;
                }
                None => {}
            }
        }
        if head.opens {
            self.open(key, ip.packet, turn);
        } else if !head.reset {
            self.net.reject(turn.now, ip.packet);
        }
    }

    /// A SYN of the guest that belongs to no connection.
    fn open(&mut self, key: Key, syn: &[u8], turn: &mut Turn<'_>) {
        if key.guest_port == 0 {
            self.stats.dropped += 1;
            return;
        }
        let limits = &turn.config.limits;
        if self.connections.len() >= limits.connections || self.connecting >= limits.half_open {
            self.stats.limited += 1;
            self.net.reject(turn.now, syn);
            return;
        }
        let id = self.new_id();
        if *key.peer.ip() == guest::GATEWAY {
            self.open_gateway(id, key, syn, turn);
            return;
        }
        let decision = self.decide(Protocol::Tcp, key.peer, turn);
        if !decision.allow {
            self.net.reject(turn.now, syn);
            return;
        }
        let Some(slot) = turn.config.budget.take(self.connections.len() + self.flows.len()) else {
            self.stats.limited += 1;
            self.net.reject(turn.now, syn);
            return;
        };
        let token = Token::Connection(self.key, id).encode();
        let opened = Connection::connect(key, syn, token, turn.epoll, &turn.config.floor, turn.now);
        match opened {
            Ok(mut connection) => {
                connection.slot = Some(slot);
                self.connecting += 1;
                self.insert(id, connection);
            }
            Err(_) => self.net.reject(turn.now, syn),
        }
    }

    /// A connection to the gateway: DNS, or nothing.
    fn open_gateway(&mut self, id: u32, key: Key, syn: &[u8], turn: &mut Turn<'_>) {
        let full = self.shared.dns_outstanding.load(Ordering::Relaxed) >= turn.config.limits.dns_outstanding;
        if key.peer.port() != dns::PORT || full {
            self.net.reject(turn.now, syn);
            return;
        }
        let opened = tcp::socket_pair().and_then(|(ours, theirs)| {
            let token = Token::Connection(self.key, id).encode();
            let mut cx = self.serve_context(id, turn);
            Ok((Connection::accept(key, syn, ours, token, &mut cx)?, theirs))
        });
        match opened {
            Ok((connection, theirs)) => {
                self.insert(id, connection);
                turn.resolver.serve_stream(theirs, Arc::clone(&self.shared));
            }
            Err(_) => self.net.reject(turn.now, syn),
        }
    }

    fn datagram(&mut self, ip: &frame::Ipv4<'_>, turn: &mut Turn<'_>) {
        let Some(datagram) = frame::udp(ip) else {
            self.stats.dropped += 1;
            return;
        };
        if ip.destination == guest::GATEWAY {
            if datagram.destination == dns::PORT {
                self.query(datagram.source, datagram.payload, turn);
            } else {
                datagram::refuse(ip.packet, ip.destination, &mut self.net.out);
            }
            return;
        }
        let peer = SocketAddrV4::new(ip.destination, datagram.destination);
        let key = datagram::Key { protocol: Protocol::Udp, guest_port: datagram.source, peer };
        self.relay(key, datagram.payload, ip.packet, turn);
    }

    fn query(&mut self, port: u16, message: &[u8], turn: &mut Turn<'_>) {
        self.stats.dns_queries += 1;
        if !self.policy.internet {
            if let Some(answer) = dns::refusal(message, dns::Refusal::NoSuchName) {
                self.send_dns(port, &answer);
            }
            return;
        }
        let answer = Answer { mailbox: Arc::clone(turn.mailbox), key: self.key, port };
        let limit = turn.config.limits.dns_outstanding;
        if !turn.resolver.serve_datagram(message, answer, Arc::clone(&self.shared), limit) {
            self.stats.limited += 1;
        }
    }

    fn ping(&mut self, ip: &frame::Ipv4<'_>, turn: &mut Turn<'_>) {
        let Some(echo) = frame::echo(ip.payload, 8) else {
            self.stats.dropped += 1;
            return;
        };
        if ip.destination == guest::GATEWAY {
            let reply = frame::build_echo(0, echo.ident, echo.sequence, echo.payload);
            if let Some(packet) = frame::build_icmp(guest::GATEWAY, guest::ADDRESS, &reply) {
                self.net.out.push(frame::TYPE_IPV4, &packet);
            }
            return;
        }
        let peer = SocketAddrV4::new(ip.destination, 0);
        let key = datagram::Key { protocol: Protocol::Ping, guest_port: echo.ident, peer };
        self.relay(key, ip.payload, ip.packet, turn);
    }

    /// Sends a datagram over its flow, which is opened when the policy allows it.
    fn relay(&mut self, key: datagram::Key, payload: &[u8], packet: &[u8], turn: &mut Turn<'_>) {
        let id = match self.flows.find(&key) {
            Some(id) => id,
            None => {
                if !self.decide(key.protocol, key.peer, turn).allow {
                    datagram::refuse(packet, *key.peer.ip(), &mut self.net.out);
                    return;
                }
                let sandbox = self.key;
                let token = |id| Token::Flow(sandbox, id).encode();
                let opened = self.flow_slot(turn.config).and_then(|slot| {
                    self.flows.open(key, slot, turn.epoll, token, &turn.config.floor, turn.now).ok()
                });
                match opened {
                    Some(id) => id,
                    None => {
                        // A ping without a socket for it is lost in silence, anything else is refused.
                        if key.protocol == Protocol::Udp {
                            datagram::refuse(packet, *key.peer.ip(), &mut self.net.out);
                        }
                        return;
                    }
                }
            }
        };
        self.flows.send(id, payload, packet, &mut self.net.out, turn.now);
    }

    /// A place for one more flow. A new one is worth more than the one that was silent longest.
    fn flow_slot(&mut self, config: &LinkConfig) -> Option<Slot> {
        if self.flows.len() >= config.limits.datagram_flows {
            self.flows.end_oldest();
        }
        let slot = config.budget.take(self.connections.len() + self.flows.len());
        let slot = slot.or_else(|| {
            self.flows.end_oldest().then(|| config.budget.take(self.connections.len() + self.flows.len()))?
        });
        self.stats.limited += u64::from(slot.is_none());
        slot
    }

    fn decide(&mut self, protocol: Protocol, peer: SocketAddrV4, turn: &Turn<'_>) -> Decision {
        let flow = Flow { protocol, destination: SocketAddr::V4(peer) };
        let decision = decide(&self.policy, &flow, &turn.config.floor);
        if !decision.allow {
            self.stats.denied += 1;
            tracing::debug!(sandbox = %self.shared.sandbox, ?protocol, %peer, rule = decision.rule, "denied");
        }
        decision
    }

    fn serve(&mut self, id: u32, turn: &mut Turn<'_>) {
        let Some(mut connection) = self.connections.remove(&id) else { return };
        connection.dirty = false;
        let (was_connecting, rings) = (connection.is_connecting(), connection.rings);
        let fate = connection.serve(&mut self.serve_context(id, turn));
        self.connecting -= usize::from(was_connecting && !connection.is_connecting());
        self.rings += connection.rings - rings;
        let timer = connection.timer;
        self.connections.insert(id, connection);
        let next = match fate {
            Fate::Remove => return self.remove(id),
            Fate::Stalled(next) => {
                self.stalled.push(id);
                next
            }
            Fate::Keep(next) => next,
        };
        if let Some(next) = next.filter(|next| timer.is_none_or(|armed| *next < armed)) {
            // A time that has passed means now: not before the next round.
            let next = next.max(turn.now + smoltcp::time::Duration::from_micros(1));
            turn.timers.set(next, self.key, id);
            if let Some(connection) = self.connections.get_mut(&id) {
                connection.timer = Some(next);
            }
        }
    }

    fn serve_context<'a>(&'a mut self, id: u32, turn: &'a Turn<'_>) -> Serve<'a> {
        Serve {
            ring: self.ring(turn.config.limits.ring_bytes),
            net: &mut self.net,
            epoll: turn.epoll,
            config: turn.config,
            now: turn.now,
            token: Token::Connection(self.key, id).encode(),
        }
    }

    /// The size of the next connection's rings: large while few share the budget.
    fn ring(&self, budget: usize) -> usize {
        let share = budget.saturating_sub(self.rings) / 64;
        let power = share.checked_ilog2().map_or(0, |log| 1usize << log);
        power.clamp(SMALLEST_RING, LARGEST_RING)
    }

    fn mark(&mut self, id: u32) {
        if let Some(connection) = self.connections.get_mut(&id).filter(|connection| !connection.dirty) {
            connection.dirty = true;
            self.dirty.push(id);
        }
    }

    fn new_id(&mut self) -> u32 {
        while self.connections.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        id
    }

    fn insert(&mut self, id: u32, connection: Connection) {
        self.stats.opened += 1;
        self.rings += connection.rings;
        self.by_key.insert(connection.key, id);
        self.connections.insert(id, connection);
        self.mark(id);
    }

    fn remove(&mut self, id: u32) {
        if let Some(connection) = self.connections.remove(&id) {
            self.connecting -= usize::from(connection.is_connecting());
            self.rings -= connection.rings;
            self.by_key.remove(&connection.key);
        }
    }

    fn publish(&mut self) {
        self.stats.frames_out = self.net.out.frames;
        self.stats.bytes_out = self.net.out.bytes;
        self.stats.connections = self.connections.len() as u64;
        self.stats.datagram_flows = self.flows.len() as u64;
        self.shared.publish(&self.stats);
    }

    /// The link is detached or the machine is gone: everything ends now.
    pub(super) fn cut(mut self) {
        self.shared.alive.store(false, Ordering::Release);
        for (_, connection) in self.connections.drain() {
            connection.cut();
        }
        self.flows = Flows::default();
        self.publish();
    }
}

/// Random bits for sequence numbers and ports.
fn random() -> u64 {
    let mut bytes = [0; 8];
    // The system's generator does not fail once it has started; a sandbox still works with a weaker seed.
    if getrandom::fill(&mut bytes).is_err() {
        tracing::error!("the system has no random bytes");
    }
    u64::from_ne_bytes(bytes)
}
