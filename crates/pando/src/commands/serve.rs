//! `pando serve`: node and control in one process.

use std::fs::File;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use client::Endpoint;
use client::node::NodeClient;
use control::db::Db;
use control::keys::{self, Seed};
use control::{Control, ControlConfig};
use edge::ingress::Ingress;
use edge::link::{Budget, LinkConfig, Links};
use node::machine::probe;
use node::uids::Uids;
use node::{Node, NodeConfig};
use rustix::fs::FlockOperation;
use rustix::process::Resource;
use store::layout::DataDir;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};

use crate::config::{Config, Limits, name_servers};
use crate::listener::{self, Public};
use crate::output;
use crate::target::{Target, address_file, key_file};

/// What open streams get to end by themselves once their sandboxes are gone.
const GRACE: Duration = Duration::from_secs(3);
/// A request's head must be whole this long after its first byte.
const HEAD_LIMIT: Duration = Duration::from_secs(15);
/// A connection is kept this long for the client's next request.
const IDLE_LIMIT: Duration = Duration::from_secs(60);
/// Descriptors of a running sandbox: link, console, control, standard error, process, and what reads its guest.
const SANDBOX_DESCRIPTORS: u64 = 8;
/// Of a connection: the client's socket, and both ends of the stream into the guest.
const CONNECTION_DESCRIPTORS: u64 = 3;
/// Of the server itself: database, templates, logs, threads, and room for what nobody counted.
const OWN_DESCRIPTORS: u64 = 512;
/// Bounds of what is derived when the configuration names no number.
const FEWEST_CONNECTIONS: u64 = 64;
const MOST_CONNECTIONS: u64 = 10_000;
/// The same of the sockets that guests may have open.
const FEWEST_GUEST_SOCKETS: u64 = 256;
const MOST_GUEST_SOCKETS: u64 = 1 << 20;

/// Serves the API and the sandboxes of this machine.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  pando serve\n  pando serve --data-dir ./data --listen 127.0.0.1:3100\n\n\
    Needs root: each machine runs under a user ID of its own. Ctrl-C or SIGTERM ends all sandboxes and then the server."
)]
pub(crate) struct Serve {
    /// Address of API and ingress [default: 127.0.0.1:3000]
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// Machine driver
    #[arg(long, value_enum, default_value_t = Machine::Auto)]
    machine: Machine,
    /// Serve plain HTTP on an address that is not loopback: keys and data can be read on the way
    #[arg(long)]
    allow_plaintext: bool,
    /// Configuration file; see docs/configuration.md
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Which driver makes machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Machine {
    /// The best that really runs here
    Auto,
    /// Pando's own VMM on KVM, without trying first whether it runs
    Kvm,
    /// QEMU, with KVM where a probe machine ran under it, else by translation
    Qemu,
}

/// Machines that templates are copied from, one each; what is left of user IDs for them.
const ZYGOTES: u32 = 64;

/// Chooses the driver.
pub(crate) async fn choose_driver(
    machine: Machine,
    data: &DataDir,
    config: &Config,
) -> Result<probe::Chosen> {
    let wanted = match machine {
        Machine::Auto => probe::Wanted::Auto,
        Machine::Kvm => probe::Wanted::Kvm,
        Machine::Qemu => probe::Wanted::Qemu,
    };
    let vmm = vmm_binary(config)?;
    let uids = || Uids::reserve(config.limits.uid_base, ZYGOTES);
    Ok(probe::choose(data, wanted, vmm.as_deref(), uids).await?)
}

/// The VMM's program: the configured one, else one beside this program.
pub(crate) fn vmm_binary(config: &Config) -> Result<Option<PathBuf>> {
    if let Some(path) = &config.vmm_binary {
        if !path.exists() {
            bail!("there is no {}, which the configuration names as vmm_binary", path.display());
        }
        return Ok(Some(path.clone()));
    }
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let beside = program.parent().unwrap_or(std::path::Path::new("/"));
    Ok(["pando-vmm", "vmm"].map(|name| beside.join(name)).into_iter().find(|place| place.exists()))
}

impl Serve {
    pub(crate) async fn execute(self, target: &Target) -> Result<u8> {
        require_root("serve")?;
        let config = self.config(&Config::load(self.config.as_deref())?)?;
        start_log(config.log_json);
        let descriptors = raise_descriptor_limit();
        let limits = listener_limits(&config.limits, descriptors)?;
        let budget = Budget::new(guest_sockets(&config.limits, descriptors, limits.connections));
        // Before anything is made or changed: a second server on the address must not sweep anything away, and one that
        // cannot serve leaves nothing behind.
        let listener = TcpListener::bind(config.listen).await.with_context(|| {
            format!("cannot listen on {}; choose another address with --listen", config.listen)
        })?;
        let address = listener.local_addr()?;
        if !DataDir::is_set_up(&target.data_dir) {
            bail!("there is no guest kernel in {}; run `pando setup` first", target.data_dir.display());
        }
        let data = DataDir::open(&target.data_dir)?;
        let _lock = lock(&data)?;
        let swept = node::sweep::sweep(&data)?;
        if swept != node::sweep::Swept::default() {
            tracing::warn!(?swept, "removed what an earlier server left");
        }
        let node = self.start_node(&data, &config, budget).await?;
        let node_api = serve_node(&data, node.clone())?;
        let control = start_control(&data, &config, address, &node).await?;
        let follow = tokio::spawn(control::follow::follow(control.clone()));
        std::fs::write(address_file(target.data_dir.as_path()), format!("http://{address}\n"))?;
        let public = Public::start(listener, control::http::router(control), limits);
        output::note(&format!(
            "pando serves the E2B API on http://{address}; Ctrl-C ends it and its sandboxes"
        ));
        wait_for_end().await?;
        output::note("ending all sandboxes…");
        node.shutdown().await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        // Streams have been cut by the sandboxes' end; what is left of them is not waited for long.
        let _ = tokio::time::timeout(GRACE, async { public.stop().await }).await;
        follow.abort();
        node_api.abort();
        let _ = std::fs::remove_file(data.node_socket());
        let _ = std::fs::remove_file(address_file(&target.data_dir));
        Ok(0)
    }

