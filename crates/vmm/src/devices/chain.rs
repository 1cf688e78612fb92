//! Descriptor chains as lists of memory pieces.
//!
//! Everything in a chain is the guest's word: addresses, lengths, order, loops. virtio-queue bounds the walk (no more
//! descriptors than the queue has entries, one level of indirection); here each piece is checked to lie in guest memory,
//! and once. What comes out is host addresses of guest memory: the guest may change the *content* at any moment, so
//! devices copy what they decide on.
#![allow(unsafe_code)]

use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::GuestMap;
use crate::sys::{self, Piece};

/// Pieces of guest memory in order.
#[derive(Debug, Default)]
pub struct Pieces {
    list: Vec<Piece>,
    bytes: usize,
}

// The addresses are of guest memory, which is valid in every thread as long as the process lives.
// SAFETY: as above.
unsafe impl Send for Pieces {}

impl Pieces {
    /// All bytes together.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// As system calls want them.
    pub fn as_slice(&self) -> &[Piece] {
        &self.list
    }

    /// Adds `bytes` of guest memory at `address`; false when not all of it is there.
    pub fn add(&mut self, memory: &GuestMap, address: GuestAddress, bytes: u32) -> bool {
        let mut at = address;
        let mut rest = bytes as usize;
        while rest > 0 {
            let Some(region) = memory.find_region(at) else { return false };
            let offset = at.0 - region.start_addr().0;
            let here = usize::try_from(region.len() - offset).unwrap_or(usize::MAX).min(rest);
            let Some(host) = region.get_host_address(vm_memory::MemoryRegionAddress(offset)).ok() else {
                return false;
            };
            self.list.push(Piece { iov_base: host.cast(), iov_len: here });
            self.bytes += here;
            rest -= here;
            match at.0.checked_add(here as u64) {
                Some(next) => at = GuestAddress(next),
                None => return rest == 0,
            }
        }
        true
    }

    /// Splits off the first `bytes`; None when there are fewer.
    pub fn take(&mut self, bytes: usize) -> Option<Pieces> {
        if bytes > self.bytes {
            return None;
        }
        let mut taken = Pieces::default();
        let mut whole = 0;
        for piece in &mut self.list {
            let missing = bytes - taken.bytes;
            if missing == 0 {
                break;
            }
            if piece.iov_len <= missing {
                taken.bytes += piece.iov_len;
                taken.list.push(*piece);
                whole += 1;
            } else {
                taken.list.push(Piece { iov_base: piece.iov_base, iov_len: missing });
                taken.bytes += missing;
                *piece = Piece {
                    iov_base: piece.iov_base.wrapping_byte_add(missing),
                    iov_len: piece.iov_len - missing,
                };
            }
        }
        self.list.drain(..whole);
        self.bytes -= bytes;
        Some(taken)
    }

    /// Copies out the first bytes, as many as fit; returns how many.
    pub fn load(&self, into: &mut [u8]) -> usize {
        let mut done = 0;
        for piece in &self.list {
            let count = piece.iov_len.min(into.len() - done);
            // SAFETY: the piece is guest memory.
            unsafe { sys::load(piece.iov_base as usize, &mut into[done..done + count]) };
            done += count;
        }
        done
    }

    /// Copies bytes in, as many as fit; returns how many.
    pub fn store(&self, bytes: &[u8]) -> usize {
        let mut done = 0;
        for piece in &self.list {
            let count = piece.iov_len.min(bytes.len() - done);
            // SAFETY: the piece is guest memory.
            unsafe { sys::store(piece.iov_base as usize, &bytes[done..done + count]) };
            done += count;
        }
        done
    }

    /// Fills all with zeros.
    pub fn clear(&self) {
        for piece in &self.list {
            // SAFETY: the piece is guest memory.
            unsafe { sys::clear(piece.iov_base as usize, piece.iov_len) };
        }
    }
}

/// A request of the guest.
#[derive(Debug)]
pub struct Chain {
    /// What it is called when it is returned.
    pub head: u16,
    /// What the guest has written for the device.
    pub readable: Pieces,
    /// What the device may write.
    pub writable: Pieces,
}

/// A chain that breaks the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// What it is called when it is returned.
    pub head: u16,
}

/// Takes the next request.
pub fn pop(queue: &mut Queue, memory: &GuestMap) -> Option<Result<Chain, Refused>> {
    let chain = queue.pop_descriptor_chain(memory)?;
    let head = chain.head_index();
    let (mut readable, mut writable) = (Pieces::default(), Pieces::default());
    for descriptor in chain {
        let kind = if descriptor.is_write_only() {
            &mut writable
        } else if writable.bytes == 0 {
            &mut readable
        } else {
            // All that is read comes before all that is written (virtio 1.2, 2.7.4.2).
            return Some(Err(Refused { head }));
        };
        if !kind.add(memory, descriptor.addr(), descriptor.len()) {
            return Some(Err(Refused { head }));
        }
    }
    Some(Ok(Chain { head, readable, writable }))
}

/// Returns a request of which `bytes` were written. A used ring that cannot be written is the guest's own loss: it was
/// checked when the device was switched on.
pub fn give_back(queue: &mut Queue, memory: &GuestMap, head: u16, bytes: usize) {
    let _ = queue.add_used(memory, head, u32::try_from(bytes).unwrap_or(u32::MAX));
}
