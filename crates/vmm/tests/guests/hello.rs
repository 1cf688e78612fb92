//! Says that it runs, and what the start information is; then switches off.
#![no_std]
#![no_main]
#![allow(dead_code, unused_imports, reason = "each guest uses a part of rt")]
#[path = "rt.rs"]
#[macro_use]
mod rt;
use rt::*;

fn main() {
    say!("hello {}", 6 * 7);
}