    fn config(&self, file: &Config) -> Result<Config> {
        let mut config = file.clone();
        if let Some(listen) = self.listen {
            config.listen = listen;
        }
        config.allow_plaintext |= self.allow_plaintext;
        if !config.listen.ip().is_loopback() && !config.allow_plaintext {
            bail!(
                "{} is not a loopback address, and this version serves plain HTTP: keys could be read on the way. \
                 Put a TLS proxy in front of 127.0.0.1, or say --allow-plaintext",
                config.listen
            );
        }
        Ok(config)
    }

    async fn start_node(&self, data: &DataDir, config: &Config, budget: Budget) -> Result<Node> {
        let chosen = choose_driver(self.machine, data, config).await?;
        tracing::info!(reason = chosen.reason, "machine");
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let dns = if config.dns.is_empty() {
            name_servers(&std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default())
        } else {
            config.dns.clone()
        };
        let links = Links::start(LinkConfig { upstream_dns: dns, budget, ..LinkConfig::default() })?;
        let limits = &config.limits;
        let uids = Uids::reserve(limits.uid_base, u32::try_from(limits.max_sandboxes)?)?;
        tracing::info!(first = uids.first(), count = limits.max_sandboxes, "user IDs of machines");
        let cgroups = node::cgroup::Cgroups::open(data);
        tracing::info!(controllers = cgroups.found(), "cgroups");
        let (name, version) = chosen.driver.identity();
        let (name, version) = (name.to_owned(), version.to_owned());
        let node = Node::start(NodeConfig {
            data: data.clone(),
            driver: chosen.driver,
            links,
            max_sandboxes: limits.max_sandboxes,
            min_free_mib: limits.min_free_mib,
            starts_at_once: if limits.starts_at_once == 0 { 2 * cpus } else { limits.starts_at_once },
            uids,
            cgroups,
        })
        .await?;
        if !node.templates()?.iter().any(|view| view.manifest.machine.is_for(&name, &version)) {
            bail!(
                "there is no template for the machine driver {name} {version} in {}; run `pando setup` with the same \
                 --machine first",
                data.root().display()
            );
        }
        Ok(node)
    }
}

/// Each machine runs under a user ID of its own, and root file systems keep their owners: both need root.
pub(crate) fn require_root(command: &str) -> Result<()> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    bail!("`pando {command}` needs root: each machine runs under a user ID of its own; try sudo")
}

/// One server or setup at a time has a data directory. Released by the system when the process ends.
pub(crate) fn lock(data: &DataDir) -> Result<File> {
    let path = data.lock();
    let file = File::create(&path).with_context(|| format!("cannot open {}", path.display()))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(_) => {
            bail!("{} is in use by another pando; stop it, or use another --data-dir", data.root().display())
        }
    }
}

fn start_log(json: bool) {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_env("PANDO_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if json {
        log.json().init();
    } else {
        log.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init();
    }
}

/// Makes the soft limit of open files the hard one; how many that is.
fn raise_descriptor_limit() -> u64 {
    let mut limit = rustix::process::getrlimit(Resource::Nofile);
    let soft = limit.current;
    limit.current = limit.maximum;
    match rustix::process::setrlimit(Resource::Nofile, limit) {
        // None is no limit.
        Ok(()) => limit.maximum.unwrap_or(u64::MAX),
        Err(error) => {
            tracing::warn!(%error, "the limit of open files cannot be raised");
            soft.unwrap_or(u64::MAX)
        }
    }
}

/// Descriptors beyond those that are kept for the sandboxes and the server itself.
fn free_descriptors(limits: &Limits, descriptors: u64) -> u64 {
    let sandboxes = (limits.max_sandboxes as u64).saturating_mul(SANDBOX_DESCRIPTORS);
    descriptors.saturating_sub(OWN_DESCRIPTORS.saturating_add(sandboxes))
}

