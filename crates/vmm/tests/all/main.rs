//! Real `vmm` processes on /dev/kvm with tiny guests. `make lab` runs Linux on the same binary.
#![allow(unsafe_code)]

mod harness;
mod life;
