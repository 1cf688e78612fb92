//! A guest without a machine: smoltcp behind QEMU's framing.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use edge::egress::{EgressPolicy, Floor};
use edge::link::{Link, LinkConfig, Links, frame};
use proto::guest;
use rustix::net::SendFlags;
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{self, DeviceCapabilities, Medium};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::wire::{HardwareAddress, IpCidr};

/// How long any step of a test may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A configuration in which 127.0.0.1 is the Internet.
pub(crate) fn config() -> LinkConfig {
    LinkConfig {
        workers: 1,
        floor: Floor::with_opened(&[(Ipv4Addr::LOCALHOST, 32)]),
        ..LinkConfig::default()
    }
}

/// Links with one guest attached.
pub(crate) fn attach(config: LinkConfig, policy: EgressPolicy) -> (Links, Link, Guest) {
    let links = Links::start(config).unwrap();
    let (link, guest) = attach_to(&links, policy);
    (links, link, guest)
}

pub(crate) fn attach_to(links: &Links, policy: EgressPolicy) -> (Link, Guest) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let link = links.attach("itest".parse().unwrap(), OwnedFd::from(theirs), policy).unwrap();
    (link, Guest::new(ours))
}

/// Bytes that differ everywhere.
pub(crate) fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        })
        .collect()
}

struct Wire {
    incoming: Option<Vec<u8>>,
    outgoing: Vec<Vec<u8>>,
    blocked: bool,
}

struct Received(Vec<u8>);
struct Place<'a>(&'a mut Vec<Vec<u8>>);

impl phy::Device for Wire {
    type RxToken<'a> = Received;
    type TxToken<'a> = Place<'a>;

    fn receive(&mut self, _: smoltcp::time::Instant) -> Option<(Received, Place<'_>)> {
        self.incoming.take().map(|packet| (Received(packet), Place(&mut self.outgoing)))
    }

    fn transmit(&mut self, _: smoltcp::time::Instant) -> Option<Place<'_>> {
        (!self.blocked && self.outgoing.len() < 8).then_some(Place(&mut self.outgoing))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = frame::MTU;
        capabilities
    }
}

impl phy::RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

impl phy::TxToken for Place<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, f: F) -> R {
        let mut packet = vec![0; length];
        let result = f(&mut packet);
        // Without it this guest would cut off bytes beyond a rounded window, which a real one does not.
        frame::lower_window(&mut packet);
        self.0.push(packet);
        result
    }
}

/// The guest. Nothing moves unless it is polled.
pub(crate) struct Guest {
    frames: UnixStream,
    iface: Interface,
    wire: Wire,
    pub(crate) sockets: SocketSet<'static>,
    /// Packets that are not TCP, as they came.
    pub(crate) other: Vec<Vec<u8>>,
    /// ARP replies.
    pub(crate) arp: Vec<Vec<u8>>,
    incoming: Vec<u8>,
    pending: Vec<u8>,
    next_port: u16,
    started: Instant,
    /// The edge closed the link.
    pub(crate) closed: bool,
}

impl Guest {
    fn new(frames: UnixStream) -> Self {
        frames.set_nonblocking(true).unwrap();
        let mut wire = Wire { incoming: None, outgoing: Vec::new(), blocked: false };
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = 7;
        let mut iface = Interface::new(config, &mut wire, smoltcp::time::Instant::ZERO);
        iface.update_ip_addrs(|list| list.push(IpCidr::new(guest::ADDRESS.into(), 24)).unwrap());
        iface.routes_mut().add_default_ipv4_route(guest::GATEWAY).unwrap();
        Self {
            frames,
            iface,
            wire,
            sockets: SocketSet::new(Vec::new()),
            other: Vec::new(),
            arp: Vec::new(),
            incoming: Vec::new(),
            pending: Vec::new(),
            next_port: 20000,
            started: Instant::now(),
            closed: false,
        }
    }

