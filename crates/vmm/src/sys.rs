//! The system calls that need `unsafe`, each behind a function that upholds what it needs.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU8, Ordering};

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Maps `bytes` of memory privately: of `file` from `offset` on, or of nothing. The mapping is never removed: guest
/// memory lives as long as the process. Returns its address.
///
/// # Errors
/// The kernel's.
pub fn map_private(bytes: usize, file: Option<(BorrowedFd<'_>, u64)>) -> io::Result<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
    let (fd, offset, flags) = match file {
        Some((fd, offset)) => (fd.as_raw_fd(), offset, flags),
        None => (-1, 0, flags | libc::MAP_ANONYMOUS),
    };
    let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    // SAFETY: no address is asked for, so no existing mapping is touched; the kernel checks everything else.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, fd, offset)
    };
    if address == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(address as usize) }
}

/// Replaces a part of guest memory by a private mapping of a file.
///
/// # Safety
/// `address..address + bytes` lies in a mapping that [`map_private`] made, and nothing but the guest and code that treats
/// guest memory as volatile looks at it.
pub unsafe fn map_over(address: usize, bytes: usize, fd: BorrowedFd<'_>, offset: u64) -> io::Result<()> {
    let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    // SAFETY: the caller's promise.
    let mapped = unsafe {
        libc::mmap(
            address as *mut libc::c_void,
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_FIXED,
            fd.as_raw_fd(),
            offset,
        )
    };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Advice on a range of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// The content is not needed any more: it may be zeros, or the mapped file's, from now on.
    Forget,
    /// Use huge pages.
    Huge,
    /// Not for children: they find nothing there.
    NotForChildren,
    /// Read it in and map it now.
    Populate,
}

/// Advises the kernel on memory. Harmless to Rust: only guest memory and KVM's own pages are ever named, and both are
/// accessed through raw pointers alone.
///
/// # Safety
/// The range is guest memory, or a mapping that nothing of this process reads after a fork.
pub unsafe fn advise(address: usize, bytes: usize, advice: Advice) -> io::Result<()> {
    let advice = match advice {
        Advice::Forget => libc::MADV_DONTNEED,
        Advice::Huge => libc::MADV_HUGEPAGE,
        Advice::NotForChildren => libc::MADV_DONTFORK,
        Advice::Populate => libc::MADV_POPULATE_READ,
    };
    // SAFETY: the caller's promise.
    check(unsafe { libc::madvise(address as *mut libc::c_void, bytes, advice) }.into()).map(|_| ())
}

/// A piece of guest memory as system calls want it.
pub type Piece = libc::iovec;

/// Reads from `fd` at `offset` into guest memory; less than wanted at the file's end.
///
/// # Safety
/// Each piece is guest memory.
pub unsafe fn read_pieces(fd: RawFd, pieces: &[Piece], offset: u64) -> io::Result<usize> {
    let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    // SAFETY: the pieces are valid for writes by the caller's promise; the kernel treats them as raw bytes.
    check(unsafe { libc::preadv(fd, pieces.as_ptr(), count(pieces), offset) } as libc::c_long)
        .map(|read| usize::try_from(read).unwrap_or(0))
}

/// Writes guest memory to `fd` at `offset`.
///
/// # Safety
/// Each piece is guest memory.
pub unsafe fn write_pieces(fd: RawFd, pieces: &[Piece], offset: u64) -> io::Result<usize> {
    let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    // SAFETY: as in `read_pieces`.
    check(unsafe { libc::pwritev(fd, pieces.as_ptr(), count(pieces), offset) } as libc::c_long)
        .map(|written| usize::try_from(written).unwrap_or(0))
}

/// Sends guest memory, and what the caller put before it, to a socket without waiting.
///
/// # Safety
/// Each piece is guest memory, or memory of the caller that outlives the call.
pub unsafe fn send_pieces(fd: RawFd, pieces: &mut [Piece]) -> io::Result<usize> {
    // SAFETY: all-zero is a valid msghdr: no name, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len();
    // SAFETY: the message and its pieces are valid for the call.
    check(unsafe { libc::sendmsg(fd, &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) } as libc::c_long)
        .map(|sent| usize::try_from(sent).unwrap_or(0))
}

fn count(pieces: &[Piece]) -> libc::c_int {
    // No more than a queue has descriptors.
    libc::c_int::try_from(pieces.len().min(1024)).unwrap_or(1024)
}

/// Writes bytes into guest memory.
///
/// # Safety
/// `address..address + bytes.len()` is guest memory.
pub unsafe fn store(address: usize, bytes: &[u8]) {
    // SAFETY: the caller's promise; guest memory never overlaps this process's own data.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) }
}

/// Reads bytes out of guest memory.
///
/// # Safety
/// `address..address + bytes.len()` is guest memory.
pub unsafe fn load(address: usize, bytes: &mut [u8]) {
    // SAFETY: as in `store`.
    unsafe { std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), bytes.len()) }
}

/// Fills guest memory with zeros.
///
/// # Safety
/// The range is guest memory.
pub unsafe fn clear(address: usize, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) }
}

/// Whether a page of guest memory is all zeros.
///
/// # Safety
/// The page is guest memory, 4096-aligned, and the guest does not run.
pub unsafe fn is_zero_page(address: usize) -> bool {
    // SAFETY: the caller's promise: mapped, aligned, and nobody writes meanwhile.
    let words = unsafe { std::slice::from_raw_parts(address as *const u64, 512) };
    words.iter().all(|word| *word == 0)
}

/// Which side of a fork this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The one that called; with the child's process ID.
    Parent(u32),
    /// The copy.
    Child,
}

