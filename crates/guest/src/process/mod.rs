//! Commands: what `process.Process` is about, without its encoding.
//!
//! Owns: every command the agent started, from fork to 30 s after its end. Does not own: the RPC (`rpc`), forking
//! (`sys::spawn`), reaping (`sys::wait`).
//!
//! ```text
//! start ── Running ──(main process reaped, and both pipes at EOF or a kill was asked for)── Ended ──30 s── forgotten
//! ```
//!
//! Contract:
//! * A command's life does not depend on any stream. Only its deadline, a signal or itself ends it.
//! * A kill (SIGKILL by request, or the deadline) takes everything the command started: its cgroup. Without cgroups it
//!   takes the process group. SIGTERM goes to the process group, which `setsid` made the command's own: what the command
//!   did not put into groups of its own.
//! * All output comes before the end. Without a kill, the end waits for the pipes, so `server &` holds it.

pub(crate) mod cgroup;
pub(crate) mod fanout;
pub(crate) mod input;
pub(crate) mod rpc;

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::pty::OpenptFlags;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::sys::spawn::{NulByte, Spec, Stdio, spawn};
use crate::sys::wait::{Children, Exit};
use cgroup::{Cgroup, Cgroups};
use fanout::{Event, Fanout, PATIENCE};
use input::Input;

/// How long an ended command can still be connected to.
const REMEMBERED: Duration = Duration::from_secs(30);
/// How many ended commands are remembered at most.
const REMEMBERED_MAX: usize = 4096;
/// Bytes of output in one event.
const PIPE_CHUNK: usize = 32 << 10;
/// The same for terminals.
const PTY_CHUNK: usize = 16 << 10;

/// How a command ended, in Go's words, which is what the SDKs show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct End {
    /// Exit code; -1 after a signal.
    pub(crate) exit_code: i32,
    /// False after a signal.
    pub(crate) exited: bool,
    /// `exit status 3` or `signal: killed`.
    pub(crate) status: String,
}

impl End {
    /// Describes an exit.
    pub(crate) fn from_exit(exit: Exit) -> Self {
        match exit {
            Exit::Code(code) => Self { exit_code: code, exited: true, status: format!("exit status {code}") },
            Exit::Signal(signal) => {
                Self { exit_code: -1, exited: false, status: format!("signal: {}", signal_name(signal)) }
            }
        }
    }
}

fn signal_name(signal: i32) -> String {
    const NAMES: [&str; 15] = [
        "hangup",
        "interrupt",
        "quit",
        "illegal instruction",
        "trace/breakpoint trap",
        "aborted",
        "bus error",
        "floating point exception",
        "killed",
        "user defined signal 1",
        "segmentation fault",
        "user defined signal 2",
        "broken pipe",
        "alarm clock",
        "terminated",
    ];
    usize::try_from(signal - 1)
        .ok()
        .and_then(|at| NAMES.get(at))
        .map_or_else(|| format!("signal {signal}"), |name| (*name).to_owned())
}

/// What a client asked for, kept for `List`.
#[derive(Debug, Clone, Default)]
pub(crate) struct Config {
    /// Program.
    pub(crate) cmd: String,
    /// Arguments.
    pub(crate) args: Vec<String>,
    /// Its own environment.
    pub(crate) envs: Vec<(String, String)>,
    /// Working directory as given.
    pub(crate) cwd: Option<String>,
}

/// What the command's descriptors are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Streams {
    /// Output pipes; input from `/dev/null` or a third pipe.
    Pipes {
        /// Whether the client will send input.
        stdin: bool,
    },
    /// A terminal of that size.
    Terminal {
        /// Columns.
        cols: u16,
        /// Rows.
        rows: u16,
    },
}

