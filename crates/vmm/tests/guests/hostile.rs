//! Writes garbage to every register of every device, gives queues that lie everywhere, and then sees that the machine
//! still works.
#![no_std]
#![no_main]
#![allow(dead_code, unused_imports, reason = "each guest uses a part of rt")]
#[path = "rt.rs"]
#[macro_use]
mod rt;
use rt::*;

struct Random(u32);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0
    }

    /// Often something that almost makes sense.
    fn word(&mut self) -> u32 {
        match self.next() % 8 {
            0 => 0,
            1 => u32::MAX,
            2 => self.next() % 16,
            3 => 0x50000 + self.next() % 0x10000,
            4 => 1 << (self.next() % 32),
            5 => 0xd000_0000 + self.next() % 0x8000,
            _ => self.next(),
        }
    }
}

fn main() {
    let mut random = Random(argument("seed").unwrap_or(1) | 1);
    for round in 0..argument("rounds").unwrap_or(20) {
        for device in 0..8 {
            let base = 0xd000_0000 + device * 0x1000;
            for _ in 0..20 {
                let register = random.next() % 0x200;
                match random.next() % 5 {
                    0 => write8(base + register, random.next() as u8),
                    1 => write16(base + (register & !1), random.next() as u16),
                    2 => drop(read32(base + (register & !3))),
                    _ => write32(base + (register & !3), random.word()),
                }
            }
            queues(&mut random, base);
        }
        if round % 4 == 0 {
            for _ in 0..20 {
                // Not the switch itself.
                let port = random.next() as u16;
                if !(0x600..0x603).contains(&port) && !(0x3f8..0x400).contains(&port) {
                    out8(port, random.next() as u8);
                    in8(port);
                }
            }
        }
    }
    let disk = Virtio::find(0, 2).expect("no disk");
    disk.begin(0);
    let mut ring = disk.queue(0, 0x50000);
    disk.go();
    say!("disk works: {}", block_request(&mut ring, 0, 0, 0x40000, 512));
    loop {
        in8(0x80);
    }
}

/// Negotiates properly, so that the device believes the rest, and fills rings with lies.
fn queues(random: &mut Random, base: u32) {
    if read32(base) != 0x7472_6976 {
        return;
    }
    let device = Virtio { base };
    device.begin(match random.next() % 3 {
        0 => 0,
        1 => 1 << 28 | 1 << 29,
        _ => 1 << 28,
    } & read32(base + 0x10));
    let number = random.next() % 3;
    let mut ring = device.queue(number, 0x50000);
    if random.next() % 4 == 0 {
        write32(base + 0xa0, random.word());
    }
    write32(base + 0x70, 15);
    for index in 0..QUEUE_SIZE {
        let flags = (random.next() % 8) as u16;
        let next = (random.next() % 10) as u16;
        ring.describe(index, random.word(), random.word(), flags, next);
    }
    for _ in 0..random.next() % 12 {
        ring.offer((random.next() % 10) as u16);
    }
    if random.next() % 8 == 0 {
        write16(ring.at + 0x402, random.next() as u16);
    }
    ring.ring();
    // Time for the device to look at it.
    for _ in 0..200 {
        read32(base + 0x70);
    }
}
