//! The driver `kvm`: Pando's own VMM, one process each (docs/vmm.md).
//!
//! A template has a **zygote**: a `vmm` that was restored from it once and never runs. A create is a live fork of the
//! zygote, so it costs neither a boot nor a restore, and copies share all memory that they do not write. The zygote is
//! made when the node starts, and made anew when it has died; it and its copies have the user IDs that they are given,
//! no privileges and no paths (the VMM's jail). Copies are no children of this process: they are watched through a pidfd
//! and their control socket.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use proto::guest::MAC;
use proto::vmm::{
    Answer, BootSpec as VmmBoot, CardSpec, ChildSpec, DevicesSpec, DiskSpec, Fd, Rate, Request,
    RestoreSpec as VmmRestore, SaveSpec,
};
use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::{Child, Command};
use tokio::sync::Mutex;

use super::control::{Control, Descriptors, listen};
use super::process::{MARK, marked, open, socket_pair, to_tokio};
use super::{BootSpec, Bounds, Driver, Exit, Machine, MachineError, RestoreSpec, Source, Started};
use crate::sys;
use crate::uids::Uids;

/// The driver's name in a template's manifest.
pub const NAME: &str = "kvm";
/// The guest cannot send larger packets; without offloads on the link, large ones are what makes it fast.
const MTU: u16 = 65520;
const COMMAND_LINE: &str = "console=ttyS0 reboot=a panic=-1 quiet random.trust_cpu=on pci=off";
/// A start takes milliseconds; a machine in software on a busy host takes a thousand times as long.
const START_LIMIT: Duration = Duration::from_secs(30);
const SAVE_LIMIT: Duration = Duration::from_secs(120);
/// A zygote reads all of a template's memory.
const PREPARE_LIMIT: Duration = Duration::from_secs(60);
/// `nobody`: a probe machine is gone before anybody else's code runs.
const PROBE_USER: u32 = 65534;
const SOCKET: &str = "vmm.sock";
const DELTA: &str = "delta.pando";

/// The driver.
pub struct Kvm {
    version: String,
    zygotes: Arc<Zygotes>,
}

/// What makes zygotes, and those there are.
struct Zygotes {
    program: PathBuf,
    /// Where zygotes have their directories.
    run: PathBuf,
    uids: Uids,
    /// By the state file that they come from.
    places: Mutex<HashMap<PathBuf, Arc<Mutex<Option<Zygote>>>>>,
}

/// A parked machine of a template. Its process ends when this is dropped.
struct Zygote {
    process: Child,
    control: Control,
    dir: PathBuf,
    uid: u32,
}

impl Kvm {
    /// The driver with the VMM at `program`; zygotes have directories in `run` and user IDs from `uids`.
    pub fn new(program: PathBuf, run: PathBuf, uids: Uids) -> Self {
        // What is saved by one version is not for another.
        let version = format!("{} {}", proto::vmm::VERSION, env!("CARGO_PKG_VERSION"));
        let zygotes = Arc::new(Zygotes { program, run, uids, places: Mutex::default() });
        Self { version, zygotes }
    }
}

impl Zygotes {
    /// The zygote of a template, locked; made if there is none, by one for all who wait.
    async fn of(
        &self,
        source: &Source,
    ) -> Result<tokio::sync::OwnedMutexGuard<Option<Zygote>>, MachineError> {
        let place = self.places.lock().await.entry(source.state.clone()).or_default().clone();
        let mut place = place.lock_owned().await;
        if place.is_none() {
            *place = Some(self.make(source).await?);
        }
        Ok(place)
    }

    async fn make(&self, source: &Source) -> Result<Zygote, MachineError> {
        let io = |verb| move |source| MachineError::Io { verb, source };
        let uid = self.uids.take().ok_or(MachineError::Died("there is no user ID left for it".to_owned()))?;
        let dir = self.run.join(format!("zygote-{uid}"));
        let started = match std::fs::create_dir(&dir).map_err(io("make a directory")) {
            Ok(()) => self.start(source, &dir, uid).await,
            Err(error) => Err(error),
        };
        match started {
            Ok((process, control)) => Ok(Zygote { process, control, dir, uid }),
            Err(error) => {
                self.forget(&dir, uid);
                Err(error)
            }
        }
    }

