//! The serial port: output goes to a ring that holds the last [`RING`] bytes until somebody takes them.

use std::collections::VecDeque;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};
use vm_superio::Trigger;
use vm_superio::serial::{NoEvents, Serial, SerialState};
use vmm_sys_util::eventfd::EventFd;

use super::{Line, eventfd};
use crate::Error;

/// First port.
pub const PORT: u16 = 0x3f8;
/// Ports.
pub const PORTS: u16 = 8;
/// Interrupt line.
pub const LINE: u32 = 4;
/// Output that is kept. A guest that says more loses the oldest.
pub const RING: usize = 64 * 1024;

/// The register of a port, if it is one of these.
pub fn offset(port: u16) -> Option<u8> {
    port.checked_sub(PORT).filter(|offset| *offset < PORTS).map(|offset| offset as u8)
}

/// What was not taken yet.
#[derive(Debug)]
pub struct Ring {
    bytes: VecDeque<u8>,
    dropped: u64,
    wake: EventFd,
}

impl Write for Ring {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.is_empty() {
            // Somebody who was not told would be told by the next byte.
            let _ = self.wake.write(1);
        }
        for byte in bytes {
            if self.bytes.len() == RING {
                self.bytes.pop_front();
                self.dropped += 1;
            }
            self.bytes.push_back(*byte);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Interrupt(EventFd);

impl Trigger for Interrupt {
    type E = io::Error;
    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// The port's registers in a snapshot. What was written to it and not taken is not the guest's any more.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct SerialRegisters {
    registers: [u8; 9],
    received: Vec<u8>,
}

/// The serial port.
pub struct SerialPort {
    port: Serial<Interrupt, NoEvents, Ring>,
    line: Line,
    wake: EventFd,
}

impl SerialPort {
    /// A port as after power-on, or as it was.
    ///
    /// # Errors
    /// No descriptors left, or a state that no port can have.
    pub fn new(state: Option<&SerialRegisters>) -> Result<Self, Error> {
        let (line, wake) = (Line::new()?, eventfd()?);
        let copy = |fd: &EventFd| fd.try_clone().map_err(Error::io("copy an eventfd"));
        let ring = Ring { bytes: VecDeque::new(), dropped: 0, wake: copy(&wake)? };
        let interrupt = Interrupt(copy(line.fd())?);
        let port = match state {
            None => Serial::new(interrupt, ring),
            Some(state) => {
                let [low, high, enable, identification, control, status, modem, modem_status, scratch] =
                    state.registers;
                let state = SerialState {
                    baud_divisor_low: low,
                    baud_divisor_high: high,
                    interrupt_enable: enable,
                    interrupt_identification: identification,
                    line_control: control,
                    line_status: status,
                    modem_control: modem,
                    modem_status,
                    scratch,
                    in_buffer: state.received.clone(),
                };
                Serial::from_state(&state, interrupt, NoEvents, ring)
                    .map_err(|_| Error::BadSnapshot("a serial port holds more than it can".to_owned()))?
            }
        };
        Ok(Self { port, line, wake })
    }

    /// Its registers.
    pub fn save(&self) -> SerialRegisters {
        let state = self.port.state();
        SerialRegisters {
            registers: [
                state.baud_divisor_low,
                state.baud_divisor_high,
                state.interrupt_enable,
                state.interrupt_identification,
                state.line_control,
                state.line_status,
                state.modem_control,
                state.modem_status,
                state.scratch,
            ],
            received: state.in_buffer,
        }
    }

    /// Its interrupt line.
    pub fn line(&self) -> &Line {
        &self.line
    }

    /// Signalled when there is output after there was none.
    pub fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// The guest reads a register.
    pub fn read(&mut self, offset: u8) -> u8 {
        self.port.read(offset)
    }

    /// The guest writes a register. An interrupt that cannot be signalled is lost, as on a real line.
    pub fn write(&mut self, offset: u8, value: u8) {
        let _ = self.port.write(offset, value);
    }

    /// Output that waits, oldest first.
    pub fn output(&self) -> (&[u8], &[u8]) {
        self.port.writer().bytes.as_slices()
    }

    /// Forgets the oldest output: it was taken.
    pub fn taken(&mut self, bytes: usize) {
        let ring = &mut self.port.writer_mut().bytes;
        ring.drain(..bytes.min(ring.len()));
    }

    /// Bytes that nobody took in time.
    pub fn dropped(&self) -> u64 {
        self.port.writer().dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_keeps_the_last_and_counts_the_rest() {
        let mut port = SerialPort::new(None).unwrap();
        for number in 0..RING + 10 {
            port.write(0, (number % 251) as u8);
        }
        let (first, _) = port.output();
        assert_eq!(first[0], 10);
        assert_eq!(port.dropped(), 10);
        port.taken(usize::MAX);
        assert!(port.output().0.is_empty());
    }
}
