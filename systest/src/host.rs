//! What a server has on the host: processes, descriptors, files, memory; and hosts of our own for guests to reach.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Result, bail};

use crate::Server;

/// A count of what a server holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holdings {
    /// Machines of its data directory.
    pub machines: usize,
    /// Open descriptors of the server.
    pub descriptors: usize,
    /// Threads of the server.
    pub threads: usize,
    /// Directories of sandboxes.
    pub directories: usize,
    /// Half-made things.
    pub half_made: usize,
}

impl Holdings {
    /// Counts.
    pub fn of(server: &Server) -> Self {
        let entries = |path: &Path| std::fs::read_dir(path).map(Iterator::count).unwrap_or(0);
        let process = Path::new("/proc").join(server.pid().to_string());
        Self {
            machines: machines(&server.data()).len(),
            descriptors: entries(&process.join("fd")),
            threads: entries(&process.join("task")),
            directories: entries(&server.data().join("sandboxes")),
            half_made: entries(&server.data().join("tmp")),
        }
    }
}

/// Process IDs of the machines of a data directory.
pub fn machines(data: &Path) -> Vec<u32> {
    let mark = [b"PANDO_MACHINE_DIR=", data.as_os_str().as_encoded_bytes(), b"/"].concat();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(environment) = std::fs::read(entry.path().join("environ")) else { continue };
        if environment.split(|byte| *byte == 0).any(|variable| variable.starts_with(&mark)) {
            found.push(pid);
        }
    }
    found
}

/// Private memory of a process in KiB: what it costs the host beyond what it shares.
pub fn private_kib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    text.lines()
        .filter(|line| line.starts_with("Private_"))
        .filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
        .sum()
}

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A host with a public address, in a network namespace of its own: what a guest may reach. Needs root.
///
/// Addresses are of TEST-NET-3 (203.0.113.0/24), a /30 for each: ours is the first, the host's the second.
pub struct OtherHost {
    name: String,
    /// The host's address.
    pub address: String,
}

impl OtherHost {
    /// Makes the namespace and the pair of links into it.
    pub fn new() -> Result<Self> {
        // Several test processes run at once: the process ID tells them apart, the counter the hosts of one.
        let slot = (std::process::id().wrapping_mul(7) + NEXT.fetch_add(1, Ordering::Relaxed)) % 64;
        let name = format!("pando{slot}-{}", std::process::id());
        let (outer, inner) = (format!("pd{slot}a"), format!("pd{slot}b"));
        let (ours, address) = (format!("203.0.113.{}", slot * 4 + 1), format!("203.0.113.{}", slot * 4 + 2));
        let host = Self { name: name.clone(), address: address.clone() };
        let _ = Command::new("ip").args(["link", "del", &outer]).output();
        ip(&format!("netns add {name}"))?;
        ip(&format!("link add {outer} type veth peer name {inner} netns {name}"))?;
        ip(&format!("addr add {ours}/30 dev {outer}"))?;
        ip(&format!("link set {outer} up"))?;
        ip(&format!("-n {name} addr add {address}/30 dev {inner}"))?;
        ip(&format!("-n {name} link set {inner} up"))?;
        ip(&format!("-n {name} link set lo up"))?;
        Ok(host)
    }

    /// Serves files by HTTP on a port of the host.
    pub fn serve_http(&self, port: u16) -> Result<Killed> {
        let mut command = self.command("python3");
        command.args(["-m", "http.server", &port.to_string()]);
        Ok(Killed(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?))
    }

    /// A command that will run on the host.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]);
        command
    }
}

impl Drop for OtherHost {
    fn drop(&mut self) {
        // Its end of the pair goes with it, and so does ours.
        let _ = ip(&format!("netns del {}", self.name));
    }
}

fn ip(arguments: &str) -> Result<()> {
    let output = Command::new("ip").args(arguments.split(' ')).output()?;
    if !output.status.success() {
        bail!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// A process that is killed when the test is done with it.
pub struct Killed(pub std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
