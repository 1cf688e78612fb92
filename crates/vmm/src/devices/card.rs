//! The network card: frames between two queues and the link, a stream socket (`proto::vmm::CardSpec`).
//!
//! Nothing is dropped on the way to the guest: when it has no buffers the link is not read, and whoever sends waits. On
//! the way out a frame that the link does not take whole is kept, and the queue stands still until the rest has gone.
//! A link that is closed takes frames and loses them: the machine runs without a network.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use virtio_queue::{Queue, QueueOwnedT};

use super::GuestMap;
use super::chain::{self, Chain};
use super::limiter::Limiter;
use super::would_block;
use crate::sys::{self, Piece};

/// Virtio device number.
pub const ID: u32 = 1;
/// Queue of buffers for frames to the guest.
pub const RECEIVE: usize = 0;
/// Queue of frames from the guest.
pub const TRANSMIT: usize = 1;
/// `virtio_net_hdr_v1`.
pub const HEADER: usize = 12;
/// Largest frame: 64 KiB of IP, Ethernet with a tag.
const FRAME: usize = 65535 + 18;
const LENGTH: usize = 4;
/// Room for what one read of the link may bring.
const BUFFER: usize = 2 * (FRAME + HEADER + LENGTH);
/// Frames of one visit, so that other devices get their turn.
const BATCH: usize = 256;

const MTU: u64 = 1 << 3;
const MAC: u64 = 1 << 5;
const MERGED_BUFFERS: u64 = 1 << 15;
/// Checksums both ways (0, 1), TSO for IPv4 and IPv6 to the guest (7, 8) and from it (11, 12).
const OFFLOADS: u64 = 1 << 0 | 1 << 1 | 1 << 7 | 1 << 8 | 1 << 11 | 1 << 12;

/// A network card.
pub struct Card {
    link: Option<OwnedFd>,
    mac: [u8; 6],
    mtu: u16,
    offloads: bool,
    limiter: Limiter,
    /// Read from the link and not delivered yet: `incoming[start..end]`.
    incoming: Vec<u8>,
    start: usize,
    end: usize,
    /// The rest of a frame that the link did not take.
    outgoing: Vec<u8>,
    /// The guest has no buffers for the next frame.
    starved: bool,
    /// When a frame that was held back may be tried again.
    pub retry_at: Option<Instant>,
    /// Frames from the guest so far.
    pub sent: u64,
    /// Frames to the guest so far.
    pub received: u64,
}

impl Card {
    /// A card on `link`, which must not block.
    pub fn new(link: OwnedFd, mac: [u8; 6], mtu: u16, offloads: bool, limiter: Limiter) -> Self {
        Self {
            link: Some(link),
            mac,
            mtu,
            offloads,
            limiter,
            incoming: Vec::new(),
            start: 0,
            end: 0,
            outgoing: Vec::new(),
            starved: false,
            retry_at: None,
            sent: 0,
            received: 0,
        }
    }

    /// Goes over to another link. What is half-way on the old one is lost, as on a cable that is pulled.
    pub fn set_link(&mut self, link: Option<OwnedFd>) -> Option<OwnedFd> {
        self.incoming = Vec::new();
        (self.start, self.end) = (0, 0);
        self.outgoing = Vec::new();
        self.starved = false;
        std::mem::replace(&mut self.link, link)
    }

    /// The link, while there is one.
    pub fn link(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().map(AsFd::as_fd)
    }

    /// Whether to wait for the link to have bytes, and to take some.
    pub fn interest(&self) -> (bool, bool) {
        (!self.starved, !self.outgoing.is_empty())
    }

    /// What it offers beside what every device offers.
    pub fn features(&self) -> u64 {
        MTU | MAC | MERGED_BUFFERS | if self.offloads { OFFLOADS } else { 0 }
    }

    /// Configuration space (virtio 1.2, 5.1.4).
    pub fn config(&self) -> Vec<u8> {
        let mut config = vec![0u8; 12];
        config[..6].copy_from_slice(&self.mac);
        config[10..].copy_from_slice(&self.mtu.to_le_bytes());
        config
    }

    /// Sends what the guest has put into its queue.
    pub fn transmit(&mut self, queue: &mut Queue, memory: &GuestMap, refused: &mut u64) -> bool {
        self.retry_at = None;
        let mut used = false;
        for _ in 0..BATCH {
            if !self.flush() {
                break;
            }
            let Some(next) = chain::pop(queue, memory) else { break };
            let head = match next {
                Ok(chain) => {
                    if let Err(later) = self.limiter.allow(chain.readable.bytes() as u64, Instant::now()) {
                        queue.go_to_previous_position();
                        self.retry_at = Some(later);
                        break;
                    }
                    let head = chain.head;
                    if !self.send(chain) {
                        *refused += 1;
                    }
                    head
                }
                Err(bad) => {
                    *refused += 1;
                    bad.head
                }
            };
            chain::give_back(queue, memory, head, 0);
            used = true;
        }
        used
    }

    /// Whether the guest may have more in its queue than was worked on.
    pub fn transmit_is_blocked(&self) -> bool {
        !self.outgoing.is_empty() || self.retry_at.is_some()
    }

