//! The configuration: one typed struct, unknown fields refused, read here and nowhere else. `docs/configuration.md`
//! describes each field; flags of the command line win over the file.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use node::uids;
use serde::{Deserialize, Serialize};

/// Where everything is kept unless `--data-dir` says otherwise.
pub(crate) const DEFAULT_DATA_DIR: &str = "/var/lib/pando";
/// The address of API and ingress unless `--listen` says otherwise.
pub(crate) const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 3000);
/// Above the IDs that Debian gives to users and packages, below those of containers.
const DEFAULT_UID_BASE: u32 = 900_000;

/// `pando.toml`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// Address of API and ingress.
    pub(crate) listen: SocketAddr,
    /// Serve plain HTTP on an address that is not loopback.
    pub(crate) allow_plaintext: bool,
    /// Domain whose `<port>-<sandboxID>` names lead here.
    pub(crate) domain: Option<String>,
    /// Name servers for sandboxes; those of the host's resolv.conf if empty.
    pub(crate) dns: Vec<SocketAddr>,
    /// The guest agent's binary; beside the program if none.
    pub(crate) guest_binary: Option<PathBuf>,
    /// The VMM's binary; beside the program if none.
    pub(crate) vmm_binary: Option<PathBuf>,
    /// Log lines as JSON.
    pub(crate) log_json: bool,
    /// The machine of new templates.
    pub(crate) template: TemplateConfig,
    /// Limits.
    pub(crate) limits: Limits,
}

/// The machine of new templates.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TemplateConfig {
    /// vCPUs.
    pub(crate) vcpus: u32,
    /// Memory in MiB.
    pub(crate) memory_mib: u64,
    /// Root disk in MiB.
    pub(crate) disk_mib: u64,
}

/// Limits of this server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Limits {
    /// Sandboxes on this host.
    pub(crate) max_sandboxes: usize,
    /// Sandboxes of one team.
    pub(crate) sandboxes_per_team: u64,
    /// Open connections to the public address; derived from the limit of open files if 0.
    pub(crate) connections: usize,
    /// Disk in MiB that must be free for a sandbox to be made.
    pub(crate) min_free_mib: u64,
    /// Machines that start at the same time; twice the number of CPUs if 0.
    pub(crate) starts_at_once: usize,
    /// The longest time to live, in seconds.
    pub(crate) max_timeout_seconds: i64,
    /// First of the user IDs that machines run under, one each.
    pub(crate) uid_base: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: DEFAULT_LISTEN,
            allow_plaintext: false,
            domain: None,
            dns: Vec::new(),
            guest_binary: None,
            vmm_binary: None,
            log_json: false,
            template: TemplateConfig::default(),
            limits: Limits::default(),
        }
    }
}

impl Default for TemplateConfig {
    fn default() -> Self {
        Self { vcpus: 1, memory_mib: 512, disk_mib: 10 << 10 }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_sandboxes: 1000,
            sandboxes_per_team: 1000,
            connections: 0,
            min_free_mib: 1024,
            starts_at_once: 0,
            max_timeout_seconds: 24 * 3600,
            uid_base: DEFAULT_UID_BASE,
        }
    }
}

