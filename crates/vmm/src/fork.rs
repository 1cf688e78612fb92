//! Copying a running machine by fork(2).
//!
//! The child of a fork has the parent's memory copy-on-write, guest memory included, for the price of its page tables.
//! What it has not is threads (only the one that called), and a right to the parent's KVM machine (KVM binds one to the
//! memory of the process that made it).
//!
//! | survives in the child | is made anew |
//! |---|---|
//! | guest memory, at the same addresses | KVM's machine, its processors, their threads |
//! | registers of devices, positions in queues (in memory) | doorbells and interrupt lines (eventfds) |
//! | files of the disk's base and frozen layers | the delta on top of them |
//! | /dev/kvm, standard streams | link, console, control socket: given with the request |
//! | state of processors and chips, read before the fork | everything else is closed unseen |
//!
//! What was on its way at that moment: disk requests are done one by one by the thread that forks, so none is half done;
//! a doorbell that has rung and an interrupt that was raised are repeated in the child, which is harmless if they were
//! not; frames half-way on the link are lost in the child, as on a pulled cable, and go on in the parent; timers are in
//! the local APICs' state; the time that vCPUs stood still is not the guest's.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Instant;

use kvm_ioctls::Kvm;
use proto::vmm::{ChildSpec, Fd, MAX_CHILDREN};

use crate::devices::Devices;
use crate::devices::block::Block;
use crate::devices::serial::SerialPort;
use crate::devices::transport::Backend;
use crate::kvm::registers::VcpuState;
use crate::kvm::{self, ChipState};
use crate::machine::{Descriptors, Machine};
use crate::sys::{self, Side};
use crate::vcpu::lock;
use crate::{Error, jail};

/// What a child begins with.
pub struct Copied {
    /// Its control socket.
    pub control: OwnedFd,
    /// Its machine, paused.
    pub machine: Machine,
    /// It shall run at once.
    pub run: bool,
}

/// How a fork went, on either side.
pub enum Outcome {
    /// This is the parent: processes of the children, and how long vCPUs stood still.
    Parent {
        /// Process IDs, in order; fewer than children were asked for if there is a failure.
        pids: Vec<u32>,
        /// Why there are no more.
        failure: Option<Error>,
        /// From the request to pause until they could go on.
        paused_us: u64,
    },
    /// This is a child. Nothing of the parent's but the machine given here may be used or dropped any more.
    Child(Result<Box<Copied>, Stillborn>),
}

/// A child that could not be made into a machine. It lives as long as it takes to say so.
pub struct Stillborn {
    /// Its control socket.
    pub control: OwnedFd,
    /// Why.
    pub error: Error,
}

struct Child {
    control: OwnedFd,
    deltas: Vec<File>,
    link: Option<OwnedFd>,
    console: Option<OwnedFd>,
    uid: Option<u32>,
    run: bool,
}

/// Copies `machine`, which may be running and then goes on afterwards.
///
/// # Errors
/// When the request does not fit the machine, or the host has no room for even one; the machine goes on. If there was
/// room for some, they exist, and the outcome says why there are no more.
pub fn copies(
    kvm: &Kvm,
    machine: &mut Machine,
    is_running: bool,
    specs: &[ChildSpec],
    deltas: &[Fd],
    fds: &mut Descriptors,
    may_change_user: bool,
) -> Result<Outcome, Error> {
    if specs.is_empty() || specs.len() > MAX_CHILDREN {
        return Err(Error::BadRequest(format!(
            "a fork makes 1 to {MAX_CHILDREN} children, not {}",
            specs.len()
        )));
    }
    let children = specs.iter().map(|spec| take_child(spec, fds)).collect::<Result<Vec<_>, _>>()?;
    let own = fds.files(deltas)?;
    check(machine, &children, &own, is_running, may_change_user)?;

    let begun = Instant::now();
    machine.pause()?;
    let outcome = stopped(kvm, machine, children, own, begun);
    // The child's machine is not this one.
    if is_running && !matches!(outcome, Ok(Outcome::Child(_))) {
        machine.resume();
    }
    outcome
}

/// What is done while no vCPU runs.
fn stopped(
    kvm: &Kvm,
    machine: &mut Machine,
    mut children: Vec<Child>,
    own: Vec<File>,
    begun: Instant,
) -> Result<Outcome, Error> {
    let (vcpus, chips) = machine.read_state()?;
    // First of all, so that nothing that copies stand on is ever written again. A fork that fails after this has cost the
    // machine one more layer, with nothing in it.
    change_disks(&mut lock(&machine.shared.devices), own, Block::freeze)?;
    let (mut pids, mut failure) = (Vec::new(), None);
    for at in 0..children.len() {
        match sys::fork() {
            Ok(Side::Parent(pid)) => pids.push(pid),
            Ok(Side::Child) => {
                let child = children.swap_remove(at);
                // The other children's descriptors are closed in `become_child`, by number.
                std::mem::forget(children);
                return Ok(Outcome::Child(become_child(kvm, machine, child, &vcpus, &chips)));
            }
            Err(error) if pids.is_empty() => return Err(Error::io("fork")(error)),
            Err(error) => {
                failure = Some(Error::io("fork")(error));
                break;
            }
        }
    }
    let paused_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
    Ok(Outcome::Parent { pids, failure, paused_us })
}

