//! Counts in memory, and says the number whenever it has counted 1000. What it says after a fork or a restore goes on
//! from what it had counted before.
#![no_std]
#![no_main]
#![allow(dead_code, unused_imports, reason = "each guest uses a part of rt")]
#[path = "rt.rs"]
#[macro_use]
mod rt;
use rt::*;

fn main() {
    let mut number = 0u32;
    loop {
        number += 1;
        write32(0x200000, number);
        if number % 1000 == 0 {
            say!("{}", read32(0x200000));
        }
    }
}
