//! Processors: one thread each, running the guest until it is told to stand still.
//!
//! ```text
//!  new ──► paused ──run──► running ──pause──► paused ──end──► gone
//!            │ read: the thread reads its processor's state
//!            ▼
//!          paused
//! ```
//!
//! A thread that is paused waits on a futex and holds no lock; that is what makes fork(2) possible. Before it is paused it
//! finishes what the guest's last exit had begun: KVM completes a read or write of a register only when it is entered
//! again, and the state before that is of an instruction half done.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::{VcpuExit, VcpuFd};
use proto::vmm::Ending;
use vmm_sys_util::eventfd::EventFd;

use crate::devices::{Devices, GuestMap, Lines};
use crate::kvm::registers::VcpuState;
use crate::{Error, jail, sys};

/// A vCPU that is in KVM for longer than this after it was kicked will not come back.
const PAUSE_LIMIT: Duration = Duration::from_secs(10);

/// Takes a lock; a thread that panicked while it held it does not make the data worse than it is.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What all vCPUs of a machine share.
pub struct Shared {
    /// The devices.
    pub devices: Mutex<Devices>,
    /// Status registers, without the lock.
    pub lines: Lines,
    /// Guest memory.
    pub memory: GuestMap,
    /// Set by the first vCPU that cannot go on.
    pub ending: Mutex<Option<Ending>>,
    /// Signalled with it.
    pub ended: EventFd,
    /// Exits to this process so far.
    pub exits: AtomicU64,
    /// Registers that this host can save.
    pub msrs: Vec<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wish {
    Run,
    Pause,
    Read,
    End,
}

#[derive(Default)]
struct Desk {
    wish: Option<Wish>,
    /// The thread stands still.
    paused: bool,
    gone: bool,
    thread: i32,
    /// Address of `immediate_exit`; 0 when the processor is not there (any more).
    exit_flag: usize,
    state: Option<Result<Box<VcpuState>, Error>>,
}

struct Seat {
    desk: Mutex<Desk>,
    changed: Condvar,
}

/// One processor, from outside.
pub struct Vcpu {
    number: usize,
    seat: Arc<Seat>,
}

impl Vcpu {
    /// Starts a thread for `fd`; it stands still at first.
    ///
    /// # Errors
    /// When the host has no thread left.
    pub fn start(
        number: usize,
        mut fd: VcpuFd,
        cpuid: Vec<kvm_cpuid_entry2>,
        shared: Arc<Shared>,
    ) -> Result<Self, Error> {
        let run = fd.get_kvm_run();
        let (page, exit_flag) = (&raw const *run as usize, &raw const run.immediate_exit as usize);
        // A child of a fork has nothing to do with this processor, and mapping it would keep it alive.
        // SAFETY: the page is KVM's, and children make processors of their own.
        unsafe { sys::advise(page, 4096, sys::Advice::NotForChildren) }
            .map_err(Error::io("keep a processor to itself"))?;
        let desk = Desk { paused: true, exit_flag, ..Desk::default() };
        let seat = Arc::new(Seat { desk: Mutex::new(desk), changed: Condvar::new() });
        let theirs = seat.clone();
        std::thread::Builder::new()
            .name(format!("vcpu{number}"))
            .stack_size(256 * 1024)
            .spawn(move || work(&theirs, fd, &cpuid, &shared))
            .map_err(Error::io("start a vCPU's thread"))?;
        Ok(Self { number, seat })
    }

    fn ask(&self, wish: Wish) {
        let mut desk = lock(&self.seat.desk);
        desk.wish = Some(wish);
        self.kick(&desk);
        self.seat.changed.notify_all();
    }

    fn kick(&self, desk: &Desk) {
        if !desk.paused && desk.exit_flag != 0 {
            // SAFETY: the thread clears the address under this lock before the processor goes.
            unsafe { sys::set_flag(desk.exit_flag, 1) };
            sys::kick(desk.thread);
        }
    }

    /// Lets it run.
    pub fn run(&self) {
        self.ask(Wish::Run);
    }

    /// Asks it to stand still; [`Vcpu::wait_paused`] waits for it.
    pub fn pause(&self) {
        self.ask(Wish::Pause);
    }

    /// Returns when it stands still.
    ///
    /// # Errors
    /// When it does not.
    pub fn wait_paused(&self) -> Result<(), Error> {
        self.wait(|desk| desk.paused || desk.gone).map(|_| ())
    }

    /// Its state. It must stand still.
    ///
    /// # Errors
    /// KVM's.
    pub fn read(&self) -> Result<Box<VcpuState>, Error> {
        self.ask(Wish::Read);
        let mut desk = self.wait(|desk| desk.state.is_some() || desk.gone)?;
        desk.state.take().unwrap_or(Err(Error::Stuck(self.number, 0)))
    }

    fn wait(&self, done: impl Fn(&Desk) -> bool) -> Result<MutexGuard<'_, Desk>, Error> {
        let deadline = Instant::now() + PAUSE_LIMIT;
        let mut desk = lock(&self.seat.desk);
        while !done(&desk) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Stuck(self.number, PAUSE_LIMIT.as_secs()));
            }
            // A kick between the thread's look at its desk and its entry into KVM is not lost (the flag stays set).
            let waited = self.seat.changed.wait_timeout(desk, left).unwrap_or_else(PoisonError::into_inner);
            desk = waited.0;
        }
        Ok(desk)
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        self.ask(Wish::End);
        // What does not end now ends with the process.
        drop(self.wait(|desk| desk.gone));
    }
}

