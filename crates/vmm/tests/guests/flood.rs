//! Says the same for ever.
#![no_std]
#![no_main]
#![allow(dead_code, unused_imports, reason = "each guest uses a part of rt")]
#[path = "rt.rs"]
#[macro_use]
mod rt;
use rt::*;

fn main() {
    loop {
        say!("the quick brown fox jumps over the lazy dog");
    }
}