    async fn start(&self, source: &Source, dir: &Path, uid: u32) -> Result<(Child, Control), MachineError> {
        let mut process = spawn(&self.program, dir, uid, &["--zygote"])?;
        match limited("load the template", PREPARE_LIMIT, park(source, dir)).await {
            Ok(control) => Ok((process, control)),
            Err(error) => {
                // An error means that it has ended already.
                let _ = process.kill().await;
                Err(error)
            }
        }
    }

    /// Ends a zygote's process and removes what it had.
    async fn bury(&self, mut zygote: Zygote) {
        // As above.
        let _ = zygote.process.kill().await;
        self.forget(&zygote.dir, zygote.uid);
    }

    /// For a zygote whose process is gone.
    fn forget(&self, dir: &Path, uid: u32) {
        match std::fs::remove_dir_all(dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::error!(dir = %dir.display(), %error, "a directory cannot be removed");
            }
            _ => {}
        }
        self.uids.give_back(uid);
    }

    /// Has the zygote of `source` do a fork; the process of the one child. A zygote that is found dead, or does not answer,
    /// is made anew, once.
    async fn fork(
        &self,
        source: &Source,
        request: &Request,
        fds: &Descriptors<'_>,
    ) -> Result<u32, MachineError> {
        let mut tried = false;
        loop {
            let mut place = self.of(source).await?;
            let Some(zygote) = place.as_mut() else {
                return Err(MachineError::Died("the template's machine is gone".to_owned()));
            };
            let answer = limited("copy itself", START_LIMIT, zygote.control.ask(request, fds)).await;
            match answer {
                Ok(Answer::Forked { pids, .. }) if pids.len() == 1 => return Ok(pids[0]),
                Ok(Answer::Forked { failure: Some(message), .. }) => {
                    return Err(MachineError::Refused { command: "fork", message });
                }
                Ok(other) => {
                    return Err(MachineError::Died(format!("it answered a fork with {other:?}")));
                }
                Err(refused @ MachineError::Refused { .. }) => return Err(refused),
                Err(error) => {
                    // One that is late would answer the next create instead of this one.
                    if let Some(zygote) = place.take() {
                        self.bury(zygote).await;
                    }
                    let is_late = matches!(error, MachineError::Deadline { .. });
                    if tried || is_late {
                        return Err(error);
                    }
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(error, "a template's parked machine has died; it is made anew");
                    tried = true;
                }
            }
        }
    }

    async fn copy(&self, spec: &RestoreSpec) -> Result<Started, MachineError> {
        let io = |verb| move |source| MachineError::Io { verb, source };
        let delta = make_delta(&spec.dir.join(DELTA), spec.source.shape.disk_mib)?;
        let listener = listen(&spec.dir, SOCKET).map_err(io("make a control socket"))?;
        let (link, link_theirs) = socket_pair().map_err(io("make a link"))?;
        let (console, console_theirs) = socket_pair().map_err(io("make a console"))?;
        let mut fds = Descriptors::default();
        let child = ChildSpec {
            control: fds.add(&listener),
            deltas: vec![fds.add(&delta)],
            link: Some(fds.add(&link_theirs)),
            console: Some(fds.add(&console_theirs)),
            uid: Some(spec.uid),
            run: false,
        };
        let request = Request::Fork { children: vec![child], deltas: Vec::new() };
        let pid = self.fork(&spec.source, &request, &fds).await?;
        // From here on it ends when this is given up.
        let watched = Watched::new(pid, &self.run);
        let resumed = async {
            // Nobody else shall keep it open: it is closed when the copy ends.
            drop(listener);
            let mut control = Control::connect(&spec.dir, SOCKET).await?;
            if control.pid() != pid {
                return Err(MachineError::Died("another process answers in its place".to_owned()));
            }
            spec.cgroup.add(pid).map_err(io("bound the process"))?;
            control.ask(&Request::Resume, &Descriptors::default()).await?;
            Ok(control)
        };
        let control = limited("start", START_LIMIT, resumed).await?;
        let machine = KvmMachine { watched: watched?, control, memory: None, process: None };
        let console = to_tokio(console).map_err(io("open the console"))?;
        Ok(Started { machine: Box::new(machine), link, console })
    }
}

