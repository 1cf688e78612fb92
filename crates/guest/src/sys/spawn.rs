//! Starting one child.
//!
//! Owns: everything between fork and exec. Does not own: which program, user, environment or cgroup (`process`).
//!
//! Contract: the child leads a new session; has only descriptors 0, 1 and 2; default signal dispositions and an empty
//! mask; nice 0 and `oom_score_adj` 100, whatever the agent has. A program that cannot be run is a child that says so on
//! its standard error and exits with 127 (not found) or 126, as a shell would: a caller sees one kind of failure.
//!
//! Between fork and exec only async-signal-safe calls are made and nothing is allocated: other threads of the agent may
//! have held any lock at the instant of the fork. All that the child needs is prepared before.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, OsString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::ptr;

use super::rights::Credentials;

/// From the kernel's `sched.h`; libc's constant is too narrow.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// What to start.
pub(crate) struct Spec {
    /// Program, as the caller named it: a path, or a name that is looked up in `PATH` of `env`.
    pub(crate) program: OsString,
    /// Arguments without the program itself.
    pub(crate) args: Vec<OsString>,
    /// The whole environment.
    pub(crate) env: Vec<(OsString, OsString)>,
    /// Working directory, entered with the child's own rights.
    pub(crate) cwd: OsString,
    /// Identity. `None` keeps the agent's (tests that do not run as root).
    pub(crate) credentials: Option<Credentials>,
    /// Sets nice 0 and the limits of a command; off in tests on a host.
    pub(crate) reset_limits: bool,
}

/// The child's standard descriptors.
pub(crate) struct Stdio<'a> {
    /// Standard input.
    pub(crate) stdin: BorrowedFd<'a>,
    /// Standard output.
    pub(crate) stdout: BorrowedFd<'a>,
    /// Standard error.
    pub(crate) stderr: BorrowedFd<'a>,
    /// Whether `stdin` is a terminal that becomes the session's controlling one.
    pub(crate) controlling_terminal: bool,
}