/// fork(2).
///
/// # Errors
/// The kernel's: no memory, or too many processes.
pub fn fork() -> io::Result<Side> {
    // SAFETY: the child has this thread alone. Locks of the allocator are handled by libc's own fork handlers; all other
    // threads of this process wait on a futex and hold no lock, which `fork::copies` makes sure of before it calls.
    match check(unsafe { libc::fork() }.into())? {
        0 => Ok(Side::Child),
        pid => Ok(Side::Parent(u32::try_from(pid).unwrap_or(0))),
    }
}

/// Closes every descriptor from 3 on that is not in `keep`, whoever owns it. For a child that forgets those owners.
pub fn close_all_but(keep: &[RawFd]) {
    let mut keep: Vec<u32> = keep.iter().filter_map(|fd| u32::try_from(*fd).ok()).collect();
    keep.sort_unstable();
    let mut from = 3u32;
    for fd in keep.into_iter().filter(|fd| *fd >= 3) {
        if fd > from {
            close_range(from, fd - 1);
        }
        from = fd + 1;
    }
    close_range(from, u32::MAX);
}

fn close_range(first: u32, last: u32) {
    // SAFETY: the owners of these descriptors were forgotten, so nobody uses the numbers again. No result: the range
    // may be empty.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
}

extern "C" fn ignore(_: libc::c_int) {}

/// The signal that makes a vCPU leave the guest.
pub fn kick_signal() -> libc::c_int {
    libc::SIGRTMIN()
}

/// Installs the handlers: the kick interrupts system calls and does nothing else, children are reaped by the kernel, a
/// broken socket is an error code.
///
/// # Errors
/// The kernel's.
pub fn set_signals() -> io::Result<()> {
    let set = |signal, handler: libc::sighandler_t, flags| {
        // SAFETY: all-zero is a valid sigaction; the handler is a function that does nothing, or SIG_IGN.
        let result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler;
            action.sa_flags = flags;
            libc::sigaction(signal, &action, std::ptr::null_mut())
        };
        check(result.into()).map(|_| ())
    };
    set(kick_signal(), ignore as extern "C" fn(libc::c_int) as libc::sighandler_t, 0)?;
    set(libc::SIGCHLD, libc::SIG_IGN, libc::SA_NOCLDWAIT)?;
    set(libc::SIGPIPE, libc::SIG_IGN, 0)
}

/// This thread, for [`kick`].
pub fn thread_id() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Interrupts a thread of this process.
pub fn kick(thread: i32) {
    // SAFETY: sends a signal whose handler does nothing. A thread that has ended is no error.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, kick_signal()) };
}

/// Tells KVM's next entry into the guest to come back at once. The flag is read by KVM, not by this process.
///
/// # Safety
/// `flag` is `immediate_exit` in the mapped `kvm_run` of a vCPU that exists.
pub unsafe fn set_flag(flag: usize, value: u8) {
    // SAFETY: the caller's promise; a byte of shared memory is accessed atomically.
    unsafe { AtomicU8::from_ptr(flag as *mut u8) }.store(value, Ordering::SeqCst);
}

/// Takes a descriptor by number.
///
/// # Safety
/// It is open and nobody else owns it.
pub unsafe fn take_fd(fd: RawFd) -> std::os::fd::OwnedFd {
    use std::os::fd::FromRawFd as _;
    // SAFETY: the caller's promise.
    unsafe { std::os::fd::OwnedFd::from_raw_fd(fd) }
}

/// Keeps no capability but `kept` (bits of the first 32), in all three sets.
///
/// # Errors
/// The kernel's.
pub fn keep_capabilities(kept: u32) -> io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    #[repr(C)]
    struct Data {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    // _LINUX_CAPABILITY_VERSION_3: two data structures.
    let header = Header { version: 0x2008_0522, pid: 0 };
    let data = [
        Data { effective: kept, permitted: kept, inheritable: 0 },
        Data { effective: 0, permitted: 0, inheritable: 0 },
    ];
    // SAFETY: both pointers are to structures of the layout that this version has.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) }).map(|_| ())
}

/// Sets user and group of the calling thread alone, without supplementary groups: no other thread exists yet.
///
/// # Errors
/// The kernel's.
pub fn become_user(uid: u32) -> io::Result<()> {
    // SAFETY: plain system calls on integers. Raw ones: libc's would signal threads that a fork has left behind.
    unsafe {
        check(libc::syscall(libc::SYS_setgroups, 0usize, std::ptr::null::<u32>()))?;
        check(libc::syscall(libc::SYS_setresgid, uid, uid, uid))?;
        check(libc::syscall(libc::SYS_setresuid, uid, uid, uid))?;
    }
    Ok(())
}

/// prctl(2) with one argument.
///
/// # Errors
/// The kernel's.
pub fn prctl(option: libc::c_int, argument: libc::c_ulong) -> io::Result<()> {
    // SAFETY: only options that take an integer are used here (`jail`).
    check(unsafe { libc::prctl(option, argument, 0, 0, 0) }.into()).map(|_| ())
}

/// A descriptor to wait for, and what for.
pub type Waiting = libc::pollfd;

/// poll(2). Numbers that are not open any more are reported as such, which is harmless.
///
/// # Errors
/// The kernel's; `Interrupted` when a signal came.
pub fn poll(list: &mut [Waiting], timeout: Option<std::time::Duration>) -> io::Result<()> {
    // Rounded up: a wait that ends too early would only be repeated.
    let timeout = timeout.map_or(-1, |left| {
        libc::c_int::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(libc::c_int::MAX)
    });
    // SAFETY: the list is valid for reads and writes for its length.
    check(unsafe { libc::poll(list.as_mut_ptr(), list.len() as libc::nfds_t, timeout) }.into()).map(|_| ())
}
