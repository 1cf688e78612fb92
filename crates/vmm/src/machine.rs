//! A machine as a whole: how it is put together, paused, saved.
//!
//! Owns: the parts of one machine and the order in which they are made. Does not own: when (`server`), copying
//! (`fork`).

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use disk::{Base, Disk};
use kvm_ioctls::{IoEventAddress, Kvm, VmFd};
use proto::vmm::{BootSpec, CardSpec, DevicesSpec, DiskSpec, Fd, RestoreSpec, SaveSpec, StatsReport};

use crate::devices::balloon::Balloon;
use crate::devices::block::Block;
use crate::devices::card::Card;
use crate::devices::limiter::Limiter;
use crate::devices::serial::{self, SerialPort};
use crate::devices::transport::{Backend, Transport, registers};
use crate::devices::{Devices, eventfd};
use crate::kvm::registers::{VcpuState, msrs_here, set_pvh_start};
use crate::kvm::{self, ChipState, cpuid};
use crate::memory::{Memory, layout};
use crate::snapshot::State;
use crate::vcpu::{Shared, Vcpu, lock};
use crate::{Error, boot};

const MAX_VCPUS: u8 = 32;
/// Lines that are left for virtio devices.
const MAX_DEVICES: usize = (layout::LINES - layout::FIRST_LINE) as usize;

/// The descriptors that came with a request. Each may be taken once; what is not taken is closed.
pub struct Descriptors(Vec<Option<OwnedFd>>);

impl Descriptors {
    /// In the order they came.
    pub fn new(descriptors: Vec<OwnedFd>) -> Self {
        Self(descriptors.into_iter().map(Some).collect())
    }

    /// Takes one.
    ///
    /// # Errors
    /// When it did not come, or was taken.
    pub fn take(&mut self, fd: Fd) -> Result<OwnedFd, Error> {
        let place = self.0.get_mut(fd.0 as usize);
        place.and_then(Option::take).ok_or_else(|| {
            Error::BadRequest(format!("descriptor {} did not come with the request, or is named twice", fd.0))
        })
    }

    /// Takes one as a file.
    ///
    /// # Errors
    /// As [`Descriptors::take`].
    pub fn file(&mut self, fd: Fd) -> Result<File, Error> {
        self.take(fd).map(File::from)
    }

    /// Takes several as files.
    ///
    /// # Errors
    /// As [`Descriptors::take`].
    pub fn files(&mut self, fds: &[Fd]) -> Result<Vec<File>, Error> {
        fds.iter().map(|fd| self.file(*fd)).collect()
    }

    /// Takes one that need not be named.
    ///
    /// # Errors
    /// As [`Descriptors::take`].
    pub fn optional(&mut self, fd: Option<Fd>) -> Result<Option<OwnedFd>, Error> {
        fd.map(|fd| self.take(fd)).transpose()
    }
}

/// A machine. Its vCPUs end when it is dropped.
pub struct Machine {
    /// Processors.
    pub vcpus: Vec<Vcpu>,
    /// What they share.
    pub shared: Arc<Shared>,
    /// Guest memory.
    pub memory: Memory,
    /// KVM's machine; last, as processors go before it.
    pub vm: VmFd,
    /// Where the console is written to.
    pub console: Option<OwnedFd>,
}

