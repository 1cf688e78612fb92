//! What KVM keeps of a machine: processors, interrupt controllers, clock; reading it and putting it back.
//!
//! Owns: the order in which state must be set, and which of it. Does not own: threads (`vcpu`), memory (`memory`).
#![allow(unsafe_code)]

pub mod cpuid;
pub mod registers;

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VmFd};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::memory::{Memory, layout};

/// State of the machine that belongs to no processor.
#[derive(Clone, Serialize, Deserialize)]
pub struct ChipState {
    chips: Vec<kvm_irqchip>,
    clock: kvm_clock_data,
}

/// Makes a virtual machine with `memory`, interrupt controllers and no processors.
///
/// # Errors
/// KVM's.
pub fn create(kvm: &Kvm, memory: &Memory) -> Result<VmFd, Error> {
    let vm = kvm.create_vm().map_err(Error::kvm("make a virtual machine"))?;
    for (slot, region) in memory.regions().iter().enumerate() {
        let region = kvm_userspace_memory_region {
            slot: slot as u32,
            flags: 0,
            guest_phys_addr: region.guest,
            memory_size: region.bytes,
            userspace_addr: region.host as u64,
        };
        // SAFETY: the range is mapped and stays so as long as this process lives (`memory`).
        unsafe { vm.set_user_memory_region(region) }.map_err(Error::kvm("set guest memory"))?;
    }
    vm.set_identity_map_address(layout::IDENTITY_MAP).map_err(Error::kvm("place its page table"))?;
    vm.set_tss_address(layout::TASK_STATE as usize).map_err(Error::kvm("place its task state"))?;
    vm.create_irq_chip().map_err(Error::kvm("make interrupt controllers"))?;
    Ok(vm)
}

impl ChipState {
    /// Reads it. All vCPUs must be paused.
    ///
    /// # Errors
    /// KVM's.
    pub fn read(vm: &VmFd) -> Result<Self, Error> {
        let chips = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC]
            .into_iter()
            .map(|chip_id| {
                let mut chip = kvm_irqchip { chip_id, ..Default::default() };
                vm.get_irqchip(&mut chip).map_err(Error::kvm("read an interrupt controller"))?;
                Ok(chip)
            })
            .collect::<Result<Vec<_>, Error>>()?;
        let mut clock = vm.get_clock().map_err(Error::kvm("read the clock"))?;
        // The guest's clock goes on from where it stood: the time between is not the guest's. The agent is told the wall
        // clock. Flags of a read are no flags of a write.
        clock.flags = 0;
        Ok(Self { chips, clock })
    }

    /// Puts it into a new machine, before its vCPUs have theirs.
    ///
    /// # Errors
    /// KVM's.
    pub fn write(&self, vm: &VmFd) -> Result<(), Error> {
        for chip in &self.chips {
            vm.set_irqchip(chip).map_err(Error::kvm("set an interrupt controller"))?;
        }
        vm.set_clock(&self.clock).map_err(Error::kvm("set the clock"))
    }
}
