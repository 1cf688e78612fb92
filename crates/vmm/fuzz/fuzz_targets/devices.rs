// A guest that does anything with one device: registers, rings, memory. The first byte chooses the device.
#![no_main]

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::time::Instant;

use disk::{Base, Disk};
use libfuzzer_sys::fuzz_target;
use vm_memory::{Bytes, GuestAddress};
use vmm::devices::balloon::Balloon;
use vmm::devices::block::Block;
use vmm::devices::card::Card;
use vmm::devices::limiter::Limiter;
use vmm::devices::transport::{Backend, Transport};
use vmm::memory::Memory;

const BYTES: usize = 1 << 20;
const QUEUE: u64 = 0x1000;

struct Fixed {
    memory: Memory,
    image: File,
    delta: File,
}

fn fixed() -> &'static Fixed {
    static FIXED: OnceLock<Fixed> = OnceLock::new();
    FIXED.get_or_init(|| {
        let image = tempfile::tempfile().unwrap();
        image.set_len(1 << 16).unwrap();
        Fixed { memory: Memory::zeroed(BYTES as u64, false).unwrap(), image, delta: tempfile::tempfile().unwrap() }
    })
}

fn device(kind: u8, fixed: &Fixed) -> (Transport, Option<UnixStream>) {
    let limiter = Limiter::new(proto::vmm::Rate::default(), Instant::now());
    let mut other = None;
    let backend = match kind % 4 {
        0 => {
            fixed.delta.set_len(0).unwrap();
            disk::create_delta(&fixed.delta, 1 << 16).unwrap();
            let base = Base::ReadOnly(fixed.image.try_clone().unwrap());
            let disk = Disk::open(base, Vec::new(), Some(fixed.delta.try_clone().unwrap())).unwrap();
            Backend::Block(Block::new(disk, false, limiter))
        }
        1 => {
            let (ours, theirs) = UnixStream::pair().unwrap();
            theirs.set_nonblocking(true).unwrap();
            other = Some(theirs);
            Backend::Card(Card::new(ours.into(), [2; 6], 1500, kind & 4 != 0, limiter))
        }
        2 => Backend::Random,
        _ => Backend::Balloon(Balloon::default()),
    };
    (Transport::new(backend).unwrap(), other)
}

/// What a well-behaved driver does first, so that the rest is reached.
fn negotiate(device: &mut Transport, memory: &Memory, features: u32) {
    let mut write = |register: u64, value: u32| device.write(register, &value.to_le_bytes(), &memory.map);
    for (register, value) in [(0x70, 1), (0x70, 3), (0x24, 0), (0x20, features), (0x24, 1), (0x20, 1), (0x70, 11)] {
        write(register, value);
    }
    for queue in 0..3u32 {
        let at = QUEUE as u32 + queue * 0x1000;
        for (register, value) in
            [(0x30, queue), (0x38, 8), (0x80, at), (0x90, at + 0x400), (0xa0, at + 0x800), (0x44, 1)]
        {
            write(register, value);
        }
    }
    write(0x70, 15);
}

fuzz_target!(|data: &[u8]| {
    let Some((&[kind, features], mut rest)) = data.split_first_chunk::<2>() else { return };
    let fixed = fixed();
    let memory = &fixed.memory;
    memory.map.write_slice(&vec![0u8; 0x8000], GuestAddress(0)).unwrap();
    let (mut device, other) = device(kind, fixed);
    // Event index, indirect descriptors, merged buffers, as far as they are offered.
    let mut offered = [0u8; 4];
    device.read(0x10, &mut offered);
    let mask = u32::from(features & 1) << 28 | u32::from(features >> 1 & 1) << 29 | u32::from(features >> 2 & 1) << 15;
    if features & 0x80 == 0 {
        negotiate(&mut device, memory, mask & u32::from_le_bytes(offered));
    }
    while let Some((&[step, a, b, c], tail)) = rest.split_first_chunk::<4>() {
        rest = tail;
        match step % 6 {
            // A register.
            0 => {
                let register = u64::from(a) << 2 & 0x1ff;
                device.write(register, &u32::from_le_bytes([b, c, b, 0]).to_le_bytes(), &memory.map);
            }
            1 => device.read(u64::from(u16::from_le_bytes([a, b]) & 0x1ff), &mut vec![0u8; usize::from(c % 9)]),
            // Memory, in the rings and around them.
            2 => {
                let count = usize::from(c).min(rest.len());
                let at = u64::from(u16::from_le_bytes([a, b]) & 0x7fff);
                memory.map.write_slice(&rest[..count], GuestAddress(at)).unwrap();
                rest = &rest[count..];
            }
            // One descriptor and its place in the ring, so that chains are common.
            3 => {
                let queue = QUEUE + u64::from(a % 3) * 0x1000;
                let index = u64::from(b % 8);
                let mut descriptor = [0u8; 16];
                let count = rest.len().min(16);
                descriptor[..count].copy_from_slice(&rest[..count]);
                rest = &rest[count..];
                // Mostly in memory.
                if c & 0x80 == 0 {
                    descriptor[3..8].fill(0);
                    descriptor[2] &= 0xf;
                    descriptor[10..12].fill(0);
                }
                memory.map.write_slice(&descriptor, GuestAddress(queue + index * 16)).unwrap();
                let next: u16 = memory.map.read_obj(GuestAddress(queue + 0x402)).unwrap();
                memory.map.write_obj(u16::from(c % 9), GuestAddress(queue + 0x404 + u64::from(next % 8) * 2)).unwrap();
                memory.map.write_obj(next.wrapping_add(1), GuestAddress(queue + 0x402)).unwrap();
            }
            4 => {
                if let Some(mut other) = other.as_ref() {
                    let count = usize::from(a).min(rest.len());
                    let _ = std::io::Write::write(&mut other, &rest[..count]);
                    rest = &rest[count..];
                }
            }
            _ => device.process(usize::from(a % 4), &memory.map),
        }
    }
    for queue in 0..3 {
        device.process(queue, &memory.map);
    }
    let saved = device.save();
    let _ = device.restore(saved, &memory.map);
});
