//! Uses every device and says what came of it.
#![no_std]
#![no_main]
#![allow(dead_code, unused_imports, reason = "each guest uses a part of rt")]
#[path = "rt.rs"]
#[macro_use]
mod rt;
use rt::*;

const DATA: u32 = 0x40000;

fn main() {
    disk();
    card();
    random();
    balloon();
}

fn disk() {
    let disk = Virtio::find(0, 2).expect("no disk");
    say!("disk {} sectors", read32(disk.base + 0x100));
    disk.begin(0);
    let mut ring = disk.queue(0, 0x50000);
    disk.go();
    let status = block_request(&mut ring, 0, 8, DATA, 512);
    say!("read {status} {:#x}", read32(DATA));
    write32(DATA, 0xfeed);
    say!("write {}", block_request(&mut ring, 1, 8, DATA, 512));
    write32(DATA, 0);
    let status = block_request(&mut ring, 0, 8, DATA, 1024);
    say!("again {status} {:#x}", read32(DATA));
    say!("beyond {}", block_request(&mut ring, 0, 0x7fff_ffff, DATA, 512));
    say!("unknown {}", block_request(&mut ring, 99, 0, DATA, 512));
    say!("flush {}", block_request(&mut ring, 4, 0, DATA, 0));
    // One segment of write-zeroes: sector, sectors, flags.
    write64(DATA, 8);
    write32(DATA + 8, 8);
    write32(DATA + 12, 0);
    say!("zeroes {}", block_request(&mut ring, 13, 0, DATA, 16));
    write32(DATA, 1);
    let status = block_request(&mut ring, 0, 8, DATA, 512);
    say!("zeroed {status} {:#x}", read32(DATA));
    say!("interrupt status {}", read32(disk.base + 0x60));
    write32(disk.base + 0x64, 1);
    say!("acknowledged {}", read32(disk.base + 0x60));
}

fn card() {
    let card = Virtio::find(1, 1).expect("no card");
    // Merged buffers.
    card.begin(1 << 15);
    let mut receive = card.queue(0, 0x60000);
    let mut send = card.queue(1, 0x61000);
    card.go();
    // Four buffers of 1000 bytes: a frame of 2500 needs three of them.
    for index in 0..4 {
        receive.describe(index, DATA + index * 0x1000, 1000, WRITE, 0);
        receive.offer(index as u16);
    }
    receive.ring();
    for offset in 0..12 {
        write8(0x48000 + offset, 0);
    }
    for offset in 0..2500 {
        write8(0x4800c + offset, offset as u8);
    }
    send.describe(0, 0x48000, 2512, 0, 0);
    send.offer(0);
    send.ring();
    send.wait();
    say!("sent");
    let (_, first) = receive.wait();
    let count = read16(DATA + 10);
    let (_, second) = receive.wait();
    let (_, third) = receive.wait();
    let right = (0..988).all(|offset| read8(DATA + 12 + offset) == offset as u8)
        && (0..512).all(|offset| read8(DATA + 0x2000 + offset) == (1988 + offset) as u8);
    say!("received {count} {first} {second} {third} {right}");
}

fn random() {
    let random = Virtio::find(2, 4).expect("no entropy");
    random.begin(0);
    let mut ring = random.queue(0, 0x50000);
    random.go();
    for offset in 0..64 {
        write8(DATA + offset, 0);
    }
    ring.describe(0, DATA, 64, WRITE, 0);
    ring.offer(0);
    ring.ring();
    let (_, count) = ring.wait();
    say!("random {count} {}", (0..64).any(|offset| read8(DATA + offset) != 0));
}

fn balloon() {
    let balloon = Virtio::find(3, 5).expect("no balloon");
    // Free page reporting.
    balloon.begin(1 << 5);
    let mut inflate = balloon.queue(0, 0x50000);
    let mut report = balloon.queue(2, 0x51000);
    balloon.go();
    write32(0x400000, 7);
    write32(0x600000, 8);
    write32(DATA, 0x400);
    inflate.describe(0, DATA, 4, 0, 0);
    inflate.offer(0);
    inflate.ring();
    inflate.wait();
    say!("inflated {}", read32(0x400000));
    report.describe(0, 0x600000, 0x10000, WRITE, 0);
    report.offer(0);
    report.ring();
    report.wait();
    say!("reported {}", read32(0x600000));
    while read32(balloon.base + 0x100) == 0 {}
    say!("asked for {}", read32(balloon.base + 0x100));
    write32(balloon.base + 0x104, 256);
}
