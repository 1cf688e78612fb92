//! virtio over MMIO, version 2 (virtio 1.2, section 4.2): registers, feature negotiation, queues.
//!
//! ```text
//! reset ── ACKNOWLEDGE ── DRIVER ── features ── FEATURES_OK ── queues ── DRIVER_OK: the device works
//!   ▲                                                                        │
//!   └────────────────────── write 0 to Status ◄── (NEEDS_RESET when a queue is not in memory)
//! ```
//!
//! Every register write is the guest's and may come in any order: what does not belong to the device's state is
//! ignored, as the specification lets a driver not expect more.

use std::sync::atomic::Ordering;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueState, QueueT};
use vmm_sys_util::eventfd::EventFd;

use super::balloon::{self, Balloon};
use super::block::{self, Block};
use super::card::{self, Card};
use super::{GuestMap, Line, eventfd, random};
use crate::Error;

/// Register offsets.
pub mod registers {
    /// The guest rings a queue.
    pub const QUEUE_NOTIFY: u64 = 0x050;
    /// Why the device interrupts.
    pub const INTERRUPT_STATUS: u64 = 0x060;
    /// The guest has seen it.
    pub const INTERRUPT_ACK: u64 = 0x064;
    /// Configuration space.
    pub const CONFIG: u64 = 0x100;
}

const MAGIC: u32 = 0x7472_6976;
const VENDOR: u32 = 0x4f44_4e50;
/// A queue was used; the configuration has changed.
const USED: u32 = 1;
const CONFIG_CHANGED: u32 = 2;

const FEATURES_OK: u32 = 8;
const DRIVER_OK: u32 = 4;
const NEEDS_RESET: u32 = 0x40;

const INDIRECT: u64 = 1 << 28;
const EVENT_INDEX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;
const MERGED_BUFFERS: u64 = 1 << 15;
/// Entries of a queue at most.
const QUEUE_SIZE: u16 = 256;

/// What stands behind the registers.
pub enum Backend {
    /// A block device.
    Block(Block),
    /// A network card.
    Card(Card),
    /// The entropy device.
    Random,
    /// The balloon.
    Balloon(Balloon),
}

impl Backend {
    fn id(&self) -> u32 {
        match self {
            Self::Block(_) => block::ID,
            Self::Card(_) => card::ID,
            Self::Random => random::ID,
            Self::Balloon(_) => balloon::ID,
        }
    }

    fn features(&self) -> u64 {
        let own = match self {
            Self::Block(block) => block.features(),
            Self::Card(card) => card.features(),
            Self::Random => 0,
            Self::Balloon(_) => balloon::FEATURES,
        };
        own | INDIRECT | EVENT_INDEX | VERSION_1
    }

    fn queues(&self) -> usize {
        match self {
            Self::Block(_) | Self::Random => 1,
            Self::Card(_) => 2,
            Self::Balloon(_) => balloon::QUEUES,
        }
    }

    fn config(&self) -> Vec<u8> {
        match self {
            Self::Block(block) => block.config(),
            Self::Card(card) => card.config(),
            Self::Random => Vec::new(),
            Self::Balloon(balloon) => balloon.config(),
        }
    }
}

/// What the driver has written, but for its queues.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Registers {
    status: u32,
    /// What the driver wants.
    features: u64,
    /// Which 32 bits of the features a register shows.
    device_word: u32,
    driver_word: u32,
    queue: u32,
    generation: u32,
}

/// A queue in a snapshot.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct SavedQueue {
    size: u16,
    ready: bool,
    next_avail: u16,
    next_used: u16,
    event_index: bool,
    descriptors: u64,
    available: u64,
    used: u64,
}

/// A device in a snapshot. What stands behind it comes from today's descriptors.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DeviceState {
    id: u32,
    registers: Registers,
    interrupt: u32,
    queues: Vec<SavedQueue>,
    balloon: Option<Balloon>,
}

/// A device with its registers.
pub struct Transport {
    /// What stands behind it.
    pub backend: Backend,
    queues: Vec<Queue>,
    doorbells: Vec<EventFd>,
    line: Line,
    registers: Registers,
    /// Chains refused so far.
    pub refused: u64,
}

