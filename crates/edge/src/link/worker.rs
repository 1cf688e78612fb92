//! A worker thread: one epoll for many sandboxes.
//!
//! Owns: the event loop, the timers, the mailbox through which the rest of the program speaks to it. Does not own: what
//! a sandbox does in its turn.
//!
//! Each round waits for events, notes them, and gives every sandbox with something to do one turn, in order. Only
//! commands take a lock.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::event::EventfdFlags;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use smoltcp::time::{Duration, Instant};
use tokio::sync::oneshot;

use super::sandbox::{After, Sandbox, Turn};
use super::wire::Spare;
use super::{Accepted, DialError, LinkConfig, Shared};
use crate::egress::EgressPolicy;
use crate::egress::resolver::Resolver;

/// A sandbox's number has 30 bits: it shares a word of epoll's with a connection's.
pub(super) const SANDBOX_MASK: u32 = (1 << 30) - 1;
/// One read of a frame socket.
const SCRATCH: usize = 512 * 1024;
const EVENTS: usize = 256;
const SWEEP: Duration = Duration::from_secs(5);

/// What a worker can be asked to do.
pub(crate) enum Command {
    Attach { key: u32, frames: OwnedFd, policy: EgressPolicy, shared: Arc<Shared> },
    Detach { key: u32 },
    SetPolicy { key: u32, policy: EgressPolicy },
    Dial { key: u32, port: u16, reply: oneshot::Sender<Result<Accepted, DialError>> },
    DnsAnswer { key: u32, port: u16, message: Vec<u8> },
}

/// The way to a worker.
pub(crate) struct Mailbox {
    /// `None` after [`Mailbox::close`].
    commands: Mutex<Option<Vec<Command>>>,
    wake: OwnedFd,
}

impl Mailbox {
    pub(super) fn new() -> io::Result<Self> {
        let wake = rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Self { commands: Mutex::new(Some(Vec::new())), wake })
    }

    /// Puts a command in. False when the worker has been stopped; the command is dropped then.
    pub(crate) fn send(&self, command: Command) -> bool {
        let mut commands = self.commands.lock();
        let Some(list) = commands.as_mut() else { return false };
        list.push(command);
        if list.len() == 1 {
            self.ring();
        }
        true
    }

    pub(super) fn close(&self) {
        *self.commands.lock() = None;
        self.ring();
    }

    fn ring(&self) {
        // It fails only when the counter is full, and then the worker will wake anyway.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Everything that was put in; `None` when the worker is to stop.
    fn take(&self) -> Option<Vec<Command>> {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        self.commands.lock().as_mut().map(std::mem::take)
    }
}

/// What epoll reports on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token {
    Wake,
    Frames(u32),
    Connection(u32, u32),
    Flow(u32, u32),
}

impl Token {
    pub(super) fn encode(self) -> u64 {
        let (kind, sandbox, item) = match self {
            Self::Wake => (0, 0, 0),
            Self::Frames(sandbox) => (1, sandbox, 0),
            Self::Connection(sandbox, item) => (2, sandbox, item),
            Self::Flow(sandbox, item) => (3, sandbox, item),
        };
        (kind << 62) | (u64::from(sandbox & SANDBOX_MASK) << 32) | u64::from(item)
    }

    fn decode(word: u64) -> Self {
        let (sandbox, item) = ((word >> 32) as u32 & SANDBOX_MASK, word as u32);
        match word >> 62 {
            0 => Self::Wake,
            1 => Self::Frames(sandbox),
            2 => Self::Connection(sandbox, item),
            _ => Self::Flow(sandbox, item),
        }
    }
}

/// When connections are to be served again. An entry whose connection has since moved its timer is ignored.
#[derive(Default)]
pub(super) struct Timers(BinaryHeap<Reverse<(Instant, u32, u32)>>);

impl Timers {
    pub(super) fn set(&mut self, at: Instant, sandbox: u32, connection: u32) {
        self.0.push(Reverse((at, sandbox, connection)));
    }

    /// The first entry that `valid` knows. Those before it are dropped: most connections end long before their timer,
    /// and must not wake the worker.
    fn first(&mut self, valid: impl Fn(u32, u32, Instant) -> bool) -> Option<(Instant, u32, u32)> {
        loop {
            let Reverse((at, sandbox, connection)) = *self.0.peek()?;
            if valid(sandbox, connection, at) {
                return Some((at, sandbox, connection));
            }
            self.0.pop();
        }
    }
}