impl Config {
    /// Reads the file, or takes the defaults without one, and checks everything at once.
    pub(crate) fn load(path: Option<&Path>) -> Result<Self> {
        let config = match path {
            None => Self::default(),
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                toml::from_str(&text)
                    .with_context(|| format!("{} is not a valid configuration", path.display()))?
            }
        };
        config.check()?;
        Ok(config)
    }

    /// Says everything that is wrong, not only the first thing.
    fn check(&self) -> Result<()> {
        let mut wrong = Vec::new();
        if !(1..=64).contains(&self.template.vcpus) {
            wrong.push("template.vcpus: must be from 1 to 64");
        }
        if !(128..=1 << 20).contains(&self.template.memory_mib) {
            wrong.push("template.memory_mib: must be from 128 to 1048576");
        }
        if !(2048..=1 << 24).contains(&self.template.disk_mib) {
            wrong.push("template.disk_mib: must be from 2048 to 16777216");
        }
        if self.limits.max_sandboxes == 0 || self.limits.sandboxes_per_team == 0 {
            wrong.push("limits.max_sandboxes, limits.sandboxes_per_team: must not be 0");
        }
        if !(1..=30 * 24 * 3600).contains(&self.limits.max_timeout_seconds) {
            wrong.push("limits.max_timeout_seconds: must be from 1 to 2592000");
        }
        if self.limits.uid_base < 1000 {
            wrong.push("limits.uid_base: must be at least 1000, so that no machine runs as a system user");
        }
        // One for each sandbox and one for a template that is made meanwhile, none of them `nobody`.
        let first = u64::from(self.limits.uid_base);
        let last = first.saturating_add(self.limits.max_sandboxes as u64);
        if last > u64::from(uids::LAST) {
            wrong.push(
                "limits.uid_base, limits.max_sandboxes: their sum must be at most 2147483646, the last user ID",
            );
        }
        if first <= u64::from(*uids::NOBODY.end()) && last >= u64::from(*uids::NOBODY.start()) {
            wrong.push(
                "limits.uid_base, limits.max_sandboxes: the user IDs from one to their sum must not hold 65534 or \
                 65535, which are nobody's",
            );
        }
        if self.dns.iter().any(|server| server.port() == 0) {
            wrong.push("dns: a name server's port must not be 0; the usual one is 53");
        }
        if let Some(domain) = &self.domain
            && (domain.is_empty() || domain.contains('/'))
        {
            wrong.push("domain: must be a host name, with a port if needed");
        }
        if wrong.is_empty() { Ok(()) } else { bail!("the configuration is wrong:\n  {}", wrong.join("\n  ")) }
    }
}

/// Name servers of a resolv.conf.
pub(crate) fn name_servers(resolv_conf: &str) -> Vec<SocketAddr> {
    resolv_conf
        .lines()
        .filter_map(|line| line.trim().strip_prefix("nameserver"))
        .filter_map(|rest| rest.trim().parse::<IpAddr>().ok())
        .map(|address| SocketAddr::new(address, 53))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_fields_are_refused_and_all_faults_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pando.toml");
        let load = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Config::load(Some(&path)).map_err(|error| format!("{error:#}"))
        };
        assert!(load("lisen = '127.0.0.1:1'").unwrap_err().contains("lisen"));
        let faults = load("[template]\nvcpus = 0\nmemory_mib = 1").unwrap_err();
        assert!(faults.contains("vcpus") && faults.contains("memory_mib"), "{faults}");
        for (text, names) in [
            ("dns = ['1.1.1.1:53', '127.0.0.1:0']", "dns"),
            ("[limits]\nuid_base = 4294967295", "uid_base"),
            ("[limits]\nuid_base = 2147483646", "uid_base"),
            ("[limits]\nmax_sandboxes = 9223372036854775807", "max_sandboxes"),
            ("[limits]\nuid_base = 65000", "nobody"),
            ("[limits]\nuid_base = 999", "system user"),
        ] {
            let faults = load(text).unwrap_err();
            assert!(faults.contains(names), "{text}: {faults}");
        }
        assert!(load("[limits]\nuid_base = 2147482646").is_ok());
        assert_eq!(
            load("listen = '127.0.0.1:9'\n[limits]\nmax_sandboxes = 5").unwrap().limits.max_sandboxes,
            5
        );
    }

    /// The documented example is the default configuration.
    #[test]
    fn documented_example_is_the_default() {
        let docs = include_str!("../../../docs/configuration.md");
        let example = docs.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
        assert_eq!(toml::from_str::<Config>(example).unwrap(), Config::default());
    }

    #[test]
    fn resolv_conf_is_read() {
        let text = "# c\nsearch x\nnameserver 10.0.0.1\nnameserver ::1\nnameserver bad\n";
        assert_eq!(name_servers(text).len(), 2);
    }
}
