//! Which machine this host can really run.
//!
//! `/dev/kvm` proves nothing: some clouds' KVM runs only kernels made for it, or interprets kernel code (`machines`
//! facts). So the guest's own kernel and agent are booted under KVM, without a disk, and KVM is taken only when the
//! agent's first words appear on the console within [`LIMIT`]. The answer is kept for the host's boot and the guest's
//! kernel, as a failed probe takes all of its time.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use store::layout::DataDir;
use tokio::io::AsyncReadExt;
use tokio::process::Command;

use super::kvm::{self, Kvm};
use super::qemu::{Accelerator, Qemu};
use super::{Driver, MachineError};
use crate::NodeError;
use crate::uids::Uids;

/// Hardware boots the guest's kernel in well under a second.
pub const LIMIT: Duration = Duration::from_secs(10);

/// What the probe found, in words for the log and for `pando doctor`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Finding {
    /// Whether guest code ran under KVM.
    pub kvm: bool,
    /// Why, or why not.
    pub reason: String,
    /// The host's boot and the guest's kernel that this is true for.
    key: String,
}

/// Which driver somebody wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// The best that really runs here.
    Auto,
    /// Pando's own VMM, without a probe.
    Kvm,
    /// QEMU, with KVM where a probe machine ran under it.
    Qemu,
}

/// The driver that was chosen, and why, for the log and for people.
pub struct Chosen {
    /// Makes machines.
    pub driver: Arc<dyn Driver>,
    /// In words.
    pub reason: String,
}

/// Chooses a driver. `vmm` is the VMM's program, if it was found; `uids` gives user IDs for the machines that it keeps
/// beside those it makes.
pub async fn choose(
    data: &DataDir,
    wanted: Wanted,
    vmm: Option<&Path>,
    uids: impl FnOnce() -> Result<Uids, NodeError>,
) -> Result<Chosen, NodeError> {
    let finding = match wanted {
        Wanted::Kvm => None,
        Wanted::Auto | Wanted::Qemu => Some(find(data, vmm).await),
    };
    let runs = finding.as_ref().is_none_or(|finding| finding.kvm);
    match vmm {
        Some(program) if wanted != Wanted::Qemu && runs => {
            let driver = Kvm::new(program.to_owned(), data.run(), uids()?);
            let reason = finding.map_or_else(|| "it was asked for".to_owned(), |finding| finding.reason);
            Ok(Chosen { driver: Arc::new(driver), reason: format!("the VMM on KVM: {reason}") })
        }
        None if wanted == Wanted::Kvm => Err(MachineError::NoVmm.into()),
        _ => {
            let accelerator = if runs { Accelerator::Kvm } else { Accelerator::Tcg };
            let reason = finding.map(|finding| finding.reason).unwrap_or_default();
            let driver = Qemu::new(accelerator)?;
            Ok(Chosen { driver: Arc::new(driver), reason: format!("QEMU, {accelerator:?}: {reason}") })
        }
    }
}

/// Whether KVM runs the guest's kernel here: as it was found before, or by trying.
pub async fn find(data: &DataDir, vmm: Option<&Path>) -> Finding {
    let key = key(data);
    let kept = data.root().join("run/probe.json");
    let known = std::fs::read(&kept).ok().and_then(|bytes| serde_json::from_slice::<Finding>(&bytes).ok());
    match known.filter(|finding| finding.key == key) {
        Some(finding) => finding,
        None => {
            let (kvm, reason) = probe(data, vmm).await;
            let finding = Finding { kvm, reason, key };
            // A lost record costs the next start another probe, nothing else.
            if let Ok(text) = serde_json::to_vec(&finding) {
                let _ = std::fs::write(&kept, text);
            }
            finding
        }
    }
}

fn key(data: &DataDir) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let kernel = std::fs::metadata(data.vmlinux()).map(|meta| meta.len()).unwrap_or(0);
    format!("{} {kernel}", boot.trim())
}

async fn probe(data: &DataDir, vmm: Option<&Path>) -> (bool, String) {
    if !Path::new("/dev/kvm").exists() {
        return (false, "there is no /dev/kvm".to_owned());
    }
    if !data.vmlinux().exists() {
        return (false, "there is no guest kernel yet to try it with".to_owned());
    }
    let heard = match vmm {
        Some(program) => probe_with_vmm(data, program).await,
        None => probe_with_qemu(data).await.map_err(|source| MachineError::Io { verb: "start QEMU", source }),
    };
    match heard {
        Ok(true) => (true, "a probe machine ran under KVM".to_owned()),
        Ok(false) => (
            false,
            format!("/dev/kvm is there, but a probe machine said nothing within {} s", LIMIT.as_secs()),
        ),
        Err(error) => {
            (false, format!("a probe machine under KVM could not be run: {}", proto::chain(&error)))
        }
    }
}

/// Boots the kernel on the VMM; true when the agent in the initramfs speaks.
async fn probe_with_vmm(data: &DataDir, program: &Path) -> Result<bool, MachineError> {
    let dir = data.tmp().join("probe");
    let io = |verb| move |source| MachineError::Io { verb, source };
    std::fs::create_dir_all(&dir).map_err(io("make a directory"))?;
    let run = async {
        let (mut console, mut process) =
            kvm::boot_bare(program, &dir, &data.vmlinux(), &data.initramfs()).await?;
        let heard = hears_agent(&mut console).await;
        // An error means that it has ended already.
        let _ = process.kill().await;
        Ok(heard)
    };
    let heard = tokio::time::timeout(LIMIT, run).await.unwrap_or(Ok(false));
    std::fs::remove_dir_all(&dir).map_err(io("remove a directory"))?;
    heard
}

/// Whether the agent's first words come before the console ends.
async fn hears_agent(console: &mut (impl tokio::io::AsyncRead + Unpin)) -> bool {
    let mut text = Vec::new();
    let mut buffer = [0u8; 4096];
    while text.len() < 1 << 20 {
        match console.read(&mut buffer).await {
            Ok(count @ 1..) => text.extend_from_slice(&buffer[..count]),
            _ => break,
        }
        if text.windows(12).any(|window| window == b"pando-guest:") {
            return true;
        }
    }
    false
}

/// The same on QEMU.
async fn probe_with_qemu(data: &DataDir) -> std::io::Result<bool> {
    let mut child = Command::new("qemu-system-x86_64")
        .args(["-machine", "microvm", "-accel", "kvm", "-cpu", "host", "-smp", "1", "-m", "256M"])
        .args(["-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-serial", "stdio"])
        .arg("-kernel")
        .arg(data.vmlinux())
        .arg("-initrd")
        .arg(data.initramfs())
        .args(["-append", "console=ttyS0 reboot=t panic=-1 quiet"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let Some(mut console) = child.stdout.take() else { return Ok(false) };
    let result = tokio::time::timeout(LIMIT, hears_agent(&mut console)).await.unwrap_or(false);
    child.kill().await?;
    Ok(result)
}
