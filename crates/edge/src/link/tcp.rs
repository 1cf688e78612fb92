//! One TCP connection of a guest, spliced to a socket of the host.
//!
//! Owns: the guest's end (one smoltcp socket in a set of its own), the host's end, bytes in between, how ends and resets
//! cross. Does not own: demultiplexing, decisions, when it is served (the sandbox's turn).
//!
//! ```text
//! guest's SYN ─▶ Connecting ─host connected─▶ Open ─▶ removed
//!                 (SYN kept)  ─failed, RST to guest─▶ removed
//! dial ────────▶ Dialing ─guest's SYN-ACK, caller gets its end─▶ Open
//!                         ─RST: Refused, 10 s: Timeout─▶ removed
//! ```
//!
//! In Open the two directions are independent: an end of file on one side is passed on when everything before it is,
//! and the other direction goes on. smoltcp has no timers for peers that fall silent; [`Connection::limit`] is that.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use proto::guest;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType};
use smoltcp::iface::{Interface, PollIngressSingleResult, PollResult, SocketHandle, SocketSet};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant;
use tokio::sync::oneshot;

use super::budget::Slot;
use super::wire::{Outbox, Wire};
use super::{Accepted, DialError, LinkConfig};
use crate::egress::Floor;

/// A connection's name on the link: the guest's port and the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) guest_port: u16,
    pub(super) peer: SocketAddrV4,
}

/// The interface and the way out, which every connection of a sandbox uses.
pub(super) struct Net {
    pub(super) iface: Interface,
    pub(super) out: Outbox,
    pub(super) frames: OwnedFd,
}

impl Net {
    /// Gives one packet to the sockets of a set; with an empty set smoltcp answers a segment with a reset.
    pub(super) fn feed(&mut self, now: Instant, set: &mut SocketSet<'static>, packet: &[u8]) {
        if !self.out.has_room_for_answer() {
            // The guest floods us and does not read: as a full network card, we lose the packet.
            self.out.dropped += 1;
            return;
        }
        let mut wire = Wire { packet: Some(packet), out: &mut self.out };
        let _: PollIngressSingleResult = self.iface.poll_ingress_single(now, &mut wire, set);
    }

    /// Answers a segment of no connection: a reset, or nothing when it is one itself.
    pub(super) fn reject(&mut self, now: Instant, packet: &[u8]) {
        self.feed(now, &mut SocketSet::new(Vec::new()), packet);
    }

    /// Sends what the set wants to send. False when the guest takes no more for now.
    fn drain(&mut self, now: Instant, set: &mut SocketSet<'static>) -> bool {
        loop {
            let mut wire = Wire { packet: None, out: &mut self.out };
            let result = self.iface.poll_egress(now, &mut wire, set);
            if !self.out.has_room() {
                // An error shows up as the end of the stream when it is read.
                if self.out.flush(&self.frames).is_err() || !self.out.has_room() {
                    return false;
                }
            } else if result == PollResult::None {
                return true;
            }
        }
    }
}

/// The host's end of a connection.
struct Host {
    socket: OwnedFd,
    token: u64,
    /// Set: the other end is a socket pair of ours, and this tells it that an end of file is a reset.
    reset: Option<Arc<AtomicBool>>,
    readable: bool,
    writable: bool,
    /// EPOLLOUT is asked for.
    armed: bool,
    /// The peer has sent its last byte; reads do not stop at a short one.
    closing: bool,
    /// End of file was read.
    ended: bool,
    /// Our write half is shut.
    shut: bool,
}

/// How often a dial changes its port. Without that, each would wait for the repetition of its SYN, a second later.
const DIAL_TRIES: u8 = 8;
/// How often a guest that owes acknowledgements is asked.
const PROBE: smoltcp::time::Duration = smoltcp::time::Duration::from_secs(1);

const EVENTS: EventFlags = EventFlags::IN.union(EventFlags::RDHUP).union(EventFlags::ET);

impl Host {
    fn new(socket: OwnedFd, token: u64, reset: Option<Arc<AtomicBool>>) -> Self {
        Self {
            socket,
            token,
            reset,
            readable: false,
            writable: false,
            armed: false,
            closing: false,
            ended: false,
            shut: false,
        }
    }

