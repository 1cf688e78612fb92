//! Says that it is there, and then nothing any more: without exits to the monitor, with interrupts off.
#![no_std]
#![no_main]
#![allow(dead_code, unused_imports, reason = "each guest uses a part of rt")]
#[path = "rt.rs"]
#[macro_use]
mod rt;
use core::arch::asm;
use rt::*;

fn main() {
    say!("spinning");
    unsafe { asm!("cli", "2: jmp 2b") }
}
