// Asks for a reset.
#![no_std]
#![no_main]
#![allow(dead_code, unused_macros, unused_imports)]
include!("rt.rs");

fn main() {
    reset()
}
