//! Faults without a table of handlers: three faults in a row.
#![no_std]
#![no_main]
#![allow(dead_code, unused_imports, reason = "each guest uses a part of rt")]
#[path = "rt.rs"]
#[macro_use]
mod rt;
use core::arch::asm;
use rt::*;

fn main() {
    say!("about to fault");
    unsafe { asm!("lidt [{}]", "ud2", in(reg) &[0u8; 8]) }
}
