//! The driver `qemu`: the same guest on QEMU's microvm machine, with KVM or with TCG.
//!
//! One process is one machine. It runs under a user ID of its own, under QEMU's own seccomp filter (no new processes,
//! no privileges), with everything it talks to handed over as descriptors: frames, console, control, memory, device
//! state, disks. It needs no path, so the data directory may lie where only root can go.
//!
//! A restore names neither kernel nor initramfs: both are in the restored memory, and reading 53 MB of kernel would
//! double the time to QMP's greeting (33 against 20 ms, `docs/performance.md`).

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use parking_lot::Mutex;
use proto::guest::MAC;
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::process::{Child, Command};

use super::process::{MARK, open, socket_pair, to_tokio};
use super::qmp::Qmp;
use super::{BootSpec, Bounds, Driver, Exit, Machine, MachineError, RestoreSpec, Started};
use crate::sys;

const PROGRAM: &str = "qemu-system-x86_64";
const PACKAGE: &str = "qemu-system-x86";
/// The largest MTU a stream netdev's guest can use: without offloads big frames are what makes it fast.
const MTU: u32 = 65520;
/// A start that takes longer than this has failed; measured: 40 ms, on a machine that may be ten times as busy.
const START_LIMIT: Duration = Duration::from_secs(20);
/// Writing device state and what is dirty in the page cache.
const SAVE_LIMIT: Duration = Duration::from_secs(120);
const STDERR_LIMIT: usize = 4096;
/// A sandbox does not outlive its host, so what the guest flushes need not reach the disk. A host without space is an
/// I/O error in the guest; QEMU would otherwise stop the machine in silence.
const BLOCK_DEVICE: &str = "virtio-blk-device,drive=disk,werror=report,rerror=report";
const WRITTEN: &str = "discard=unmap,cache.no-flush=on";
/// Descriptors that QEMU opens as `/dev/fdset/N`.
const WRITTEN_SET: u32 = 1;
const TEMPLATE_SET: u32 = 2;
/// The name under which QEMU gets the descriptor it saves to.
const STATE_STREAM: &str = "state";

/// How QEMU runs guest code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// In hardware.
    Kvm,
    /// By translation.
    Tcg,
}

impl Accelerator {
    fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// The QEMU driver.
#[derive(Debug, Clone)]
pub struct Qemu {
    accelerator: Accelerator,
    identity: &'static str,
    version: String,
}

impl Qemu {
    /// Finds the installed QEMU's version.
    pub fn new(accelerator: Accelerator) -> Result<Self, MachineError> {
        let output = std::process::Command::new(PROGRAM)
            .arg("--version")
            .output()
            .map_err(|source| MachineError::Start { program: PROGRAM, package: PACKAGE, source })?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version =
            text.lines().next().unwrap_or_default().trim_start_matches("QEMU emulator version ").to_owned();
        let identity = match accelerator {
            Accelerator::Kvm => "qemu-kvm",
            Accelerator::Tcg => "qemu-tcg",
        };
        Ok(Self { accelerator, identity, version })
    }

    /// How it runs guest code.
    pub fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    /// The kernel's command line. Under TCG the guest's TSC is the host's, and the kernel is told how fast it is: on a
    /// busy host its own measurement against the PIT fails, and then the boot hangs waiting for ticks (seen on two boots
    /// of three at load 3; none of six hung with the frequency given). There is no speculation under TCG to guard from.
    async fn kernel_arguments(&self) -> String {
        let mut line = "console=ttyS0 reboot=t panic=-1 quiet random.trust_cpu=on".to_owned();
        if self.accelerator == Accelerator::Tcg {
            line.push_str(" mitigations=off");
            if let Some(khz) = host_tsc_khz().await {
                line.push_str(&format!(" tsc_early_khz={khz}"));
            }
        }
        line
    }