/// Makes the machine of the zygote whose directory is `dir`.
async fn park(source: &Source, dir: &Path) -> Result<Control, MachineError> {
    let mut control = Control::connect(dir, SOCKET).await?;
    let (state, disk) = (open(&source.state, false)?, open(&source.disk, false)?);
    // Never written, as it never runs.
    let delta = make_delta(&dir.join(DELTA), source.shape.disk_mib)?;
    let (link, _) = socket_pair().map_err(|source| MachineError::Io { verb: "make a link", source })?;
    let mut fds = Descriptors::default();
    let request = Request::Restore(VmmRestore {
        state: fds.add(&state),
        memory: vec![fds.add(&*source.memory)],
        devices: devices(&mut fds, &disk, Some(&delta), &link, None),
    });
    control.ask(&request, &fds).await?;
    Ok(control)
}

impl Kvm {
    async fn boot_machine(&self, spec: &BootSpec) -> Result<Started, MachineError> {
        let io = |verb| move |source| MachineError::Io { verb, source };
        let (link, link_theirs) = socket_pair().map_err(io("make a link"))?;
        let (console, console_theirs) = socket_pair().map_err(io("make a console"))?;
        let process = spawn(&self.zygotes.program, &spec.dir, spec.uid, &[])?;
        let mut control = Control::connect(&spec.dir, SOCKET).await?;
        // The directory becomes a template, and nobody connects again.
        std::fs::remove_file(spec.dir.join(SOCKET)).map_err(io("remove the control socket"))?;
        let disk = open(&spec.disk, true)?;
        let (kernel, initramfs) = (open(&spec.kernel, false)?, open(&spec.initramfs, false)?);
        let mut fds = Descriptors::default();
        let request = Request::Boot(VmmBoot {
            vcpus: u8::try_from(spec.vcpus).unwrap_or(u8::MAX),
            memory_mib: spec.memory_mib,
            huge_pages: true,
            kernel: fds.add(&kernel),
            initramfs: Some(fds.add(&initramfs)),
            command_line: COMMAND_LINE.to_owned(),
            devices: devices(&mut fds, &disk, None, &link_theirs, Some(&console_theirs)),
        });
        control.ask(&request, &fds).await?;
        let machine = KvmMachine {
            watched: Watched::new(control.pid(), &spec.dir)?,
            control,
            memory: Some(spec.memory.clone()),
            process: Some(process),
        };
        let console = to_tokio(console).map_err(io("open the console"))?;
        Ok(Started { machine: Box::new(machine), link, console })
    }
}