/// Starts a worker's thread.
pub(super) fn spawn(
    number: usize,
    config: Arc<LinkConfig>,
    resolver: Arc<Resolver>,
    mailbox: Arc<Mailbox>,
) -> io::Result<std::thread::JoinHandle<()>> {
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, &mailbox.wake, EventData::new_u64(Token::Wake.encode()), EventFlags::IN)?;
    let worker = Worker {
        epoll,
        config,
        resolver,
        mailbox,
        sandboxes: HashMap::new(),
        runnable: VecDeque::new(),
        timers: Timers::default(),
        scratch: vec![0; SCRATCH],
        spare: Spare::default(),
        started: std::time::Instant::now(),
        now: Instant::ZERO,
        next_sweep: Instant::ZERO + SWEEP,
    };
    std::thread::Builder::new().name(format!("edge-link-{number}")).spawn(move || worker.run())
}

struct Worker {
    epoll: OwnedFd,
    config: Arc<LinkConfig>,
    resolver: Arc<Resolver>,
    mailbox: Arc<Mailbox>,
    sandboxes: HashMap<u32, Sandbox>,
    runnable: VecDeque<u32>,
    timers: Timers,
    scratch: Vec<u8>,
    spare: Spare,
    started: std::time::Instant,
    now: Instant,
    next_sweep: Instant,
}

/// Splits a worker into one sandbox and what its turn needs of the rest.
macro_rules! with_sandbox {
    ($worker:expr, $key:expr, |$sandbox:ident, $turn:ident| $body:expr) => {
        if let Some($sandbox) = $worker.sandboxes.get_mut(&$key) {
            #[allow(unused_mut)]
            let mut $turn = Turn {
                epoll: &$worker.epoll,
                config: &$worker.config,
                resolver: &$worker.resolver,
                mailbox: &$worker.mailbox,
                timers: &mut $worker.timers,
                scratch: &mut $worker.scratch,
                spare: &mut $worker.spare,
                now: $worker.now,
            };
            Some($body)
        } else {
            None
        }
    };
}

