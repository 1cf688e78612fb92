//! What the process may do, from before it reads the first byte of a guest: a user of its own, no capabilities, no new
//! privileges, no file system, and for each thread a list of system calls; any other kills the process.
//!
//! A zygote keeps the right to change its user (CAP_SETUID, CAP_SETGID), so that each of its children can have one of
//! its own. It never runs a guest; a child gives the right up before it makes its vCPUs, and takes the list of an
//! ordinary machine on top of the zygote's.
//!
//! The lists are in [`MAIN`], [`VCPU`] and [`CHANGE_USER`]; `docs/vmm.md` says why each is there, and a test compares the two.

use std::collections::BTreeMap;

use landlock::{ABI, Access, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use crate::{Error, sys};

/// System calls of the thread that serves the control socket and the devices.
pub const MAIN: [(&str, i64); 48] = [
    ("accept4", libc::SYS_accept4),
    ("brk", libc::SYS_brk),
    ("clock_gettime", libc::SYS_clock_gettime),
    ("close", libc::SYS_close),
    ("close_range", libc::SYS_close_range),
    ("eventfd2", libc::SYS_eventfd2),
    ("exit", libc::SYS_exit),
    ("exit_group", libc::SYS_exit_group),
    ("fallocate", libc::SYS_fallocate),
    ("fcntl", libc::SYS_fcntl),
    ("fdatasync", libc::SYS_fdatasync),
    ("fstat", libc::SYS_fstat),
    ("ftruncate", libc::SYS_ftruncate),
    ("futex", libc::SYS_futex),
    ("getpid", libc::SYS_getpid),
    ("getrandom", libc::SYS_getrandom),
    ("gettid", libc::SYS_gettid),
    ("lseek", libc::SYS_lseek),
    ("madvise", libc::SYS_madvise),
    ("mmap", libc::SYS_mmap),
    ("mprotect", libc::SYS_mprotect),
    ("mremap", libc::SYS_mremap),
    ("munmap", libc::SYS_munmap),
    ("poll", libc::SYS_poll),
    ("ppoll", libc::SYS_ppoll),
    ("prctl", libc::SYS_prctl),
    ("pread64", libc::SYS_pread64),
    ("preadv", libc::SYS_preadv),
    ("pwrite64", libc::SYS_pwrite64),
    ("pwritev", libc::SYS_pwritev),
    ("read", libc::SYS_read),
    ("recvfrom", libc::SYS_recvfrom),
    ("recvmsg", libc::SYS_recvmsg),
    ("restart_syscall", libc::SYS_restart_syscall),
    ("rseq", libc::SYS_rseq),
    ("rt_sigaction", libc::SYS_rt_sigaction),
    ("rt_sigprocmask", libc::SYS_rt_sigprocmask),
    ("rt_sigreturn", libc::SYS_rt_sigreturn),
    ("sched_getaffinity", libc::SYS_sched_getaffinity),
    ("sched_yield", libc::SYS_sched_yield),
    ("seccomp", libc::SYS_seccomp),
    ("sendmsg", libc::SYS_sendmsg),
    ("sendto", libc::SYS_sendto),
    ("set_robust_list", libc::SYS_set_robust_list),
    ("sigaltstack", libc::SYS_sigaltstack),
    ("statx", libc::SYS_statx),
    ("tgkill", libc::SYS_tgkill),
    ("write", libc::SYS_write),
];

/// System calls of a vCPU's thread, `ioctl` on KVM beside them.
pub const VCPU: [(&str, i64); 24] = [
    ("brk", libc::SYS_brk),
    ("clock_gettime", libc::SYS_clock_gettime),
    ("close", libc::SYS_close),
    ("exit", libc::SYS_exit),
    ("exit_group", libc::SYS_exit_group),
    ("fcntl", libc::SYS_fcntl),
    ("futex", libc::SYS_futex),
    ("getpid", libc::SYS_getpid),
    ("gettid", libc::SYS_gettid),
    ("madvise", libc::SYS_madvise),
    ("mmap", libc::SYS_mmap),
    ("mprotect", libc::SYS_mprotect),
    ("mremap", libc::SYS_mremap),
    ("munmap", libc::SYS_munmap),
    ("prctl", libc::SYS_prctl),
    ("restart_syscall", libc::SYS_restart_syscall),
    ("rseq", libc::SYS_rseq),
    ("rt_sigaction", libc::SYS_rt_sigaction),
    ("rt_sigprocmask", libc::SYS_rt_sigprocmask),
    ("rt_sigreturn", libc::SYS_rt_sigreturn),
    ("sched_yield", libc::SYS_sched_yield),
    ("set_robust_list", libc::SYS_set_robust_list),
    ("sigaltstack", libc::SYS_sigaltstack),
    ("write", libc::SYS_write),
];

/// What a zygote may beside these.
pub const CHANGE_USER: [(&str, i64); 4] = [
    ("capset", libc::SYS_capset),
    ("setgroups", libc::SYS_setgroups),
    ("setresgid", libc::SYS_setresgid),
    ("setresuid", libc::SYS_setresuid),
];

const CAP_SETGID: u32 = 6;
const CAP_SETUID: u32 = 7;
/// KVM's ioctls: their type is the second byte of the request.
const IOCTL_TYPE: u64 = 0xff00;
const KVM_TYPE: u64 = 0xae00;
/// Flags of clone(2) that glibc's fork() sets, and those that make it a thread.
const FORK_FLAGS: u64 = (libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID | libc::SIGCHLD) as u64;
const THREAD_FLAG: u64 = libc::CLONE_THREAD as u64;

/// Shuts the process in. Everything that needs a path or a privilege is done before this.
///
/// # Errors
/// When a step fails; the process must end then.
pub fn enter(uid: Option<u32>, zygote: bool) -> Result<(), Error> {
    sys::set_signals().map_err(Error::io("set signal handlers"))?;
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(rustix::process::Resource::Core, none)
        .map_err(Error::io("switch off core dumps"))?;
    let kept = if zygote { 1 << CAP_SETUID | 1 << CAP_SETGID } else { 0 };
    if let Some(uid) = uid {
        sys::prctl(libc::PR_SET_KEEPCAPS, 1).map_err(Error::io("keep capabilities"))?;
        sys::become_user(uid).map_err(Error::io("change the user"))?;
    }
    sys::keep_capabilities(kept).map_err(Error::io("give up capabilities"))?;
    // Nobody of this user may look into it, and a core could not be written either.
    sys::prctl(libc::PR_SET_DUMPABLE, 0).map_err(Error::io("close the process to others"))?;
    sys::prctl(libc::PR_SET_NO_NEW_PRIVS, 1).map_err(Error::io("give up new privileges"))?;
    no_files();
    apply(&main_filter(zygote)?)
}

/// A child of a zygote becomes a user of its own and an ordinary machine.
///
/// # Errors
/// When a step fails; the process must end then.
pub fn become_user(uid: u32) -> Result<(), Error> {
    sys::become_user(uid).map_err(Error::io("change the user"))?;
    sys::keep_capabilities(0).map_err(Error::io("give up capabilities"))?;
    apply(&main_filter(false)?)
}

/// Narrows the calling thread, a vCPU's, further.
///
/// # Errors
/// When the kernel has no seccomp.
pub fn enter_vcpu() -> Result<(), Error> {
    apply(&filter(&VCPU, Vec::new())?)
}

/// No path can be opened any more. Without landlock in the host's kernel there is still seccomp, which has no call that
/// takes a path.
fn no_files() {
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V5))
        .and_then(Ruleset::create)
        .and_then(landlock::RulesetCreated::restrict_self);
    drop(ruleset);
}

