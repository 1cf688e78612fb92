//! The block device on a chain of layers (crate `disk`).
//!
//! Requests are done one after the other in the server's thread, straight between guest memory and the layers' files:
//! what a disk does is mostly in the host's page cache, and so nothing is ever in flight when the machine is saved or
//! forked. Contract: a request is answered with an error, never dropped.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Instant;

use disk::{Disk, Source};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use virtio_queue::{Queue, QueueOwnedT};

use super::GuestMap;
use super::chain::{self, Chain, Pieces};
use super::limiter::Limiter;
use crate::sys;

/// Virtio device number.
pub const ID: u32 = 2;
const SECTOR: u64 = 512;
const HEADER: usize = 16;
const NAME_BYTES: usize = 20;
/// Data of one request at most: drivers ask for 126 segments of a page or a few. A guest that names all its memory many
/// times over gets an error instead of the thread for minutes.
const DATA_LIMIT: usize = 64 << 20;
/// Largest part of a discard or write-zeroes request, in sectors; and segments of one.
const ZERO_SECTORS: u32 = 1 << 21;
const ZERO_SEGMENTS: u32 = 64;
const SEGMENT: usize = 16;

const READ_ONLY: u64 = 1 << 5;
const BLOCK_SIZE: u64 = 1 << 6;
const FLUSH: u64 = 1 << 9;
const SEGMENTS: u64 = 1 << 2;
const DISCARD: u64 = 1 << 13;
const WRITE_ZEROES: u64 = 1 << 14;

/// A block device.
pub struct Block {
    disk: Disk,
    durable: bool,
    limiter: Limiter,
    /// When a request that was held back may be tried again.
    pub retry_at: Option<Instant>,
    /// Bytes read so far.
    pub read: u64,
    /// Bytes written so far.
    pub written: u64,
}

impl Block {
    /// A device on `disk`; with `durable` a flush reaches the host's disk.
    pub fn new(disk: Disk, durable: bool, limiter: Limiter) -> Self {
        Self { disk, durable, limiter, retry_at: None, read: 0, written: 0 }
    }

    /// What was written becomes a frozen layer, and `delta` what is written from now on.
    ///
    /// # Errors
    /// The disk's; it is then as it was.
    pub fn freeze(&mut self, delta: File) -> Result<(), disk::DiskError> {
        self.disk.freeze(delta)
    }

    /// Writes to `delta` from now on instead of to the one it has, in which there is nothing yet.
    ///
    /// # Errors
    /// The disk's; it is then as it was.
    pub fn replace_top(&mut self, delta: File) -> Result<(), disk::DiskError> {
        self.disk.replace_top(delta)
    }

    /// The disk.
    pub fn disk(&self) -> &Disk {
        &self.disk
    }

    /// What it offers beside what every device offers.
    pub fn features(&self) -> u64 {
        let writable = if self.disk.writable() { FLUSH | DISCARD | WRITE_ZEROES } else { READ_ONLY };
        SEGMENTS | BLOCK_SIZE | writable
    }