    fn note(&mut self, events: EventFlags) {
        if events.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR) {
            self.readable = true;
        }
        if events.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR) {
            self.closing = true;
        }
        if events.intersects(EventFlags::OUT | EventFlags::HUP | EventFlags::ERR) {
            self.writable = true;
        }
    }

    /// Asks to be told when the socket takes bytes again.
    fn blocked(&mut self, epoll: &OwnedFd) {
        self.writable = false;
        if !self.armed {
            let events = EVENTS | EventFlags::OUT;
            self.armed = epoll::modify(epoll, &self.socket, EventData::new_u64(self.token), events).is_ok();
        }
    }

    /// A socket pair wakes us at every read of its peer while this is asked for; TCP only when it had been full.
    fn unblocked(&mut self, epoll: &OwnedFd) {
        if self.armed && self.reset.is_some() {
            let _ = epoll::modify(epoll, &self.socket, EventData::new_u64(self.token), EVENTS);
            self.armed = false;
        }
    }

    /// Makes the close a reset.
    fn poison(&self) {
        match &self.reset {
            Some(flag) => flag.store(true, Ordering::Release),
            None => {
                let _ = rustix::net::sockopt::set_socket_linger(&self.socket, Some(Duration::ZERO));
            }
        }
    }
}

/// Where the outcome of a dial goes.
pub(super) type Reply = oneshot::Sender<Result<Accepted, DialError>>;

enum Stage {
    Connecting { syn: Box<[u8]> },
    Dialing { reply: Reply, tries: u8 },
    Open,
}

/// What is to become of a connection after it was served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// It goes on. Serve it again at this time at the latest.
    Keep(Option<Instant>),
    /// It goes on, and has more for the guest when the guest takes it.
    Stalled(Option<Instant>),
    /// It is over.
    Remove,
}

/// A connection; see the module.
pub(super) struct Connection {
    pub(super) key: Key,
    /// Bytes of its two rings.
    pub(super) rings: usize,
    /// The earliest time for which the worker's timer is set.
    pub(super) timer: Option<Instant>,
    /// It is in the list of those to be served.
    pub(super) dirty: bool,
    /// Its host socket's place among those of all guests, when the guest opened it.
    pub(super) slot: Option<Slot>,
    stage: Stage,
    set: SocketSet<'static>,
    socket: Option<SocketHandle>,
    host: Option<Host>,
    /// The guest has sent its FIN.
    guest_ended: bool,
    /// We reset the connection.
    aborted: bool,
    /// Both directions are closed and the guest has been told all.
    finished: bool,
    /// Bytes moved, or the stage changed.
    active: Instant,
}

