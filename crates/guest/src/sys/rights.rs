//! Acting on files with the rights of the caller, not of root.
//!
//! Owns: the identity of the current thread for file access. Does not own: who the caller is (`users`).
//!
//! How: `setfsuid`, `setfsgid` and `setgroups` are properties of a thread in Linux. When the file-system user ID changes
//! from 0, the kernel also takes the file capabilities (CAP_DAC_OVERRIDE and the like) out of the thread's effective set,
//! and puts them back when it returns to 0.
//!
//! Contract: [`as_user`] restores root's identity before it returns, also when the operation panics; a thread whose
//! identity cannot be restored aborts the process rather than serve the next caller with it.
#![allow(unsafe_code)]

use rustix::process::{Gid, Uid};

/// The identity that file operations are done with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Credentials {
    /// User ID.
    pub(crate) uid: u32,
    /// Primary group.
    pub(crate) gid: u32,
    /// Supplementary groups, the primary one included.
    pub(crate) groups: Vec<u32>,
}

struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        if !assume(0, 0, &[]) {
            std::process::abort();
        }
    }
}

/// Sets this thread's identity for file access. The group calls need privileges that only the user ID 0 has, so the
/// order is: become root, groups, then the user.
fn assume(uid: u32, gid: u32, groups: &[u32]) -> bool {
    let groups: Vec<Gid> = groups.iter().map(|id| Gid::from_raw(*id)).collect();
    if rustix::thread::set_thread_groups(&groups).is_err() {
        return false;
    }
    // SAFETY: these two are plain system calls on this thread alone (neither libc broadcasts them), with no memory
    // effects. They return the previous ID; a second call with an invalid one reads back what is in force.
    unsafe {
        libc::setfsgid(gid);
        libc::setfsuid(uid);
        libc::setfsgid(u32::MAX) as u32 == gid && libc::setfsuid(u32::MAX) as u32 == uid
    }
}

/// Runs `operation` with the file rights of `who`. When the agent is not root (tests) it runs with the agent's own.
///
/// `operation` must not await, and must not start threads: they would inherit the identity.
pub(crate) fn as_user<T>(who: &Credentials, operation: impl FnOnce() -> T) -> std::io::Result<T> {
    if !rustix::process::geteuid().is_root() {
        return Ok(operation());
    }
    let _restore = Restore;
    if !assume(who.uid, who.gid, &who.groups) {
        return Err(std::io::Error::from_raw_os_error(libc::EPERM));
    }
    Ok(operation())
}

/// The agent's own user ID.
pub(crate) fn own_uid() -> Uid {
    rustix::process::getuid()
}
