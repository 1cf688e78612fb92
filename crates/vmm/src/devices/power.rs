//! The switch: ports by which a guest turns itself off or asks for a reset (ACPI 6.5, 4.8.3.7 and 4.8.3.6).

use proto::vmm::Ending;

/// Sleep control register.
pub const SLEEP_PORT: u16 = 0x600;
/// Sleep status register; reads as no wake.
pub const SLEEP_STATUS_PORT: u16 = 0x601;
/// Reset register.
pub const RESET_PORT: u16 = 0x602;
/// What a guest writes there.
pub const RESET_VALUE: u8 = 1;
/// The sleep type of soft off.
pub const SOFT_OFF: u8 = 5;

const SLEEP_ENABLE: u8 = 1 << 5;

/// What a write means for the machine.
pub fn write(port: u16, value: u8) -> Option<Ending> {
    match port {
        SLEEP_PORT if value & SLEEP_ENABLE != 0 && value >> 2 & 7 == SOFT_OFF => Some(Ending::PowerOff),
        RESET_PORT if value == RESET_VALUE => Some(Ending::Reset),
        _ => None,
    }
}
