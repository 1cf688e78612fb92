//! The one place that waits for children.
//!
//! Owns: reaping. As PID 1 (or as a subreaper in test mode) the agent is the parent of every orphan as well, so a second
//! wait anywhere could take a status that is not its own.
//!
//! Contract: a status is delivered to exactly one [`Exit`], even when the child ends before `spawn` has returned. How:
//! the reaper looks without reaping (`WNOWAIT`), then reaps under the lock of the table, and a spawner holds that lock
//! from before the fork until the pid is in the table. For the same reason [`Children::signal_group`] never signals a pid
//! that was reused: an entry leaves the table only when its pid is freed.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// It returned or called `exit` with this code.
    Code(i32),
    /// A signal ended it.
    Signal(i32),
}

struct Table {
    waiting: HashMap<i32, oneshot::Sender<Exit>>,
}

/// The children of this process. Clones share one table.
#[derive(Clone)]
pub(crate) struct Children {
    table: Arc<Mutex<Table>>,
    more: Arc<Condvar>,
}

impl Children {
    /// Starts the reaper thread.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub(crate) fn start() -> io::Result<Self> {
        let children = Self {
            table: Arc::new(Mutex::new(Table { waiting: HashMap::new() })),
            more: Arc::new(Condvar::new()),
        };
        let own = children.clone();
        std::thread::Builder::new().name("reaper".into()).stack_size(64 << 10).spawn(move || own.reap())?;
        Ok(children)
    }

    /// Runs `fork`, which returns a new child's pid, and registers that child before it can be reaped.
    ///
    /// # Errors
    /// What `fork` returned.
    pub(crate) fn register(
        &self,
        fork: impl FnOnce() -> io::Result<i32>,
    ) -> io::Result<(i32, oneshot::Receiver<Exit>)> {
        let mut table = self.table.lock();
        let pid = fork()?;
        let (tx, rx) = oneshot::channel();
        table.waiting.insert(pid, tx);
        self.more.notify_one();
        Ok((pid, rx))
    }

    /// Sends `signal` to the process group led by the child `pid`, if that child is not reaped yet.
    pub(crate) fn signal_group(&self, pid: i32, signal: i32) -> bool {
        let table = self.table.lock();
        if !table.waiting.contains_key(&pid) {
            return false;
        }
        // SAFETY: kill has no memory effects. `pid` is a child that is not reaped (the lock is held), so the group -pid
        // is the one that this child leads, or does not exist yet (the child is still before setsid).
        unsafe {
            if libc::kill(-pid, signal) != 0 {
                libc::kill(pid, signal);
            }
        }
        true
    }

    fn reap(&self) {
        loop {
            // SAFETY: an all-zero siginfo_t is valid, and waitid only writes to it.
            let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
            // SAFETY: `info` outlives the call. WNOWAIT leaves the child for the locked wait below.
            let found = unsafe { libc::waitid(libc::P_ALL, 0, &mut info, libc::WEXITED | libc::WNOWAIT) };
            if found != 0 {
                if io::Error::last_os_error().raw_os_error() == Some(libc::ECHILD) {
                    let mut table = self.table.lock();
                    // Orphans come from children, so with none of ours there is nothing to adopt either.
                    if table.waiting.is_empty() {
                        self.more.wait(&mut table);
                    }
                }
                continue;
            }
            // SAFETY: waitid succeeded, so the SIGCHLD fields are the ones that are set.
            let pid = unsafe { info.si_pid() };
            let mut table = self.table.lock();
            let mut status = 0;
            // SAFETY: `status` outlives the call. The child is known to have ended, so this does not block.
            if unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } != pid {
                continue;
            }
            let exit = if libc::WIFSIGNALED(status) {
                Exit::Signal(libc::WTERMSIG(status))
            } else {
                Exit::Code(libc::WEXITSTATUS(status))
            };
            if let Some(tx) = table.waiting.remove(&pid) {
                // The receiver may be gone: nobody cares about that child any more.
                let _ = tx.send(exit);
            }
        }
    }
}
