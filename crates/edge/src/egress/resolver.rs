//! Forwards the guests' DNS queries to the host's name servers.
//!
//! Owns: sockets to name servers, fail-over between them, the limit of outstanding queries of one sandbox. Does not
//! own: judging messages ([`super::dns`]), the guest's side (datagrams come from the link's worker, connections by a
//! socket pair).
//!
//! Fail-over: a server that has not answered after [`PATIENCE`] gets company from the next, and the first good answer
//! of any is taken. One that stayed silent goes to the end of the list for a while. A query never takes more than
//! [`DEADLINE`].

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket, UnixStream};
use tokio::runtime::Handle;

use super::Floor;
use super::dns::{self, Question, Refusal, Verdict};
use crate::link::Shared;
use crate::link::{Mailbox, WorkerCommand};

/// How long the first server is waited for alone.
const PATIENCE: Duration = Duration::from_millis(700);
/// How long a query may take in all.
const DEADLINE: Duration = Duration::from_secs(5);
/// How long a silent server stays at the end of the list.
const BENCH: Duration = Duration::from_secs(30);
/// How long a DNS connection of the guest may be silent.
const IDLE: Duration = Duration::from_secs(30);
const LARGEST: usize = 65535;

/// Where the answer to a datagram goes.
pub(crate) struct Answer {
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) key: u32,
    pub(crate) port: u16,
}

