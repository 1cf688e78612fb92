//! The entropy device: fills what the guest gives it with the host's random bytes.

use virtio_queue::Queue;

use super::GuestMap;
use super::chain::{self, Pieces};

/// Virtio device number.
pub const ID: u32 = 4;
/// Bytes that one request gets at most.
const LIMIT: usize = 64 * 1024;

/// Works through the queue; how many chains were refused, and whether the guest is to be told.
pub fn process(queue: &mut Queue, memory: &GuestMap, refused: &mut u64) -> bool {
    let mut used = false;
    while let Some(next) = chain::pop(queue, memory) {
        used = true;
        match next {
            Ok(chain) => {
                let filled = fill(chain.writable);
                chain::give_back(queue, memory, chain.head, filled);
            }
            Err(bad) => {
                *refused += 1;
                chain::give_back(queue, memory, bad.head, 0);
            }
        }
    }
    used
}

fn fill(mut pieces: Pieces) -> usize {
    let Some(pieces) = pieces.take(pieces.bytes().min(LIMIT)) else { return 0 };
    let mut bytes = vec![0u8; pieces.bytes()];
    let mut done = 0;
    while done < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[done..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => done += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => break,
        }
    }
    pieces.store(&bytes[..done])
}
