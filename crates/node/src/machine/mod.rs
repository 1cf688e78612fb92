//! The border to virtual machines: what a driver can make and what a machine can do.
//!
//! A [`Driver`] makes machines, by booting a kernel or by restoring a template's memory. A [`Machine`] is one running
//! process, owned by exactly one task; dropping it ends the process. Pausing and forking join with the issue that needs
//! them.
//!
//! ```text
//!            boot ──► running ──save──► saved (the process ends)
//!  restore ──────────►   │
//!                        ├── stop ──► ended
//!                        └── (exits by itself) ──► ended
//! ```

mod control;
pub mod kvm;
pub mod probe;
pub(crate) mod process;
pub mod qemu;
mod qmp;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use futures::future::BoxFuture;
use proto::manifest::MachineShape;

use crate::cgroup::Cgroup;

/// A machine to boot from a disk, in order to make a template.
#[derive(Debug)]
pub struct BootSpec {
    /// A name for logs and process lists.
    pub name: String,
    /// Directory that is the machine's alone.
    pub dir: PathBuf,
    /// User ID the process runs under.
    pub uid: u32,
    /// Kernel, an uncompressed ELF.
    pub kernel: PathBuf,
    /// Initramfs with the agent.
    pub initramfs: PathBuf,
    /// Raw disk, written in place.
    pub disk: PathBuf,
    /// File that becomes guest memory; made by the driver.
    pub memory: PathBuf,
    /// vCPUs.
    pub vcpus: u32,
    /// Guest memory.
    pub memory_mib: u64,
}

/// What a template's machine was parked as.
#[derive(Debug, Clone)]
pub struct Source {
    /// Its memory, sealed; mapped privately.
    pub memory: Arc<OwnedFd>,
    /// Its device state.
    pub state: PathBuf,
    /// Its disk, never written.
    pub disk: PathBuf,
    /// What it was.
    pub shape: MachineShape,
}

/// A machine to copy from a template.
#[derive(Debug, Clone)]
pub struct RestoreSpec {
    /// A name for logs and process lists.
    pub name: String,
    /// Directory that is the machine's alone, owned by `uid`; the driver puts the disk's delta there.
    pub dir: PathBuf,
    /// User ID the process runs under.
    pub uid: u32,
    /// The template.
    pub source: Source,
    /// The group that the process is put into before its guest runs.
    pub cgroup: Cgroup,
}

/// What a machine's process needs beside its guest's memory; more than that is a defect or an attack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Threads.
    pub tasks: u32,
    /// Memory.
    pub memory_mib: u64,
}

/// A machine and the two ends it is born with.
pub struct Started {
    /// The machine.
    pub machine: Box<dyn Machine>,
    /// Ethernet frames to and from the guest, in the framing of QEMU's stream netdev.
    pub link: OwnedFd,
    /// The guest's serial console.
    pub console: tokio::net::UnixStream,
}

/// How a machine's process ended.
#[derive(Debug, Clone)]
pub struct Exit {
    /// For logs: exit status, and what the process said last on its standard error.
    pub description: String,
}

/// Makes machines.
pub trait Driver: Send + Sync + 'static {
    /// Name and version as they stand in a template's manifest.
    fn identity(&self) -> (&str, &str);
    /// Whether copies can be made of a machine that was parked as `shape`.
    ///
    /// # Errors
    /// With both identities when they cannot.
    fn check(&self, shape: &MachineShape) -> Result<(), MachineError> {
        let (name, version) = self.identity();
        if shape.is_for(name, version) {
            return Ok(());
        }
        Err(MachineError::OtherMachine {
            template: format!("{} {}", shape.driver, shape.driver_version),
            here: format!("{name} {version}"),
        })
    }
    /// What a process of it needs.
    fn bounds(&self) -> Bounds;
    /// Boots a kernel.
    fn boot<'a>(&'a self, spec: &'a BootSpec) -> BoxFuture<'a, Result<Started, MachineError>>;
    /// Makes what all copies of a template share, so that the first does not wait for it.
    fn prepare<'a>(&'a self, _source: &'a Source) -> BoxFuture<'a, Result<(), MachineError>> {
        Box::pin(std::future::ready(Ok(())))
    }
    /// Copies a template; the guest runs when this returns. Given up half-way, it leaves no process.
    fn restore<'a>(&'a self, spec: &'a RestoreSpec) -> BoxFuture<'a, Result<Started, MachineError>>;
    /// Ends what the driver keeps beside the machines it made. No machine is made after this.
    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}

/// One running machine. Dropping it kills the process.
pub trait Machine: Send {
    /// The process, for accounting.
    fn pid(&self) -> u32;
    /// Resolves when the process has ended. Cancel-safe.
    fn exited(&mut self) -> BoxFuture<'_, Exit>;
    /// Stops the guest and writes device state to `state`; memory and disk files are complete when this returns, and the
    /// process has ended.
    fn save<'a>(&'a mut self, state: &'a std::path::Path) -> BoxFuture<'a, Result<(), MachineError>>;
    /// Ends the process at once and reaps it.
    fn stop(&mut self) -> BoxFuture<'_, ()>;
}

/// What can go wrong with a machine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// The machine program cannot be started.
    #[error("cannot start {program}; install the Debian package {package}")]
    Start {
        /// The program.
        program: &'static str,
        /// The package that has it.
        package: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// The VMM's program is not there.
    #[error(
        "the program vmm is not beside pando; build it with `make build`, name it as vmm_binary in the configuration, or \
             use --machine qemu"
    )]
    NoVmm,
    /// It ended before it was ready.
    #[error("the machine ended while it started: {0}")]
    Died(String),
    /// A step took longer than it may.
    #[error("the machine did not {step} within {seconds} s")]
    Deadline {
        /// The step.
        step: &'static str,
        /// The limit.
        seconds: u64,
    },
    /// It refused a command.
    #[error("the machine refused {command}: {message}")]
    Refused {
        /// The command.
        command: &'static str,
        /// What it said.
        message: String,
    },
    /// It said something that is not its protocol.
    #[error("the machine's control connection failed")]
    Control(#[source] std::io::Error),
    /// A file or socket for it cannot be made.
    #[error("cannot {verb} for the machine")]
    Io {
        /// What was tried.
        verb: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// A file of the template.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// The disk of a copy.
    #[error("the disk's delta cannot be made")]
    Disk(#[from] disk::DiskError),
    /// The template was made on another kind of machine.
    #[error(
        "the template was made on {template}, this node runs {here}; rebuild it with `pando setup --rebuild`"
    )]
    OtherMachine {
        /// What the template needs.
        template: String,
        /// What is here.
        here: String,
    },
}
