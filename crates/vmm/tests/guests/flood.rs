// Says the same for ever.
#![no_std]
#![no_main]
#![allow(dead_code, unused_macros, unused_imports)]
include!("rt.rs");

fn main() {
    loop {
        say!("the quick brown fox jumps over the lazy dog");
    }
}
