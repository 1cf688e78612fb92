//! The peer: the same guest on a QEMU of its own with `-netdev user`, booted by hand.

use std::fs::File;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use client::api::ApiClient;
use proto::Secret;
use proto::api::Sandbox;
use proto::guest::{ENVD_PORT, MAC};
use proto::manifest::{MachineShape, Manifest};
use systest::host::Killed;
use systest::{Guest, Server, raw};

const BOOT_LIMIT: Duration = Duration::from_secs(120);

/// A machine; ended when dropped.
pub(crate) struct Peer {
    _machine: Killed,
    /// Its agent, through a forwarded port.
    pub(crate) guest: Guest,
}

impl Peer {
    /// Boots kernel, initramfs and disk of the server, with the size of `like`'s machine and its kernel command line;
    /// returns when the agent answers. `like` is a sandbox of the server.
    pub(crate) async fn boot(server: &Server, like: &Guest) -> Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let files = server.data().join("guest");
        let shape = shape(server)?;
        let command_line = like.sh("cat /proc/cmdline").await?.stdout;
        let accelerator = shape.driver.trim_start_matches("qemu-");
        let console = server.data().join("tmp/peer-console");
        let mac = MAC.map(|byte| format!("{byte:02x}")).join(":");
        let path = |name: &str| files.join(name).display().to_string();
        let machine = Command::new("qemu-system-x86_64")
            .args(["-machine", "microvm", "-accel", accelerator])
            .args(["-cpu", if accelerator == "kvm" { "host" } else { "max" }])
            .args(["-smp", &shape.vcpus.to_string(), "-m", &format!("{}M", shape.memory_mib)])
            .args(["-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-serial", "stdio"])
            .args(["-netdev", &format!("user,id=net,hostfwd=tcp:127.0.0.1:{port}-:{ENVD_PORT}")])
            .args(["-device", &format!("virtio-net-device,netdev=net,mac={mac}")])
            .args(["-drive", &format!("if=none,id=disk,format=raw,snapshot=on,file={}", path("base.raw"))])
            .args(["-device", "virtio-blk-device,drive=disk", "-device", "virtio-rng-device"])
            .args(["-kernel", &path("vmlinux"), "-initrd", &path("initramfs")])
            .args(["-append", command_line.trim()])
            .stdin(Stdio::null())
            .stdout(File::create(&console)?)
            .spawn()
            .context("cannot start qemu-system-x86_64")?;
        let mut machine = Killed(machine);
        let url = format!("http://127.0.0.1:{port}");
        let deadline = Instant::now() + BOOT_LIMIT;
        while !answers(&url).await {
            if machine.0.try_wait()?.is_some() || Instant::now() > deadline {
                bail!("the peer did not boot: {}", std::fs::read_to_string(&console)?);
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        // Nobody has told its agent a token, so it asks for none.
        let api = ApiClient::new(&url, &Secret::new("none"))?;
        let sandbox = Sandbox { envd_access_token: None, ..like.sandbox.clone() };
        let agent = api.envd(&sandbox.sandbox_id, None)?;
        Ok(Self { _machine: machine, guest: Guest { sandbox, agent } })
    }
}

/// QEMU accepts on the port before the guest does; then the connection breaks or stays silent.
async fn answers(url: &str) -> bool {
    let asked =
        tokio::time::timeout(Duration::from_secs(5), raw::request(url, "GET", "/health", &[], "")).await;
    matches!(asked, Ok(Ok(answer)) if answer.status.is_success())
}

/// The shape of the template's machine.
fn shape(server: &Server) -> Result<MachineShape> {
    let manifests = std::fs::read_dir(server.data().join("templates"))?
        .map(|entry| Ok(entry?.path().join("manifest.json")))
        .collect::<Result<Vec<PathBuf>>>()?;
    for path in manifests {
        let manifest: Manifest = serde_json::from_slice(&std::fs::read(path)?)?;
        if manifest.aliases.iter().any(|alias| alias == "base") {
            return Ok(manifest.machine);
        }
    }
    bail!("there is no template base")
}