/// Starts a process whose control socket is in `dir`, by which a sweep finds it too. It begins as root, as its program may lie
/// where only root can go and a zygote keeps the right to change the user of its copies, and becomes `uid` by itself.
fn spawn(program: &Path, dir: &Path, uid: u32, arguments: &[&str]) -> Result<Child, MachineError> {
    let io = |verb| move |source| MachineError::Io { verb, source };
    let control = listen(dir, SOCKET).map_err(io("make a control socket"))?;
    let kvm = File::options().read(true).write(true).open("/dev/kvm").map_err(io("open /dev/kvm"))?;
    let kvm = OwnedFd::from(kvm);
    let mut command = Command::new(program);
    command
        .args(["--control", &control.as_raw_fd().to_string(), "--kvm", &kvm.as_raw_fd().to_string()])
        .args(["--uid", &uid.to_string()])
        .args(arguments)
        .current_dir("/")
        .env_clear()
        .env(MARK, dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        // What it says goes where the server's own words go.
        .stderr(Stdio::inherit())
        .kill_on_drop(true);
    sys::confine(&mut command, 0, &[&control, &kvm]);
    command.spawn().map_err(|source| MachineError::Start {
        program: "vmm",
        package: "pando (vmm lies beside pando; `make build` builds both)",
        source,
    })
}

/// Boots a kernel without disk or network in a process of its own and returns its console and the process, which ends
/// when it is dropped.
pub(super) async fn boot_bare(
    program: &Path,
    dir: &Path,
    kernel: &Path,
    initramfs: &Path,
) -> Result<(tokio::net::UnixStream, Child), MachineError> {
    let io = |verb| move |source| MachineError::Io { verb, source };
    let process = spawn(program, dir, PROBE_USER, &[])?;
    let mut control = Control::connect(dir, SOCKET).await?;
    let (console, theirs) = socket_pair().map_err(io("make a console"))?;
    let (kernel, initramfs) = (open(kernel, false)?, open(initramfs, false)?);
    let mut fds = Descriptors::default();
    let request = Request::Boot(VmmBoot {
        vcpus: 1,
        memory_mib: 256,
        huge_pages: false,
        kernel: fds.add(&kernel),
        initramfs: Some(fds.add(&initramfs)),
        command_line: COMMAND_LINE.to_owned(),
        devices: DevicesSpec { disks: Vec::new(), card: None, console: Some(fds.add(&theirs)) },
    });
    control.ask(&request, &fds).await?;
    Ok((to_tokio(console).map_err(io("open the console"))?, process))
}

/// One disk, the card, the console. Without a delta the disk's image itself is written.
fn devices<'a>(
    fds: &mut Descriptors<'a>,
    disk: &'a OwnedFd,
    delta: Option<&'a File>,
    link: &'a OwnedFd,
    console: Option<&'a OwnedFd>,
) -> DevicesSpec {
    let disk = DiskSpec {
        base: fds.add(disk),
        base_written: delta.is_none(),
        frozen: Vec::new(),
        delta: delta.map(|delta| fds.add(delta)),
        // A sandbox does not outlive its host; a template's disk is hashed and published after its machine has ended.
        durable: false,
        rate: Rate::default(),
    };
    let card = CardSpec { link: fds.add(link), mac: MAC, mtu: MTU, offloads: false, rate: Rate::default() };
    let console: Option<Fd> = console.map(|console| fds.add(console));
    DevicesSpec { disks: vec![disk], card: Some(card), console }
}

fn make_delta(path: &Path, disk_mib: u64) -> Result<File, MachineError> {
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(|source| MachineError::Io { verb: "make the disk's delta", source })?;
    disk::create_delta(&file, disk_mib << 20)?;
    Ok(file)
}

async fn limited<T>(
    step: &'static str,
    limit: Duration,
    work: impl Future<Output = Result<T, MachineError>>,
) -> Result<T, MachineError> {
    let late = MachineError::Deadline { step, seconds: limit.as_secs() };
    tokio::time::timeout(limit, work).await.unwrap_or(Err(late))
}

impl Driver for Kvm {
    fn identity(&self) -> (&str, &str) {
        (NAME, &self.version)
    }

    fn bounds(&self) -> Bounds {
        // One thread beside the vCPUs, of which there are at most 32.
        Bounds { tasks: 64, memory_mib: 256 }
    }

    fn boot<'a>(&'a self, spec: &'a BootSpec) -> BoxFuture<'a, Result<Started, MachineError>> {
        Box::pin(limited("start", START_LIMIT, self.boot_machine(spec)))
    }

    fn restore<'a>(&'a self, spec: &'a RestoreSpec) -> BoxFuture<'a, Result<Started, MachineError>> {
        Box::pin(async move {
            self.check(&spec.source.shape)?;
            let (zygotes, spec) = (self.zygotes.clone(), spec.clone());
            // A task of its own goes on when the create is given up: what it makes then ends at once. Otherwise a copy would
            // live that nobody knows, and its zygote's answer would be taken for that to the next request.
            unwind(tokio::spawn(async move { zygotes.copy(&spec).await }).await)
        })
    }

    fn prepare<'a>(&'a self, source: &'a Source) -> BoxFuture<'a, Result<(), MachineError>> {
        Box::pin(async move {
            self.check(&source.shape)?;
            let (zygotes, source) = (self.zygotes.clone(), source.clone());
            unwind(tokio::spawn(async move { zygotes.of(&source).await.map(|_| ()) }).await)
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let places: Vec<_> = self.zygotes.places.lock().await.drain().map(|(_, place)| place).collect();
            for place in places {
                if let Some(zygote) = place.lock().await.take() {
                    self.zygotes.bury(zygote).await;
                }
            }
        })
    }
}

