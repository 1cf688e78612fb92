//! The guest's frame socket: frames in, frames out, and the device that smoltcp sees.
//!
//! Owns: QEMU's framing in both directions and the queue of what the socket has not taken yet. Does not own: what the
//! frames mean.
//!
//! The queue is lossless for TCP: [`Wire`] hands out no transmit token while [`Outbox::has_room`] is false, and the
//! connection is served again when the socket has taken some. Everything else (UDP, ARP, resets) is dropped then, as
//! a full network card would.

use std::os::fd::OwnedFd;

use proto::guest;
use rustix::io::Errno;
use rustix::net::SendFlags;
use smoltcp::phy::{self, DeviceCapabilities, Medium};
use smoltcp::time::Instant;

use super::frame;

/// Bytes that may wait for one guest.
const CAPACITY: usize = 1024 * 1024;
const HEAD: usize = frame::PREFIX + frame::ETHERNET;
const LARGEST: usize = HEAD + frame::MTU;
/// Kept free for answers to packets that came in (resets, duplicate ACKs), which ask for no room first.
const RESERVE: usize = 64 * 1024;

/// Frames on their way to one guest. Holds memory only while there are any: see [`Spare`].
#[derive(Default)]
pub(super) struct Outbox {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// The socket took less than it was given; [`Outbox::flush`] is tried again when it is writable.
    pub(super) blocked: bool,
    pub(super) frames: u64,
    pub(super) bytes: u64,
    pub(super) dropped: u64,
}

/// Buffers that no outbox needs now. One worker's sandboxes share them.
#[derive(Default)]
pub(super) struct Spare(Vec<Vec<u8>>);

impl Spare {
    /// Gives the outbox memory for this turn.
    pub(super) fn lend(&mut self, outbox: &mut Outbox) {
        if outbox.buffer.is_empty() {
            outbox.buffer = self.0.pop().unwrap_or_else(|| vec![0; CAPACITY]);
        }
    }

    /// Takes it back when everything is out.
    pub(super) fn reclaim(&mut self, outbox: &mut Outbox) {
        if outbox.start == outbox.end && !outbox.buffer.is_empty() {
            let buffer = std::mem::take(&mut outbox.buffer);
            if self.0.len() < 4 {
                self.0.push(buffer);
            }
        }
    }
}

impl Outbox {
    /// Whether a frame of full size fits.
    pub(super) fn has_room(&self) -> bool {
        self.buffer.len() >= self.end + LARGEST + RESERVE
    }

    /// Whether an answer to an incoming packet fits.
    pub(super) fn has_room_for_answer(&self) -> bool {
        self.buffer.len() >= self.end + HEAD + 256
    }

    /// Appends one frame of `length` payload bytes, which `fill` writes.
    fn append<R>(&mut self, kind: u16, length: usize, fill: impl FnOnce(&mut [u8]) -> R) -> R {
        let total = HEAD + length;
        if self.buffer.len() < self.end + total {
            // Only an answer longer than the reserve gets here; it is dropped.
            self.dropped += 1;
            return fill(&mut vec![0; length]);
        }
        let place = &mut self.buffer[self.end..self.end + total];
        let (head, payload) = place.split_at_mut(HEAD);
        let (prefix, ethernet) = head.split_at_mut(frame::PREFIX);
        prefix.copy_from_slice(&((frame::ETHERNET + length) as u32).to_be_bytes());
        if let Some(ethernet) = ethernet.first_chunk_mut() {
            frame::put_ethernet(ethernet, guest::MAC, guest::GATEWAY_MAC, kind);
        }
        self.end += total;
        self.frames += 1;
        self.bytes += (frame::ETHERNET + length) as u64;
        fill(payload)
    }

    /// Appends a packet that was built by hand; a full queue drops it.
    pub(super) fn push(&mut self, kind: u16, packet: &[u8]) {
        if packet.len() > frame::MTU || self.buffer.len() < self.end + HEAD + packet.len() {
            self.dropped += 1;
            return;
        }
        self.append(kind, packet.len(), |place| place.copy_from_slice(packet));
    }