    /// Starts QEMU with the arguments that boot and restore share, plus `extra`. It inherits `fds` under their numbers.
    fn spawn(
        &self,
        shared: &Shared<'_>,
        extra: &[String],
        fds: &[&OwnedFd],
    ) -> Result<Spawned, MachineError> {
        let io = |verb| move |source| MachineError::Io { verb, source };
        let (link, link_theirs) = socket_pair().map_err(io("make a link"))?;
        let (console, console_theirs) = socket_pair().map_err(io("make a console"))?;
        let (control, control_theirs) = socket_pair().map_err(io("make a control connection"))?;
        let mut command = Command::new(PROGRAM);
        command
            .args(["-name", &format!("pando-{},debug-threads=on", shared.name)])
            .args(["-machine", "microvm,memory-backend=mem"])
            .args(["-accel", self.accelerator.name()])
            .args(["-cpu", if self.accelerator == Accelerator::Kvm { "host" } else { "max" }])
            .args(["-smp", &shared.vcpus.to_string(), "-m", &format!("{}M", shared.memory_mib)])
            .args(["-object", &memory_backend(shared)])
            .args(["-nodefaults", "-no-user-config", "-nographic", "-no-reboot"])
            .args(["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"])
            .args([
                "-chardev",
                &format!("socket,id=con,fd={}", console_theirs.as_raw_fd()),
                "-serial",
                "chardev:con",
            ])
            .args(["-chardev", &format!("socket,id=qmp,fd={}", control_theirs.as_raw_fd())])
            .args(["-mon", "chardev=qmp,mode=control"])
            .args(["-netdev", &format!("stream,id=net,addr.type=fd,addr.str={}", link_theirs.as_raw_fd())])
            .args(["-device", &format!("virtio-net-device,netdev=net,mac={},host_mtu={MTU}", mac())])
            .args(&shared.disk)
            .args(["-device", BLOCK_DEVICE])
            .args(["-device", "virtio-rng-device"])
            .args(extra)
            .current_dir("/")
            .env_clear()
            .env(MARK, shared.dir)
            .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let fds = [fds, &[&link_theirs, &console_theirs, &control_theirs]].concat();
        sys::confine(&mut command, shared.uid, &fds);
        let child = command.spawn().map_err(|source| MachineError::Start {
            program: PROGRAM,
            package: PACKAGE,
            source,
        })?;
        Ok(Spawned { machine: QemuMachine::new(child), link, console, control })
    }
}

/// Measures the host's time stamp counter against its clock. Half a second, for an error of a few parts in a million:
/// the guest keeps time by this figure.
async fn host_tsc_khz() -> Option<u64> {
    let sample = || Some((std::time::Instant::now(), sys::time_stamp_counter()?));
    let (begun, first) = sample()?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let (ended, last) = sample()?;
    let microseconds = ended.duration_since(begun).as_micros();
    u64::try_from(u128::from(last.checked_sub(first)?) * 1000 / microseconds).ok()
}

/// What boot and restore both say of a machine.
struct Shared<'a> {
    name: &'a str,
    dir: &'a Path,
    uid: u32,
    vcpus: u32,
    memory_mib: u64,
    memory: &'a OwnedFd,
    memory_is_written: bool,
    disk: Vec<String>,
}

struct Spawned {
    machine: QemuMachine,
    link: OwnedFd,
    console: OwnedFd,
    control: OwnedFd,
}

fn memory_backend(shared: &Shared<'_>) -> String {
    let share = if shared.memory_is_written { "on" } else { "off" };
    let path = path_of(shared.memory);
    format!("memory-backend-file,id=mem,size={}M,mem-path={path},share={share}", shared.memory_mib)
}