impl Transport {
    /// A device after reset.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn new(backend: Backend) -> Result<Self, Error> {
        let count = backend.queues();
        let mut device = Self {
            backend,
            queues: (0..count).filter_map(|_| Queue::new(QUEUE_SIZE).ok()).collect(),
            doorbells: Vec::new(),
            line: Line::new()?,
            registers: Registers::default(),
            refused: 0,
        };
        device.doorbells = (0..count).map(|_| eventfd()).collect::<Result<_, _>>()?;
        Ok(device)
    }

    /// Makes new doorbells and a new line, forgetting the old ones unclosed: in a forked child they are the parent's.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn rewire(&mut self) -> Result<(), Error> {
        let line = Line::new()?;
        line.status().store(self.line.status().load(Ordering::SeqCst), Ordering::SeqCst);
        std::mem::forget(std::mem::replace(&mut self.line, line));
        let doorbells = (0..self.queues.len()).map(|_| eventfd()).collect::<Result<Vec<_>, _>>()?;
        std::mem::forget(std::mem::replace(&mut self.doorbells, doorbells));
        Ok(())
    }

    /// Its registers and queues.
    pub fn save(&self) -> DeviceState {
        let queues = self
            .queues
            .iter()
            .map(|queue| {
                let state = queue.state();
                SavedQueue {
                    size: state.size,
                    ready: state.ready,
                    next_avail: state.next_avail,
                    next_used: state.next_used,
                    event_index: state.event_idx_enabled,
                    descriptors: state.desc_table,
                    available: state.avail_ring,
                    used: state.used_ring,
                }
            })
            .collect();
        DeviceState {
            id: self.backend.id(),
            registers: self.registers.clone(),
            interrupt: self.line.status().load(Ordering::SeqCst),
            queues,
            balloon: match &self.backend {
                Backend::Balloon(balloon) => Some(balloon.clone()),
                _ => None,
            },
        }
    }

    /// Goes on from a snapshot. The driver was promised features and keeps them, so the device must have them all.
    ///
    /// # Errors
    /// When the snapshot is of another device, or says what cannot be.
    pub fn restore(&mut self, state: DeviceState, memory: &GuestMap) -> Result<(), Error> {
        let bad = |what: &str| Error::BadSnapshot(format!("device {}: {what}", state.id));
        if state.id != self.backend.id() || state.queues.len() != self.queues.len() {
            return Err(bad("another device stands in its place"));
        }
        if state.registers.features & !self.backend.features() != 0 {
            return Err(bad("it had features that it has not now"));
        }
        let mut queues = Vec::new();
        for saved in &state.queues {
            let queue = Queue::try_from(QueueState {
                max_size: QUEUE_SIZE,
                next_avail: saved.next_avail,
                next_used: saved.next_used,
                event_idx_enabled: saved.event_index,
                size: saved.size,
                ready: saved.ready,
                desc_table: saved.descriptors,
                avail_ring: saved.available,
                used_ring: saved.used,
            });
            let queue = queue.map_err(|_| bad("a queue is none"))?;
            if saved.ready && state.registers.status & DRIVER_OK != 0 && !queue.is_valid(memory) {
                return Err(bad("a queue is not in memory"));
            }
            queues.push(queue);
        }
        self.queues = queues;
        self.registers = state.registers;
        self.line.status().store(state.interrupt, Ordering::SeqCst);
        if let (Backend::Balloon(balloon), Some(saved)) = (&mut self.backend, state.balloon) {
            *balloon = saved;
        }
        Ok(())
    }

    /// Its interrupt line.
    pub fn line(&self) -> &Line {
        &self.line
    }

    /// One eventfd for each queue.
    pub fn doorbells(&self) -> &[EventFd] {
        &self.doorbells
    }

    /// Rings every queue and interrupts: after a restore nobody knows which of either was on its way. A queue without
    /// work and an interrupt without reason are harmless.
    pub fn wake(&self) {
        for doorbell in &self.doorbells {
            let _ = doorbell.write(1);
        }
        if self.registers.status & DRIVER_OK != 0 {
            self.line.raise(USED);
        }
    }

    /// Tells the guest that configuration space has changed.
    pub fn config_changed(&mut self) {
        self.registers.generation = self.registers.generation.wrapping_add(1);
        if self.registers.status & DRIVER_OK != 0 {
            self.line.raise(CONFIG_CHANGED);
        }
    }

    fn works(&self) -> bool {
        self.registers.status & DRIVER_OK != 0 && self.registers.status & NEEDS_RESET == 0
    }

    /// Whether queue `number` is in use.
    pub fn is_ready(&self, number: usize) -> bool {
        self.works() && self.queues.get(number).is_some_and(Queue::ready)
    }

    /// When a rate allows it to go on.
    pub fn retry_at(&self) -> Option<Instant> {
        match &self.backend {
            Backend::Block(block) => block.retry_at,
            Backend::Card(card) => card.retry_at,
            _ => None,
        }
    }

    /// Works through queue `number`; a card looks at its link too.
    pub fn process(&mut self, number: usize, memory: &GuestMap) {
        if !self.is_ready(number) {
            return;
        }
        let merged = self.registers.features & MERGED_BUFFERS != 0;
        let queue = &mut self.queues[number];
        // Until the guest has put nothing new into the queue since notifications were switched on again.
        for _ in 0..64 {
            if queue.disable_notification(memory).is_err() {
                break;
            }
            let (used, blocked) = match &mut self.backend {
                Backend::Block(block) => {
                    let used = block.process(queue, memory, &mut self.refused);
                    (used, block.retry_at.is_some())
                }
                Backend::Card(card) if number == card::TRANSMIT => {
                    let used = card.transmit(queue, memory, &mut self.refused);
                    (used, card.transmit_is_blocked())
                }
                Backend::Card(card) => (card.receive(queue, memory, merged, &mut self.refused), false),
                Backend::Random => (random::process(queue, memory, &mut self.refused), false),
                Backend::Balloon(balloon) => {
                    (balloon.process(number, queue, memory, &mut self.refused), false)
                }
            };
            if used && queue.needs_notification(memory).unwrap_or(true) {
                self.line.raise(USED);
            }
            match queue.enable_notification(memory) {
                // A card's receive queue always has buffers that wait for frames.
                Ok(true) if !blocked && used => {}
                _ => return,
            }
        }
        // More than its share: the others first.
        let _ = self.doorbells[number].write(1);
    }

    /// The guest reads a register. All but configuration space are of 32 bits.
    pub fn read(&mut self, register: u64, data: &mut [u8]) {
        if let Some(offset) = register.checked_sub(registers::CONFIG) {
            let config = self.backend.config();
            for (at, byte) in data.iter_mut().enumerate() {
                let at = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(at));
                *byte = at.and_then(|at| config.get(at)).copied().unwrap_or(0);
            }
            return;
        }
        let Ok(data) = <&mut [u8; 4]>::try_from(data) else { return };
        let queue = self.queues.get(self.registers.queue as usize);
        let value = match register {
            0x000 => MAGIC,
            0x004 => 2,
            0x008 => self.backend.id(),
            0x00c => VENDOR,
            0x010 => match self.registers.device_word {
                0 => self.backend.features() as u32,
                1 => (self.backend.features() >> 32) as u32,
                _ => 0,
            },
            0x034 => queue.map_or(0, |queue| queue.max_size().into()),
            0x044 => queue.map_or(0, |queue| queue.ready().into()),
            registers::INTERRUPT_STATUS => self.line.status().load(Ordering::SeqCst),
            0x070 => self.registers.status,
            0x0fc => self.registers.generation,
            _ => 0,
        };
        *data = value.to_le_bytes();
    }

    /// The guest writes a register.
    pub fn write(&mut self, register: u64, data: &[u8], memory: &GuestMap) {
        if let Some(offset) = register.checked_sub(registers::CONFIG) {
            if let Backend::Balloon(balloon) = &mut self.backend {
                balloon.write_config(usize::try_from(offset).unwrap_or(usize::MAX), data);
            }
            return;
        }
        let Ok(data) = <[u8; 4]>::try_from(data) else { return };
        let value = u32::from_le_bytes(data);
        match register {
            0x014 => self.registers.device_word = value,
            0x020 if self.registers.status & FEATURES_OK == 0 => match self.registers.driver_word {
                0 => self.registers.features = self.registers.features & !0xffff_ffff | u64::from(value),
                1 => self.registers.features = self.registers.features & 0xffff_ffff | u64::from(value) << 32,
                _ => {}
            },
            0x024 => self.registers.driver_word = value,
            0x030 => self.registers.queue = value,
            registers::QUEUE_NOTIFY => {
                if let Some(doorbell) = self.doorbells.get(value as usize) {
                    let _ = doorbell.write(1);
                }
            }
            registers::INTERRUPT_ACK => {
                self.line.status().fetch_and(!value, Ordering::SeqCst);
            }
            0x070 => self.set_status(value, memory),
            _ => self.write_queue(register, value),
        }
    }

    fn write_queue(&mut self, register: u64, value: u32) {
        if self.registers.status & FEATURES_OK == 0 || self.registers.status & DRIVER_OK != 0 {
            return;
        }
        let Some(queue) = self.queues.get_mut(self.registers.queue as usize) else { return };
        match register {
            // A size that is no power of two leaves the old one.
            0x038 => queue.set_size(u16::try_from(value).unwrap_or(0)),
            0x044 => queue.set_ready(value == 1),
            0x080 => queue.set_desc_table_address(Some(value), None),
            0x084 => queue.set_desc_table_address(None, Some(value)),
            0x090 => queue.set_avail_ring_address(Some(value), None),
            0x094 => queue.set_avail_ring_address(None, Some(value)),
            0x0a0 => queue.set_used_ring_address(Some(value), None),
            0x0a4 => queue.set_used_ring_address(None, Some(value)),
            _ => {}
        }
    }

    fn set_status(&mut self, value: u32, memory: &GuestMap) {
        if value == 0 {
            for queue in &mut self.queues {
                queue.reset();
            }
            (self.registers.status, self.registers.features) = (0, 0);
            self.line.status().store(0, Ordering::SeqCst);
            return;
        }
        let mut status = self.registers.status & NEEDS_RESET | value;
        let begun = status & !self.registers.status;
        if begun & FEATURES_OK != 0
            && (self.registers.features & !self.backend.features() != 0
                || self.registers.features & VERSION_1 == 0)
        {
            // The driver looks again and finds that it was refused.
            status &= !FEATURES_OK;
        }
        if begun & DRIVER_OK != 0 {
            let event_index = self.registers.features & EVENT_INDEX != 0;
            let mut ready = self.queues.iter_mut().filter(|queue| queue.ready());
            let valid = ready.all(|queue| {
                queue.set_event_idx(event_index);
                queue.is_valid(memory)
            });
            if status & FEATURES_OK == 0 || !valid {
                status |= NEEDS_RESET;
            }
        }
        self.registers.status = status;
    }
}
