// Faults without a table of handlers: three faults in a row.
#![no_std]
#![no_main]
#![allow(dead_code, unused_macros, unused_imports)]
include!("rt.rs");

fn main() {
    say!("about to fault");
    unsafe { asm!("lidt [{}]", "ud2", in(reg) &[0u8; 8]) }
}