impl Machine {
    /// A machine that stands at a kernel's first instruction.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn boot(kvm: &Kvm, spec: &BootSpec, fds: &mut Descriptors) -> Result<Self, Error> {
        if !(1..=MAX_VCPUS).contains(&spec.vcpus) {
            return Err(Error::BadRequest(format!(
                "a machine has 1 to {MAX_VCPUS} vCPUs, not {}",
                spec.vcpus
            )));
        }
        let bytes = spec
            .memory_mib
            .checked_mul(1 << 20)
            .ok_or_else(|| Error::BadRequest(format!("{} MiB of memory are too many", spec.memory_mib)))?;
        let memory = Memory::zeroed(bytes, spec.huge_pages)?;
        let mut kernel = fds.file(spec.kernel)?;
        let mut initramfs = fds.optional(spec.initramfs)?.map(File::from);
        let devices = make_devices(&spec.devices, fds)?;
        let count = devices.len() as u32;
        let entry =
            boot::load(&memory, &mut kernel, initramfs.as_mut(), &spec.command_line, spec.vcpus, count)?;
        let vm = kvm::create(kvm, &memory)?;
        let supported = cpuid::supported(kvm)?;
        let mut processors = Vec::new();
        for number in 0..spec.vcpus {
            let vcpu = vm.create_vcpu(number.into()).map_err(Error::kvm("make a processor"))?;
            let entries = cpuid::for_vcpu(&supported, number, spec.vcpus);
            vcpu.set_cpuid2(&cpuid::to_kvm(&entries)?).map_err(Error::kvm("set CPUID"))?;
            if number == 0 {
                set_pvh_start(&vcpu, entry.instruction, entry.start_info)?;
            }
            processors.push((vcpu, entries));
        }
        let devices = Devices { virtio: devices, serial: SerialPort::new(None)?, ending: None };
        let console = fds.optional(spec.devices.console)?;
        Self::assemble(kvm, vm, memory, devices, processors, console)
    }

    /// A machine as it was saved, paused.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn restore(kvm: &Kvm, spec: &RestoreSpec, fds: &mut Descriptors) -> Result<Self, Error> {
        let state = State::read(&mut fds.file(spec.state)?)?;
        let files = fds.files(&spec.memory)?;
        let count = state.vcpus.len();
        if count == 0 || count > usize::from(MAX_VCPUS) {
            return Err(Error::BadSnapshot(format!("it has {count} vCPUs")));
        }
        let supported = cpuid::supported(kvm)?;
        for vcpu in &state.vcpus {
            cpuid::check(&vcpu.cpuid, &supported)?;
        }
        let memory = Memory::from_files(state.memory_bytes, &files, state.layers)?;
        let mut virtio = make_devices(&spec.devices, fds)?;
        if virtio.len() != state.devices.len() {
            return Err(Error::BadRequest(format!(
                "the snapshot has {} devices, the request {}",
                state.devices.len(),
                virtio.len()
            )));
        }
        for (device, saved) in virtio.iter_mut().zip(state.devices) {
            device.restore(saved, &memory.map)?;
        }
        let console = fds.optional(spec.devices.console)?;
        let devices = Devices { virtio, serial: SerialPort::new(Some(&state.serial))?, ending: None };
        let vm = kvm::create(kvm, &memory)?;
        Self::with_state(kvm, vm, memory, devices, &state.vcpus, &state.chips, console)
    }

    /// A machine of KVM around devices and memory that are there already.
    ///
    /// # Errors
    /// KVM's.
    pub fn with_state(
        kvm: &Kvm,
        vm: VmFd,
        memory: Memory,
        devices: Devices,
        vcpus: &[VcpuState],
        chips: &ChipState,
        console: Option<OwnedFd>,
    ) -> Result<Self, Error> {
        let mut processors = Vec::new();
        for (number, _) in vcpus.iter().enumerate() {
            processors.push(vm.create_vcpu(number as u64).map_err(Error::kvm("make a processor"))?);
        }
        // The clock comes first, as each processor's own is derived from it; all processors exist, as the local APICs
        // know each other.
        chips.write(&vm)?;
        for (processor, state) in processors.iter().zip(vcpus) {
            state.write(processor)?;
        }
        let processors =
            processors.into_iter().zip(vcpus).map(|(fd, state)| (fd, state.cpuid.clone())).collect();
        let machine = Self::assemble(kvm, vm, memory, devices, processors, console)?;
        for device in &lock(&machine.shared.devices).virtio {
            device.wake();
        }
        Ok(machine)
    }

    fn assemble(
        kvm: &Kvm,
        vm: VmFd,
        memory: Memory,
        devices: Devices,
        processors: Vec<(kvm_ioctls::VcpuFd, Vec<kvm_bindings::kvm_cpuid_entry2>)>,
        console: Option<OwnedFd>,
    ) -> Result<Self, Error> {
        connect(&vm, &devices)?;
        let shared = Arc::new(Shared {
            lines: devices.lines(),
            devices: Mutex::new(devices),
            memory: memory.map.clone(),
            ending: Mutex::new(None),
            ended: eventfd()?,
            exits: AtomicU64::new(0),
            msrs: msrs_here(kvm)?,
        });
        let mut vcpus = Vec::new();
        for (number, (fd, entries)) in processors.into_iter().enumerate() {
            vcpus.push(Vcpu::start(number, fd, entries, shared.clone())?);
        }
        Ok(Self { vcpus, shared, memory, vm, console })
    }

    /// Lets all vCPUs run.
    pub fn resume(&self) {
        self.vcpus.iter().for_each(Vcpu::run);
    }

    /// Returns when all vCPUs stand still.
    ///
    /// # Errors
    /// When one does not.
    pub fn pause(&self) -> Result<(), Error> {
        self.vcpus.iter().for_each(Vcpu::pause);
        self.vcpus.iter().try_for_each(Vcpu::wait_paused)
    }

    /// What KVM keeps. The machine must be paused.
    ///
    /// # Errors
    /// KVM's.
    pub fn read_state(&self) -> Result<(Vec<VcpuState>, ChipState), Error> {
        let vcpus =
            self.vcpus.iter().map(|vcpu| vcpu.read().map(|state| *state)).collect::<Result<_, _>>()?;
        Ok((vcpus, ChipState::read(&self.vm)?))
    }

    /// Writes a snapshot. The machine must be paused.
    ///
    /// # Errors
    /// KVM's and the files'.
    pub fn save(&self, spec: &SaveSpec, fds: &mut Descriptors) -> Result<(), Error> {
        let (mut state_file, memory_file) = (fds.file(spec.state)?, fds.file(spec.memory)?);
        let pagemap = fds.optional(spec.pagemap)?.map(File::from);
        let (vcpus, chips) = self.read_state()?;
        let devices = lock(&self.shared.devices);
        let state = State {
            memory_bytes: self.memory.bytes(),
            layers: self.memory.save(&memory_file, pagemap.as_ref())?,
            vcpus,
            chips,
            devices: devices.virtio.iter().map(Transport::save).collect(),
            serial: devices.serial.save(),
        };
        state.write(&mut state_file)
    }

    /// What it has used.
    pub fn stats(&self) -> StatsReport {
        let devices = lock(&self.shared.devices);
        let mut report = StatsReport {
            exits: self.shared.exits.load(std::sync::atomic::Ordering::Relaxed),
            console_dropped: devices.serial.dropped(),
            ..StatsReport::default()
        };
        for device in &devices.virtio {
            report.refused_chains += device.refused;
            match &device.backend {
                Backend::Block(block) => {
                    report.disk_read += block.read;
                    report.disk_written += block.written;
                }
                Backend::Card(card) => {
                    report.frames_sent += card.sent;
                    report.frames_received += card.received;
                }
                Backend::Balloon(balloon) => {
                    report.balloon_mib = balloon.actual_mib();
                    report.reported_free = balloon.reported;
                }
                Backend::Random => {}
            }
        }
        report
    }

    /// Asks the guest to give back memory.
    pub fn balloon(&self, mib: u64) {
        let most = (self.memory.bytes() >> 20).saturating_sub(64);
        for device in &mut lock(&self.shared.devices).virtio {
            if let Backend::Balloon(balloon) = &mut device.backend {
                balloon.set(mib.min(most));
                device.config_changed();
            }
        }
    }
}

