//! Making a template: a disk is booted, the guest gets ready, and the machine is parked as files.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use proto::manifest::{GuestDefaults, MachineShape};
use proto::{BuildId, TemplateId};
use store::layout::DataDir;
use store::template::{DISK, Description, MEMORY, STATE, Template};

use crate::NodeError;
use crate::logs::{Logs, follow_console};
use crate::machine::{BootSpec, Driver, MachineError, Started};

/// From power-on to the ready line: 2.5 s under TCG on a quiet machine.
const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// After the ready line the guest still finishes what its start began; parking it busy would make each copy busy.
const SETTLE: Duration = Duration::from_secs(2);

/// What to make.
#[derive(Debug)]
pub struct Plan {
    /// The raw disk to boot; it is copied, never written.
    pub disk: PathBuf,
    /// Names of the template.
    pub aliases: Vec<String>,
    /// vCPUs.
    pub vcpus: u32,
    /// Guest memory.
    pub memory_mib: u64,
    /// Size of the disk.
    pub disk_mib: u64,
    /// User the machine's process runs under while it is made.
    pub uid: u32,
    /// Defaults for commands.
    pub defaults: GuestDefaults,
}

/// Boots `plan` and parks it. What is half-made lies in the data directory's `tmp/` and is removed on failure.
pub async fn build(data: &DataDir, driver: Arc<dyn Driver>, plan: Plan) -> Result<Template, NodeError> {
    let mut random = [0u8; 36];
    getrandom::fill(&mut random).map_err(|_| NodeError::Busy("the host has no random bytes"))?;
    let (id, build) = random.split_at(20);
    let id = TemplateId::from_random(id.try_into().map_err(|_| NodeError::OwnerLost)?);
    let build = BuildId::from_random(build.try_into().map_err(|_| NodeError::OwnerLost)?);
    let dir = data.tmp().join(format!("template-{id}"));
    let result = build_in(data, driver, plan, &dir, id, build).await;
    if result.is_err() {
        let _ = std::fs::remove_dir_all(&dir);
    }
    result
}

async fn build_in(
    data: &DataDir,
    driver: Arc<dyn Driver>,
    plan: Plan,
    dir: &std::path::Path,
    id: TemplateId,
    build: BuildId,
) -> Result<Template, NodeError> {
    let io = |verb, path: &std::path::Path| {
        let path = path.to_owned();
        move |source| NodeError::Io { verb, path, source }
    };
    std::fs::create_dir(dir).map_err(io("create", dir))?;
    let disk = dir.join(DISK);
    let (source, target) = (plan.disk.clone(), disk.clone());
    tokio::task::spawn_blocking(move || store::memory::copy_file_sparse(&source, &target))
        .await
        .map_err(|_| NodeError::OwnerLost)??;
    let spec = BootSpec {
        name: format!("template-{id}"),
        dir: dir.to_owned(),
        uid: plan.uid,
        kernel: data.vmlinux(),
        initramfs: data.initramfs(),
        disk,
        memory: dir.join(MEMORY),
        vcpus: plan.vcpus,
        memory_mib: plan.memory_mib,
    };
    boot_and_park(driver.as_ref(), &spec, &dir.join(STATE)).await?;
    for name in [DISK, MEMORY, STATE] {
        let path = dir.join(name);
        // Machines may read the disk; nobody may write what copies stand on.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(if name == DISK { 0o444 } else { 0o400 });
        std::os::unix::fs::chown(&path, Some(0), Some(0)).map_err(io("own", &path))?;
        std::fs::set_permissions(&path, mode).map_err(io("protect", &path))?;
    }
    let (driver_name, driver_version) = driver.identity();
    let machine = MachineShape {
        driver: driver_name.to_owned(),
        driver_version: driver_version.to_owned(),
        vcpus: plan.vcpus,
        memory_mib: plan.memory_mib,
        disk_mib: plan.disk_mib,
        kernel: store::sha256_file(&spec.kernel)?,
        initramfs: store::sha256_file(&spec.initramfs)?,
    };
    let description = Description { id, build, aliases: plan.aliases, machine, defaults: plan.defaults };
    let (data, dir) = (data.clone(), dir.to_owned());
    let publish = move || store::template::publish(&data, &dir, description);
    Ok(tokio::task::spawn_blocking(publish).await.map_err(|_| NodeError::OwnerLost)??)
}

async fn boot_and_park(
    driver: &dyn Driver,
    spec: &BootSpec,
    state: &std::path::Path,
) -> Result<(), NodeError> {
    let Started { mut machine, link, console } = driver.boot(spec).await?;
    let logs = Logs::default();
    let (ready, is_ready) = tokio::sync::oneshot::channel();
    let mut ready = Some(ready);
    let follow = follow_console(console, logs.clone(), move |line| {
        if line.contains(proto::guest::READY_LINE)
            && let Some(ready) = ready.take()
        {
            let _ = ready.send(());
        }
    });
    let follow = tokio::spawn(follow);
    // Nobody reads the link: the guest has nothing to say to the world before it is somebody.
    let _link = link;
    let outcome = tokio::select! {
        Ok(()) = is_ready => Ok(()),
        exit = machine.exited() => Err(MachineError::Died(exit.description)),
        () = tokio::time::sleep(BOOT_LIMIT) => {
            Err(MachineError::Deadline { step: "boot", seconds: BOOT_LIMIT.as_secs() })
        }
    };
    let outcome = match outcome {
        Ok(()) => {
            tokio::time::sleep(SETTLE).await;
            machine.save(state).await
        }
        Err(error) => Err(error),
    };
    machine.stop().await;
    follow.abort();
    if outcome.is_err() {
        for line in logs.lines() {
            tracing::error!(line = line.text, "guest console");
        }
    }
    Ok(outcome?)
}
