// Touches memory (`touch=N` MiB from 16 MiB on), says so, and from then on says how often a byte came in from a port. What
// it says after a copy depends on memory that was there before.
#![no_std]
#![no_main]
#![allow(dead_code, unused_macros, unused_imports)]
include!("rt.rs");

fn main() {
    let pages = argument("touch").unwrap_or(0) * 256;
    // As far as 32-bit addresses go; what lies above 3 GiB is for 64-bit guests.
    for page in 0..pages.min((0xc000_0000 - 0x100_0000) / 4096) {
        write32(0x100_0000 + page * 4096, page);
    }
    say!("touched");
    let mut number = 0u32;
    loop {
        number += 1;
        write32(0x200000, number);
        say!("{} {}", read32(0x200000), read32(0x100_0000 + number % pages.max(1) * 4096));
        for _ in 0..1000 {
            in8(0x80);
        }
    }
}