    /// Puts one frame on the link; false when it is none.
    fn send(&mut self, mut chain: Chain) -> bool {
        let Some(header) = chain.readable.take(HEADER) else { return false };
        let frame = chain.readable;
        if frame.bytes() == 0 || frame.bytes() > FRAME {
            return false;
        }
        let Some(link) = &self.link else { return true };
        let mut header_bytes = [0u8; HEADER];
        let mut front = Vec::with_capacity(LENGTH + HEADER);
        let extra = if self.offloads { HEADER } else { 0 };
        // At most FRAME + HEADER.
        front.extend_from_slice(&((frame.bytes() + extra) as u32).to_be_bytes());
        if self.offloads {
            header.load(&mut header_bytes);
            front.extend_from_slice(&header_bytes);
        }
        let mut pieces = vec![Piece { iov_base: front.as_mut_ptr().cast(), iov_len: front.len() }];
        pieces.extend_from_slice(frame.as_slice());
        // SAFETY: the first piece is `front`, which lives until the end of this function; the others are guest memory.
        let sent = match unsafe { sys::send_pieces(link.as_raw_fd(), &mut pieces) } {
            Ok(sent) => sent,
            Err(error) if would_block(&error) => 0,
            Err(_) => {
                self.link = None;
                return true;
            }
        };
        self.sent += 1;
        if sent < front.len() + frame.bytes() {
            let mut whole = front;
            let at = whole.len();
            whole.resize(at + frame.bytes(), 0);
            frame.load(&mut whole[at..]);
            self.outgoing = whole.split_off(sent);
        }
        true
    }

    /// Sends what was kept; true when nothing is left.
    fn flush(&mut self) -> bool {
        while let (Some(link), false) = (&self.link, self.outgoing.is_empty()) {
            match rustix::net::send(
                link,
                &self.outgoing,
                rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL,
            ) {
                Ok(count) => {
                    self.outgoing.drain(..count);
                }
                Err(error) if would_block(&error.into()) => return false,
                Err(_) => self.link = None,
            }
        }
        if self.link.is_none() {
            self.outgoing.clear();
        }
        // An empty vector of the largest frame's size would stay for good.
        self.outgoing.shrink_to(0);
        true
    }

    /// Delivers what the link has.
    pub fn receive(&mut self, queue: &mut Queue, memory: &GuestMap, merged: bool, refused: &mut u64) -> bool {
        let mut used = false;
        self.starved = false;
        for _ in 0..BATCH {
            match self.next_frame() {
                Some((from, to)) => {
                    if !self.deliver(queue, memory, from, to, merged, refused) {
                        self.starved = true;
                        break;
                    }
                    used = true;
                    self.start = to;
                }
                None => {
                    if !self.read_link() {
                        break;
                    }
                }
            }
        }
        if self.start == self.end {
            // An idle card holds no buffer.
            (self.start, self.end) = (0, 0);
            self.incoming = Vec::new();
        }
        used
    }

    /// Where the next whole frame lies. A length that no frame can have ends the link: the two ends have lost each other.
    fn next_frame(&mut self) -> Option<(usize, usize)> {
        let waiting = self.incoming.get(self.start..self.end)?;
        let length = u32::from_be_bytes(*waiting.first_chunk::<LENGTH>()?) as usize;
        let most = FRAME + if self.offloads { HEADER } else { 0 };
        let least = 1 + if self.offloads { HEADER } else { 0 };
        if !(least..=most).contains(&length) {
            self.set_link(None);
            return None;
        }
        let from = self.start + LENGTH;
        (waiting.len() >= LENGTH + length).then_some((from, from + length))
    }

    /// Reads once; false when there is nothing.
    fn read_link(&mut self) -> bool {
        let Some(link) = &self.link else { return false };
        if self.start > 0 {
            self.incoming.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        self.incoming.resize(BUFFER, 0);
        match rustix::net::recv(link, &mut self.incoming[self.end..], rustix::net::RecvFlags::DONTWAIT) {
            Ok((_, 0)) => {
                self.set_link(None);
                false
            }
            Ok((_, count)) => {
                self.end += count;
                true
            }
            Err(error) => {
                if !would_block(&io::Error::from(error)) {
                    self.set_link(None);
                }
                false
            }
        }
    }

    /// Puts `incoming[from..to]` into the guest's buffers; false when there are not enough.
    fn deliver(
        &mut self,
        queue: &mut Queue,
        memory: &GuestMap,
        from: usize,
        to: usize,
        merged: bool,
        refused: &mut u64,
    ) -> bool {
        let mut frame = vec![0u8; if self.offloads { 0 } else { HEADER }];
        frame.extend_from_slice(&self.incoming[from..to]);
        let mut chains: Vec<Chain> = Vec::new();
        let mut room = 0;
        while room < frame.len() {
            match chain::pop(queue, memory) {
                Some(Ok(chain)) if chain.writable.bytes() >= HEADER => {
                    room += chain.writable.bytes();
                    chains.push(chain);
                    if !merged && room < frame.len() {
                        // Larger than the guest takes: lost, as on a card with small buffers.
                        chain::give_back(queue, memory, chains[0].head, 0);
                        *refused += 1;
                        return true;
                    }
                }
                Some(Ok(Chain { head, .. }) | Err(chain::Refused { head })) => {
                    *refused += 1;
                    chain::give_back(queue, memory, head, 0);
                    // Buffers may only go back in order; those taken before it go back empty with it.
                    for chain in chains.drain(..) {
                        chain::give_back(queue, memory, chain.head, 0);
                    }
                    room = 0;
                }
                None => {
                    for _ in &chains {
                        queue.go_to_previous_position();
                    }
                    return false;
                }
            }
        }
        // How many buffers it took, at the end of the header.
        frame[HEADER - 2..HEADER].copy_from_slice(&(chains.len() as u16).to_le_bytes());
        let mut rest = frame.as_slice();
        for chain in chains {
            let count = chain.writable.store(rest);
            chain::give_back(queue, memory, chain.head, count);
            rest = &rest[count..];
        }
        self.received += 1;
        true
    }
}
