// Says that it runs, and what the start information is; then switches off.
#![no_std]
#![no_main]
#![allow(dead_code, unused_macros, unused_imports)]
include!("rt.rs");

fn main() {
    say!("hello {}", 6 * 7);
}
