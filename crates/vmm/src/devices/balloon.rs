//! The balloon: memory that the guest gives back, when asked (inflate) and by itself (free page reporting).
//!
//! A page that comes back is forgotten by the host: it reads as zeros, or, in a machine made from a snapshot, as the
//! snapshot's. Both are right: the guest has said that it does not need the content.
#![allow(unsafe_code)]

use serde::{Deserialize, Serialize};
use virtio_queue::Queue;
use vm_memory::GuestAddress;

use super::GuestMap;
use super::chain::{self, Pieces};
use crate::sys::{self, Advice, Piece};

/// Virtio device number.
pub const ID: u32 = 5;
/// Offered beside what every device offers: give back on out-of-memory, free page reporting (virtio 1.2, 5.5.3).
pub const FEATURES: u64 = 1 << 2 | 1 << 5;
/// Queues: inflate, deflate, reporting. Reporting comes third as neither statistics nor hints are offered.
pub const QUEUES: usize = 3;

const INFLATE: usize = 0;
const REPORTING: usize = 2;
const PAGE: usize = 4096;

/// The balloon's registers.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Balloon {
    /// Pages the guest is asked for.
    wanted: u32,
    /// Pages the guest says it has given.
    actual: u32,
    /// Bytes reported free so far.
    pub reported: u64,
}

impl Balloon {
    /// Asks for this much.
    pub fn set(&mut self, mib: u64) {
        self.wanted = u32::try_from(mib.saturating_mul(256)).unwrap_or(u32::MAX);
    }

    /// What the guest has given.
    pub fn actual_mib(&self) -> u64 {
        u64::from(self.actual) / 256
    }

    /// Configuration space.
    pub fn config(&self) -> Vec<u8> {
        [self.wanted.to_le_bytes(), self.actual.to_le_bytes()].concat()
    }

    /// The guest writes configuration space: only `actual` is its to write.
    pub fn write_config(&mut self, offset: usize, data: &[u8]) {
        if let (4, Ok(actual)) = (offset, data.try_into()) {
            self.actual = u32::from_le_bytes(actual);
        }
    }

    /// Works through a queue.
    pub fn process(
        &mut self,
        number: usize,
        queue: &mut Queue,
        memory: &GuestMap,
        refused: &mut u64,
    ) -> bool {
        let mut used = false;
        while let Some(next) = chain::pop(queue, memory) {
            used = true;
            let head = match next {
                Ok(chain) => {
                    match number {
                        INFLATE => inflate(&chain.readable, memory),
                        REPORTING => self.reported += forget(chain.writable.as_slice()),
                        _ => {}
                    }
                    chain.head
                }
                Err(bad) => {
                    *refused += 1;
                    bad.head
                }
            };
            chain::give_back(queue, memory, head, 0);
        }
        used
    }
}

/// A list of page numbers, 32 bits each. Those of no RAM are left out.
fn inflate(list: &Pieces, memory: &GuestMap) {
    let mut bytes = vec![0u8; list.bytes().min(256 * 1024)];
    list.load(&mut bytes);
    let mut run = Pieces::default();
    for number in bytes.as_chunks::<4>().0 {
        let address = u64::from(u32::from_le_bytes(*number)) * PAGE as u64;
        run.add(memory, GuestAddress(address), PAGE as u32);
    }
    forget(run.as_slice());
}

/// Gives whole pages back to the host; how many bytes.
fn forget(pieces: &[Piece]) -> u64 {
    let mut bytes = 0;
    let mut rest = pieces;
    while let Some((first, mut tail)) = rest.split_first() {
        let (start, mut end) = (first.iov_base as usize, first.iov_base as usize + first.iov_len);
        // Neighbours go in one call.
        while let Some((next, further)) = tail.split_first().filter(|(next, _)| next.iov_base as usize == end)
        {
            end += next.iov_len;
            tail = further;
        }
        rest = tail;
        let (start, end) = (start.next_multiple_of(PAGE), end / PAGE * PAGE);
        // SAFETY: pieces are guest memory. A refusal costs only memory.
        if start < end && unsafe { sys::advise(start, end - start, Advice::Forget) }.is_ok() {
            bytes += (end - start) as u64;
        }
    }
    bytes
}