/// The thread.
fn work(seat: &Seat, mut fd: VcpuFd, cpuid: &[kvm_cpuid_entry2], shared: &Shared) {
    lock(&seat.desk).thread = sys::thread_id();
    if let Err(error) = jail::enter_vcpu() {
        tell_ending(shared, Ending::Fault { detail: proto::chain(&error) });
    }
    loop {
        let wish = {
            let mut desk = lock(&seat.desk);
            loop {
                match desk.wish.take() {
                    Some(Wish::Pause) => {}
                    Some(wish) => break wish,
                    None => desk = seat.changed.wait(desk).unwrap_or_else(PoisonError::into_inner),
                }
            }
        };
        match wish {
            Wish::Run => {
                lock(&seat.desk).paused = false;
                fd.set_kvm_immediate_exit(0);
                // A kick that came before the line above has left its wish.
                run(seat, &mut fd, shared);
                finish(&mut fd, shared);
                lock(&seat.desk).paused = true;
            }
            Wish::Read => {
                let state = VcpuState::read(&fd, &shared.msrs, cpuid.to_vec()).map(Box::new);
                lock(&seat.desk).state = Some(state);
            }
            Wish::End => break,
            Wish::Pause => {}
        }
        seat.changed.notify_all();
    }
    let mut desk = lock(&seat.desk);
    desk.exit_flag = 0;
    (desk.paused, desk.gone) = (true, true);
    drop(desk);
    drop(fd);
    seat.changed.notify_all();
}

/// Runs the guest until somebody wishes something or it has ended.
fn run(seat: &Seat, fd: &mut VcpuFd, shared: &Shared) {
    while lock(&seat.desk).wish.is_none() {
        match fd.run() {
            Ok(exit) => {
                shared.exits.fetch_add(1, Ordering::Relaxed);
                if let Some(ending) = handle(exit, shared) {
                    return tell_ending(shared, ending);
                }
            }
            Err(error) if [libc::EINTR, libc::EAGAIN].contains(&error.errno()) => {}
            Err(error) => {
                let detail = format!("KVM cannot run the guest: {error}");
                return tell_ending(shared, Ending::Fault { detail });
            }
        }
    }
}

/// Lets KVM finish the instruction of the last exit, without running another.
fn finish(fd: &mut VcpuFd, shared: &Shared) {
    fd.set_kvm_immediate_exit(1);
    // An instruction with many accesses exits once for each.
    while let Ok(exit) = fd.run() {
        if let Some(ending) = handle(exit, shared) {
            tell_ending(shared, ending);
            break;
        }
    }
}

/// Does what the guest's exit asks for; Some when the machine has ended.
fn handle(exit: VcpuExit<'_>, shared: &Shared) -> Option<Ending> {
    match exit {
        VcpuExit::MmioRead(address, data) => match (shared.lines.read(address), data.len()) {
            (Some(value), 4) => data.copy_from_slice(&value.to_le_bytes()),
            _ => lock(&shared.devices).read(address, data),
        },
        VcpuExit::MmioWrite(address, data) => {
            let word = <[u8; 4]>::try_from(data).map(u32::from_le_bytes);
            if !word.is_ok_and(|word| shared.lines.acknowledge(address, word)) {
                lock(&shared.devices).write(address, data, &shared.memory);
            }
        }
        VcpuExit::IoIn(port, data) => {
            // A string instruction brings several accesses of one byte at once.
            let mut devices = lock(&shared.devices);
            for byte in data.chunks_mut(1) {
                devices.port_read(port, byte);
            }
        }
        VcpuExit::IoOut(port, data) => {
            let mut devices = lock(&shared.devices);
            for byte in data.chunks(1) {
                devices.port_write(port, byte);
            }
            return devices.ending.take();
        }
        VcpuExit::Shutdown => return Some(Ending::TripleFault),
        VcpuExit::FailEntry(reason, _) => {
            return Some(Ending::Fault {
                detail: format!("the processor refuses to enter the guest: {reason:#x}"),
            });
        }
        VcpuExit::InternalError => {
            return Some(Ending::Fault { detail: "KVM cannot emulate an instruction".to_owned() });
        }
        VcpuExit::MemoryFault { gpa, .. } => {
            return Some(Ending::Fault {
                detail: format!("the host has no memory for the guest at {gpa:#x}"),
            });
        }
        // Interrupts of the thread, and halts, which the in-kernel APIC handles.
        VcpuExit::Intr | VcpuExit::Hlt => {}
        other => return Some(Ending::Fault { detail: format!("KVM left the guest with {other:?}") }),
    }
    None
}

/// The first reason counts.
fn tell_ending(shared: &Shared, ending: Ending) {
    lock(&shared.ending).get_or_insert(ending);
    // Its counter is never read down to where a write could fail.
    let _ = shared.ended.write(1);
}