impl Connection {
    /// A connection of the guest: starts the host's connect and keeps the SYN.
    pub(super) fn connect(
        key: Key,
        syn: &[u8],
        token: u64,
        epoll: &OwnedFd,
        floor: &Floor,
        now: Instant,
    ) -> Result<Self, Errno> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
        rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
        rustix::net::sockopt::set_socket_keepalive(&socket, true)?;
        match rustix::net::connect(&socket, &key.peer) {
            Ok(()) | Err(Errno::INPROGRESS | Errno::AGAIN) => {}
            Err(error) => return Err(error),
        }
        // The second barrier: an address that the host was given since the floor was last read.
        if is_own_address(&socket, *key.peer.ip()) && !floor.is_opened(*key.peer.ip()) {
            return Err(Errno::ACCESS);
        }
        epoll::add(epoll, &socket, EventData::new_u64(token), EVENTS | EventFlags::OUT)?;
        let mut host = Host::new(socket, token, None);
        host.armed = true;
        Ok(Self::new(key, Stage::Connecting { syn: syn.into() }, Some(host), now))
    }

    /// A connection of the guest to ourselves: the host's end exists already.
    pub(super) fn accept(
        key: Key,
        syn: &[u8],
        pair: OwnedFd,
        token: u64,
        cx: &mut Serve<'_>,
    ) -> Result<Self, Errno> {
        epoll::add(cx.epoll, &pair, EventData::new_u64(token), EVENTS)?;
        let mut host = Host::new(pair, token, Some(Arc::default()));
        host.writable = true;
        let mut connection = Self::new(key, Stage::Open, Some(host), cx.now);
        connection.answer(syn, cx);
        Ok(connection)
    }

    /// A connection into the guest.
    pub(super) fn dial(key: Key, reply: Reply, tries: u8, cx: &mut Serve<'_>) -> Result<Self, Reply> {
        let mut connection = Self::new(key, Stage::Open, None, cx.now);
        let mut socket = connection.make_socket(cx.ring);
        let local = (*key.peer.ip(), key.peer.port());
        if socket.connect(cx.net.iface.context(), (guest::ADDRESS, key.guest_port), local).is_err() {
            return Err(reply);
        }
        connection.socket = Some(connection.set.add(socket));
        connection.stage = Stage::Dialing { reply, tries };
        Ok(connection)
    }

    fn new(key: Key, stage: Stage, host: Option<Host>, now: Instant) -> Self {
        Self {
            key,
            rings: 0,
            timer: None,
            dirty: false,
            slot: None,
            stage,
            set: SocketSet::new(Vec::with_capacity(1)),
            socket: None,
            host,
            guest_ended: false,
            aborted: false,
            finished: false,
            active: now,
        }
    }

    /// The host's connect has not finished.
    pub(super) fn is_connecting(&self) -> bool {
        matches!(self.stage, Stage::Connecting { .. })
    }

    /// Gives up a dial whose ports the guest remembers from an earlier connection; returns what a new one needs. `None`
    /// when this is no dial, or has been tried often enough.
    pub(super) fn take_stale_dial(&mut self) -> Option<(Reply, u8)> {
        let state = self.socket.map(|handle| self.set.get::<Socket<'_>>(handle).state());
        match std::mem::replace(&mut self.stage, Stage::Open) {
            Stage::Dialing { reply, tries } if tries < DIAL_TRIES && state == Some(State::SynSent) => {
                Some((reply, tries + 1))
            }
            stage => {
                self.stage = stage;
                None
            }
        }
    }

    /// The guest may use the same ports for a new connection.
    pub(super) fn is_over(&self) -> bool {
        self.socket.map(|handle| self.set.get::<Socket<'_>>(handle)).is_some_and(|socket| {
            let over =
                matches!(socket.state(), State::Closed | State::TimeWait | State::LastAck | State::Listen);
            over && !socket.can_recv()
        })
    }

    /// The peer is outside, so that the policy applies to this connection.
    pub(super) fn leads_outside(&self) -> bool {
        *self.key.peer.ip() != guest::GATEWAY
    }

    /// Notes what epoll said of the host's socket.
    pub(super) fn note(&mut self, events: EventFlags) {
        if let Some(host) = &mut self.host {
            host.note(events);
        }
    }

    /// Gives a segment of this connection to its socket.
    pub(super) fn segment(&mut self, packet: &[u8], net: &mut Net, now: Instant) {
        // Before the socket exists only repeated SYNs can come.
        if self.socket.is_some() {
            net.feed(now, &mut self.set, packet);
        }
    }

    /// Resets both ends: the policy changed or the link goes.
    pub(super) fn abort(&mut self) {
        if let Some(host) = &self.host {
            host.poison();
        }
        self.aborted = true;
        // There is a reset to send.
        self.finished = false;
        if let Some(handle) = self.socket {
            self.set.get_mut::<Socket<'_>>(handle).abort();
        }
    }

    /// Ends the connection without a word to the guest, whose machine is gone.
    pub(super) fn cut(self) {
        if let Some(host) = &self.host {
            host.poison();
        }
        if let Stage::Dialing { reply, .. } = self.stage {
            let _ = reply.send(Err(DialError::Gone));
        }
    }

    fn make_socket(&mut self, ring: usize) -> Socket<'static> {
        self.rings = 2 * ring;
        // calloc: pages that are never used are never touched.
        let mut socket = Socket::new(SocketBuffer::new(vec![0; ring]), SocketBuffer::new(vec![0; ring]));
        socket.set_nagle_enabled(false);
        socket.set_ack_delay(None);
        socket
    }

    /// Lets smoltcp take the guest's SYN.
    fn answer(&mut self, syn: &[u8], cx: &mut Serve<'_>) {
        let mut socket = self.make_socket(cx.ring);
        // Cannot fail: the port of a connection is not 0, and the socket is new.
        let _ = socket.listen((*self.key.peer.ip(), self.key.peer.port()));
        self.socket = Some(self.set.add(socket));
        self.stage = Stage::Open;
        self.active = cx.now;
        cx.net.feed(cx.now, &mut self.set, syn);
    }

    /// Moves everything that can be moved now.
    pub(super) fn serve(&mut self, cx: &mut Serve<'_>) -> Fate {
        if self.is_connecting() && !self.finish_connect(cx) {
            return if self.aborted {
                Fate::Remove
            } else {
                Fate::Keep(Some(self.active + cx.connect_timeout()))
            };
        }
        let Some(handle) = self.socket else { return Fate::Remove };
        if matches!(self.stage, Stage::Dialing { .. }) {
            self.finish_dial(handle, cx);
        }
        if matches!(self.stage, Stage::Open) {
            self.splice(handle, cx);
        }
        self.expire(handle, cx);
        let socket = self.set.get_mut::<Socket<'_>>(handle);
        // smoltcp forgets its retransmission timer when a closed window opens. The acknowledgements of these probes
        // make it send again what was lost; without them the connection would stand still for ever.
        let probe = (socket.send_queue() > 0).then_some(PROBE);
        if socket.keep_alive() != probe {
            socket.set_keep_alive(probe);
        }
        // In TIME-WAIT nothing is left to send but the last ACK; ten seconds later smoltcp would throw away what the host
        // has not taken yet.
        if !self.finished {
            let drained = cx.net.drain(cx.now, &mut self.set);
            self.finished = drained && self.set.get::<Socket<'_>>(handle).state() == State::TimeWait;
            if !drained {
                return Fate::Stalled(self.limit(handle, cx.config));
            }
        }
        let socket = self.set.get::<Socket<'_>>(handle);
        match socket.state() {
            // A reset while the handshake ran puts the socket back to LISTEN.
            State::Listen => {
                self.abort();
                Fate::Remove
            }
            State::TimeWait if !socket.can_recv() => Fate::Remove,
            State::Closed if socket.remote_endpoint().is_none() && (self.aborted || !socket.can_recv()) => {
                if !(self.guest_ended && self.host.as_ref().is_some_and(|host| host.ended)) {
                    self.abort();
                }
                Fate::Remove
            }
            _ => {
                let next = if self.finished { None } else { cx.net.iface.poll_at(cx.now, &self.set) };
                Fate::Keep(next.into_iter().chain(self.limit(handle, cx.config)).min())
            }
        }
    }

    /// Looks whether the host's connect is done. True when the connection is open now.
    fn finish_connect(&mut self, cx: &mut Serve<'_>) -> bool {
        let Stage::Connecting { syn } = &self.stage else { return true };
        let Some(host) = &mut self.host else { return false };
        let expired = cx.now >= self.active + cx.connect_timeout();
        if self.aborted || !host.writable {
            if expired || self.aborted {
                self.aborted = true;
                cx.net.reject(cx.now, syn);
            }
            return false;
        }
        let failed = !matches!(rustix::net::sockopt::socket_error(&host.socket), Ok(Ok(())));
        if failed {
            self.aborted = true;
            cx.net.reject(cx.now, syn);
            return false;
        }
        if rustix::net::getpeername(&host.socket).is_err() {
            host.writable = false;
            return false;
        }
        let syn = syn.clone();
        self.answer(&syn, cx);
        true
    }

    /// Looks whether the guest has accepted, and gives the caller its end.
    fn finish_dial(&mut self, handle: SocketHandle, cx: &mut Serve<'_>) {
        let state = self.set.get::<Socket<'_>>(handle).state();
        if matches!(state, State::SynSent | State::SynReceived) {
            return;
        }
        let Stage::Dialing { reply, .. } = std::mem::replace(&mut self.stage, Stage::Open) else { return };
        self.active = cx.now;
        if state == State::Closed {
            let _ = reply.send(Err(DialError::Refused));
            return;
        }
        let token = cx.token;
        let answer = socket_pair().and_then(|(ours, theirs)| {
            epoll::add(cx.epoll, &ours, EventData::new_u64(token), EVENTS)?;
            Ok((ours, theirs))
        });
        let answer = answer.map(|(ours, theirs)| {
            let reset = Arc::new(AtomicBool::new(false));
            let mut host = Host::new(ours, token, Some(Arc::clone(&reset)));
            host.writable = true;
            host.readable = true;
            self.host = Some(host);
            Accepted { socket: theirs, reset }
        });
        // A caller that has gone dropped its end with the answer: that is read as an end of file.
        let failed = answer.is_err();
        let _ = reply.send(answer.map_err(|error| DialError::Io(error.into())));
        if failed {
            self.abort();
        }
    }

    fn splice(&mut self, handle: SocketHandle, cx: &mut Serve<'_>) {
        let socket = self.set.get_mut::<Socket<'static>>(handle);
        let Some(host) = &mut self.host else { return };
        if matches!(socket.state(), State::CloseWait | State::LastAck | State::Closing | State::TimeWait) {
            self.guest_ended = true;
        }
        let moved = to_host(socket, host, cx.epoll).and_then(|out| Ok((out, from_host(socket, host)?)));
        match moved {
            Ok((0, 0)) => {}
            Ok(_) => self.active = cx.now,
            Err(_) => {
                self.abort();
                return;
            }
        }
        if self.guest_ended && !host.shut && !socket.can_recv() {
            host.shut = true;
            self.active = cx.now;
            // The peer may have reset already; reading says so.
            let _ = rustix::net::shutdown(&host.socket, Shutdown::Write);
        }
        if host.ended && socket.may_send() {
            self.active = cx.now;
            socket.close();
        }
    }

    /// When the connection has to end if nothing more happens.
    fn limit(&self, handle: SocketHandle, config: &LinkConfig) -> Option<Instant> {
        let socket = self.set.get::<Socket<'_>>(handle);
        let after = match (&self.stage, socket.state()) {
            (Stage::Connecting { .. } | Stage::Dialing { .. }, _) => config.connect_timeout,
            (Stage::Open, State::SynReceived | State::SynSent) => config.connect_timeout,
            (Stage::Open, State::Established) => return None,
            (Stage::Open, State::CloseWait | State::FinWait1 | State::FinWait2) => config.half_closed_timeout,
            // The guest is done, and the host has not taken it all.
            (Stage::Open, _) if socket.can_recv() => config.half_closed_timeout,
            (Stage::Open, _) => config.closing_timeout,
        };
        Some(self.active + after.into())
    }

    fn expire(&mut self, handle: SocketHandle, cx: &Serve<'_>) {
        if self.aborted || self.limit(handle, cx.config).is_none_or(|limit| cx.now < limit) {
            return;
        }
        if let Stage::Dialing { reply, .. } = std::mem::replace(&mut self.stage, Stage::Open) {
            let _ = reply.send(Err(DialError::Timeout));
        }
        self.abort();
    }
}

