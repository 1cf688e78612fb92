//! From the kernel's `execve("/init")` to a machine in which commands can run.
//!
//! Owns: everything that an init does before and after: modules, mounts, network, limits, switching off. Does not own: what
//! is served then (`http`).
//!
//! ```text
//! initramfs: /init /modules ── modules ── /dev/vda on /newroot ── switch root ── mounts ── network ── limits ── ready
//! ```
//!
//! Contract: the process stays PID 1 over the switch of root. A step without which nothing can run ends the machine, with the
//! reason on the console; a step that only costs a feature is reported there and left out.

mod network;

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount, mount_move};
use rustix::process::{Resource, Rlimit, chroot, setpriority_process, setrlimit};
use rustix::system::{RebootCommand, finit_module, reboot};

/// Where commands' cgroups are.
pub(crate) const COMMANDS: &str = "/sys/fs/cgroup/user";
const ROOT_DEVICE: &str = "/dev/vda";
const NEW_ROOT: &str = "/newroot";
/// How long the root disk may take to appear.
const DISK_WAIT: Duration = Duration::from_secs(10);

/// Why the machine did not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BootError {
    /// A step failed.
    #[error("cannot {step}")]
    Step {
        /// What was to be done.
        step: String,
        /// Why it was not.
        #[source]
        source: io::Error,
    },
    /// The disk never came.
    #[error("no {ROOT_DEVICE} after {} s: is the disk attached, and are its modules in /modules?", DISK_WAIT.as_secs())]
    NoDisk,
}

fn step<T, E: Into<io::Error>>(what: impl Into<String>, result: Result<T, E>) -> Result<T, BootError> {
    result.map_err(|source| BootError::Step { step: what.into(), source: source.into() })
}

/// Says something on the console.
pub(crate) fn say(text: &str) {
    use std::io::Write as _;
    // Nobody to tell when the console is gone.
    let _ = writeln!(io::stdout(), "{text}");
    let _ = io::stdout().flush();
}

/// Leaves out a step, with a word on the console.
fn optional<T, E: Into<io::Error>>(what: &str, result: Result<T, E>) {
    if let Err(error) = result {
        say(&format!("pando-guest: cannot {what}: {}", error.into()));
    }
}

/// Makes a machine out of an initramfs and a disk.
///
/// # Errors
/// When it cannot run commands.
pub(crate) fn boot() -> Result<(), BootError> {
    fs::create_dir_all("/dev").ok();
    fs::create_dir_all("/proc").ok();
    fs::create_dir_all("/sys").ok();
    step("mount /dev", mount("devtmpfs", "/dev", "devtmpfs", MountFlags::NOSUID, None::<&std::ffi::CStr>))?;
    console();
    // The first sign that guest code runs here: the probe for KVM waits for it, without a disk.
    say("pando-guest: begins");
    step("mount /proc", mount("proc", "/proc", "proc", nosuid_nodev_noexec(), None::<&std::ffi::CStr>))?;
    step("mount /sys", mount("sysfs", "/sys", "sysfs", nosuid_nodev_noexec(), None::<&std::ffi::CStr>))?;
    modules();
    wait_for_disk()?;
    step("make /newroot", fs::create_dir_all(NEW_ROOT))?;
    step(
        "mount the root disk",
        mount(ROOT_DEVICE, NEW_ROOT, "ext4", MountFlags::NOATIME, None::<&std::ffi::CStr>),
    )?;
    switch_root()?;
    mounts()?;
    configuration();
    network::up();
    kernel_settings();
    optional("set up cgroups", cgroups());
    own_privileges();
    Ok(())
}

fn nosuid_nodev_noexec() -> MountFlags {
    MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC
}

/// Standard descriptors on the console, whatever the kernel gave.
fn console() {
    let opened = rustix::fs::open("/dev/console", OFlags::RDWR | OFlags::NOCTTY, Mode::empty())
        .or_else(|_| rustix::fs::open("/dev/ttyS0", OFlags::RDWR | OFlags::NOCTTY, Mode::empty()));
    if let Ok(console) = opened {
        let _ = rustix::stdio::dup2_stdin(&console);
        let _ = rustix::stdio::dup2_stdout(&console);
        let _ = rustix::stdio::dup2_stderr(&console);
    }
}

