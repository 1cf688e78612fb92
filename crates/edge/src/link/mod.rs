//! The virtual network of the sandboxes of one host, all in user space.
//!
//! Owns: the guests' frame sockets, their TCP, UDP and ping, the sockets on the host that stand for them, connections
//! into guests, limits of one guest. Does not own: the decision ([`crate::egress`]), HTTP ([`crate::ingress`]).
//!
//! ```text
//! caller ──commands──▶ worker thread (one epoll, many sandboxes; a sandbox stays on its worker)
//!                        ├─ sandbox: frame socket, smoltcp interface, policy
//!                        │    ├─ connection: one-socket set, host socket        (tcp)
//!                        │    └─ flow: host socket                              (datagram)
//!                        └─ next sandbox …
//! names thread (tokio): DNS and the host's addresses; reached by a socket pair or a task, never on the data path
//! ```
//!
//! The data path takes no lock: commands alone go through a mailbox.

mod budget;
mod datagram;
pub mod frame;
mod sandbox;
mod stream;
mod tcp;
mod wire;
mod worker;

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use proto::{SandboxId, guest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::oneshot;

use crate::egress::resolver::Resolver;
use crate::egress::{EgressPolicy, Floor};
pub use budget::Budget;
pub use stream::GuestStream;
use worker::Command;
pub(crate) use worker::{Command as WorkerCommand, Mailbox};

/// Limits of one sandbox.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// TCP connections in both directions together.
    pub connections: usize,
    /// Of these, connections of the guest whose far end has not answered yet.
    pub half_open: usize,
    /// UDP flows and pings; the oldest gives way to a new one.
    pub datagram_flows: usize,
    /// Bytes of TCP rings that are shared out in large pieces; beyond that each connection gets the smallest.
    pub ring_bytes: usize,
    /// DNS queries without an answer, and DNS connections.
    pub dns_outstanding: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 4096,
            half_open: 512,
            datagram_flows: 512,
            ring_bytes: 128 * 1024 * 1024,
            dns_outstanding: 128,
        }
    }
}

/// How the links of one host are run. The default reads nothing from the host.
#[derive(Debug, Clone)]
pub struct LinkConfig {
    /// Worker threads.
    pub workers: usize,
    /// Name servers, in order of preference. With none, every query fails with SERVFAIL.
    pub upstream_dns: Vec<SocketAddr>,
    /// The floor under every policy.
    pub floor: Floor,
    /// How often the host's own addresses are read again.
    pub floor_refresh: Duration,
    /// Limits of one sandbox.
    pub limits: Limits,
    /// Sockets on the host for what guests open themselves, all sandboxes together.
    pub budget: Budget,
    /// How long a connection may take to be established, in either direction.
    pub connect_timeout: Duration,
    /// How long a connection that one side has closed may stay silent.
    pub half_closed_timeout: Duration,
    /// How long a connection that both sides have closed may wait for the guest's last acknowledgement.
    pub closing_timeout: Duration,
    /// How long a UDP flow or a ping may stay silent.
    pub datagram_timeout: Duration,
}

impl Default for LinkConfig {
    fn default() -> Self {
        Self {
            workers: std::thread::available_parallelism().map_or(1, usize::from).min(8),
            upstream_dns: Vec::new(),
            floor: Floor::default(),
            floor_refresh: Duration::from_secs(10),
            limits: Limits::default(),
            budget: Budget::new(16_384),
            connect_timeout: Duration::from_secs(10),
            half_closed_timeout: Duration::from_secs(900),
            closing_timeout: Duration::from_secs(60),
            datagram_timeout: Duration::from_secs(60),
        }
    }
}

/// The links could not be started or a sandbox not attached.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The system refused a resource.
    #[error("cannot set up a link: {what}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The links were shut down.
    #[error("the links are shut down")]
    Shutdown,
}

impl LinkError {
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

/// A connection into a guest could not be made.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// Nothing listens on that port, neither on the guest's address nor on its loopback.
    #[error("the port is closed")]
    Refused,
    /// The guest did not answer in time.
    #[error("the guest did not answer")]
    Timeout,
    /// The sandbox has no link any more.
    #[error("the sandbox is gone")]
    Gone,
    /// The sandbox has as many connections as it may have.
    #[error("the sandbox has too many connections")]
    Limit,
    /// The host's own resources failed.
    #[error("cannot connect to the guest")]
    Io(#[source] io::Error),
}

/// What a link has done so far. Counters only grow, except those of what exists now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinkStats {
    /// Frames from the guest.
    pub frames_in: u64,
    /// Bytes of these.
    pub bytes_in: u64,
    /// Frames to the guest.
    pub frames_out: u64,
    /// Bytes of these.
    pub bytes_out: u64,
    /// Frames dropped because they were malformed, or neither ARP nor unfragmented IPv4 with TCP, UDP or echo.
    pub dropped: u64,
    /// Frames dropped because their source was not the guest.
    pub spoofed: u64,
    /// Flows that policy or floor denied.
    pub denied: u64,
    /// Flows refused because of a limit.
    pub limited: u64,
    /// TCP connections that exist now.
    pub connections: u64,
    /// TCP connections opened so far, in both directions.
    pub opened: u64,
    /// UDP flows and pings that exist now.
    pub datagram_flows: u64,
    /// DNS queries seen.
    pub dns_queries: u64,
}