fn take_child(spec: &ChildSpec, fds: &mut Descriptors) -> Result<Child, Error> {
    Ok(Child {
        control: fds.take(spec.control)?,
        deltas: fds.files(&spec.deltas)?,
        link: fds.optional(spec.link)?,
        console: fds.optional(spec.console)?,
        uid: spec.uid,
        run: spec.run,
    })
}

/// All that can be known to fail is known before anything is stopped.
fn check(
    machine: &Machine,
    children: &[Child],
    own: &[File],
    is_running: bool,
    may_change_user: bool,
) -> Result<(), Error> {
    let bad = |why: String| Err(Error::BadRequest(why));
    let devices = lock(&machine.shared.devices);
    let (mut written, mut has_card) = (0, false);
    for device in &devices.virtio {
        match &device.backend {
            Backend::Block(block) if block.disk().is_base_written() => {
                return bad("a disk whose image is written itself cannot be shared with copies".to_owned());
            }
            Backend::Block(block) => written += usize::from(block.disk().writable()),
            Backend::Card(_) => has_card = true,
            _ => {}
        }
    }
    if is_running && own.len() != written {
        return bad(format!("the machine itself needs {written} new deltas, {} came", own.len()));
    }
    for child in children {
        if child.deltas.len() != written {
            return bad(format!("each child needs {written} deltas, {} came", child.deltas.len()));
        }
        if child.link.is_some() != has_card {
            return bad("each child needs a link if the machine has a card, and only then".to_owned());
        }
        if child.uid == Some(0) || child.uid.is_some() && !may_change_user {
            return bad("only a zygote's children may have a user of their own, and not root".to_owned());
        }
        for delta in child.deltas.iter().chain(own) {
            if !delta.metadata().is_ok_and(|meta| meta.is_file()) {
                return bad("a delta is a file".to_owned());
            }
        }
    }
    Ok(())
}

/// Does `change` with each written disk and the next of `deltas`, as long as there are any.
fn change_disks(
    devices: &mut Devices,
    deltas: Vec<File>,
    change: impl Fn(&mut Block, File) -> Result<(), disk::DiskError>,
) -> Result<(), Error> {
    let mut deltas = deltas.into_iter();
    let mut number = 0;
    for device in &mut devices.virtio {
        if let Backend::Block(block) = &mut device.backend {
            if block.disk().writable() {
                let Some(delta) = deltas.next() else { break };
                change(block, delta).map_err(|source| Error::Disk { number, source })?;
            }
            number += 1;
        }
    }
    Ok(())
}

/// Everything that happens in the child before it is a machine of its own.
fn become_child(
    kvm: &Kvm,
    machine: &mut Machine,
    child: Child,
    vcpus: &[VcpuState],
    chips: &ChipState,
) -> Result<Box<Copied>, Stillborn> {
    close_the_parents(kvm, machine, &child);
    let Child { control, deltas, link, console, uid, run } = child;
    match make_machine(kvm, machine, (deltas, link, console), uid, vcpus, chips) {
        Ok(machine) => Ok(Box::new(Copied { control, machine, run })),
        Err(error) => Err(Stillborn { control, error }),
    }
}

fn make_machine(
    kvm: &Kvm,
    machine: &mut Machine,
    (deltas, mut link, console): (Vec<File>, Option<OwnedFd>, Option<OwnedFd>),
    uid: Option<u32>,
    vcpus: &[VcpuState],
    chips: &ChipState,
) -> Result<Machine, Error> {
    if let Some(uid) = uid {
        jail::become_user(uid)?;
    }
    // The devices move out of what the parent's vCPUs share; the rest of that, the vCPUs and KVM's machine are the
    // parent's and are forgotten, never dropped: their threads are not here and their descriptors are closed.
    let mut devices = take_devices(machine)?;
    // The parent has frozen what it wrote, or never runs: its top has nothing in it.
    change_disks(&mut devices, deltas, Block::replace_top)?;
    for device in &mut devices.virtio {
        device.rewire()?;
        if let Backend::Card(card) = &mut device.backend {
            std::mem::forget(card.set_link(link.take()));
        }
    }
    let memory = std::mem::replace(&mut machine.memory, crate::memory::Memory::none());
    let vm = kvm::create(kvm, &memory)?;
    Machine::with_state(kvm, vm, memory, devices, vcpus, chips, console)
}

fn take_devices(machine: &Machine) -> Result<Devices, Error> {
    let mut devices = lock(&machine.shared.devices);
    let serial = SerialPort::new(Some(&devices.serial.save()))?;
    std::mem::forget(std::mem::replace(&mut devices.serial, SerialPort::new(None)?));
    Ok(Devices { virtio: std::mem::take(&mut devices.virtio), serial, ending: None })
}

fn close_the_parents(kvm: &Kvm, machine: &Machine, child: &Child) {
    let mut keep: Vec<RawFd> = vec![kvm.as_raw_fd(), child.control.as_raw_fd()];
    keep.extend(child.deltas.iter().map(AsRawFd::as_raw_fd));
    keep.extend(child.link.iter().chain(&child.console).map(AsRawFd::as_raw_fd));
    for device in &lock(&machine.shared.devices).virtio {
        if let Backend::Block(block) = &device.backend {
            keep.extend(block.disk().files().map(AsRawFd::as_raw_fd));
        }
    }
    sys::close_all_but(&keep);
}
