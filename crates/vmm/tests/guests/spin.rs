// Says that it is there, and then nothing any more: without exits to the monitor, with interrupts off.
#![no_std]
#![no_main]
#![allow(dead_code, unused_macros, unused_imports)]
include!("rt.rs");

fn main() {
    say!("spinning");
    unsafe { asm!("cli", "2: jmp 2b") }
}