/// What a task returned; one that panicked is a defect.
fn unwind<T>(outcome: Result<Result<T, MachineError>, tokio::task::JoinError>) -> Result<T, MachineError> {
    outcome.unwrap_or_else(|_| Err(MachineError::Died("the task that made it ended early".to_owned())))
}

/// A process that need not be a child. Killed when this is dropped.
struct Watched {
    pid: u32,
    pidfd: AsyncFd<OwnedFd>,
}

impl Watched {
    /// The process `pid`, if its directory ([`MARK`]) is in `dir`. One that has ended meanwhile, and whose number may be
    /// another's by now, is not taken: so nobody else is ever killed.
    fn new(pid: u32, dir: &Path) -> Result<Self, MachineError> {
        let open = || {
            let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
            let number = number.ok_or_else(|| std::io::Error::other("no process ID"))?;
            let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty())?;
            if !marked(number.as_raw_pid())?.is_some_and(|marked| marked.starts_with(dir)) {
                return Err(std::io::Error::other("it has ended"));
            }
            sys::watch(pidfd, Interest::READABLE)
        };
        let pidfd = open().map_err(|source| MachineError::Io { verb: "watch the process", source })?;
        Ok(Self { pid, pidfd })
    }

    fn kill(&self) {
        // One that has ended needs no killing.
        let _ = rustix::process::pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL);
    }

    /// Resolves when the process has ended.
    async fn gone(&self) {
        // A pidfd stays readable from then on; an error of epoll is none of this process's.
        let _ = self.pidfd.readable().await;
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.kill();
    }
}

/// One `vmm` process with a machine.
struct KvmMachine {
    watched: Watched,
    control: Control,
    /// Where memory goes when it is saved; a copy of a template is not saved.
    memory: Option<PathBuf>,
    /// A booted one is a child.
    process: Option<Child>,
}

impl KvmMachine {
    async fn save_to(&mut self, state: &Path) -> Result<(), MachineError> {
        let io = |verb| move |source| MachineError::Io { verb, source };
        let (control, Some(memory)) = (&mut self.control, &self.memory) else {
            return Err(MachineError::Died("a copy is not saved".to_owned()));
        };
        let none = Descriptors::default();
        control.ask(&Request::Pause, &none).await?;
        let state = File::create_new(state).map_err(io("make the state file"))?;
        let memory = File::create_new(memory).map_err(io("make the memory file"))?;
        let pagemap =
            File::open(format!("/proc/{}/pagemap", self.watched.pid)).map_err(io("read its page map"))?;
        let mut fds = Descriptors::default();
        let save =
            SaveSpec { state: fds.add(&state), memory: fds.add(&memory), pagemap: Some(fds.add(&pagemap)) };
        control.ask(&Request::Save(save), &fds).await?;
        control.ask(&Request::Stop, &none).await?;
        self.watched.gone().await;
        if let Some(process) = &mut self.process {
            // As in `stop`.
            let _ = process.wait().await;
        }
        let sync = move || state.sync_all().and_then(|()| memory.sync_all());
        tokio::task::spawn_blocking(sync)
            .await
            .map_err(|_| MachineError::Died("its files could not be synced".to_owned()))?
            .map_err(io("write its files through"))
    }
}

impl Machine for KvmMachine {
    fn pid(&self) -> u32 {
        self.watched.pid
    }

    fn exited(&mut self) -> BoxFuture<'_, Exit> {
        Box::pin(async move {
            // The socket closes with the process, and the guest's end is told before.
            let description = self.control.ended().await;
            self.watched.gone().await;
            Exit { description }
        })
    }

    fn save<'a>(&'a mut self, state: &'a Path) -> BoxFuture<'a, Result<(), MachineError>> {
        Box::pin(limited("save its state", SAVE_LIMIT, self.save_to(state)))
    }

    fn stop(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.watched.kill();
            self.watched.gone().await;
            if let Some(process) = &mut self.process {
                // It has ended: this reaps it.
                let _ = process.wait().await;
            }
        })
    }
}