/// Loads `/modules` in the order of its list. A module that lacks a symbol is tried again after the others, so the order need
/// not be perfect. One that fails for good is no reason to stop; if it mattered, the disk does not appear.
fn modules() {
    let order = fs::read_to_string("/modules/order").unwrap_or_default();
    let mut waiting: Vec<&str> =
        order.lines().map(str::trim).filter(|name| !name.is_empty() && !name.starts_with('#')).collect();
    loop {
        let before = waiting.len();
        let mut failed = Vec::new();
        for name in waiting {
            match load_module(name) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => failed.push((name, error)),
            }
        }
        if failed.is_empty() {
            break;
        }
        if failed.len() == before {
            for (name, error) in failed {
                optional::<(), _>(&format!("load {name}"), Err(error));
            }
            break;
        }
        waiting = failed.into_iter().map(|(name, _)| name).collect();
    }
    // Its memory is the guest's.
    let _ = fs::remove_dir_all("/modules");
}

fn load_module(name: &str) -> Result<(), Errno> {
    let path = Path::new("/modules").join(name);
    let file = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    finit_module(file, c"", 0)
}

fn wait_for_disk() -> Result<(), BootError> {
    let start = Instant::now();
    while !Path::new(ROOT_DEVICE).exists() {
        if start.elapsed() > DISK_WAIT {
            return Err(BootError::NoDisk);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Makes the disk the root and drops the view of the initramfs.
fn switch_root() -> Result<(), BootError> {
    for name in ["dev", "proc", "sys"] {
        let target = format!("{NEW_ROOT}/{name}");
        step(format!("make {target}"), fs::create_dir_all(&target))?;
        step(format!("move /{name}"), mount_move(format!("/{name}"), target))?;
    }
    step("enter the new root", rustix::process::chdir(NEW_ROOT))?;
    step("move the new root", mount_move(".", "/"))?;
    step("change the root", chroot("."))?;
    step("enter /", rustix::process::chdir("/"))
}

fn mounts() -> Result<(), BootError> {
    let none = MountFlags::NOSUID | MountFlags::NODEV;
    let all: [(&str, &str, MountFlags, Option<&std::ffi::CStr>); 4] = [
        ("/dev/pts", "devpts", MountFlags::NOSUID | MountFlags::NOEXEC, Some(c"gid=5,mode=620,ptmxmode=666")),
        ("/dev/shm", "tmpfs", none, Some(c"mode=1777")),
        ("/run", "tmpfs", none, Some(c"mode=755")),
        ("/sys/fs/cgroup", "cgroup2", nosuid_nodev_noexec(), None),
    ];
    for (target, kind, flags, data) in all {
        step(format!("make {target}"), fs::create_dir_all(target))?;
        step(format!("mount {target}"), mount(kind, target, kind, flags, data))?;
    }
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
        ("/dev/ptmx", "pts/ptmx"),
    ] {
        if link == "/dev/ptmx" {
            let _ = fs::remove_file(link);
        }
        let _ = std::os::unix::fs::symlink(target, link);
    }
    for (dir, mode) in [("/tmp", 0o1777), ("/run/lock", 0o1777), ("/var/tmp", 0o1777)] {
        use std::os::unix::fs::PermissionsExt as _;
        let made =
            fs::create_dir_all(dir).and_then(|()| fs::set_permissions(dir, fs::Permissions::from_mode(mode)));
        optional(&format!("make {dir}"), made);
    }
    Ok(())
}

/// Replaces a file; images made elsewhere have links to places that do not exist here.
fn replace(path: &str, text: &str) {
    let dangling =
        fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink()) && fs::metadata(path).is_err();
    if dangling {
        let _ = fs::remove_file(path);
    }
    optional(&format!("write {path}"), fs::write(path, text));
}

fn configuration() {
    optional("make /etc", fs::create_dir_all("/etc"));
    // Often a link to a resolver's own file: that resolver does not run here.
    let _ = fs::remove_file("/etc/resolv.conf");
    replace("/etc/resolv.conf", &format!("nameserver {}\n", proto::guest::GATEWAY));
    let hosts = fs::read_to_string("/etc/hosts").unwrap_or_default();
    if !hosts.lines().any(|line| line.split_whitespace().any(|word| word == "localhost")) {
        replace(
            "/etc/hosts",
            &format!("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n{hosts}"),
        );
    }
    if fs::symlink_metadata("/etc/mtab").is_err() {
        let _ = std::os::unix::fs::symlink("../proc/self/mounts", "/etc/mtab");
    }
    let name = fs::read_to_string("/etc/hostname").unwrap_or_default();
    let name = name.trim();
    let name = if name.is_empty() || name.len() > 64 { "sandbox" } else { name };
    optional("set the host name", rustix::system::sethostname(name.as_bytes()));
}

/// Whether the CPU is emulated, as QEMU's TCG says in the CPU's name.
fn emulated(cpuinfo: &str) -> bool {
    cpuinfo.lines().filter(|line| line.starts_with("model name")).any(|line| line.contains("TCG"))
}

fn kernel_settings() {
    // An emulator translates code anew for each address it is at. With every program at random addresses, each command
    // costs three times as much, and the pile of translations stops the machine for seconds when it is cleared. What keeps
    // sandboxes apart is the machine; on real CPUs programs keep their random addresses.
    if emulated(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()) {
        optional("set kernel/randomize_va_space", fs::write("/proc/sys/kernel/randomize_va_space", "0"));
    }
    for (path, value) in [
        ("fs/inotify/max_user_watches", "1048576"),
        ("fs/inotify/max_user_instances", "8192"),
        ("net/ipv4/ping_group_range", "0 2147483647"),
        ("net/ipv4/ip_unprivileged_port_start", "0"),
        ("vm/max_map_count", "262144"),
        // When memory runs out the kernel would print a line for each process to the slow console, and hold up all others
        // that need memory for as long: many seconds in an emulated machine.
        ("vm/oom_dump_tasks", "0"),
    ] {
        let written = fs::write(format!("/proc/sys/{path}"), value);
        // Not every kernel has every one.
        if !matches!(&written, Err(error) if error.kind() == io::ErrorKind::NotFound) {
            optional(&format!("set {path}"), written);
        }
    }
}

/// Memory in bytes.
fn total_memory() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram * u64::from(info.mem_unit)
}

