//! `pando doctor`: what this machine needs, and how to mend what it lacks.

use std::path::Path;
use std::process::Command;

use anyhow::Result;
use serde::Serialize;
use store::layout::DataDir;

use crate::config::Config;
use crate::output;
use crate::target::Target;

const NEEDED_BYTES: u64 = 4 << 30;
const NEEDED_MEMORY_KB: u64 = 2 << 20;

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    verdict: Verdict,
    found: String,
    /// What to do, when it is not as it should be.
    #[serde(skip_serializing_if = "Option::is_none")]
    mend: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Good,
    Slow,
    Optional,
    Missing,
}

impl Check {
    fn good(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Good, found: found.into(), mend: None }
    }

    fn not(name: &'static str, verdict: Verdict, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { name, verdict, found: found.into(), mend: Some(mend.into()) }
    }
}

/// Checks everything; 1 if something is missing.
pub(crate) async fn execute(target: &Target) -> Result<u8> {
    let mut checks = vec![root()];
    checks.extend([
        program("qemu", "qemu-system-x86_64", "qemu-system-x86"),
        program("mmdebstrap", "mmdebstrap", "mmdebstrap"),
        program("mke2fs", "mke2fs", "e2fsprogs"),
        program("depmod", "depmod", "kmod"),
        program("apt-get", "apt-get", "apt"),
    ]);
    checks.push(ping());
    checks.push(memory());
    checks.push(disk(&target.data_dir));
    checks.extend(data(&target.data_dir).await);
    let missing = checks.iter().any(|check| check.verdict == Verdict::Missing);
    if target.json {
        output::json(&checks)?;
    } else {
        for check in &checks {
            let mark = match check.verdict {
                Verdict::Good => "ok  ",
                Verdict::Slow => "slow",
                Verdict::Optional => "note",
                Verdict::Missing => "FAIL",
            };
            output::line(&format!("{mark}  {:<12} {}", check.name, check.found))?;
            if let Some(mend) = &check.mend {
                output::line(&format!("{:20}→ {mend}", ""))?;
            }
        }
    }
    Ok(u8::from(missing))
}

fn root() -> Check {
    if rustix::process::geteuid().is_root() {
        Check::good("root", "yes")
    } else {
        Check::not(
            "root",
            Verdict::Missing,
            "no",
            "run pando with sudo: each machine has a user ID of its own",
        )
    }
}

fn program(name: &'static str, program: &str, package: &str) -> Check {
    let version = if program == "mke2fs" { "-V" } else { "--version" };
    match Command::new(program).arg(version).output() {
        Ok(output) => {
            let text = String::from_utf8_lossy(if output.stdout.is_empty() {
                &output.stderr
            } else {
                &output.stdout
            });
            Check::good(name, text.lines().next().unwrap_or("there").to_owned())
        }
        Err(_) => Check::not(
            name,
            Verdict::Missing,
            "not found",
            format!("apt-get install --no-install-recommends {package}"),
        ),
    }
}

/// The edge sends a guest's pings as a user may, and many hosts let no user.
fn ping() -> Check {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ping_group_range").unwrap_or_default();
    let mut bounds = range.split_whitespace().filter_map(|bound| bound.parse::<u64>().ok());
    match (bounds.next(), bounds.next()) {
        (Some(0), Some(_)) => Check::good("ping", "sandboxes can ping"),
        _ => Check::not(
            "ping",
            Verdict::Optional,
            "pings from sandboxes are dropped; all else works",
            "sysctl -w net.ipv4.ping_group_range='0 0'",
        ),
    }
}

fn memory() -> Check {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = info
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok())
        .unwrap_or(0);
    let found = format!("{} MiB available", available >> 10);
    if available >= NEEDED_MEMORY_KB {
        Check::good("memory", found)
    } else {
        Check::not("memory", Verdict::Missing, found, "2 GiB are needed for setup and a few sandboxes")
    }
}

/// The nearest directory above `path` that exists.
fn existing(path: &Path) -> &Path {
    path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"))
}

fn disk(dir: &Path) -> Check {
    let Ok(stat) = rustix::fs::statvfs(existing(dir)) else {
        return Check::not(
            "disk",
            Verdict::Missing,
            "unknown",
            format!("{} cannot be looked at", dir.display()),
        );
    };
    let free = stat.f_bavail * stat.f_frsize;
    let found = format!("{} MiB free for {}", free >> 20, dir.display());
    if free >= NEEDED_BYTES {
        Check::good("disk", found)
    } else {
        Check::not("disk", Verdict::Missing, found, "free 4 GiB, or name another directory with --data-dir")
    }
}

/// What `pando setup` makes, and the machine it chose.
async fn data(dir: &Path) -> Vec<Check> {
    let setup = || "pando setup".to_owned();
    if !dir.join("guest/vmlinux").exists() {
        return vec![Check::not("setup", Verdict::Missing, "not done for this data directory", setup())];
    }
    let data = match DataDir::open(dir) {
        Ok(data) => data,
        Err(error) => return vec![Check::not("setup", Verdict::Missing, error.to_string(), setup())],
    };
    let templates = match store::template::list(&data) {
        Ok((templates, damaged)) if damaged.is_empty() && !templates.is_empty() => {
            Check::good("templates", format!("{}", templates.len()))
        }
        Ok((_, damaged)) => {
            let found = damaged.first().map_or_else(|| "none".to_owned(), ToString::to_string);
            Check::not("templates", Verdict::Missing, found, setup())
        }
        Err(error) => Check::not("templates", Verdict::Missing, error.to_string(), setup()),
    };
    let vmm = super::serve::vmm_binary(&Config::default()).ok().flatten();
    let finding = node::machine::probe::find(&data, vmm.as_deref()).await;
    let machine = match (finding.kvm, &vmm) {
        (true, Some(_)) => {
            Check::good("kvm", format!("{}; machines are copies made by the VMM", finding.reason))
        }
        (true, None) => Check::not(
            "kvm",
            Verdict::Optional,
            format!("{}, but the program vmm is not beside pando", finding.reason),
            "QEMU is used; `make build` builds vmm, which makes sandboxes faster",
        ),
        (false, _) => Check::not(
            "kvm",
            Verdict::Slow,
            finding.reason,
            "sandboxes run by translation (TCG): complete and isolated, with slow CPUs; use a host whose KVM runs Linux",
        ),
    };
    let groups = node::cgroup::Cgroups::look(&data);
    let bounds = if groups.is_whole() {
        Check::good("cgroups", groups.found().to_owned())
    } else {
        Check::not(
            "cgroups",
            Verdict::Optional,
            groups.found().to_owned(),
            "machines' processes are bounded by what their guests have; mount cgroups with pids and memory to bound them",
        )
    };
    vec![templates, machine, bounds]
}
