// A link that sends anything, in any pieces, to a guest with plenty of buffers.
#![no_main]

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::time::Instant;

use libfuzzer_sys::fuzz_target;
use vm_memory::{Bytes, GuestAddress};
use vmm::devices::card::Card;
use vmm::devices::limiter::Limiter;
use vmm::devices::transport::{Backend, Transport};
use vmm::memory::Memory;

fn memory() -> &'static Memory {
    static MEMORY: OnceLock<Memory> = OnceLock::new();
    MEMORY.get_or_init(|| Memory::zeroed(1 << 20, false).unwrap())
}

fuzz_target!(|data: &[u8]| {
    let Some((first, mut rest)) = data.split_first() else { return };
    let memory = memory();
    memory.map.write_slice(&[0u8; 0x1000], GuestAddress(0x1000)).unwrap();
    let (ours, mut other) = UnixStream::pair().unwrap();
    other.set_nonblocking(true).unwrap();
    let limiter = Limiter::new(proto::vmm::Rate::default(), Instant::now());
    let mut device =
        Transport::new(Backend::Card(Card::new(ours.into(), [2; 6], 1500, first & 1 == 1, limiter))).unwrap();
    let merged = u32::from(first & 2) << 14;
    for (register, value) in [
        (0x70u64, 1u32), (0x70, 3), (0x20, merged), (0x24, 1), (0x20, 1), (0x70, 11),
        (0x30, 0), (0x38, 64), (0x80, 0x1000), (0x90, 0x1800), (0xa0, 0x1c00), (0x44, 1), (0x70, 15),
    ] {
        device.write(register, &value.to_le_bytes(), &memory.map);
    }
    for index in 0..64u64 {
        let size = if first & 4 == 0 { 2048u32 } else { 80_000 };
        let descriptor = [&(0x10000 + index * 2048).to_le_bytes()[..], &size.to_le_bytes(), &[2, 0, 0, 0]].concat();
        memory.map.write_slice(&descriptor, GuestAddress(0x1000 + index * 16)).unwrap();
        memory.map.write_obj(index as u16, GuestAddress(0x1804 + index * 2)).unwrap();
    }
    memory.map.write_obj(64u16, GuestAddress(0x1802)).unwrap();
    while let Some((count, tail)) = rest.split_first() {
        let count = usize::from(*count).min(tail.len());
        let _ = other.write(&tail[..count]);
        device.process(0, &memory.map);
        rest = &tail[count..];
    }
});