/// Why a command was not started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    /// A string cannot be passed to the kernel.
    #[error("invalid command")]
    Nul(#[from] NulByte),
    /// Out of descriptors, processes or memory.
    #[error("cannot start the process")]
    Io(#[from] io::Error),
}

/// One command.
pub(crate) struct Process {
    /// Its process ID.
    pub(crate) pid: u32,
    /// What was asked for.
    pub(crate) config: Config,
    /// The client's name for it.
    pub(crate) tag: Option<String>,
    /// Its input.
    pub(crate) input: Input,
    fanout: Fanout,
    // Until the end; what is left in it then is no part of the command any more.
    cgroup: Mutex<Option<Cgroup>>,
    children: Children,
    // Someone asked for its end: output of survivors is not waited for.
    ending: CancellationToken,
    ended: CancellationToken,
}

/// All commands.
pub(crate) struct Table {
    children: Children,
    cgroups: Cgroups,
    processes: Mutex<HashMap<u32, Arc<Process>>>,
}

/// A read end and how its bytes are reported.
struct Output {
    fd: Arc<AsyncFd<OwnedFd>>,
    wrap: fn(Bytes) -> Event,
    chunk: usize,
}

struct Channels {
    input: Input,
    outputs: Vec<Output>,
    child: [OwnedFd; 3],
    terminal: bool,
}

fn pipe_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}

fn asynchronous(fd: OwnedFd) -> io::Result<Arc<AsyncFd<OwnedFd>>> {
    rustix::io::ioctl_fionbio(&fd, true)?;
    Ok(Arc::new(crate::sys::events::asynchronous(fd)?))
}

impl Channels {
    fn open(streams: Streams) -> io::Result<Self> {
        match streams {
            Streams::Pipes { stdin } => {
                let (stdout, child_stdout) = pipe_pair()?;
                let (stderr, child_stderr) = pipe_pair()?;
                let (input, child_stdin) = if stdin {
                    let (child_stdin, stdin) = pipe_pair()?;
                    rustix::io::ioctl_fionbio(&stdin, true)?;
                    (Input::pipe(pipe::Sender::from_owned_fd(stdin)?), child_stdin)
                } else {
                    let null =
                        rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
                    (Input::none(), null)
                };
                let outputs = vec![
                    Output { fd: asynchronous(stdout)?, wrap: Event::Stdout, chunk: PIPE_CHUNK },
                    Output { fd: asynchronous(stderr)?, wrap: Event::Stderr, chunk: PIPE_CHUNK },
                ];
                Ok(Self { input, outputs, child: [child_stdin, child_stdout, child_stderr], terminal: false })
            }
            Streams::Terminal { cols, rows } => {
                let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
                let master = rustix::pty::openpt(flags)?;
                rustix::pty::grantpt(&master)?;
                rustix::pty::unlockpt(&master)?;
                let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
                input::set_size(&slave, cols, rows)?;
                let master = asynchronous(master)?;
                Ok(Self {
                    input: Input::terminal(Arc::clone(&master)),
                    outputs: vec![Output { fd: master, wrap: Event::Pty, chunk: PTY_CHUNK }],
                    child: [slave.try_clone()?, slave.try_clone()?, slave],
                    terminal: true,
                })
            }
        }
    }
}

/// What [`Table::start`] needs.
pub(crate) struct Start {
    /// As the client gave it.
    pub(crate) config: Config,
    /// The client's name for it.
    pub(crate) tag: Option<String>,
    /// Environment, complete.
    pub(crate) env: Vec<(OsString, OsString)>,
    /// Working directory, which exists.
    pub(crate) cwd: PathBuf,
    /// Identity; `None` keeps the agent's.
    pub(crate) credentials: Option<crate::sys::rights::Credentials>,
    /// Descriptors.
    pub(crate) streams: Streams,
    /// Nice value and limits of a command instead of the agent's.
    pub(crate) reset_limits: bool,
}

impl Start {
    fn spec(&self) -> Spec {
        Spec {
            program: self.config.cmd.clone().into(),
            args: self.config.args.iter().map(Into::into).collect(),
            env: self.env.clone(),
            cwd: self.cwd.clone().into_os_string(),
            credentials: self.credentials.clone(),
            reset_limits: self.reset_limits,
        }
    }
}