const COUNTERS: usize = 12;

impl LinkStats {
    fn to_array(self) -> [u64; COUNTERS] {
        [
            self.frames_in,
            self.bytes_in,
            self.frames_out,
            self.bytes_out,
            self.dropped,
            self.spoofed,
            self.denied,
            self.limited,
            self.connections,
            self.opened,
            self.datagram_flows,
            self.dns_queries,
        ]
    }

    fn from_array(values: [u64; COUNTERS]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l] = values;
        Self {
            frames_in: a,
            bytes_in: b,
            frames_out: c,
            bytes_out: d,
            dropped: e,
            spoofed: f,
            denied: g,
            limited: h,
            connections: i,
            opened: j,
            datagram_flows: k,
            dns_queries: l,
        }
    }
}

/// What a link's owner, its worker and the resolver all see of one sandbox.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) sandbox: SandboxId,
    /// The link is attached and the machine's socket is open.
    pub(crate) alive: AtomicBool,
    /// The policy's `internet`, for the resolver, which looks at each query.
    pub(crate) internet: AtomicBool,
    pub(crate) dns_outstanding: AtomicUsize,
    counters: [AtomicU64; COUNTERS],
}

impl Shared {
    fn new(sandbox: SandboxId, policy: EgressPolicy) -> Self {
        Self {
            sandbox,
            alive: AtomicBool::new(true),
            internet: AtomicBool::new(policy.internet),
            dns_outstanding: AtomicUsize::new(0),
            counters: Default::default(),
        }
    }

    /// Only the worker calls this.
    fn publish(&self, stats: &LinkStats) {
        for (place, value) in self.counters.iter().zip(stats.to_array()) {
            place.store(value, Ordering::Relaxed);
        }
    }

    fn stats(&self) -> LinkStats {
        LinkStats::from_array(std::array::from_fn(|at| self.counters[at].load(Ordering::Relaxed)))
    }
}

/// The worker threads. Cheap to clone; the last clone that is dropped stops them.
#[derive(Clone)]
pub struct Links {
    inner: Arc<Inner>,
}

struct Inner {
    mailboxes: Vec<Arc<Mailbox>>,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
    names: Mutex<Option<oneshot::Sender<()>>>,
    floor: Floor,
    next: AtomicU32,
}

impl Links {
    /// Starts the threads.
    pub fn start(config: LinkConfig) -> Result<Self, LinkError> {
        config.floor.refresh().map_err(LinkError::io("read the host's addresses"))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(LinkError::io("start the resolver"))?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let (floor, every) = (config.floor.clone(), config.floor_refresh);
        let names = std::thread::Builder::new()
            .name("edge-names".into())
            .spawn(move || runtime.block_on(keep_floor_fresh(floor, every, stopped)))
            .map_err(LinkError::io("start the resolver"))?;
        let config = Arc::new(config);
        let resolver = Arc::new(Resolver::new(config.upstream_dns.clone(), config.floor.clone(), handle));
        let mailboxes: io::Result<Vec<_>> =
            (0..config.workers.max(1)).map(|_| Mailbox::new().map(Arc::new)).collect();
        let inner = Inner {
            mailboxes: mailboxes.map_err(LinkError::io("make a mailbox"))?,
            threads: Mutex::new(vec![names]),
            names: Mutex::new(Some(stop)),
            floor: config.floor.clone(),
            next: AtomicU32::new(0),
        };
        // Dropping it stops what was started, should a later thread fail.
        let links = Self { inner: Arc::new(inner) };
        for (number, mailbox) in links.inner.mailboxes.iter().enumerate() {
            let thread =
                worker::spawn(number, Arc::clone(&config), Arc::clone(&resolver), Arc::clone(mailbox))
                    .map_err(LinkError::io("start a worker"))?;
            links.inner.threads.lock().push(thread);
        }
        Ok(links)
    }