/// A name with a NUL byte in it cannot be given to the kernel.
#[derive(Debug, thiserror::Error)]
#[error("{0} contains a NUL byte")]
pub(crate) struct NulByte(pub(crate) &'static str);

fn c_string(text: &OsString, what: &'static str) -> Result<CString, NulByte> {
    CString::new(text.as_bytes()).map_err(|_| NulByte(what))
}

/// A [`Spec`] in the form in which the child uses it.
pub(crate) struct Prepared {
    candidates: Vec<CString>,
    // argv[0] of `argv`; a spare slot stands before it, for `/bin/sh` when a script has no interpreter line.
    argv: Vec<CString>,
    env: Vec<CString>,
    cwd: CString,
    credentials: Option<Credentials>,
    reset_limits: bool,
    not_found: Vec<u8>,
    not_executable: Vec<u8>,
    too_long: Vec<u8>,
    bad_cwd: Vec<u8>,
}

const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

impl Spec {
    /// Makes what the child needs.
    ///
    /// # Errors
    /// When a string holds a NUL byte.
    pub(crate) fn prepare(&self) -> Result<Prepared, NulByte> {
        let name = self.program.as_bytes();
        let mut candidates = Vec::new();
        if name.contains(&b'/') {
            candidates.push(c_string(&self.program, "command")?);
        } else if !name.is_empty() {
            let path =
                self.env.iter().find(|(key, _)| key == "PATH").map_or(DEFAULT_PATH, |(_, v)| v.as_bytes());
            for dir in path.split(|b| *b == b':') {
                let dir = if dir.is_empty() { b"." } else { dir };
                let full = [dir, b"/", name].concat();
                candidates.push(CString::new(full).map_err(|_| NulByte("command"))?);
            }
        }
        let mut argv = vec![c_string(&self.program, "command")?];
        for arg in &self.args {
            argv.push(c_string(arg, "argument")?);
        }
        let env = self
            .env
            .iter()
            .map(|(key, value)| {
                CString::new([key.as_bytes(), b"=", value.as_bytes()].concat())
                    .map_err(|_| NulByte("environment"))
            })
            .collect::<Result<_, _>>()?;
        let say = |what: &str, text: &str| [what.as_bytes(), b": ", text.as_bytes(), b"\n"].concat();
        let shown = self.program.to_string_lossy();
        Ok(Prepared {
            candidates,
            argv,
            env,
            cwd: c_string(&self.cwd, "cwd")?,
            credentials: self.credentials.clone(),
            reset_limits: self.reset_limits,
            not_found: say(&shown, "not found"),
            not_executable: say(&shown, "cannot execute: permission denied"),
            too_long: say(&shown, "cannot execute: argument list too long"),
            bad_cwd: say(&self.cwd.to_string_lossy(), "cannot enter the working directory"),
        })
    }
}

/// Forks and execs. Returns the child's pid; the caller must make sure that it is waited for (`wait::Children`).
/// With `cgroup`, a descriptor of a cgroup directory, the child is born in that cgroup.
///
/// # Errors
/// When the kernel does not fork.
pub(crate) fn spawn(what: &Prepared, stdio: &Stdio<'_>, cgroup: Option<BorrowedFd<'_>>) -> io::Result<i32> {
    let mut argv: Vec<*const libc::c_char> = vec![c"/bin/sh".as_ptr()];
    argv.extend(what.argv.iter().map(|arg| arg.as_ptr()));
    argv.push(ptr::null());
    let mut env: Vec<*const libc::c_char> = what.env.iter().map(|var| var.as_ptr()).collect();
    env.push(ptr::null());
    let fds = [stdio.stdin.as_raw_fd(), stdio.stdout.as_raw_fd(), stdio.stderr.as_raw_fd()];
    let block = SignalBlock::new();
    // SAFETY: the child branch runs only `child`, which never returns and obeys the rules in the module's description;
    // `argv`, `env` and `what` outlive it because the child has its own copy of this stack and heap.
    let pid = unsafe { fork(cgroup) };
    match pid {
        // SAFETY: this is the child of the fork above; the pointers are valid and null-terminated.
        Ok(0) => unsafe { child(what, &mut argv, &env, fds, stdio.controlling_terminal, &block.previous) },
        other => other,
    }
}

/// Blocks all signals while forking, so that no handler of the agent runs in the child.
struct SignalBlock {
    previous: libc::sigset_t,
}

impl SignalBlock {
    fn new() -> Self {
        // SAFETY: sigset_t is plain data; both sets are initialised by the calls before they are read.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut previous: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut previous);
            Self { previous }
        }
    }
}

impl Drop for SignalBlock {
    fn drop(&mut self) {
        // SAFETY: `previous` was filled in by `new`.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.previous, ptr::null_mut());
        }
    }
}

/// `clone3` into a cgroup when there is one: moving the child later would wait for an RCU grace period in the kernel.
///
/// # Safety
/// As for `fork` in a program with threads: in the child only async-signal-safe calls are allowed.
unsafe fn fork(cgroup: Option<BorrowedFd<'_>>) -> io::Result<i32> {
    if let Some(cgroup) = cgroup {
        // SAFETY: clone_args is plain data for which all-zero is valid.
        let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
        args.flags = CLONE_INTO_CGROUP;
        args.exit_signal = libc::SIGCHLD as u64;
        args.cgroup = cgroup.as_raw_fd() as u64;
        // SAFETY: without CLONE_VM and with no stack given this is fork: the child gets a copy of everything.
        let pid = unsafe {
            libc::syscall(libc::SYS_clone3, ptr::from_mut(&mut args), std::mem::size_of::<libc::clone_args>())
        };
        if pid >= 0 {
            return Ok(pid as i32);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ENOSYS) {
            return Err(error);
        }
    }
    // SAFETY: passed on to the caller.
    let pid = unsafe { libc::fork() };
    if pid < 0 { Err(io::Error::last_os_error()) } else { Ok(pid) }
}

/// Writes a message to standard error and ends the child.
unsafe fn fail(message: &[u8], code: i32) -> ! {
    // SAFETY: write and _exit are async-signal-safe; the slice is valid.
    unsafe {
        libc::write(2, message.as_ptr().cast(), message.len());
        libc::_exit(code)
    }
}