impl Table {
    /// An empty table.
    pub(crate) fn new(children: Children, cgroups: Cgroups) -> Arc<Self> {
        Arc::new(Self { children, cgroups, processes: Mutex::default() })
    }

    /// Starts a command. Its output waits for the returned subscriber from the first byte on.
    ///
    /// # Errors
    /// When no process could be made. A program that cannot be run is no error here: see `sys::spawn`.
    pub(crate) fn start(
        self: &Arc<Self>,
        start: Start,
    ) -> Result<(Arc<Process>, mpsc::Receiver<Event>), StartError> {
        let spec = start.spec();
        let prepared = spec.prepare()?;
        let channels = Channels::open(start.streams)?;
        if let (true, Some(who)) = (channels.terminal, &spec.credentials) {
            // The terminal belongs to its user, as after a login.
            let owner = rustix::fs::Uid::from_raw(who.uid);
            let _ = rustix::fs::fchown(&channels.child[0], Some(owner), None);
        }
        let cgroup = self.cgroups.create()?;
        let stdio = Stdio {
            stdin: channels.child[0].as_fd(),
            stdout: channels.child[1].as_fd(),
            stderr: channels.child[2].as_fd(),
            controlling_terminal: channels.terminal,
        };
        let (pid, exit) =
            self.children.register(|| spawn(&prepared, &stdio, cgroup.as_ref().map(Cgroup::directory)))?;
        drop(channels.child);
        let fanout = Fanout::default();
        let subscriber = fanout.subscribe();
        let process = Arc::new(Process {
            pid: pid.unsigned_abs(),
            config: start.config,
            tag: start.tag,
            input: channels.input,
            fanout,
            cgroup: Mutex::new(cgroup),
            children: self.children.clone(),
            ending: CancellationToken::new(),
            ended: CancellationToken::new(),
        });
        self.processes.lock().insert(process.pid, Arc::clone(&process));
        tokio::spawn(Arc::clone(self).follow(Arc::clone(&process), exit, channels.outputs));
        Ok((process, subscriber))
    }

    /// Runs a program of the agent's own to its end: no cgroup, no output, no entry in the table.
    ///
    /// # Errors
    /// When no process could be made.
    pub(crate) async fn start_beside(&self, start: Start) -> Result<Exit, StartError> {
        let exit = {
            let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
            let null = null.map_err(io::Error::from)?;
            let prepared = start.spec().prepare()?;
            let (stdin, stdout, stderr) = (null.as_fd(), null.as_fd(), null.as_fd());
            let stdio = Stdio { stdin, stdout, stderr, controlling_terminal: false };
            self.children.register(|| spawn(&prepared, &stdio, None))?.1
        };
        Ok(exit.await.unwrap_or(Exit::Signal(libc::SIGKILL)))
    }

    /// Sees one command to its end.
    async fn follow(
        self: Arc<Self>,
        process: Arc<Process>,
        exit: oneshot::Receiver<Exit>,
        outputs: Vec<Output>,
    ) {
        let stop = CancellationToken::new();
        let mut pumps = tokio::task::JoinSet::new();
        for output in outputs {
            pumps.spawn(pump(output, process.fanout.clone(), stop.clone()));
        }
        // The reaper never drops a sender without a status.
        let exit = exit.await.unwrap_or(Exit::Signal(libc::SIGKILL));
        let drained = tokio::select! {
            () = async { while pumps.join_next().await.is_some() {} } => true,
            () = process.ending.cancelled() => false,
        };
        if !drained {
            stop.cancel();
            // What is in the pipes still goes out, unless nobody takes it.
            let _ =
                tokio::time::timeout(PATIENCE, async { while pumps.join_next().await.is_some() {} }).await;
            pumps.shutdown().await;
        }
        process.input.end().await;
        drop(process.cgroup.lock().take());
        process.ended.cancel();
        process.fanout.finish(End::from_exit(exit)).await;
        self.forget_later(process);
    }