/// Wires devices to KVM: a line for each, a doorbell for each queue.
///
/// # Errors
/// KVM's.
pub fn connect(vm: &VmFd, devices: &Devices) -> Result<(), Error> {
    for (number, device) in devices.virtio.iter().enumerate() {
        let gsi = layout::FIRST_LINE + number as u32;
        vm.register_irqfd(device.line().fd(), gsi).map_err(Error::kvm("connect an interrupt"))?;
        let address = layout::DEVICES + number as u64 * layout::DEVICE_SIZE + registers::QUEUE_NOTIFY;
        for (queue, doorbell) in device.doorbells().iter().enumerate() {
            vm.register_ioevent(doorbell, &IoEventAddress::Mmio(address), queue as u32)
                .map_err(Error::kvm("connect a doorbell"))?;
        }
    }
    vm.register_irqfd(devices.serial.line().fd(), serial::LINE).map_err(Error::kvm("connect the console"))
}

/// Virtio devices in the order in which a guest finds them: disks, card, entropy, balloon.
///
/// # Errors
/// When a descriptor did not come, or is not what it should be.
pub fn make_devices(spec: &DevicesSpec, fds: &mut Descriptors) -> Result<Vec<Transport>, Error> {
    let mut backends = Vec::new();
    for (number, disk) in spec.disks.iter().enumerate() {
        backends.push(Backend::Block(make_disk(disk, number, fds)?));
    }
    if let Some(card) = &spec.card {
        backends.push(Backend::Card(make_card(card, fds)?));
    }
    backends.push(Backend::Random);
    backends.push(Backend::Balloon(Balloon::default()));
    if backends.len() > MAX_DEVICES {
        return Err(Error::BadRequest(format!("a machine has at most {} disks", MAX_DEVICES - 3)));
    }
    backends.into_iter().map(Transport::new).collect()
}

fn make_disk(spec: &DiskSpec, number: usize, fds: &mut Descriptors) -> Result<Block, Error> {
    let base = fds.file(spec.base)?;
    let base = if spec.base_written { Base::Written(base) } else { Base::ReadOnly(base) };
    let frozen = fds.files(&spec.frozen)?;
    let delta = fds.optional(spec.delta)?.map(File::from);
    let disk = Disk::open(base, frozen, delta).map_err(|source| Error::Disk { number, source })?;
    Ok(Block::new(disk, spec.durable, Limiter::new(spec.rate, Instant::now())))
}

fn make_card(spec: &CardSpec, fds: &mut Descriptors) -> Result<Card, Error> {
    if spec.mtu < 68 {
        return Err(Error::BadRequest(format!("an MTU of {} is less than IP allows", spec.mtu)));
    }
    let link = fds.take(spec.link)?;
    let limiter = Limiter::new(spec.rate, Instant::now());
    Ok(Card::new(link, spec.mac, spec.mtu, spec.offloads, limiter))
}