impl Worker {
    fn run(mut self) {
        let mut events = [MaybeUninit::<Event>::uninit(); EVENTS];
        loop {
            let timeout = self.timeout();
            let noted: Vec<(Token, EventFlags)> =
                match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
                    Ok((ready, _)) => ready.iter().map(|e| (Token::decode(e.data.u64()), e.flags)).collect(),
                    Err(Errno::INTR) => Vec::new(),
                    Err(error) => {
                        tracing::error!(%error, "a worker of the network cannot wait for events and stops");
                        break;
                    }
                };
            self.tick();
            for (token, flags) in noted {
                if token == Token::Wake {
                    let Some(commands) = self.mailbox.take() else { return self.stop() };
                    commands.into_iter().for_each(|command| self.obey(command));
                } else {
                    self.note(token, flags);
                }
            }
            self.expire();
            for _ in 0..self.runnable.len() {
                if let Some(key) = self.runnable.pop_front() {
                    self.turn(key);
                }
            }
        }
        self.mailbox.close();
        self.stop();
    }

    fn stop(self) {
        self.sandboxes.into_values().for_each(Sandbox::cut);
    }

    fn tick(&mut self) {
        self.now = Instant::from_micros(self.started.elapsed().as_micros() as i64);
    }

    /// The next timer that still means something.
    fn next_timer(&mut self) -> Option<(Instant, u32, u32)> {
        let sandboxes = &self.sandboxes;
        self.timers.first(|key, id, at| sandboxes.get(&key).is_some_and(|sandbox| sandbox.has_timer(id, at)))
    }

    fn timeout(&mut self) -> Option<rustix::event::Timespec> {
        if !self.runnable.is_empty() {
            return Some(rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 });
        }
        // Without sandboxes there is nothing to sweep.
        let sweep = (!self.sandboxes.is_empty()).then_some(self.next_sweep);
        let next = self.next_timer().map(|(at, ..)| at).into_iter().chain(sweep).min()?;
        let now = Instant::from_micros(self.started.elapsed().as_micros() as i64);
        let wait = if next > now { next - now } else { Duration::ZERO };
        let wait = std::time::Duration::from(wait);
        Some(rustix::event::Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() })
    }

    fn note(&mut self, token: Token, flags: EventFlags) {
        let key = match token {
            Token::Wake => return,
            Token::Frames(key) | Token::Connection(key, _) | Token::Flow(key, _) => key,
        };
        let Some(sandbox) = self.sandboxes.get_mut(&key) else { return };
        match token {
            Token::Wake => {}
            Token::Connection(_, id) => sandbox.connection_event(id, flags),
            Token::Flow(_, id) => sandbox.flow_event(id),
            Token::Frames(_) => {
                if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR | EventFlags::RDHUP) {
                    sandbox.readable = true;
                }
                if flags.contains(EventFlags::OUT) {
                    sandbox.writable();
                }
            }
        }
        self.queue(key);
    }

    fn queue(&mut self, key: u32) {
        if let Some(sandbox) = self.sandboxes.get_mut(&key).filter(|sandbox| !sandbox.queued) {
            sandbox.queued = true;
            self.runnable.push_back(key);
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Attach { key, frames, policy, shared } => self.attach(key, frames, policy, shared),
            Command::Detach { key } => {
                if let Some(sandbox) = self.sandboxes.remove(&key) {
                    sandbox.cut();
                }
            }
            Command::SetPolicy { key, policy } => {
                with_sandbox!(self, key, |sandbox, turn| sandbox.set_policy(policy, &turn));
                self.queue(key);
            }
            Command::Dial { key, port, reply } => {
                let mut reply = Some(reply);
                with_sandbox!(self, key, |sandbox, turn| {
                    if let Some(reply) = reply.take() {
                        sandbox.dial(port, reply, 0, &mut turn);
                    }
                });
                if let Some(reply) = reply {
                    let _ = reply.send(Err(DialError::Gone));
                }
                self.queue(key);
            }
            Command::DnsAnswer { key, port, message } => {
                with_sandbox!(self, key, |sandbox, turn| sandbox.dns_answer(port, &message, &mut turn));
                self.queue(key);
            }
        }
    }

    fn attach(&mut self, key: u32, frames: OwnedFd, policy: EgressPolicy, shared: Arc<Shared>) {
        // Large buffers save wake-ups; the system clamps what it does not allow.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&frames, 1024 * 1024);
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&frames, 1024 * 1024);
        let data = EventData::new_u64(Token::Frames(key).encode());
        let sandbox = Sandbox::new(key, frames, policy, shared, self.now);
        if let Err(error) = epoll::add(&self.epoll, sandbox.frames(), data, EventFlags::IN) {
            tracing::error!(sandbox = %sandbox.shared.sandbox, %error, "cannot watch the frame socket");
            return sandbox.cut();
        }
        if let Some(old) = self.sandboxes.insert(key, sandbox) {
            old.cut();
        }
        self.queue(key);
    }

    fn expire(&mut self) {
        while let Some((_, key, connection)) = self.next_timer().filter(|(at, ..)| *at <= self.now) {
            if let Some(sandbox) = self.sandboxes.get_mut(&key) {
                sandbox.connection_timer(connection);
            }
            self.queue(key);
        }
        if self.now >= self.next_sweep {
            self.next_sweep = self.now + SWEEP;
            let keys: Vec<u32> = self.sandboxes.keys().copied().collect();
            for key in keys {
                with_sandbox!(self, key, |sandbox, turn| sandbox.sweep(&turn));
            }
        }
    }

    fn turn(&mut self, key: u32) {
        if let Some(sandbox) = self.sandboxes.get_mut(&key) {
            sandbox.queued = false;
        }
        match with_sandbox!(self, key, |sandbox, turn| sandbox.turn(&mut turn)) {
            None => return,
            Some(After::Idle) => {}
            Some(After::Again) => self.queue(key),
            Some(After::Gone) => {
                if let Some(sandbox) = self.sandboxes.remove(&key) {
                    tracing::debug!(sandbox = %sandbox.shared.sandbox, "the machine closed its link");
                    sandbox.cut();
                }
                return;
            }
        }
        self.watch_writes(key);
    }

    /// Asks for EPOLLOUT on the frame socket only while it is full.
    fn watch_writes(&mut self, key: u32) {
        let Some(sandbox) = self.sandboxes.get_mut(&key) else { return };
        let wanted = sandbox.is_blocked();
        if wanted != sandbox.armed {
            let events = if wanted { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
            let data = EventData::new_u64(Token::Frames(key).encode());
            if epoll::modify(&self.epoll, sandbox.frames(), data, events).is_ok() {
                sandbox.armed = wanted;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_the_round_trip() {
        for token in [
            Token::Wake,
            Token::Frames(SANDBOX_MASK),
            Token::Connection(7, u32::MAX),
            Token::Flow(SANDBOX_MASK, 0),
        ] {
            assert_eq!(Token::decode(token.encode()), token);
        }
    }

    #[test]
    fn a_closed_mailbox_takes_nothing() {
        let mailbox = Mailbox::new().unwrap();
        assert!(mailbox.send(Command::Detach { key: 1 }));
        assert_eq!(mailbox.take().map(|list| list.len()), Some(1));
        mailbox.close();
        assert!(!mailbox.send(Command::Detach { key: 1 }));
        assert!(mailbox.take().is_none());
    }
}
