//! Counts the ticks of its timer, and says each hundredth.
#![no_std]
#![no_main]
#![allow(dead_code, unused_imports, reason = "each guest uses a part of rt")]
#[path = "rt.rs"]
#[macro_use]
mod rt;
use rt::*;

fn main() {
    take_interrupts(16);
    // KVM's local APIC counts at 1 GHz: a millisecond.
    start_timer(1_000_000);
    loop {
        halt();
        let count = interrupts();
        if count % 100 == 0 {
            say!("{count}");
        }
    }
}
