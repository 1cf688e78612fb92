//! Real `vmm` processes on /dev/kvm with tiny guests. `make lab` runs Linux on the same binary.
#![allow(unsafe_code, clippy::unwrap_used, unreachable_pub)]

#[allow(dead_code, reason = "each of the two test programs uses a part")]
mod harness;

mod copies;
mod devices;
mod ends;
mod jail;
mod snapshots;
