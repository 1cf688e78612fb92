//! The one place of this crate with `unsafe`: handing descriptors to a child, limits set between fork and exec, locks on
//! bytes of a file, descriptors that the runtime watches, and reading the processor's time stamp counter.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use tokio::io::unix::AsyncFd;
use tokio::process::Command;

/// Makes `command` run as `uid` (user and group, no other groups), with `fds` open under the numbers they have here, no
/// core dumps, no new privileges and a session of its own.
///
/// The descriptors stay close-on-exec in this process: clearing the flag here would hand them to every other child that
/// another thread starts at the same moment.
pub(crate) fn confine(command: &mut Command, uid: u32, fds: &[&OwnedFd]) {
    let fds: Vec<i32> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    command.uid(uid).gid(uid);
    // SAFETY: the closure runs in the forked child before exec, where only async-signal-safe calls are allowed. It makes
    // plain system calls through libc, reads memory that was allocated before the fork, allocates nothing and takes no lock. `fds` are open in the
    // parent until after `spawn` returns, as the caller keeps the `OwnedFd`s.
    unsafe {
        command.pre_exec(move || {
            for fd in &fds {
                if libc::fcntl(*fd, libc::F_SETFD, 0) == -1 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            if libc::setrlimit(libc::RLIMIT_CORE, &none) == -1 {
                return Err(std::io::Error::last_os_error());
            }
            if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == -1 {
                return Err(std::io::Error::last_os_error());
            }
            // Own session: a Ctrl-C at the server's terminal must not reach the machines.
            if libc::setsid() == -1 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
}

/// Waits for a descriptor by way of the runtime.
pub(crate) fn watch(fd: OwnedFd, interest: tokio::io::Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` names the same open descriptor as long as it lives, which is as long as the `AsyncFd`.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(io::Error::from)
}

/// The host's time stamp counter now; None on a processor that has none.
pub(crate) fn time_stamp_counter() -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: every x86_64 processor has RDTSC, and it only reads a register.
        Some(unsafe { core::arch::x86_64::_rdtsc() })
    }
    #[cfg(not(target_arch = "x86_64"))]
    None
}

/// Locks bytes of a file for this open file alone, without waiting. When another has one of them: the first byte behind
/// that other's.
pub(crate) fn lock_bytes(file: &File, start: u64, length: u64) -> io::Result<Option<u64>> {
    let start = libc::off_t::try_from(start).map_err(io::Error::other)?;
    let length = libc::off_t::try_from(length).map_err(io::Error::other)?;
    // The loop ends: the other is asked for only when there was one, and may be gone again.
    loop {
        match byte_lock(file, libc::F_OFD_SETLK, libc::F_WRLCK, start, length) {
            Ok(_) => return Ok(None),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {}
            Err(error) => return Err(error),
        }
        let other = byte_lock(file, libc::F_OFD_GETLK, libc::F_WRLCK, start, length)?;
        if i32::from(other.l_type) != libc::F_UNLCK {
            // A length of 0 is all there is.
            let behind = if other.l_len == 0 { libc::off_t::MAX } else { other.l_start + other.l_len };
            return Ok(Some(behind.unsigned_abs()));
        }
    }
}

/// Lets go of all bytes of a file that this open file has locked.
pub(crate) fn unlock_bytes(file: &File) -> io::Result<()> {
    byte_lock(file, libc::F_OFD_SETLK, libc::F_UNLCK, 0, 0).map(|_| ())
}

fn byte_lock(
    file: &File,
    command: i32,
    kind: i32,
    start: libc::off_t,
    length: libc::off_t,
) -> io::Result<libc::flock> {
    let mut lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: length,
        // Must be 0 for locks of an open file.
        l_pid: 0,
    };
    // SAFETY: the descriptor is open as long as `file` is borrowed, and `lock` is a valid flock structure, which these
    // commands read and F_OFD_GETLK writes.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &mut lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(lock),
    }
}