/// The path by which a process opens a descriptor it has inherited.
fn path_of(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Options that make a descriptor `/dev/fdset/SET` for block devices.
fn fd_set(fd: &OwnedFd, set: u32) -> [String; 2] {
    ["-add-fd".to_owned(), format!("fd={},set={set}", fd.as_raw_fd())]
}

/// Options that define a block device's node.
fn block_node(definition: String) -> [String; 2] {
    ["-blockdev".to_owned(), definition]
}

/// The disk of a machine that writes to the raw file `disk` itself.
fn raw_disk(disk: &OwnedFd) -> Vec<String> {
    let file = format!("driver=file,node-name=file,filename=/dev/fdset/{WRITTEN_SET},locking=off,{WRITTEN}");
    let format = format!("driver=raw,node-name=disk,file=file,{WRITTEN}");
    [fd_set(disk, WRITTEN_SET), block_node(file), block_node(format)].concat()
}

/// The disk of a copy: a qcow2 layer over a template's raw disk, which can only be read.
fn layered_disk(layer: &OwnedFd, template: &OwnedFd) -> Vec<String> {
    let base_file = format!(
        "driver=file,node-name=base-file,filename=/dev/fdset/{TEMPLATE_SET},locking=off,read-only=on"
    );
    let base = "driver=raw,node-name=base,file=base-file,read-only=on".to_owned();
    let file = format!("driver=file,node-name=file,filename=/dev/fdset/{WRITTEN_SET},locking=off,{WRITTEN}");
    let format = format!("driver=qcow2,node-name=disk,file=file,backing=base,{WRITTEN}");
    let sets = [fd_set(layer, WRITTEN_SET), fd_set(template, TEMPLATE_SET)].concat();
    [sets, [base_file, base, file, format].map(block_node).concat()].concat()
}

fn mac() -> String {
    MAC.map(|byte| format!("{byte:02x}")).join(":")
}

impl Driver for Qemu {
    fn identity(&self) -> (&str, &str) {
        (self.identity, &self.version)
    }

    fn bounds(&self) -> Bounds {
        // Threads of its pool for files beside vCPUs; translated code.
        Bounds { tasks: 256, memory_mib: 1024 }
    }

    fn boot<'a>(&'a self, spec: &'a BootSpec) -> BoxFuture<'a, Result<Started, MachineError>> {
        Box::pin(async move {
            // QEMU opens memory anew through its descriptor, so the file must be its user's.
            std::fs::File::create_new(&spec.memory)
                .and_then(|file| file.set_len(spec.memory_mib << 20))
                .and_then(|()| std::os::unix::fs::chown(&spec.memory, Some(spec.uid), Some(spec.uid)))
                .map_err(|source| MachineError::Io { verb: "make the memory file", source })?;
            let (memory, disk) = (open(&spec.memory, true)?, open(&spec.disk, true)?);
            let (kernel, initramfs) = (open(&spec.kernel, false)?, open(&spec.initramfs, false)?);
            let shared = Shared {
                name: &spec.name,
                dir: &spec.dir,
                uid: spec.uid,
                vcpus: spec.vcpus,
                memory_mib: spec.memory_mib,
                memory: &memory,
                memory_is_written: true,
                disk: raw_disk(&disk),
            };
            let extra = [
                "-kernel".to_owned(),
                path_of(&kernel),
                "-initrd".to_owned(),
                path_of(&initramfs),
                "-append".to_owned(),
                self.kernel_arguments().await,
            ];
            let inherited = [&memory, &disk, &kernel, &initramfs];
            let mut spawned = self.spawn(&shared, &extra, &inherited)?;
            let qmp = spawned.machine.opened(spawned.control, Qmp::open).await?;
            spawned.machine.finish(qmp, spawned.link, spawned.console)
        })
    }

    fn restore<'a>(&'a self, spec: &'a RestoreSpec) -> BoxFuture<'a, Result<Started, MachineError>> {
        Box::pin(async move {
            let source = &spec.source;
            self.check(&source.shape)?;
            let delta = spec.dir.join("delta.qcow2");
            store::qcow2::create(&delta, &source.disk, source.shape.disk_mib << 20)?;
            let (delta, template, state) =
                (open(&delta, true)?, open(&source.disk, false)?, open(&source.state, false)?);
            let shared = Shared {
                name: &spec.name,
                dir: &spec.dir,
                uid: spec.uid,
                vcpus: source.shape.vcpus,
                memory_mib: source.shape.memory_mib,
                memory: &source.memory,
                memory_is_written: false,
                disk: layered_disk(&delta, &template),
            };
            let extra = ["-S", "-incoming", "defer"].map(str::to_owned);
            let stream = format!("fd:{}", state.as_raw_fd());
            let inherited = [&*source.memory, &delta, &template, &state];
            let mut spawned = self.spawn(&shared, &extra, &inherited)?;
            // Not its guest's memory alone: translated code takes up to 512 MiB.
            spec.cgroup
                .add(spawned.machine.pid())
                .map_err(|source| MachineError::Io { verb: "bound the process", source })?;
            let load = async |socket| {
                let mut qmp = Qmp::open(socket).await?;
                ignore_shared_memory(&mut qmp).await?;
                qmp.execute("migrate-incoming", json!({ "uri": stream })).await?;
                qmp.migrated("migrate-incoming").await?;
                qmp.execute("cont", json!({})).await?;
                Ok(qmp)
            };
            let qmp = spawned.machine.opened(spawned.control, load).await?;
            spawned.machine.finish(qmp, spawned.link, spawned.console)
        })
    }
}

/// Memory is a file that the other side maps itself; only device state goes through the migration stream.
async fn ignore_shared_memory(qmp: &mut Qmp) -> Result<(), MachineError> {
    let capability = json!({ "capabilities": [{ "capability": "x-ignore-shared", "state": true }] });
    qmp.execute("migrate-set-capabilities", capability).await.map(|_| ())
}

/// One QEMU process.
struct QemuMachine {
    child: Child,
    qmp: Option<Qmp>,
    stderr: Arc<Mutex<String>>,
}

impl QemuMachine {
    fn new(mut child: Child) -> Self {
        let stderr = Arc::new(Mutex::new(String::new()));
        if let Some(mut pipe) = child.stderr.take() {
            let kept = stderr.clone();
            // Ends with the process, whose end of the pipe it reads.
            tokio::spawn(async move {
                let mut buffer = [0u8; 1024];
                while let Ok(count @ 1..) = pipe.read(&mut buffer).await {
                    let mut kept = kept.lock();
                    if kept.len() < STDERR_LIMIT {
                        kept.push_str(&String::from_utf8_lossy(&buffer[..count]));
                    }
                }
            });
        }
        Self { child, qmp: None, stderr }
    }

    /// Runs `start` on the control socket, ending early when the process does or the limit is reached.
    async fn opened<F>(&mut self, control: OwnedFd, start: F) -> Result<Qmp, MachineError>
    where
        F: AsyncFnOnce(UnixStream) -> Result<Qmp, MachineError>,
    {
        let socket = to_tokio(control)
            .map_err(|source| MachineError::Io { verb: "open a control connection", source })?;
        let outcome = tokio::select! {
            biased;
            outcome = start(socket) => outcome,
            exit = self.exited() => return Err(MachineError::Died(exit.description)),
            () = tokio::time::sleep(START_LIMIT) => {
                return Err(MachineError::Deadline { step: "start", seconds: START_LIMIT.as_secs() });
            }
        };
        match outcome {
            // The connection broke because the process ended: the process's own words say more.
            Err(MachineError::Control(_)) => {
                let exit = tokio::time::timeout(Duration::from_secs(1), self.exited()).await;
                Err(MachineError::Died(
                    exit.map_or_else(|_| "its control connection broke".to_owned(), |e| e.description),
                ))
            }
            other => other,
        }
    }

    fn finish(mut self, qmp: Qmp, link: OwnedFd, console: OwnedFd) -> Result<Started, MachineError> {
        self.qmp = Some(qmp);
        let console =
            to_tokio(console).map_err(|source| MachineError::Io { verb: "open the console", source })?;
        Ok(Started { machine: Box::new(self), link, console })
    }

    async fn save_to(&mut self, state: &Path) -> Result<(), MachineError> {
        let io = |verb| move |source: std::io::Error| MachineError::Io { verb, source };
        let Some(mut qmp) = self.qmp.take() else {
            return Err(MachineError::Died("it was saved before".to_owned()));
        };
        qmp.execute("stop", json!({})).await?;
        ignore_shared_memory(&mut qmp).await?;
        // QEMU may start no process (`exec:`) and opens no path, so the stream comes here.
        let (ours, theirs) = socket_pair().map_err(io("receive the device state"))?;
        let mut stream = to_tokio(ours).map_err(io("receive the device state"))?;
        qmp.give_fd(STATE_STREAM, theirs.as_fd()).await?;
        drop(theirs);
        let receive = async {
            let mut file = tokio::fs::File::create_new(state).await?;
            tokio::io::copy(&mut stream, &mut file).await?;
            file.sync_all().await
        };
        let receive = async { receive.await.map_err(io("receive the device state")) };
        let send = async {
            qmp.execute("migrate", json!({ "uri": format!("fd:{STATE_STREAM}") })).await?;
            qmp.migrated("migrate").await
        };
        tokio::try_join!(receive, send)?;
        // An orderly end closes the disk image.
        let _ = qmp.execute("quit", json!({})).await;
        self.exited().await;
        Ok(())
    }
}

impl Machine for QemuMachine {
    fn pid(&self) -> u32 {
        self.child.id().unwrap_or(0)
    }

    fn exited(&mut self) -> BoxFuture<'_, Exit> {
        Box::pin(async move {
            let status = match self.child.wait().await {
                Ok(status) => status.to_string(),
                Err(error) => format!("its status is unknown: {error}"),
            };
            let said = self.stderr.lock().trim().to_owned();
            let description = if said.is_empty() { status } else { format!("{status}: {said}") };
            Exit { description }
        })
    }

    fn save<'a>(&'a mut self, state: &'a Path) -> BoxFuture<'a, Result<(), MachineError>> {
        Box::pin(async move {
            tokio::time::timeout(SAVE_LIMIT, self.save_to(state)).await.unwrap_or(Err(
                MachineError::Deadline { step: "save its state", seconds: SAVE_LIMIT.as_secs() },
            ))
        })
    }

    fn stop(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            // An error means that it has ended already.
            let _ = self.child.kill().await;
        })
    }
}