    /// Takes over the frame socket of a machine (QEMU's `-netdev stream`: a length, big-endian, then the frame).
    pub fn attach(
        &self,
        sandbox: SandboxId,
        frames: OwnedFd,
        policy: EgressPolicy,
    ) -> Result<Link, LinkError> {
        self.inner.floor.refresh().map_err(LinkError::io("read the host's addresses"))?;
        rustix::io::ioctl_fionbio(&frames, true)
            .map_err(io::Error::from)
            .map_err(LinkError::io("make the frame socket non-blocking"))?;
        let number = self.inner.next.fetch_add(1, Ordering::Relaxed);
        let mailbox = &self.inner.mailboxes[number as usize % self.inner.mailboxes.len()];
        let shared = Arc::new(Shared::new(sandbox, policy));
        let key = number & worker::SANDBOX_MASK;
        let attach = Command::Attach { key, frames, policy, shared: Arc::clone(&shared) };
        if !mailbox.send(attach) {
            return Err(LinkError::Shutdown);
        }
        Ok(Link { dialer: Dialer { key, mailbox: Arc::clone(mailbox), shared } })
    }

    /// Cuts everything and stops the threads. Further attaches fail.
    pub fn shutdown(&self) {
        self.inner.shutdown();
    }
}

impl Inner {
    fn shutdown(&self) {
        for mailbox in &self.mailboxes {
            mailbox.close();
        }
        drop(self.names.lock().take());
        for thread in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the network had panicked");
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shutdown();
    }
}

async fn keep_floor_fresh(floor: Floor, every: Duration, mut stopped: oneshot::Receiver<()>) {
    let mut ticks = tokio::time::interval(every.max(Duration::from_millis(100)));
    loop {
        tokio::select! {
            _ = &mut stopped => return,
            _ = ticks.tick() => {
                if let Err(error) = floor.refresh() {
                    tracing::warn!(%error, "cannot read the host's addresses; the last known ones stay in force");
                }
            }
        }
    }
}

/// The network of one sandbox. Dropping it cuts every connection and closes the frame socket.
pub struct Link {
    dialer: Dialer,
}

impl Link {
    /// Connects to a port of the guest: on its address, or, when nothing listens there, on its loopback.
    pub async fn dial(&self, port: u16) -> Result<GuestStream, DialError> {
        self.dialer.dial(port).await
    }

    /// A handle that dials as long as the link exists.
    pub fn dialer(&self) -> Dialer {
        self.dialer.clone()
    }

    /// What the link has done so far.
    pub fn stats(&self) -> LinkStats {
        self.dialer.shared.stats()
    }

    /// Replaces the policy. Flows that the new one denies are cut.
    pub fn set_policy(&self, policy: EgressPolicy) {
        self.dialer.shared.internet.store(policy.internet, Ordering::Release);
        self.dialer.mailbox.send(Command::SetPolicy { key: self.dialer.key, policy });
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.dialer.shared.alive.store(false, Ordering::Release);
        self.dialer.mailbox.send(Command::Detach { key: self.dialer.key });
    }
}

/// Dials into one sandbox. Cheap to clone; does not keep the link alive.
#[derive(Clone)]
pub struct Dialer {
    key: u32,
    mailbox: Arc<Mailbox>,
    shared: Arc<Shared>,
}

impl Dialer {
    /// As [`Link::dial`]; [`DialError::Gone`] after the link was dropped or the machine died.
    pub async fn dial(&self, port: u16) -> Result<GuestStream, DialError> {
        // The relay answers only the edge itself: through it, closed ports would look open.
        if port == 0 || port == guest::RELAY_PORT {
            return Err(DialError::Refused);
        }
        match self.connect(port).await {
            Err(DialError::Refused) if port != guest::ENVD_PORT => self.relay(port).await,
            answer => answer,
        }
    }

    async fn connect(&self, port: u16) -> Result<GuestStream, DialError> {
        if !self.shared.alive.load(Ordering::Acquire) {
            return Err(DialError::Gone);
        }
        let (reply, answer) = oneshot::channel();
        self.mailbox.send(Command::Dial { key: self.key, port, reply });
        let accepted = answer.await.map_err(|_| DialError::Gone)??;
        accepted.into_stream().map_err(DialError::Io)
    }

    async fn relay(&self, port: u16) -> Result<GuestStream, DialError> {
        let mut stream = self.connect(guest::RELAY_PORT).await?;
        let conversation = async {
            stream.write_all(&port.to_be_bytes()).await?;
            stream.read_u8().await
        };
        match tokio::time::timeout(Duration::from_secs(10), conversation).await {
            Err(_) => Err(DialError::Timeout),
            Ok(Ok(guest::RELAY_OK)) => Ok(stream),
            Ok(Ok(_)) => Err(DialError::Refused),
            Ok(Err(_)) if !self.shared.alive.load(Ordering::Acquire) => Err(DialError::Gone),
            Ok(Err(_)) => Err(DialError::Refused),
        }
    }
}

/// A connection that the guest has accepted, before it belongs to the caller's runtime.
pub(crate) struct Accepted {
    socket: OwnedFd,
    reset: Arc<AtomicBool>,
}

impl Accepted {
    fn into_stream(self) -> io::Result<GuestStream> {
        let socket = std::os::unix::net::UnixStream::from(self.socket);
        Ok(GuestStream::new(tokio::net::UnixStream::from_std(socket)?, self.reset))
    }
}