    pub(crate) fn socket(ring: usize) -> Socket<'static> {
        let mut socket = Socket::new(SocketBuffer::new(vec![0; ring]), SocketBuffer::new(vec![0; ring]));
        socket.set_nagle_enabled(false);
        socket.set_ack_delay(None);
        socket
    }

    pub(crate) fn listen(&mut self, port: u16) -> SocketHandle {
        let mut socket = Self::socket(256 * 1024);
        socket.listen(port).unwrap();
        self.sockets.add(socket)
    }

    /// Starts a connection.
    pub(crate) fn connect(&mut self, to: SocketAddrV4) -> SocketHandle {
        self.connect_with(to, 256 * 1024)
    }

    pub(crate) fn connect_with(&mut self, to: SocketAddrV4, ring: usize) -> SocketHandle {
        let mut socket = Self::socket(ring);
        self.next_port = if self.next_port == u16::MAX { 20000 } else { self.next_port + 1 };
        socket.connect(self.iface.context(), (*to.ip(), to.port()), self.next_port).unwrap();
        self.sockets.add(socket)
    }

    pub(crate) fn tcp(&mut self, handle: SocketHandle) -> &mut Socket<'static> {
        self.sockets.get_mut(handle)
    }

    pub(crate) fn state(&self, handle: SocketHandle) -> State {
        self.sockets.get::<Socket<'_>>(handle).state()
    }

    /// Starts a connection and waits for it. False: refused.
    pub(crate) fn open(&mut self, to: SocketAddrV4) -> Option<SocketHandle> {
        let handle = self.connect(to);
        self.wait(|guest| !matches!(guest.state(handle), State::SynSent | State::SynReceived));
        (guest_is_open(self.state(handle))).then_some(handle)
    }

    /// Sends a packet as it is.
    pub(crate) fn send_packet(&mut self, packet: &[u8]) {
        self.send_frame(guest::GATEWAY_MAC, guest::MAC, frame::TYPE_IPV4, packet);
    }

    pub(crate) fn send_frame(&mut self, to: [u8; 6], from: [u8; 6], kind: u16, payload: &[u8]) {
        let mut head = [0; frame::ETHERNET];
        frame::put_ethernet(&mut head, to, from, kind);
        self.pending.extend_from_slice(&((head.len() + payload.len()) as u32).to_be_bytes());
        self.pending.extend_from_slice(&head);
        self.pending.extend_from_slice(payload);
        self.flush();
    }

    /// Writes bytes past the framing.
    pub(crate) fn send_raw(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
        self.flush();
    }

    fn flush(&mut self) {
        while !self.pending.is_empty() {
            match rustix::net::send(&self.frames, &self.pending, SendFlags::NOSIGNAL) {
                Ok(sent) => drop(self.pending.drain(..sent)),
                Err(rustix::io::Errno::AGAIN) => break,
                Err(_) => {
                    self.closed = true;
                    self.pending.clear();
                }
            }
        }
        self.wire.blocked = !self.pending.is_empty();
    }

    /// One round of everything.
    pub(crate) fn poll(&mut self) {
        let now = smoltcp::time::Instant::from_micros(self.started.elapsed().as_micros() as i64);
        let mut chunk = vec![0; 256 * 1024];
        match io::Read::read(&mut self.frames, &mut chunk) {
            Ok(0) => self.closed = true,
            Ok(got) => self.incoming.extend_from_slice(&chunk[..got]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => self.closed = true,
        }
        let incoming = std::mem::take(&mut self.incoming);
        let mut rest = &incoming[..];
        while let Some((bytes, used)) = frame::split(rest).unwrap() {
            rest = &rest[used..];
            let ethernet = frame::ethernet(bytes).unwrap();
            assert_eq!((ethernet.source, ethernet.destination), (guest::GATEWAY_MAC, guest::MAC));
            if ethernet.kind == frame::TYPE_ARP {
                self.arp.push(ethernet.payload.to_vec());
                continue;
            }
            let ip = frame::ipv4(ethernet.payload).expect("the edge sends whole packets");
            if ip.protocol != frame::TCP_PROTOCOL {
                self.other.push(ip.packet.to_vec());
                continue;
            }
            self.wire.incoming = Some(ip.packet.to_vec());
            self.iface.poll_ingress_single(now, &mut self.wire, &mut self.sockets);
            self.send_packets();
        }
        self.incoming = rest.to_vec();
        loop {
            let more = self.iface.poll_egress(now, &mut self.wire, &mut self.sockets);
            let sent = !self.wire.outgoing.is_empty();
            self.send_packets();
            if self.wire.blocked || (more == smoltcp::iface::PollResult::None && !sent) {
                break;
            }
        }
        self.flush();
    }

    fn send_packets(&mut self) {
        for packet in std::mem::take(&mut self.wire.outgoing) {
            self.send_packet(&packet);
        }
    }

    /// Sleeps until there may be something to do.
    fn pause(&self) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut events = PollFlags::IN;
        if self.wire.blocked {
            events |= PollFlags::OUT;
        }
        let tick = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
        let _ = poll(&mut [PollFd::new(&self.frames, events)], Some(&tick));
    }

    /// Polls until it is so. Panics when it takes too long.
    #[track_caller]
    pub(crate) fn wait(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        assert!(self.wait_for(PATIENCE, &mut done), "it did not happen in time");
    }

    /// Polls until it is so, or this long.
    pub(crate) fn wait_for(&mut self, time: Duration, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let end = Instant::now() + time;
        loop {
            self.poll();
            if done(self) {
                return true;
            }
            if Instant::now() > end {
                return false;
            }
            self.pause();
        }
    }

    /// Sends it all.
    #[track_caller]
    pub(crate) fn send(&mut self, handle: SocketHandle, bytes: &[u8]) {
        let mut sent = 0;
        self.wait(|guest| {
            let socket = guest.tcp(handle);
            assert!(socket.may_send(), "cannot send in {}", socket.state());
            sent += socket.send_slice(&bytes[sent..]).unwrap();
            sent == bytes.len()
        });
        self.poll();
    }

    /// Receives exactly so much.
    #[track_caller]
    pub(crate) fn receive(&mut self, handle: SocketHandle, length: usize) -> Vec<u8> {
        let mut got = Vec::new();
        self.wait(|guest| {
            take(guest.tcp(handle), &mut got);
            got.len() >= length
        });
        got
    }

    /// Receives until the other side's FIN, or panics at a reset.
    #[track_caller]
    pub(crate) fn receive_to_end(&mut self, handle: SocketHandle) -> Vec<u8> {
        let mut got = Vec::new();
        self.wait(|guest| {
            let socket = guest.tcp(handle);
            take(socket, &mut got);
            assert_ne!(socket.state(), State::Closed, "the connection was reset");
            !socket.may_recv()
        });
        got
    }
}

