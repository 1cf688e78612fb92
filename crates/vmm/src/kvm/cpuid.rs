//! What a guest is told of its processor, and whether this host can run what another host's guest was told.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::Kvm;

use crate::Error;

const FEATURES: u32 = 1;
const TOPOLOGY: [u32; 2] = [0xb, 0x1f];
const PERFORMANCE: u32 = 0xa;
const KVM_FEATURES: u32 = 0x4000_0001;
const HYPERVISOR_BIT: u32 = 31;
const TSC_DEADLINE_BIT: u32 = 24;
/// Asynchronous page faults: a fault in flight would have to be carried over a save. Bits 4, 10, 14.
const ASYNC_FAULTS: u32 = 1 << 4 | 1 << 10 | 1 << 14;

/// Words that hold one feature in each bit: leaf, subleaf, register (a, b, c, d).
const FEATURE_WORDS: [(u32, u32, char); 12] = [
    (1, 0, 'c'),
    (1, 0, 'd'),
    (7, 0, 'b'),
    (7, 0, 'c'),
    (7, 0, 'd'),
    (7, 1, 'a'),
    (0xd, 0, 'a'),
    (0xd, 1, 'a'),
    (0x8000_0001, 0, 'c'),
    (0x8000_0001, 0, 'd'),
    (0x8000_0008, 0, 'b'),
    (KVM_FEATURES, 0, 'a'),
];

/// What the host can offer.
///
/// # Errors
/// KVM's.
pub fn supported(kvm: &Kvm) -> Result<Vec<kvm_cpuid_entry2>, Error> {
    let all = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(Error::kvm("say what processors it can offer"))?;
    Ok(all.as_slice().to_vec())
}

/// The answers for vCPU `number` of `count`.
pub fn for_vcpu(supported: &[kvm_cpuid_entry2], number: u8, count: u8) -> Vec<kvm_cpuid_entry2> {
    let mut entries = supported.to_vec();
    // Bits of the APIC ID that tell processors of one package apart.
    let bits = u32::from(count).next_power_of_two().trailing_zeros();
    for entry in &mut entries {
        match entry.function {
            FEATURES => {
                entry.ebx = entry.ebx & 0xffff | u32::from(count) << 16 | u32::from(number) << 24;
                entry.ecx |= 1 << HYPERVISOR_BIT | 1 << TSC_DEADLINE_BIT;
                if count > 1 {
                    entry.edx |= 1 << 28;
                }
            }
            function if TOPOLOGY.contains(&function) => {
                entry.edx = number.into();
                match entry.index {
                    0 => (entry.eax, entry.ebx, entry.ecx) = (0, 1, 1 << 8),
                    1 => (entry.eax, entry.ebx, entry.ecx) = (bits, count.into(), 2 << 8 | 1),
                    _ => (entry.eax, entry.ebx, entry.ecx) = (0, 0, entry.index),
                }
            }
            // Counters are not carried over a save.
            PERFORMANCE => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
            KVM_FEATURES => entry.eax &= !ASYNC_FAULTS,
            _ => {}
        }
    }
    entries
}

/// As KVM wants it.
///
/// # Errors
/// When there are more entries than KVM takes.
pub fn to_kvm(entries: &[kvm_cpuid_entry2]) -> Result<CpuId, Error> {
    CpuId::from_entries(entries)
        .map_err(|_| Error::BadSnapshot(format!("{} CPUID entries are too many", entries.len())))
}

fn word(entries: &[kvm_cpuid_entry2], leaf: u32, subleaf: u32, register: char) -> u32 {
    let entry = entries.iter().find(|entry| entry.function == leaf && entry.index == subleaf);
    entry.map_or(0, |entry| match register {
        'a' => entry.eax,
        'b' => entry.ebx,
        'c' => entry.ecx,
        _ => entry.edx,
    })
}

/// Whether a guest that was told `saved` can go on here.
///
/// # Errors
/// [`Error::CpuFeatures`] names what is missing.
pub fn check(saved: &[kvm_cpuid_entry2], supported: &[kvm_cpuid_entry2]) -> Result<(), Error> {
    let vendor = |entries: &[kvm_cpuid_entry2]| ['b', 'd', 'c'].map(|register| word(entries, 0, 0, register));
    if vendor(saved) != vendor(supported) {
        return Err(Error::CpuFeatures(format!("the vendor {}", vendor_name(vendor(saved)))));
    }
    let mut missing = Vec::new();
    for (leaf, subleaf, register) in FEATURE_WORDS {
        let mut wanted = word(saved, leaf, subleaf, register);
        if (leaf, register) == (FEATURES, 'c') {
            // Set for every guest, whatever KVM's table says. OSXSAVE mirrors a control register.
            wanted &= !(1 << HYPERVISOR_BIT | 1 << TSC_DEADLINE_BIT | 1 << 27);
        }
        if (leaf, register) == (FEATURES, 'd') {
            wanted &= !(1 << 28);
        }
        if (leaf, subleaf, register) == (7, 0, 'c') {
            // OSPKE mirrors a control register.
            wanted &= !(1 << 4);
        }
        let lost = wanted & !word(supported, leaf, subleaf, register);
        missing.extend(
            (0..32)
                .filter(|bit| lost >> bit & 1 == 1)
                .map(|bit| format!("CPUID {leaf:#x}.{subleaf} e{register}x bit {bit}")),
        );
    }
    if missing.is_empty() { Ok(()) } else { Err(Error::CpuFeatures(missing.join(", "))) }
}

fn vendor_name(words: [u32; 3]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32, registers: [u32; 4]) -> kvm_cpuid_entry2 {
        let [eax, ebx, ecx, edx] = registers;
        kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
    }

    #[test]
    fn what_is_missing_is_named() {
        let here = [entry(0, 0, [1, 1, 2, 3]), entry(7, 0, [0, 0b0111, 0, 0])];
        assert!(check(&here, &here).is_ok());
        let other = [entry(0, 0, [1, 1, 2, 3]), entry(7, 0, [0, 0b1001, 0, 0])];
        match check(&other, &here) {
            Err(Error::CpuFeatures(missing)) => assert_eq!(missing, "CPUID 0x7.0 ebx bit 3"),
            other => panic!("{other:?}"),
        }
        let vendor = [entry(0, 0, [1, 0x6874_7541, 0x444d_4163, 0x6974_6e65])];
        match check(&vendor, &here) {
            Err(Error::CpuFeatures(missing)) => assert_eq!(missing, "the vendor AuthenticAMD"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_vcpu_has_its_number_and_no_counters() {
        let supported = [
            entry(1, 0, [0, 0x0800, 0, 0]),
            entry(0xa, 0, [7, 7, 7, 7]),
            entry(0xb, 0, [0; 4]),
            entry(0xb, 1, [0; 4]),
            entry(KVM_FEATURES, 0, [u32::MAX, 0, 0, 0]),
        ];
        let entries = for_vcpu(&supported, 2, 3);
        assert_eq!(entries[0].ebx, 0x0203_0800);
        assert_eq!(entries[0].ecx >> 24 & 1, 1);
        assert_eq!(entries[1].eax, 0);
        assert_eq!((entries[3].eax, entries[3].ebx, entries[3].edx), (2, 3, 2));
        assert_eq!(entries[4].eax & ASYNC_FAULTS, 0);
        assert!(check(&entries, &supported).is_ok());
    }
}