    /// Configuration space (virtio 1.2, 5.2.4).
    pub fn config(&self) -> Vec<u8> {
        let mut config = vec![0u8; 60];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(self.disk.bytes() / SECTOR).to_le_bytes());
        put(12, &126u32.to_le_bytes()); // data segments of a request
        put(20, &512u32.to_le_bytes()); // block size
        put(36, &ZERO_SECTORS.to_le_bytes());
        put(40, &ZERO_SEGMENTS.to_le_bytes());
        put(44, &8u32.to_le_bytes()); // alignment of discards, in sectors
        put(48, &ZERO_SECTORS.to_le_bytes());
        put(52, &ZERO_SEGMENTS.to_le_bytes());
        put(56, &[1]); // zeroes may give back space
        config
    }

    /// Works through the queue until it is empty or the rate is used up.
    pub fn process(&mut self, queue: &mut Queue, memory: &GuestMap, refused: &mut u64) -> bool {
        self.retry_at = None;
        let mut used = false;
        while let Some(next) = chain::pop(queue, memory) {
            let (head, written) = match next {
                Ok(chain) => {
                    let bytes = (chain.readable.bytes() + chain.writable.bytes()) as u64;
                    if let Err(later) = self.limiter.allow(bytes, Instant::now()) {
                        queue.go_to_previous_position();
                        self.retry_at = Some(later);
                        break;
                    }
                    let head = chain.head;
                    let written = self.request(chain);
                    if written.is_none() {
                        *refused += 1;
                    }
                    (head, written.unwrap_or(0))
                }
                Err(bad) => {
                    *refused += 1;
                    (bad.head, 0)
                }
            };
            chain::give_back(queue, memory, head, written);
            used = true;
        }
        used
    }

    /// Does one request; how many bytes the guest finds in its buffers. None when there is no place for a status.
    fn request(&mut self, mut chain: Chain) -> Option<usize> {
        let data_bytes = chain.writable.bytes().checked_sub(1)?;
        let data = chain.writable.take(data_bytes)?;
        let status = chain.writable;
        let outcome = match chain.readable.take(HEADER) {
            Some(header_pieces) => {
                let mut header = [0u8; HEADER];
                header_pieces.load(&mut header);
                let [a, b, c, d, _, _, _, _, sector @ ..] = header;
                self.run(
                    u32::from_le_bytes([a, b, c, d]),
                    u64::from_le_bytes(sector),
                    &mut chain.readable,
                    data,
                )
            }
            None => Err(Failure::Io),
        };
        let (byte, written) = match outcome {
            Ok(written) => (VIRTIO_BLK_S_OK, written),
            Err(Failure::Unsupported) => (VIRTIO_BLK_S_UNSUPP, 0),
            Err(Failure::Io) => (VIRTIO_BLK_S_IOERR, 0),
        };
        status.store(&[byte as u8]);
        Some(written + 1)
    }

    fn run(
        &mut self,
        kind: u32,
        sector: u64,
        readable: &mut Pieces,
        writable: Pieces,
    ) -> Result<usize, Failure> {
        let offset = sector.checked_mul(SECTOR).ok_or(Failure::Io)?;
        if readable.bytes().max(writable.bytes()) > DATA_LIMIT {
            return Err(Failure::Io);
        }
        match kind {
            VIRTIO_BLK_T_IN => {
                let bytes = writable.bytes();
                read(&self.disk, offset, writable)?;
                self.read += bytes as u64;
                Ok(bytes)
            }
            VIRTIO_BLK_T_OUT => {
                self.writable()?;
                let bytes = readable.bytes() as u64;
                if !bytes.is_multiple_of(SECTOR) {
                    return Err(Failure::Io);
                }
                let write = |file: &File, at| write_all(file, readable, at);
                self.disk.write_at(offset, bytes, write).map_err(|_| Failure::Io)?;
                self.written += bytes;
                Ok(0)
            }
            VIRTIO_BLK_T_FLUSH => {
                if self.durable {
                    self.disk.flush().map_err(|_| Failure::Io)?;
                }
                Ok(0)
            }
            VIRTIO_BLK_T_GET_ID => {
                let name = [b"pando".as_slice(), &[0; NAME_BYTES]].concat();
                Ok(writable.store(&name[..NAME_BYTES]))
            }
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
                self.writable()?;
                self.zero(readable)?;
                Ok(0)
            }
            _ => Err(Failure::Unsupported),
        }
    }

    fn writable(&self) -> Result<(), Failure> {
        if self.disk.writable() { Ok(()) } else { Err(Failure::Io) }
    }

    fn zero(&mut self, segments: &mut Pieces) -> Result<(), Failure> {
        let count = segments.bytes() / SEGMENT;
        if !segments.bytes().is_multiple_of(SEGMENT) || count == 0 || count > ZERO_SEGMENTS as usize {
            return Err(Failure::Io);
        }
        for _ in 0..count {
            let mut segment = [0u8; SEGMENT];
            segments.take(SEGMENT).ok_or(Failure::Io)?.load(&mut segment);
            let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, ..] = segment;
            let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
            let sectors = u32::from_le_bytes([n0, n1, n2, n3]);
            if sectors > ZERO_SECTORS {
                return Err(Failure::Io);
            }
            let offset = sector.checked_mul(SECTOR).ok_or(Failure::Io)?;
            self.disk.zero(offset, u64::from(sectors) * SECTOR).map_err(|_| Failure::Io)?;
        }
        Ok(())
    }
}

enum Failure {
    Io,
    Unsupported,
}

fn read(disk: &Disk, offset: u64, mut into: Pieces) -> Result<(), Failure> {
    for extent in disk.extents(offset, into.bytes() as u64).map_err(|_| Failure::Io)? {
        let bytes = usize::try_from(extent.len).map_err(|_| Failure::Io)?;
        let mut pieces = into.take(bytes).ok_or(Failure::Io)?;
        match extent.source {
            Source::Zero => pieces.clear(),
            Source::File { file, mut offset } => {
                while pieces.bytes() > 0 {
                    // SAFETY: the pieces are guest memory.
                    match unsafe { sys::read_pieces(file.as_raw_fd(), pieces.as_slice(), offset) } {
                        // Beyond the end of a sparse file is nothing but zeros.
                        Ok(0) => {
                            pieces.clear();
                            break;
                        }
                        Ok(count) => {
                            pieces.take(count).ok_or(Failure::Io)?;
                            offset += count as u64;
                        }
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(_) => return Err(Failure::Io),
                    }
                }
            }
        }
    }
    Ok(())
}

fn write_all(file: &File, pieces: &mut Pieces, mut offset: u64) -> io::Result<()> {
    while pieces.bytes() > 0 {
        // SAFETY: the pieces are guest memory.
        match unsafe { sys::write_pieces(file.as_raw_fd(), pieces.as_slice(), offset) } {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                pieces.take(count).ok_or(io::ErrorKind::InvalidData)?;
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