/// Takes what has arrived.
pub(crate) fn take(socket: &mut Socket<'static>, got: &mut Vec<u8>) {
    while socket.can_recv() {
        let more = socket.recv(|bytes| {
            got.extend_from_slice(bytes);
            (bytes.len(), !bytes.is_empty())
        });
        if !more.unwrap_or(false) {
            break;
        }
    }
}

fn guest_is_open(state: State) -> bool {
    !matches!(state, State::Closed | State::Listen | State::SynSent | State::SynReceived)
}

/// Stops a guest that runs in a thread, and gives it back.
pub(crate) struct Running {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<Guest>>,
}

impl Running {
    pub(crate) fn stop(mut self) -> Guest {
        self.stop.store(true, Ordering::Release);
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
    }
}

impl Guest {
    /// Runs the guest in a thread, with `step` after each round.
    pub(crate) fn run(mut self, mut step: impl FnMut(&mut Guest) + Send + 'static) -> Running {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Acquire) {
                self.poll();
                step(&mut self);
                self.pause();
            }
            self
        });
        Running { stop, thread: Some(thread) }
    }

    /// Runs an echo server on a port: each connection gets back what it sends, and a FIN after its FIN.
    pub(crate) fn run_echo(mut self, port: u16) -> Running {
        let mut handles: Vec<SocketHandle> = (0..8).map(|_| self.listen(port)).collect();
        self.run(move |guest| {
            for handle in &mut handles {
                let socket = guest.tcp(*handle);
                if matches!(socket.state(), State::Closed | State::TimeWait) {
                    guest.sockets.remove(*handle);
                    *handle = guest.listen(port);
                    continue;
                }
                echo(socket);
            }
        })
    }
}

/// Sends back what has arrived, and the end.
pub(crate) fn echo(socket: &mut Socket<'static>) {
    while socket.can_recv() && socket.can_send() {
        let room = socket.send_capacity() - socket.send_queue();
        let bytes = socket.recv(|bytes| {
            let length = bytes.len().min(room);
            (length, bytes[..length].to_vec())
        });
        socket.send_slice(&bytes.unwrap()).unwrap();
    }
    if socket.state() == State::CloseWait && !socket.can_recv() {
        socket.close();
    }
}