fn main_filter(zygote: bool) -> Result<BpfProgram, Error> {
    let mut calls = MAIN.to_vec();
    if zygote {
        calls.extend(CHANGE_USER);
    }
    let clone = vec![
        rule(vec![condition(0, SeccompCmpOp::Eq, FORK_FLAGS)?])?,
        rule(vec![condition(0, SeccompCmpOp::MaskedEq(THREAD_FLAG), THREAD_FLAG)?])?,
    ];
    filter(&calls, vec![(libc::SYS_clone, clone)])
}

fn filter(calls: &[(&str, i64)], more: Vec<(i64, Vec<SeccompRule>)>) -> Result<BpfProgram, Error> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        calls.iter().map(|(_, number)| (*number, Vec::new())).collect();
    rules.extend(more);
    rules.insert(
        libc::SYS_ioctl,
        vec![rule(vec![condition(1, SeccompCmpOp::MaskedEq(IOCTL_TYPE), KVM_TYPE)?])?],
    );
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(seccomp)?;
    let filter =
        SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, arch).map_err(seccomp)?;
    let allowed = BpfProgram::try_from(filter).map_err(seccomp)?;
    Ok(refuse_clone3(allowed))
}

/// clone3(2) has its flags in memory, where no filter sees them. libc uses clone(2) when it is told that there is none.
fn refuse_clone3(allowed: BpfProgram) -> BpfProgram {
    let statement = |code: u32, jump_if_not: u8, k: u32| seccompiler::sock_filter {
        code: code as u16,
        jt: 0,
        jf: jump_if_not,
        k,
    };
    // The system call's number is at the start of the data. The architecture is checked by the program that follows; a
    // foreign one that has this number gets an error instead of its end.
    let mut program = vec![
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, libc::SYS_clone3 as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
    ];
    program.extend(allowed);
    program
}

fn rule(conditions: Vec<SeccompCondition>) -> Result<SeccompRule, Error> {
    SeccompRule::new(conditions).map_err(seccomp)
}

fn condition(argument: u8, operator: SeccompCmpOp, value: u64) -> Result<SeccompCondition, Error> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Qword, operator, value).map_err(seccomp)
}

fn seccomp(error: seccompiler::BackendError) -> Error {
    Error::io("make a list of system calls")(std::io::Error::other(error))
}

fn apply(program: &BpfProgram) -> Result<(), Error> {
    seccompiler::apply_filter(program)
        .map_err(|error| Error::io("put the list of system calls in force")(std::io::Error::other(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documents_list_is_this_one() {
        let text =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/vmm.md")).unwrap();
        for (name, _) in MAIN.iter().chain(&VCPU).chain(&CHANGE_USER) {
            assert!(text.contains(&format!("`{name}`")), "docs/vmm.md does not name {name}");
        }
    }
}
