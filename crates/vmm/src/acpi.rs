//! The ACPI tables: hardware-reduced, with processors, one I/O APIC, virtio-mmio devices, a serial port, and registers
//! to switch off and reset. Debian's kernel takes virtio-mmio devices from here alone (`LNRO0005`).

use acpi_tables::aml::{Device, IO, Interrupt, Memory32Fixed, Name, Package, Path, ResourceTemplate};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::{GenericAddress, Sdt};
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};

use crate::devices::{power, serial};
use crate::memory::layout;

/// Where firmware keeps them; the kernel is told the address too.
pub const ADDRESS: u64 = 0xe_0000;
const END: u64 = 0x10_0000;
const OEM: [u8; 6] = *b"PANDO ";
const TABLE: [u8; 8] = *b"PANDOVMM";
const REVISION: u32 = 1;

/// Flags of the FADT (ACPI 6.5, 5.2.9): reset register, hardware-reduced.
const FADT_FLAGS: u32 = 1 << 10 | 1 << 20;
/// No VGA, no CMOS clock; nothing legacy is promised.
const BOOT_FLAGS: u16 = 1 << 2 | 1 << 5;

struct Bytes(Vec<u8>);

impl AmlSink for Bytes {
    fn byte(&mut self, byte: u8) {
        self.0.push(byte);
    }
}

fn bytes(aml: &dyn Aml) -> Vec<u8> {
    let mut sink = Bytes(Vec::new());
    aml.to_aml_bytes(&mut sink);
    sink.0
}

/// The tables of a machine with `vcpus` processors and `devices` virtio devices, to be put at [`ADDRESS`]; the first
/// bytes are the root pointer.
pub fn tables(vcpus: u8, devices: u32) -> Vec<u8> {
    let mut out = vec![0u8; Rsdp::len().next_multiple_of(16)];
    let mut place = |table: &[u8]| {
        let at = ADDRESS + out.len() as u64;
        out.extend_from_slice(table);
        out.resize(out.len().next_multiple_of(16), 0);
        at
    };
    let dsdt = place(&dsdt(devices));
    let fadt = place(&fadt(dsdt));
    let madt = place(&bytes(&madt(vcpus)));
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = place(&bytes(&xsdt));
    let root = bytes(&Rsdp::new(OEM, xsdt));
    out[..root.len()].copy_from_slice(&root);
    debug_assert!(ADDRESS + (out.len() as u64) < END);
    out
}

fn madt(vcpus: u8) -> MADT {
    let mut madt = MADT::new(OEM, TABLE, REVISION, LocalInterruptController::Address(layout::LOCAL_APIC));
    for number in 0..vcpus {
        madt.add_structure(ProcessorLocalApic::new(number, number, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, layout::IO_APIC, 0));
    madt
}

fn fadt(dsdt: u64) -> Vec<u8> {
    let mut fadt = Sdt::new(*b"FACP", 276, 6, OEM, TABLE, REVISION);
    fadt.write_u16(109, BOOT_FLAGS);
    fadt.write_u32(112, FADT_FLAGS);
    fadt.write(116, GenericAddress::io_port_address::<u8>(power::RESET_PORT));
    fadt.write_u8(128, power::RESET_VALUE);
    fadt.write_u8(131, 5); // minor version
    fadt.write_u64(140, dsdt);
    fadt.write(244, GenericAddress::io_port_address::<u8>(power::SLEEP_PORT));
    fadt.write(256, GenericAddress::io_port_address::<u8>(power::SLEEP_STATUS_PORT));
    fadt.update_checksum();
    fadt.as_slice().to_vec()
}

fn dsdt(devices: u32) -> Vec<u8> {
    let mut dsdt = Sdt::new(*b"DSDT", 36, 6, OEM, TABLE, REVISION);
    let mut add = |aml: &dyn Aml| dsdt.append_slice(&bytes(aml));
    for number in 0..devices {
        let address = layout::DEVICES as u32 + number * layout::DEVICE_SIZE as u32;
        let name = format!("_SB_.VI{number:02}");
        add(&Device::new(
            Path::new(&name),
            vec![
                &Name::new(Path::new("_HID"), &"LNRO0005"),
                &Name::new(Path::new("_UID"), &number),
                &Name::new(Path::new("_CCA"), &1u8),
                &Name::new(
                    Path::new("_CRS"),
                    &ResourceTemplate::new(vec![
                        &Memory32Fixed::new(true, address, layout::DEVICE_SIZE as u32),
                        &Interrupt::new(true, true, false, false, layout::FIRST_LINE + number),
                    ]),
                ),
            ],
        ));
    }
    add(&Device::new(
        Path::new("_SB_.COM1"),
        vec![
            &Name::new(Path::new("_HID"), &acpi_tables::aml::EISAName::new("PNP0501")),
            &Name::new(Path::new("_UID"), &0u8),
            &Name::new(
                Path::new("_CRS"),
                &ResourceTemplate::new(vec![
                    &Interrupt::new(true, true, false, false, serial::LINE),
                    &IO::new(serial::PORT, serial::PORT, 0, serial::PORTS as u8),
                ]),
            ),
        ],
    ));
    // Soft off is sleep type 5.
    add(&Name::new(Path::new("_S5_"), &Package::new(vec![&power::SOFT_OFF])));
    dsdt.update_checksum();
    dsdt.as_slice().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_adds_up_to_zero() {
        let tables = tables(32, 8);
        assert_eq!(&tables[..8], b"RSD PTR ");
        let sum = |bytes: &[u8]| bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        assert_eq!(sum(&tables[..20]), 0);
        assert_eq!(sum(&tables[..36]), 0);
        let mut at = 48;
        let mut names = Vec::new();
        while at < tables.len() {
            let length = u32::from_le_bytes(tables[at + 4..at + 8].try_into().unwrap()) as usize;
            names.push(String::from_utf8_lossy(&tables[at..at + 4]).into_owned());
            assert_eq!(sum(&tables[at..at + length]), 0, "{}", names.last().unwrap());
            at += length.next_multiple_of(16);
        }
        assert_eq!(names, ["DSDT", "FACP", "APIC", "XSDT"]);
        assert!(ADDRESS + (tables.len() as u64) < END);
    }
}