/// The child between fork and exec.
///
/// # Safety
/// Call only in a freshly forked child. `argv` starts with a spare slot; `argv` and `env` are null-terminated.
unsafe fn child(
    what: &Prepared,
    argv: &mut [*const libc::c_char],
    env: &[*const libc::c_char],
    fds: [RawFd; 3],
    controlling_terminal: bool,
    mask: &libc::sigset_t,
) -> ! {
    // SAFETY: only system calls that are async-signal-safe, on memory prepared before the fork. Identity is set with raw
    // system calls: libc's wrappers would try to stop the other threads, which do not exist in the child.
    unsafe {
        libc::setsid();
        // The sources may be 0, 1 or 2 themselves, so first move them out of the way.
        let mut high = [0; 3];
        for (at, fd) in fds.iter().enumerate() {
            high[at] = libc::fcntl(*fd, libc::F_DUPFD_CLOEXEC, 3);
        }
        for (at, fd) in high.iter().enumerate() {
            libc::dup2(*fd, at as RawFd);
        }
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
        if controlling_terminal {
            libc::ioctl(0, libc::TIOCSCTTY, 0);
        }
        default_signals();
        let mut mask = *mask;
        libc::sigemptyset(&mut mask);
        libc::sigprocmask(libc::SIG_SETMASK, &mask, ptr::null_mut());
        limits(what.reset_limits);
        if let Some(who) = &what.credentials {
            identity(who);
        }
        libc::umask(0o022);
        if libc::chdir(what.cwd.as_ptr()) != 0 {
            fail(&what.bad_cwd, 126);
        }
        exec(what, argv, env)
    }
}

/// The Rust runtime ignores SIGPIPE and ignored signals stay ignored over exec.
unsafe fn default_signals() {
    // SAFETY: sigaction with SIG_DFL runs no code of ours; an all-zero sigaction is SIG_DFL with an empty mask.
    unsafe {
        let action: libc::sigaction = std::mem::zeroed();
        for signal in 1..=64 {
            if signal != libc::SIGKILL && signal != libc::SIGSTOP {
                libc::sigaction(signal, &action, ptr::null_mut());
            }
        }
    }
}

unsafe fn limits(reset: bool) {
    // SAFETY: plain system calls on constants.
    unsafe {
        let fd = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd >= 0 {
            libc::write(fd, c"100".as_ptr().cast(), 3);
            libc::close(fd);
        }
        if reset {
            libc::setpriority(libc::PRIO_PROCESS, 0, 0);
            let files = libc::rlimit { rlim_cur: 65_536, rlim_max: 1_048_576 };
            libc::setrlimit(libc::RLIMIT_NOFILE, &files);
        }
    }
}

unsafe fn identity(who: &Credentials) {
    // SAFETY: raw system calls on this (only) thread; `groups` is a valid array of that length.
    unsafe {
        let done = libc::syscall(libc::SYS_setgroups, who.groups.len(), who.groups.as_ptr()) == 0
            && libc::syscall(libc::SYS_setresgid, who.gid, who.gid, who.gid) == 0
            && libc::syscall(libc::SYS_setresuid, who.uid, who.uid, who.uid) == 0;
        if !done {
            fail(b"cannot take the user's identity\n", 126);
        }
    }
}

unsafe fn exec(what: &Prepared, argv: &mut [*const libc::c_char], env: &[*const libc::c_char]) -> ! {
    let mut denied = false;
    for path in &what.candidates {
        // SAFETY: all three are valid and null-terminated; argv without its spare slot starts with the program's name.
        unsafe { libc::execve(path.as_ptr(), argv[1..].as_ptr(), env.as_ptr()) };
        match errno() {
            libc::ENOEXEC => {
                // A script without an interpreter line: what every shell does.
                argv[1] = CStr::as_ptr(path);
                // SAFETY: as above; argv now is /bin/sh, the script, its arguments.
                unsafe { libc::execve(c"/bin/sh".as_ptr(), argv.as_ptr(), env.as_ptr()) };
                denied = true;
            }
            // SAFETY: this is the child.
            libc::E2BIG => unsafe { fail(&what.too_long, 126) },
            libc::ENOENT | libc::ENOTDIR => {}
            _ => denied = true,
        }
    }
    // SAFETY: this is the child.
    unsafe { if denied { fail(&what.not_executable, 126) } else { fail(&what.not_found, 127) } }
}

fn errno() -> i32 {
    // Reads the thread's errno; allocates nothing.
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}
