//! One process is one microVM: KVM, guest memory, virtio devices, save, restore, live fork.
//!
//! Owns: a machine from its first instruction to its end, and the jail around it. Does not own: what disks and frames
//! mean (crate `disk`, and `edge` at the other end of the link), when a machine is made and for whom (`node`).
//!
//! * [`server`]: the one thread that answers the control socket and works for the devices.
//! * [`phase`]: which request is allowed when.
//! * [`machine`]: a machine as a whole: boot, save, restore, pause; [`fork`]: copying it while it runs.
//! * [`memory`]: guest memory; [`boot`], [`acpi`]: what a kernel finds in it.
//! * [`vcpu`], [`kvm`]: processors, and the state KVM keeps.
//! * [`devices`]: virtio devices, serial port, power switch.
//! * [`snapshot`]: the state file.
//! * [`jail`]: what the process may do at all.
//!
//! Locks are the standard library's: they are plain futexes without a table that spans the process, so a fork copies no
//! trace of threads that are not there any more.

pub mod acpi;
pub mod boot;
pub mod control;
pub mod devices;
pub mod error;
pub mod fork;
pub mod jail;
pub mod kvm;
pub mod machine;
pub mod memory;
pub mod phase;
pub mod server;
pub mod snapshot;
pub mod sys;
pub mod vcpu;

pub use error::Error;
