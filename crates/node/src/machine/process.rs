//! What drivers share about processes: one to kill and wait for by descriptor, its last words, sockets to it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, Interest};
use tokio::net::UnixStream;
use tokio::process::ChildStderr;

use super::MachineError;

/// In the environment of each machine: a directory in the data directory, by which a sweep finds what an earlier server
/// left. A copy of a machine inherits it.
pub(crate) const MARK: &str = "PANDO_MACHINE_DIR";

const STDERR_LIMIT: usize = 4096;

/// A process that need not be a child of this one. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Process {
    pid: u32,
    fd: AsyncFd<OwnedFd>,
}

impl Process {
    /// The process `pid`, if it has [`MARK`] with the directory `dir`. One that has ended meanwhile, and whose number is
    /// another's now, has not: so nobody else is ever killed.
    pub(super) fn find(pid: u32, dir: &Path) -> io::Result<Self> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        let fd = rustix::process::pidfd_open(number, PidfdFlags::empty())?;
        let environment = std::fs::read(format!("/proc/{pid}/environ"))?;
        let mark = [MARK.as_bytes(), b"=", dir.as_os_str().as_encoded_bytes()].concat();
        if !environment.split(|byte| *byte == 0).any(|variable| variable == mark) {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(Self { pid, fd: AsyncFd::with_interest(fd, Interest::READABLE)? })
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    pub(super) fn kill(&self) {
        // An error means that it has ended already.
        let _ = rustix::process::pidfd_send_signal(self.fd.get_ref(), Signal::KILL);
    }

    /// Returns when it has ended. Cancel-safe.
    pub(super) async fn ended(&self) {
        // Readiness is never cleared: a process ends once. An error means that the runtime is ending.
        let _ = self.fd.readable().await;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The beginning of what a process has said on its standard error.
#[derive(Debug, Clone, Default)]
pub(super) struct LastWords(Arc<Mutex<String>>);

impl LastWords {
    /// Listens until every process that has the other end is gone.
    pub(super) fn of(pipe: Option<ChildStderr>) -> Self {
        let words = Self::default();
        if let Some(mut pipe) = pipe {
            let kept = words.0.clone();
            // Ends with the process, whose end of the pipe it reads.
            tokio::spawn(async move {
                let mut buffer = [0u8; 1024];
                while let Ok(count @ 1..) = pipe.read(&mut buffer).await {
                    let mut kept = kept.lock();
                    if kept.len() < STDERR_LIMIT {
                        kept.push_str(&String::from_utf8_lossy(&buffer[..count]));
                    }
                }
            });
        }
        words
    }

    /// `outcome`, and what was said.
    pub(super) fn after(&self, outcome: String) -> String {
        let said = self.0.lock().trim().to_owned();
        if said.is_empty() { outcome } else { format!("{outcome}: {said}") }
    }
}

/// Both ends of a stream.
pub(super) fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    Ok((ours.into(), theirs.into()))
}

/// An end for tasks.
pub(super) fn to_tokio(fd: OwnedFd) -> io::Result<UnixStream> {
    let socket = std::os::unix::net::UnixStream::from(fd);
    socket.set_nonblocking(true)?;
    UnixStream::from_std(socket)
}

/// Opens a file for a machine.
pub(super) fn open(path: &Path, write: bool) -> Result<OwnedFd, MachineError> {
    let file = std::fs::OpenOptions::new().read(true).write(write).open(path);
    Ok(file.map(OwnedFd::from).map_err(store::Error::io("open", path))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_a_marked_process_is_taken_and_it_ends() {
        let start = |dir: &str| {
            let mut command = tokio::process::Command::new("sleep");
            command.arg("60").env(MARK, dir).kill_on_drop(true).spawn().unwrap()
        };
        let mut child = start("/a/b");
        let pid = child.id().unwrap();
        // A child has its environment once it has begun its program.
        let process = loop {
            if let Ok(process) = Process::find(pid, Path::new("/a/b")) {
                break process;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        };
        assert!(Process::find(pid, Path::new("/a")).is_err());
        process.kill();
        process.ended().await;
        child.wait().await.unwrap();
        assert!(Process::find(pid, Path::new("/a/b")).is_err());
    }
}
