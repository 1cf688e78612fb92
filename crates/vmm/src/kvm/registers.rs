//! The state of one processor.
//!
//! The order of setting matters: CPUID decides which registers exist; the mode decides which segments are valid; the
//! local APIC must be there before its timer's deadline is set, and the TSC before that; pending events come last.
#![allow(unsafe_code)]

use kvm_bindings::{
    Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs,
    kvm_segment, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

use super::cpuid;
use crate::Error;

const TSC: u32 = 0x10;
const TSC_DEADLINE: u32 = 0x6e0;
/// Single registers worth carrying; which of them exist is the host's answer ([`msrs_here`]).
const SINGLE: [u32; 38] = [
    TSC,
    0x3b, // TSC and its adjustment
    0x48, // speculation control
    0x174,
    0x175,
    0x176, // SYSENTER
    0x1a0, // miscellaneous enables
    0x1d9, // debug control
    0x277, // page attributes
    0x2ff,
    0x250,
    0x258,
    0x259,
    0x268,
    0x269,
    0x26a,
    0x26b,
    0x26c,
    0x26d,
    0x26e,
    0x26f, // memory types
    0x6a0,
    0x6a2,
    0x6a4,
    0x6a5,
    0x6a6,
    0x6a7,
    0x6a8, // shadow stacks
    TSC_DEADLINE,
    0xda0, // extended state of the supervisor
    0xc000_0081,
    0xc000_0082,
    0xc000_0083,
    0xc000_0084, // SYSCALL
    0xc000_0102,
    0xc000_0103, // kernel GS base, TSC_AUX
    0x1c4,
    0x1c5,
];
/// Variable memory type ranges.
const RANGES: std::ops::Range<u32> = 0x200..0x210;
/// KVM's own: wall clock, clock, steal time, end of interrupt, polling.
const PARAVIRTUAL: [u32; 5] = [0x4b56_4d00, 0x4b56_4d01, 0x4b56_4d03, 0x4b56_4d04, 0x4b56_4d05];

/// One processor as it stands between two instructions.
#[derive(Serialize, Deserialize)]
pub struct VcpuState {
    /// What the guest was told of its processor.
    pub cpuid: Vec<kvm_cpuid_entry2>,
    tsc_khz: u32,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: kvm_xsave,
    xcrs: kvm_xcrs,
    debugregs: kvm_debugregs,
    lapic: kvm_lapic_state,
    mp_state: kvm_mp_state,
    events: kvm_vcpu_events,
    msrs: Vec<kvm_msr_entry>,
}

/// The registers that this host's KVM can save.
///
/// # Errors
/// KVM's.
pub fn msrs_here(kvm: &Kvm) -> Result<Vec<u32>, Error> {
    let list = kvm.get_msr_index_list().map_err(Error::kvm("list its registers"))?;
    let known = list.as_slice();
    Ok(SINGLE.into_iter().chain(PARAVIRTUAL).filter(|msr| known.contains(msr)).chain(RANGES).collect())
}

impl VcpuState {
    /// Reads a processor that does not run. `msrs`: from [`msrs_here`].
    ///
    /// # Errors
    /// KVM's.
    pub fn read(vcpu: &VcpuFd, msrs: &[u32], cpuid: Vec<kvm_cpuid_entry2>) -> Result<Self, Error> {
        // Reading this first makes KVM settle what an INIT or SIPI in flight does to the others.
        let mp_state = vcpu.get_mp_state().map_err(Error::kvm("read a processor's state"))?;
        let mut state = Self {
            cpuid,
            tsc_khz: vcpu.get_tsc_khz().unwrap_or(0),
            regs: vcpu.get_regs().map_err(Error::kvm("read registers"))?,
            sregs: vcpu.get_sregs().map_err(Error::kvm("read special registers"))?,
            xsave: vcpu.get_xsave().map_err(Error::kvm("read extended state"))?,
            xcrs: vcpu.get_xcrs().map_err(Error::kvm("read extended control"))?,
            debugregs: vcpu.get_debug_regs().map_err(Error::kvm("read debug registers"))?,
            lapic: vcpu.get_lapic().map_err(Error::kvm("read a local APIC"))?,
            mp_state,
            events: vcpu.get_vcpu_events().map_err(Error::kvm("read pending events"))?,
            msrs: Vec::new(),
        };
        state.msrs = read_msrs(vcpu, msrs)?;
        Ok(state)
    }

    /// Puts it into a new processor.
    ///
    /// # Errors
    /// KVM's, or a TSC that this host cannot count at the guest's rate.
    pub fn write(&self, vcpu: &VcpuFd) -> Result<(), Error> {
        vcpu.set_cpuid2(&cpuid::to_kvm(&self.cpuid)?).map_err(Error::kvm("set CPUID"))?;
        self.set_tsc_rate(vcpu)?;
        vcpu.set_mp_state(self.mp_state).map_err(Error::kvm("set a processor's state"))?;
        vcpu.set_regs(&self.regs).map_err(Error::kvm("set registers"))?;
        vcpu.set_sregs(&self.sregs).map_err(Error::kvm("set special registers"))?;
        // SAFETY: the structure is KVM_GET_XSAVE's whole 4 KiB; no feature that needs more is ever switched on, as this
        // process never asks the kernel for one (arch_prctl).
        unsafe { vcpu.set_xsave(&self.xsave) }.map_err(Error::kvm("set extended state"))?;
        vcpu.set_xcrs(&self.xcrs).map_err(Error::kvm("set extended control"))?;
        vcpu.set_debug_regs(&self.debugregs).map_err(Error::kvm("set debug registers"))?;
        vcpu.set_lapic(&self.lapic).map_err(Error::kvm("set a local APIC"))?;
        let (deadline, others): (Vec<_>, Vec<_>) =
            self.msrs.iter().partition(|msr| msr.index == TSC_DEADLINE);
        write_msrs(vcpu, &others)?;
        write_msrs(vcpu, &deadline)?;
        vcpu.set_vcpu_events(&self.events).map_err(Error::kvm("set pending events"))?;
        // Tells the guest's watchdogs that it stood still. A guest that has set up no clock has none to tell.
        let _ = vcpu.kvmclock_ctrl();
        Ok(())
    }

    /// Up to 250 parts in a million are what clocks drift by themselves.
    fn set_tsc_rate(&self, vcpu: &VcpuFd) -> Result<(), Error> {
        let here = vcpu.get_tsc_khz().unwrap_or(0);
        if self.tsc_khz == 0 || here.abs_diff(self.tsc_khz) <= self.tsc_khz / 4000 {
            return Ok(());
        }
        vcpu.set_tsc_khz(self.tsc_khz)
            .map_err(|_| Error::CpuFeatures(format!("a time stamp counter of {} kHz", self.tsc_khz)))
    }
}

/// Reads registers in one call, and without the ones that this processor does not have after all: KVM stops at the
/// first of those.
fn read_msrs(vcpu: &VcpuFd, wanted: &[u32]) -> Result<Vec<kvm_msr_entry>, Error> {
    let mut rest: Vec<u32> = wanted.to_vec();
    let mut found = Vec::with_capacity(rest.len());
    while !rest.is_empty() {
        let entries: Vec<_> =
            rest.iter().map(|index| kvm_msr_entry { index: *index, ..Default::default() }).collect();
        let mut msrs = Msrs::from_entries(&entries)
            .map_err(|_| Error::BadSnapshot("too many model-specific registers".to_owned()))?;
        let count = vcpu.get_msrs(&mut msrs).map_err(Error::kvm("read model-specific registers"))?;
        found.extend_from_slice(&msrs.as_slice()[..count]);
        rest.drain(..(count + 1).min(rest.len()));
    }
    Ok(found)
}

fn write_msrs(vcpu: &VcpuFd, wanted: &[&kvm_msr_entry]) -> Result<(), Error> {
    let mut rest: Vec<kvm_msr_entry> = wanted.iter().map(|msr| **msr).collect();
    while !rest.is_empty() {
        let msrs = Msrs::from_entries(&rest)
            .map_err(|_| Error::BadSnapshot("too many model-specific registers".to_owned()))?;
        let count = vcpu.set_msrs(&msrs).map_err(Error::kvm("set model-specific registers"))?;
        // One that refuses its own value of zero does not exist here and was never used there.
        if let Some(refused) = rest.get(count).filter(|msr| msr.data != 0) {
            return Err(Error::CpuFeatures(format!("the model-specific register {:#x}", refused.index)));
        }
        rest.drain(..(count + 1).min(rest.len()));
    }
    Ok(())
}

/// Sets the first processor to where a kernel with a PVH note begins: 32-bit protected mode, flat segments, no paging;
/// EBX points to the start information (Xen's PVH boot protocol).
///
/// # Errors
/// KVM's.
pub fn set_pvh_start(vcpu: &VcpuFd, entry: u64, start_info: u64) -> Result<(), Error> {
    let flat = |kind: u8, selector: u16| kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_: kind,
        present: 1,
        dpl: 0,
        db: 1,
        s: 1,
        l: 0,
        g: 1,
        ..Default::default()
    };
    let mut sregs = vcpu.get_sregs().map_err(Error::kvm("read special registers"))?;
    sregs.cs = flat(0xb, 0x8);
    for segment in [&mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs, &mut sregs.ss] {
        *segment = flat(0x3, 0x10);
    }
    sregs.tr = kvm_segment { limit: 0x67, type_: 0xb, present: 1, ..Default::default() };
    sregs.cr0 = 0x11; // protected mode, and the coprocessor type that is the only one
    sregs.cr4 = 0;
    sregs.efer = 0;
    vcpu.set_sregs(&sregs).map_err(Error::kvm("set special registers"))?;
    let regs = kvm_regs { rip: entry, rbx: start_info, rflags: 2, ..Default::default() };
    vcpu.set_regs(&regs).map_err(Error::kvm("set registers"))
}
