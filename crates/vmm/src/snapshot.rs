//! The state file: everything of a machine but its memory and disks.
//!
//! ```text
//! 0   "PANDOVM\0"                      8 bytes
//! 8   version (proto::vmm::VERSION)    u32, little-endian
//! 12  length of the body               u32
//! 16  CRC-32 of the body               u32
//! 20  body: State in postcard's format
//! ```
//!
//! A file is read whole before anything is believed: length and checksum first, then the body. It comes from a machine of
//! our own and from the host's disk, but a damaged one must not take the process down.

use std::fs::File;
use std::io::{Read, Write};

use proto::vmm::VERSION;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::devices::serial::SerialRegisters;
use crate::devices::transport::DeviceState;
use crate::kvm::ChipState;
use crate::kvm::registers::VcpuState;
use crate::memory::Extent;

const MAGIC: [u8; 8] = *b"PANDOVM\0";
const HEADER: usize = 20;
/// A state is some tens of KB for each vCPU, and 16 bytes for each run of written pages.
const LIMIT: u64 = 64 << 20;

/// A machine without memory and disks.
#[derive(Serialize, Deserialize)]
pub struct State {
    /// Size of guest memory.
    pub memory_bytes: u64,
    /// What each memory file of the chain holds.
    pub layers: Vec<Vec<Extent>>,
    /// Processors, in order.
    pub vcpus: Vec<VcpuState>,
    /// Interrupt controllers and clock.
    pub chips: ChipState,
    /// Virtio devices, in the order of their addresses.
    pub devices: Vec<DeviceState>,
    /// The serial port.
    pub serial: SerialRegisters,
}

impl State {
    /// The file's bytes.
    ///
    /// # Errors
    /// When it is larger than a file may be.
    pub fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        let body = postcard::to_stdvec(self).map_err(|error| Error::BadSnapshot(error.to_string()))?;
        if body.len() as u64 > LIMIT {
            return Err(Error::BadSnapshot(format!("a state of {} bytes is too large", body.len())));
        }
        Ok(Self::frame(&body))
    }

    /// Puts the header before a body.
    pub fn frame(body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.extend_from_slice(&MAGIC);
        for word in [VERSION, body.len() as u32, crc32fast::hash(body)] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(body);
        bytes
    }

    /// Reads a file's bytes.
    ///
    /// # Errors
    /// When they are not what [`State::to_bytes`] of this version wrote.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let bad = |why: &str| Error::BadSnapshot(why.to_owned());
        let (header, body) = bytes.split_at_checked(HEADER).ok_or_else(|| bad("it is too short"))?;
        if header[..8] != MAGIC {
            return Err(bad("it is no machine's state"));
        }
        let word = |at: usize| {
            header.get(at..at + 4).and_then(|word| word.try_into().ok()).map_or(0, u32::from_le_bytes)
        };
        if word(8) != VERSION {
            return Err(Error::BadSnapshot(format!(
                "it is of version {}, this program reads version {VERSION}",
                word(8)
            )));
        }
        if word(12) as usize != body.len() {
            return Err(bad("its length is not what it says"));
        }
        if word(16) != crc32fast::hash(body) {
            return Err(bad("its checksum is wrong"));
        }
        postcard::from_bytes(body).map_err(|error| Error::BadSnapshot(error.to_string()))
    }

    /// Writes it to an empty file.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, file: &mut File) -> Result<(), Error> {
        file.write_all(&self.to_bytes()?).map_err(Error::io("write the state file"))
    }

    /// Reads a file.
    ///
    /// # Errors
    /// As [`State::from_bytes`], and when the file cannot be read.
    pub fn read(file: &mut File) -> Result<Self, Error> {
        use std::io::Seek as _;
        file.rewind().map_err(Error::io("read the state file"))?;
        let mut bytes = Vec::new();
        file.take(LIMIT + HEADER as u64 + 1)
            .read_to_end(&mut bytes)
            .map_err(Error::io("read the state file"))?;
        Self::from_bytes(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_noticed() {
        let file = |version: u32, body: &[u8]| {
            let mut bytes = State::frame(body);
            bytes[8..12].copy_from_slice(&version.to_le_bytes());
            bytes
        };
        for bytes in [
            Vec::new(),
            b"PANDOVM\0".to_vec(),
            file(VERSION + 1, b"x"),
            file(VERSION, b""),
            file(VERSION, &[0xff; 100]),
            [file(VERSION, b"abc"), b"d".to_vec()].concat(),
            {
                let mut bytes = file(VERSION, b"abc");
                bytes[21] ^= 1;
                bytes
            },
        ] {
            assert!(matches!(State::from_bytes(&bytes), Err(Error::BadSnapshot(_))), "{bytes:?}");
        }
    }
}