    /// Writes what the socket takes.
    pub(super) fn flush(&mut self, socket: &OwnedFd) -> Result<(), Errno> {
        while self.start < self.end {
            match rustix::net::send(socket, &self.buffer[self.start..self.end], SendFlags::NOSIGNAL) {
                Ok(sent) => self.start += sent,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.blocked = true;
                    self.compact();
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        (self.start, self.end) = (0, 0);
        self.blocked = false;
        Ok(())
    }

    fn compact(&mut self) {
        if self.start > CAPACITY / 2 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
    }
}

/// smoltcp's view of the link: at most one packet in, an outbox out.
pub(super) struct Wire<'a> {
    pub(super) packet: Option<&'a [u8]>,
    pub(super) out: &'a mut Outbox,
}

/// A packet for smoltcp.
pub(super) struct Received<'a>(&'a [u8]);
/// A place for a packet of smoltcp's.
pub(super) struct Place<'a>(&'a mut Outbox);

/// What smoltcp may assume of the link.
pub(super) fn capabilities() -> DeviceCapabilities {
    let mut capabilities = DeviceCapabilities::default();
    capabilities.medium = Medium::Ip;
    capabilities.max_transmission_unit = frame::MTU;
    capabilities
}

impl phy::Device for Wire<'_> {
    type RxToken<'b>
        = Received<'b>
    where
        Self: 'b;
    type TxToken<'b>
        = Place<'b>
    where
        Self: 'b;

    fn receive(&mut self, _now: Instant) -> Option<(Received<'_>, Place<'_>)> {
        self.packet.take().map(|packet| (Received(packet), Place(self.out)))
    }

    fn transmit(&mut self, _now: Instant) -> Option<Place<'_>> {
        self.out.has_room().then_some(Place(self.out))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        capabilities()
    }
}

impl phy::RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0)
    }
}

impl phy::TxToken for Place<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, f: F) -> R {
        self.0.append(frame::TYPE_IPV4, length, |packet| {
            let result = f(packet);
            frame::lower_window(packet);
            result
        })
    }
}

/// What one read of the frame socket gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fill {
    /// There may be more.
    More,
    /// The socket is empty.
    Drained,
    /// The machine is gone.
    Closed,
}

/// Frames from one guest. Keeps bytes between turns only when a frame was cut or a turn ended early.
#[derive(Default)]
pub(super) struct Inbox {
    kept: Vec<u8>,
}

impl Inbox {
    /// Whether bytes wait that the last turn did not look at.
    pub(super) fn has_frame(&self) -> bool {
        !matches!(frame::split(&self.kept), Ok(None))
    }

    /// Moves kept bytes to the front of `scratch`, reads behind them unless a whole frame is there already, and
    /// returns how many bytes there are.
    pub(super) fn fill(&mut self, socket: &OwnedFd, scratch: &mut [u8]) -> (usize, Fill) {
        let backlog = self.has_frame();
        let kept = self.kept.len();
        scratch[..kept].copy_from_slice(&self.kept);
        self.kept.clear();
        if backlog {
            return (kept, Fill::More);
        }
        loop {
            return match rustix::io::read(socket, &mut scratch[kept..]) {
                Ok(0) => (kept, Fill::Closed),
                Ok(got) if kept + got < scratch.len() => (kept + got, Fill::Drained),
                Ok(got) => (kept + got, Fill::More),
                Err(Errno::AGAIN) => (kept, Fill::Drained),
                Err(Errno::INTR) => continue,
                Err(_) => (kept, Fill::Closed),
            };
        }
    }

    /// Keeps the rest for the next turn.
    pub(super) fn keep(&mut self, rest: &[u8]) {
        self.kept.extend_from_slice(rest);
        if self.kept.is_empty() && self.kept.capacity() > 0 {
            self.kept = Vec::new();
        }
    }
}