/// What serving a connection needs of its surroundings.
pub(super) struct Serve<'a> {
    pub(super) net: &'a mut Net,
    pub(super) epoll: &'a OwnedFd,
    pub(super) config: &'a LinkConfig,
    pub(super) now: Instant,
    /// Epoll's name for this connection.
    pub(super) token: u64,
    /// Size of each ring of a connection that opens now.
    pub(super) ring: usize,
}

impl Serve<'_> {
    fn connect_timeout(&self) -> smoltcp::time::Duration {
        self.config.connect_timeout.into()
    }
}

/// A connected pair of non-blocking stream sockets.
pub(super) fn socket_pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Whether the kernel reached this destination by going to itself: then source and destination are one address.
pub(super) fn is_own_address(socket: impl AsFd, destination: Ipv4Addr) -> bool {
    rustix::net::getsockname(socket)
        .ok()
        .and_then(|address| SocketAddrV4::try_from(address).ok())
        .is_some_and(|local| *local.ip() == destination)
}

fn to_host(socket: &mut Socket<'static>, host: &mut Host, epoll: &OwnedFd) -> Result<usize, Errno> {
    let mut total = 0;
    while host.writable && !host.shut && socket.can_recv() {
        let mut failure = None;
        let sent = socket.recv(|bytes| match rustix::net::send(&host.socket, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => (sent, sent),
            Err(error) => {
                failure = Some(error);
                (0, 0)
            }
        });
        match failure {
            None => {}
            Some(Errno::INTR) => continue,
            Some(Errno::AGAIN) => {
                host.blocked(epoll);
                return Ok(total);
            }
            Some(error) => return Err(error),
        }
        match sent {
            Ok(sent) => total += sent,
            Err(_) => break,
        }
    }
    if total > 0 && host.writable {
        host.unblocked(epoll);
    }
    Ok(total)
}

fn from_host(socket: &mut Socket<'static>, host: &mut Host) -> Result<usize, Errno> {
    let mut total = 0;
    while host.readable && !host.ended && socket.can_send() {
        let mut failure = None;
        let mut short = false;
        let got =
            socket.send(|place| match rustix::net::recv(&host.socket, &mut *place, RecvFlags::empty()) {
                Ok((got, _)) => {
                    short = got < place.len();
                    (got, got)
                }
                Err(error) => {
                    failure = Some(error);
                    (0, 1)
                }
            });
        match failure {
            None => {}
            Some(Errno::INTR) => continue,
            Some(Errno::AGAIN) => {
                host.readable = false;
                return Ok(total);
            }
            Some(error) => return Err(error),
        }
        match got {
            Ok(0) => host.ended = true,
            Ok(got) => {
                total += got;
                // A short read means empty, unless the end of the stream waits behind it.
                if short && !host.closing {
                    host.readable = false;
                }
            }
            Err(_) => break,
        }
    }
    Ok(total)
}
