//! The devices of a machine and the addresses they answer at.
//!
//! Owns: which access goes to which device. Does not own: who works for a device (`server`: one thread, when a doorbell
//! rings) or what stands behind it.
//!
//! Two parties come here. A vCPU thread, whose guest has read or written a register: it holds the lock for the time of
//! that one access, and for the two registers of every interrupt it takes no lock at all ([`Lines`]). And the server's
//! thread, which holds the lock while it works through a queue. Doorbells are eventfds that KVM signals itself.

pub mod balloon;
pub mod block;
pub mod card;
pub mod chain;
pub mod limiter;
pub mod power;
pub mod random;
pub mod serial;
pub mod transport;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use proto::vmm::Ending;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::Error;
use crate::memory::layout;
use serial::SerialPort;
use transport::{Transport, registers};

/// What a queue needs of guest memory.
pub type GuestMap = vm_memory::GuestMemoryMmap;

/// An interrupt line.
#[derive(Debug)]
pub struct Line {
    fd: EventFd,
    status: Arc<AtomicU32>,
}

impl Line {
    /// A line that is low.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn new() -> Result<Self, Error> {
        Ok(Self { fd: eventfd()?, status: Arc::default() })
    }

    /// What KVM listens on.
    pub fn fd(&self) -> &EventFd {
        &self.fd
    }

    /// The device's interrupt status register.
    pub fn status(&self) -> &Arc<AtomicU32> {
        &self.status
    }

    /// Interrupts the guest because of `reason` (a bit of the status register).
    pub fn raise(&self, reason: u32) {
        self.status.fetch_or(reason, Ordering::SeqCst);
        self.pulse();
    }

    /// Interrupts the guest. The counter of an eventfd is full only when nobody has listened for 2^64 times.
    pub fn pulse(&self) {
        let _ = self.fd.write(1);
    }
}

/// An eventfd that never blocks.
///
/// # Errors
/// No descriptors left.
pub fn eventfd() -> Result<EventFd, Error> {
    EventFd::new(EFD_NONBLOCK).map_err(Error::io("make an eventfd"))
}

/// The interrupt status registers of all virtio devices, for vCPUs to read and acknowledge without the lock.
#[derive(Debug, Clone, Default)]
pub struct Lines(Arc<[Arc<AtomicU32>]>);

impl Lines {
    /// Answers a read of a status register; None when the address is another register.
    pub fn read(&self, address: u64) -> Option<u32> {
        let (device, register) = place(address)?;
        (register == registers::INTERRUPT_STATUS)
            .then(|| self.0.get(device).map(|status| status.load(Ordering::SeqCst)))?
    }

    /// Takes a write to an acknowledge register; false when the address is another register.
    pub fn acknowledge(&self, address: u64, value: u32) -> bool {
        match place(address) {
            Some((device, registers::INTERRUPT_ACK)) => match self.0.get(device) {
                Some(status) => {
                    status.fetch_and(!value, Ordering::SeqCst);
                    true
                }
                None => false,
            },
            _ => false,
        }
    }
}

/// Device and register at an address.
fn place(address: u64) -> Option<(usize, u64)> {
    let offset = address.checked_sub(layout::DEVICES)?;
    Some((usize::try_from(offset / layout::DEVICE_SIZE).ok()?, offset % layout::DEVICE_SIZE))
}

/// All devices of a machine.
pub struct Devices {
    /// Virtio devices in the order of their addresses.
    pub virtio: Vec<Transport>,
    /// The console.
    pub serial: SerialPort,
    /// Set when the guest has switched itself off.
    pub ending: Option<Ending>,
}

impl Devices {
    /// Their status registers.
    pub fn lines(&self) -> Lines {
        Lines(self.virtio.iter().map(|device| device.line().status().clone()).collect())
    }

    /// A guest reads a register. What is not there reads as all ones, as on real machines.
    pub fn read(&mut self, address: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let Some((device, register)) = place(address)
            && let Some(device) = self.virtio.get_mut(device)
        {
            device.read(register, data);
        }
    }

    /// A guest writes a register. What is not there takes it and does nothing.
    pub fn write(&mut self, address: u64, data: &[u8], memory: &GuestMap) {
        if let Some((device, register)) = place(address)
            && let Some(device) = self.virtio.get_mut(device)
        {
            device.write(register, data, memory);
        }
    }

    /// A guest reads a port.
    pub fn port_read(&mut self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        if let (Some(offset), [byte]) = (serial::offset(port), data) {
            *byte = self.serial.read(offset);
        }
    }

    /// A guest writes a port.
    pub fn port_write(&mut self, port: u16, data: &[u8]) {
        let &[byte] = data else { return };
        if let Some(offset) = serial::offset(port) {
            self.serial.write(offset, byte);
        } else if let Some(ending) = power::write(port, byte) {
            self.ending = Some(ending);
        }
    }
}

/// Whether an error of a non-blocking call means "not now".
pub(crate) fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
