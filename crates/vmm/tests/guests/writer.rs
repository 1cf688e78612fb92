//! Keeps its disk busy: writes a number to a sector, reads it back, says it. And touches memory as it is told to:
//! `touch=N` MiB from 16 MiB on are written first.
#![no_std]
#![no_main]
#![allow(dead_code, unused_imports, reason = "each guest uses a part of rt")]
#[path = "rt.rs"]
#[macro_use]
mod rt;
use rt::*;

fn main() {
    for page in 0..argument("touch").unwrap_or(0) * 256 {
        write32(0x100_0000 + page * 4096, page | 1);
    }
    let disk = Virtio::find(0, 2).expect("no disk");
    disk.begin(0);
    let mut ring = disk.queue(0, 0x50000);
    disk.go();
    let mut number = 0u32;
    loop {
        number += 1;
        write32(0x40000, number);
        assert!(block_request(&mut ring, 1, 16, 0x40000, 4096) == 0);
        write32(0x40000, 0);
        assert!(block_request(&mut ring, 0, 16, 0x40000, 512) == 0);
        say!("{number} {}", read32(0x40000));
    }
}
