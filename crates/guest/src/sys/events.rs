//! Descriptors in tokio's event loop.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::unix::AsyncFd;

/// Registers a descriptor that does not block.
pub(crate) fn asynchronous(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd gives the same, open descriptor each time it is asked, until it is dropped; the AsyncFd owns it
    // and takes it out of the event loop before that.
    unsafe { AsyncFd::register(fd) }.map_err(Into::into)
}