/// What user code may not take: an eighth, between 64 and 160 MiB. The kernel's own memory comes out of it too.
fn reserve(total: u64) -> u64 {
    (total / 8).clamp(64 << 20, 160 << 20)
}

/// Commands live under [`COMMANDS`], with limits; the agent beside them, with more weight.
fn cgroups() -> io::Result<()> {
    let root = Path::new("/sys/fs/cgroup");
    for controller in ["+memory", "+pids", "+cpu"] {
        optional(&format!("enable {controller}"), fs::write(root.join("cgroup.subtree_control"), controller));
    }
    fs::create_dir_all(COMMANDS)?;
    fs::create_dir_all(root.join("agent"))?;
    fs::write(root.join("agent/cgroup.procs"), "1")?;
    let total = total_memory();
    let threads = fs::read_to_string("/proc/sys/kernel/threads-max").unwrap_or_default();
    let pids = threads.trim().parse::<u64>().map_or(8192, |threads| (threads / 4 * 3).clamp(1024, 32_768));
    for (file, value) in [
        ("user/memory.max", total.saturating_sub(reserve(total)).to_string()),
        ("user/pids.max", pids.to_string()),
        ("user/cpu.weight", "100".to_owned()),
        ("agent/cpu.weight", "1000".to_owned()),
        ("agent/memory.min", reserve(total).to_string()),
        // Each command has its share: one with a thousand processes does not hold up the next.
        ("user/cgroup.subtree_control", "+cpu".to_owned()),
    ] {
        optional(&format!("set {file}"), fs::write(root.join(file), value));
    }
    Ok(())
}

fn own_privileges() {
    optional("protect the agent from the OOM killer", fs::write("/proc/self/oom_score_adj", "-1000"));
    optional("raise the agent's priority", setpriority_process(None, -10));
    let files = Rlimit { current: Some(1 << 20), maximum: Some(1 << 20) };
    optional("raise the limit of open files", setrlimit(Resource::Nofile, files));
    rustix::process::umask(Mode::from_raw_mode(0o022));
}

/// Writes everything to disk and switches off. Returns only when the kernel does not.
pub(crate) fn power_off() {
    rustix::fs::sync();
    // Best effort: writers are still running.
    let _ = rustix::mount::mount_remount("/", MountFlags::RDONLY, c"");
    if let Err(error) = reboot(RebootCommand::PowerOff) {
        say(&format!("pando-guest: cannot switch off: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_emulated_cpu_is_known_by_its_name() {
        assert!(emulated("processor\t: 0\nmodel name\t: QEMU TCG CPU version 2.5+\n"));
        assert!(!emulated("model name\t: AMD EPYC 7763\nflags\t: TCG\n"));
        assert!(!emulated(""));
    }

    #[test]
    fn the_reserve_is_an_eighth_within_bounds() {
        assert_eq!(reserve(256 << 20), 64 << 20);
        assert_eq!(reserve(1000 << 20), 125 << 20);
        assert_eq!(reserve(64 << 30), 160 << 20);
    }
}
