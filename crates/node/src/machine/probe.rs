//! Which machine this host can really run.
//!
//! `/dev/kvm` proves nothing: some clouds' KVM runs only kernels made for it, or interprets kernel code (`machines`
//! facts). So the guest's own kernel and agent are booted under KVM, without a disk, and KVM is taken only when the
//! agent's first words appear on the console within [`LIMIT`]. The answer is kept for the host's boot and the guest's
//! kernel, as a failed probe takes all of its time.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use store::layout::DataDir;
use tokio::io::AsyncReadExt;
use tokio::process::Command;

use super::MachineError;
use super::qemu::{Accelerator, Qemu};

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

/// Chooses the accelerator for QEMU and says why.
pub async fn choose(data: &DataDir) -> Result<(Qemu, Finding), MachineError> {
    let key = key(data);
    let kept = data.root().join("run/probe.json");
    let known = std::fs::read(&kept).ok().and_then(|bytes| serde_json::from_slice::<Finding>(&bytes).ok());
    let finding = match known.filter(|finding| finding.key == key) {
        Some(finding) => finding,
        None => {
            let (kvm, reason) = probe(data).await;
            let finding = Finding { kvm, reason, key };
            // A lost record costs the next start another probe, nothing else.
            if let Ok(text) = serde_json::to_vec(&finding) {
                let _ = std::fs::write(&kept, text);
            }
            finding
        }
    };
    let accelerator = if finding.kvm { Accelerator::Kvm } else { Accelerator::Tcg };
    Ok((Qemu::new(accelerator)?, finding))
}

fn key(data: &DataDir) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let kernel = std::fs::metadata(data.vmlinux()).map(|meta| meta.len()).unwrap_or(0);
    format!("{} {kernel}", boot.trim())
}

async fn probe(data: &DataDir) -> (bool, String) {
    if !Path::new("/dev/kvm").exists() {
        return (false, "there is no /dev/kvm".to_owned());
    }
    if !data.vmlinux().exists() {
        return (false, "there is no guest kernel yet to try it with".to_owned());
    }
    match run_probe(data).await {
        Ok(true) => (true, "a probe machine ran under KVM".to_owned()),
        Ok(false) => (
            false,
            format!("/dev/kvm is there, but a probe machine said nothing within {} s", LIMIT.as_secs()),
        ),
        Err(error) => (false, format!("a probe machine under KVM could not be run: {error}")),
    }
}

/// Boots the kernel under KVM; true when the agent in the initramfs speaks.
async fn run_probe(data: &DataDir) -> std::io::Result<bool> {
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
    let heard = async {
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
    };
    let result = tokio::time::timeout(LIMIT, heard).await.unwrap_or(false);
    child.kill().await?;
    Ok(result)
}
