//! What both drivers need of a machine's process: files and sockets to hand over, and the mark by which it is found.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use tokio::net::UnixStream;

use super::MachineError;

/// In the environment of each machine: its directory, by which a sweep finds what an earlier server left. A copy of a
/// machine has that of what it was copied from.
pub(crate) const MARK: &str = "PANDO_MACHINE_DIR";

/// The directory in the environment of a process; None when it has none, as a process that has ended. Only root can give
/// a process of another user this environment, or read it.
pub(crate) fn marked(pid: i32) -> std::io::Result<Option<PathBuf>> {
    let environment = std::fs::read(format!("/proc/{pid}/environ"))?;
    let mark = [MARK.as_bytes(), b"="].concat();
    let found = environment.split(|byte| *byte == 0).find_map(|variable| variable.strip_prefix(&mark[..]));
    Ok(found.map(|dir| PathBuf::from(OsStr::from_bytes(dir))))
}

pub(super) fn open(path: &Path, write: bool) -> Result<OwnedFd, MachineError> {
    let file = std::fs::OpenOptions::new().read(true).write(write).open(path);
    Ok(file.map(OwnedFd::from).map_err(store::Error::io("open", path))?)
}

pub(super) fn socket_pair() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    Ok((ours.into(), theirs.into()))
}

pub(super) fn to_tokio(fd: OwnedFd) -> std::io::Result<UnixStream> {
    let socket = std::os::unix::net::UnixStream::from(fd);
    socket.set_nonblocking(true)?;
    UnixStream::from_std(socket)
}