struct Server {
    address: SocketAddr,
    /// When it last stayed silent, in milliseconds since the resolver was made, plus one; 0 is never.
    silent: AtomicU64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transport {
    Datagram,
    Stream,
}

/// The resolver of all sandboxes of a host.
pub(crate) struct Resolver {
    servers: Vec<Server>,
    floor: Floor,
    runtime: Handle,
    started: Instant,
}

/// Counts one query or connection of a sandbox while it lives.
struct Slot(Arc<Shared>);

impl Slot {
    fn take(shared: Arc<Shared>, limit: usize) -> Option<Self> {
        let taken = shared.dns_outstanding.fetch_add(1, Ordering::Relaxed);
        let slot = Self(shared);
        (taken < limit).then_some(slot)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.dns_outstanding.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Resolver {
    pub(crate) fn new(servers: Vec<SocketAddr>, floor: Floor, runtime: Handle) -> Self {
        let servers =
            servers.into_iter().map(|address| Server { address, silent: AtomicU64::new(0) }).collect();
        Self { servers, floor, runtime, started: Instant::now() }
    }

    /// Answers one datagram, later. False when the sandbox has too many under way.
    pub(crate) fn serve_datagram(
        self: &Arc<Self>,
        message: &[u8],
        answer: Answer,
        shared: Arc<Shared>,
        limit: usize,
    ) -> bool {
        let Some(slot) = Slot::take(shared, limit) else { return false };
        let (resolver, query) = (Arc::clone(self), message.to_vec());
        self.runtime.spawn(async move {
            let reply = resolver.answer(&query, Transport::Datagram, &slot.0).await;
            drop(slot);
            if let Some(message) = reply {
                answer.mailbox.send(WorkerCommand::DnsAnswer { key: answer.key, port: answer.port, message });
            }
        });
        true
    }

    /// Serves one connection of a guest.
    pub(crate) fn serve_stream(self: &Arc<Self>, socket: OwnedFd, shared: Arc<Shared>) {
        let resolver = Arc::clone(self);
        // The worker has looked at the limit.
        let slot = Slot::take(shared, usize::MAX);
        self.runtime.spawn(async move {
            let Some(slot) = slot else { return };
            let socket = std::os::unix::net::UnixStream::from(socket);
            let Ok(mut stream) = UnixStream::from_std(socket) else { return };
            while let Ok(Ok(query)) = tokio::time::timeout(IDLE, read_message(&mut stream)).await {
                let Some(reply) = resolver.answer(&query, Transport::Stream, &slot.0).await else { return };
                if !matches!(tokio::time::timeout(IDLE, write_message(&mut stream, &reply)).await, Ok(Ok(())))
                {
                    return;
                }
            }
        });
    }

    /// The answer to a guest's message; `None` when it is no query.
    async fn answer(&self, query: &[u8], transport: Transport, shared: &Shared) -> Option<Vec<u8>> {
        if !shared.internet.load(Ordering::Acquire) {
            return dns::refusal(query, Refusal::NoSuchName);
        }
        let question = dns::question(query)?;
        if question.wants_ipv6() {
            return dns::refusal(query, Refusal::NoData);
        }
        let found = tokio::time::timeout(DEADLINE, self.resolve(query, &question, transport)).await;
        match found.ok().flatten() {
            Some((mut reply, Verdict::Good | Verdict::Unwilling)) => {
                dns::set_id(&mut reply, question.id);
                Some(reply)
            }
            Some((_, Verdict::Floor)) => {
                tracing::debug!(sandbox = %shared.sandbox, ?question, "a name led below the floor");
                dns::refusal(query, Refusal::NoSuchName)
            }
            Some((_, Verdict::Foreign)) | None => dns::refusal(query, Refusal::Failure),
        }
    }

    /// Asks one server after the other, with overlap, twice round the list.
    async fn resolve(
        &self,
        query: &[u8],
        question: &Question,
        transport: Transport,
    ) -> Option<(Vec<u8>, Verdict)> {
        let order = self.order();
        let mut next = order.iter().chain(order.iter());
        let mut asked = FuturesUnordered::new();
        let mut unwilling = None;
        loop {
            let fresh = next.next();
            if let Some(server) = fresh {
                asked.push(self.ask(&self.servers[*server], query, question, transport));
            } else if asked.is_empty() {
                return unwilling;
            }
            let patience = if fresh.is_some() { PATIENCE } else { DEADLINE };
            match tokio::time::timeout(patience, asked.next()).await {
                Ok(Some(Some((reply, Verdict::Unwilling)))) => unwilling = Some((reply, Verdict::Unwilling)),
                Ok(Some(Some(found))) => return Some(found),
                // It failed, or is slow: go on with the next one.
                Ok(Some(None) | None) | Err(_) => {}
            }
        }
    }

    /// The servers' numbers: in the given order, those that were silent lately last.
    fn order(&self) -> Vec<usize> {
        let now = self.started.elapsed().as_millis() as u64;
        let benched = |server: &Server| match server.silent.load(Ordering::Relaxed) {
            0 => false,
            at => now < at + BENCH.as_millis() as u64,
        };
        let mut order: Vec<usize> = (0..self.servers.len()).collect();
        order.sort_by_key(|number| benched(&self.servers[*number]));
        order
    }

    async fn ask(
        &self,
        server: &Server,
        query: &[u8],
        question: &Question,
        transport: Transport,
    ) -> Option<(Vec<u8>, Verdict)> {
        let mut mark = Silence { server, started: self.started, asked: Instant::now(), answered: None };
        let mut id = [0; 2];
        getrandom::fill(&mut id).ok()?;
        let id = u16::from_be_bytes(id);
        let mut message = query.to_vec();
        dns::set_id(&mut message, id);
        let answer = match transport {
            Transport::Datagram => self.ask_datagram(server.address, &message, question, id).await,
            Transport::Stream => self.ask_stream(server.address, &message, question, id).await,
        };
        mark.answered = Some(answer.is_ok());
        answer.ok()
    }

    async fn ask_datagram(
        &self,
        server: SocketAddr,
        message: &[u8],
        question: &Question,
        id: u16,
    ) -> std::io::Result<(Vec<u8>, Verdict)> {
        // A socket for each query: its port is random, too.
        let any = match server {
            SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
            SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
        };
        let socket = UdpSocket::bind(any).await?;
        socket.connect(server).await?;
        socket.send(message).await?;
        let mut reply = vec![0; LARGEST];
        loop {
            let got = socket.recv(&mut reply).await?;
            match dns::judge(question, id, &reply[..got], &self.floor) {
                Verdict::Foreign => {}
                verdict => {
                    reply.truncate(got);
                    return Ok((reply, verdict));
                }
            }
        }
    }

    async fn ask_stream(
        &self,
        server: SocketAddr,
        message: &[u8],
        question: &Question,
        id: u16,
    ) -> std::io::Result<(Vec<u8>, Verdict)> {
        let mut stream = TcpStream::connect(server).await?;
        write_message(&mut stream, message).await?;
        let reply = read_message(&mut stream).await?;
        match dns::judge(question, id, &reply, &self.floor) {
            Verdict::Foreign => Err(std::io::ErrorKind::InvalidData.into()),
            verdict => Ok((reply, verdict)),
        }
    }
}

/// Benches a server that failed or stayed silent; one that answered comes off the bench.
struct Silence<'a> {
    server: &'a Server,
    started: Instant,
    asked: Instant,
    /// `None`: another one was faster.
    answered: Option<bool>,
}

impl Drop for Silence<'_> {
    fn drop(&mut self) {
        match self.answered {
            Some(true) => self.server.silent.store(0, Ordering::Relaxed),
            None if self.asked.elapsed() < PATIENCE => {}
            Some(false) | None => {
                let now = self.started.elapsed().as_millis() as u64;
                self.server.silent.store(now + 1, Ordering::Relaxed);
            }
        }
    }
}

async fn read_message<S: AsyncReadExt + Unpin>(stream: &mut S) -> std::io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut message = vec![0; usize::from(length)];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

async fn write_message<S: AsyncWriteExt + Unpin>(stream: &mut S, message: &[u8]) -> std::io::Result<()> {
    let length = u16::try_from(message.len()).map_err(|_| std::io::ErrorKind::InvalidData)?;
    let mut framed = Vec::with_capacity(2 + message.len());
    framed.extend_from_slice(&length.to_be_bytes());
    framed.extend_from_slice(message);
    stream.write_all(&framed).await
}
