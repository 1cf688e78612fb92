//! What a kernel finds in memory when it begins: itself, its initramfs, its command line, ACPI tables, and the start
//! information that leads to them (Xen's PVH boot protocol, as `Documentation/arch/x86` and `xen/include/public/arch-x86/hvm/start_info.h` say).

use std::fs::File;

use linux_loader::loader::elf::PvhBootCapability;
use linux_loader::loader::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};
use linux_loader::loader::{Elf, KernelLoader};
use vm_memory::{Bytes, GuestAddress};

use crate::memory::{Memory, PAGE, layout};
use crate::{Error, acpi};

const START_INFO: u64 = 0x6000;
const MODULES: u64 = 0x6100;
const MEMORY_MAP: u64 = 0x7000;
const COMMAND_LINE: u64 = 0x2_0000;
/// The kernel's own limit (COMMAND_LINE_SIZE).
const COMMAND_LINE_LIMIT: usize = 2048;
/// End of what lies below the ROM area.
const BASE_END: u64 = 0x9_fc00;
const HIGH_MEMORY: u64 = 0x10_0000;
const MAGIC: u32 = 0x336e_c578;
const RAM: u32 = 1;

/// Where the first processor begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// First instruction.
    pub instruction: u64,
    /// Start information, for EBX.
    pub start_info: u64,
}

/// Loads everything.
///
/// # Errors
/// When the kernel is no ELF with a PVH note, or something does not fit.
pub fn load(
    memory: &Memory,
    kernel: &mut File,
    initramfs: Option<&mut File>,
    command_line: &str,
    vcpus: u8,
    devices: u32,
) -> Result<Entry, Error> {
    let loaded =
        Elf::load(&memory.map, None, kernel, Some(GuestAddress(HIGH_MEMORY))).map_err(Error::Loader)?;
    let PvhBootCapability::PvhEntryPresent(instruction) = loaded.pvh_boot_cap else {
        return Err(Error::Kernel("it has no PVH note"));
    };
    let module = match initramfs {
        Some(file) => Some(load_initramfs(memory, file, loaded.kernel_end)?),
        None => None,
    };
    if command_line.len() >= COMMAND_LINE_LIMIT || command_line.bytes().any(|byte| byte == 0) {
        return Err(Error::BadRequest(format!("a command line is at most {} bytes", COMMAND_LINE_LIMIT - 1)));
    }
    let put = |what: &'static str, bytes: &[u8], at: u64| {
        memory
            .map
            .write_slice(bytes, GuestAddress(at))
            .map_err(|_| Error::DoesNotFit { what, needed: bytes.len() as u64 })
    };
    put("the command line", &[command_line.as_bytes(), &[0]].concat(), COMMAND_LINE)?;
    put("the ACPI tables", &acpi::tables(vcpus, devices), acpi::ADDRESS)?;

    let mut ranges = vec![(0, BASE_END), (HIGH_MEMORY, memory.low_end() - HIGH_MEMORY)];
    if memory.bytes() > layout::LOW_END {
        ranges.push((layout::HIGH_START, memory.bytes() - layout::LOW_END));
    }
    let object = |_| Error::DoesNotFit { what: "the start information", needed: PAGE };
    for (number, (addr, size)) in ranges.iter().enumerate() {
        let entry = hvm_memmap_table_entry { addr: *addr, size: *size, type_: RAM, reserved: 0 };
        memory.map.write_obj(entry, GuestAddress(MEMORY_MAP + 24 * number as u64)).map_err(object)?;
    }
    if let Some(module) = module {
        memory.map.write_obj(module, GuestAddress(MODULES)).map_err(object)?;
    }
    let start_info = hvm_start_info {
        magic: MAGIC,
        version: 1,
        flags: 0,
        nr_modules: module.is_some().into(),
        modlist_paddr: MODULES,
        cmdline_paddr: COMMAND_LINE,
        rsdp_paddr: acpi::ADDRESS,
        memmap_paddr: MEMORY_MAP,
        memmap_entries: ranges.len() as u32,
        reserved: 0,
    };
    memory.map.write_obj(start_info, GuestAddress(START_INFO)).map_err(object)?;
    Ok(Entry { instruction: instruction.0, start_info: START_INFO })
}

/// As high as it can be, so that the kernel has room to grow.
fn load_initramfs(memory: &Memory, file: &mut File, kernel_end: u64) -> Result<hvm_modlist_entry, Error> {
    let size = file.metadata().map_err(Error::io("look at the initramfs"))?.len();
    let does_not_fit = || Error::DoesNotFit { what: "the initramfs", needed: size };
    let address = memory.low_end().checked_sub(size.next_multiple_of(PAGE)).ok_or_else(does_not_fit)?;
    if address < kernel_end {
        return Err(does_not_fit());
    }
    let count = usize::try_from(size).map_err(|_| does_not_fit())?;
    memory.map.read_exact_volatile_from(GuestAddress(address), file, count).map_err(|_| does_not_fit())?;
    Ok(hvm_modlist_entry { paddr: address, size, cmdline_paddr: 0, reserved: 0 })
}