    fn forget_later(self: Arc<Self>, process: Arc<Process>) {
        let remembered = self.processes.lock().values().filter(|p| p.has_ended()).count();
        let delay = if remembered > REMEMBERED_MAX { Duration::ZERO } else { REMEMBERED };
        tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            let mut processes = self.processes.lock();
            // The pid may have been given to a newer command.
            if processes.get(&process.pid).is_some_and(|known| Arc::ptr_eq(known, &process)) {
                processes.remove(&process.pid);
            }
        });
    }

    /// Commands that still run.
    pub(crate) fn running(&self) -> Vec<Arc<Process>> {
        let mut all: Vec<_> = self.processes.lock().values().filter(|p| !p.has_ended()).cloned().collect();
        all.sort_by_key(|process| process.pid);
        all
    }

    /// A command by process ID, ended ones included.
    pub(crate) fn by_pid(&self, pid: u32) -> Option<Arc<Process>> {
        self.processes.lock().get(&pid).cloned()
    }

    /// A command by name; a running one before an ended one.
    pub(crate) fn by_tag(&self, tag: &str) -> Option<Arc<Process>> {
        let processes = self.processes.lock();
        let named = || processes.values().filter(|process| process.tag.as_deref() == Some(tag));
        named().find(|process| !process.has_ended()).or_else(|| named().next()).cloned()
    }
}

impl Process {
    /// Whether its end has been reported.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.is_cancelled()
    }

    /// Returns when it has ended.
    pub(crate) async fn wait(&self) {
        self.ended.cancelled().await;
    }

    /// Joins its output.
    pub(crate) fn subscribe(&self) -> mpsc::Receiver<Event> {
        self.fanout.subscribe()
    }

    /// Kills it and all it started.
    pub(crate) fn kill(&self) {
        self.ending.cancel();
        if !self.cgroup.lock().as_ref().is_some_and(Cgroup::kill) {
            self.children.signal_group(self.pid.cast_signed(), libc::SIGKILL);
        }
    }

    /// Asks its process group to end.
    pub(crate) fn terminate(&self) {
        self.ending.cancel();
        self.children.signal_group(self.pid.cast_signed(), libc::SIGTERM);
    }
}

/// Moves one output to the subscribers until its end, or, once stopped, until nothing is there at this moment.
async fn pump(output: Output, fanout: Fanout, stop: CancellationToken) {
    let mut buffer = vec![0; output.chunk];
    loop {
        let mut read = |fd: &OwnedFd| -> io::Result<usize> { Ok(rustix::io::read(fd, &mut buffer[..])?) };
        let got = if stop.is_cancelled() {
            read(output.fd.get_ref())
        } else {
            tokio::select! {
                got = output.fd.async_io(Interest::READABLE, read) => got,
                () = stop.cancelled() => continue,
            }
        };
        match got {
            // EIO is how the master of a terminal says that nobody has the other side open.
            Ok(0) | Err(_) => return,
            Ok(count) => fanout.send((output.wrap)(Bytes::copy_from_slice(&buffer[..count]))).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_read_as_go_prints_them() {
        let end = End::from_exit(Exit::Code(3));
        assert_eq!((end.exit_code, end.exited, end.status.as_str()), (3, true, "exit status 3"));
        let end = End::from_exit(Exit::Signal(9));
        assert_eq!((end.exit_code, end.exited, end.status.as_str()), (-1, false, "signal: killed"));
        assert_eq!(End::from_exit(Exit::Signal(15)).status, "signal: terminated");
        assert_eq!(End::from_exit(Exit::Signal(11)).status, "signal: segmentation fault");
        assert_eq!(End::from_exit(Exit::Signal(31)).status, "signal: signal 31");
    }
}
