//! Sleeps until its entropy device interrupts, then says how often it has woken and what is in memory at 16 MiB. A copy is
//! interrupted once when it begins.
#![no_std]
#![no_main]
#![allow(dead_code, unused_imports, reason = "each guest uses a part of rt")]
#[path = "rt.rs"]
#[macro_use]
mod rt;
use rt::*;

fn main() {
    let random = (0..8).find_map(|number| Virtio::find(number, 4)).expect("no entropy");
    random.begin(0);
    random.queue(0, 0x50000);
    random.go();
    take_interrupts(16 + (random.base >> 12 & 0xf));
    let mut woken = 0u32;
    say!("asleep");
    loop {
        halt();
        write32(random.base + 0x64, 3);
        woken += 1;
        say!("{woken} {:#x}", read32(0x100_0000));
    }
}