/// How many sockets guests may have open on the host: what the listener's connections leave.
fn guest_sockets(limits: &Limits, descriptors: u64, connections: usize) -> usize {
    let taken = (connections as u64).saturating_mul(CONNECTION_DESCRIPTORS);
    let left = free_descriptors(limits, descriptors).saturating_sub(taken);
    usize::try_from(left.clamp(FEWEST_GUEST_SOCKETS, MOST_GUEST_SOCKETS)).unwrap_or(usize::MAX)
}

/// How many connections the listener may have open, so that sandboxes always find descriptors left.
fn listener_limits(limits: &Limits, descriptors: u64) -> Result<listener::Limits> {
    let sandboxes = limits.max_sandboxes as u64;
    let room = free_descriptors(limits, descriptors) / CONNECTION_DESCRIPTORS;
    let wanted = limits.connections as u64;
    if wanted > room {
        bail!(
            "limits.connections: beside {sandboxes} sandboxes (limits.max_sandboxes) this process has room for {room} \
             connections, not {wanted}: it may open {descriptors} files. Raise the hard limit (ulimit -Hn; \
             LimitNOFILE= of a service), or lower one of the two"
        );
    }
    if room < FEWEST_CONNECTIONS && wanted == 0 {
        tracing::warn!(
            descriptors,
            max_sandboxes = sandboxes,
            "this process may open too few files for limits.max_sandboxes sandboxes: raise the hard limit of open files"
        );
    }
    let derived = (room / 2).clamp(FEWEST_CONNECTIONS, MOST_CONNECTIONS);
    let connections = usize::try_from(if wanted == 0 { derived } else { wanted })?;
    tracing::debug!(connections, descriptors, "public listener");
    Ok(listener::Limits { connections, head: HEAD_LIMIT, idle: IDLE_LIMIT })
}

/// The node's API, on a socket that root alone can reach.
fn serve_node(data: &DataDir, node: Node) -> Result<tokio::task::JoinHandle<()>> {
    use std::os::unix::fs::PermissionsExt;
    let path = data.node_socket();
    // Left by a server that was killed; this one has the lock.
    let _ = std::fs::remove_file(&path);
    let listener =
        UnixListener::bind(&path).with_context(|| format!("cannot listen on {}", path.display()))?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    Ok(tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, node::http::router(node)).await {
            tracing::error!(%error, "the node's API ended");
        }
    }))
}

async fn start_control(data: &DataDir, config: &Config, address: SocketAddr, node: &Node) -> Result<Control> {
    let db = Db::open(&data.database()).await.context("cannot open the database")?;
    if let Some(key) = Control::first_key(&db).await? {
        let path = key_file(data.root());
        let _ = std::fs::remove_file(&path);
        keys::write_secret(&path, key.expose().as_bytes())
            .with_context(|| format!("cannot write {}", path.display()))?;
        output::note(&format!(
            "the first API key, shown this once and kept in {}:\n  {}",
            path.display(),
            key.expose()
        ));
    }
    let domain = config.domain.clone();
    tracing::debug!(%address, ?domain, "control");
    let control = Control::start(ControlConfig {
        db,
        seed: Seed::open(&data.secrets().join("seed")).context("cannot open the seed of tokens")?,
        node: NodeClient::new(Endpoint::Unix(data.node_socket())),
        ingress: Ingress::new(Arc::new(node.clone()), domain.clone()),
        domain,
        max_timeout: config.limits.max_timeout_seconds,
        sandboxes_per_team: config.limits.sandboxes_per_team,
    })
    .await?;
    Ok(control)
}

async fn wait_for_end() -> Result<()> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_descriptors_for_the_sandboxes() {
        let limits = |connections, max_sandboxes| Limits { connections, max_sandboxes, ..Limits::default() };
        let derived = |sandboxes, descriptors| {
            listener_limits(&limits(0, sandboxes), descriptors).unwrap().connections as u64
        };
        assert!(derived(1000, 20_000) * CONNECTION_DESCRIPTORS + 1000 * SANDBOX_DESCRIPTORS < 20_000);
        assert_eq!(derived(10, u64::MAX), MOST_CONNECTIONS);
        let guests = guest_sockets(&limits(0, 1000), 20_000, derived(1000, 20_000) as usize) as u64;
        let all = guests + derived(1000, 20_000) * CONNECTION_DESCRIPTORS + 1000 * SANDBOX_DESCRIPTORS;
        assert!(guests > 5000 && all + OWN_DESCRIPTORS <= 20_000, "{guests} {all}");
        assert_eq!(derived(1000, 1024), FEWEST_CONNECTIONS);
        assert_eq!(listener_limits(&limits(7, 1000), 20_000).unwrap().connections, 7);
        let error = listener_limits(&limits(10_000, 1000), 20_000).unwrap_err().to_string();
        assert!(error.contains("limits.connections") && error.contains("20000"), "{error}");
    }
}
