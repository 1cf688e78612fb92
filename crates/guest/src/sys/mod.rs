//! Everything that needs `unsafe`, and nothing else.
//!
//! Owns: starting a child ([`spawn`]), waiting for children ([`wait`]), acting with a caller's rights ([`rights`]),
//! tokio's event loop ([`events`]),
//! and the ioctls for network and entropy ([`ioctl`]). Does not own: when any of this is done.
//!
//! Contract: every function here is safe to call; each `unsafe` block says why it is sound.

pub(crate) mod events;
pub(crate) mod ioctl;
pub(crate) mod rights;
pub(crate) mod spawn;
pub(crate) mod wait;
