//! The one place of this crate with `unsafe`: handing descriptors to a child, limits set between fork and exec, and
//! reading the processor's time stamp counter.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, OwnedFd};

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
