//! What every tiny guest has: an entry, a serial port, ports, memory, interrupts, virtio. Included by each guest's source.
//!
//! A guest is 32-bit code in flat memory at 1 MiB, entered as PVH says (protected mode, no paging). It is built for i586,
//! which has no SSE: some KVMs interpret the guest's kernel code and know few instructions.

use core::arch::{asm, global_asm};
use core::fmt::{self, Write};
use core::ptr::{read_volatile, write_volatile};

/// A line on the console.
macro_rules! say {
    ($($arguments:tt)*) => {{
        use core::fmt::Write as _;
        let _ = writeln!($crate::rt::Serial, $($arguments)*);
    }};
}

global_asm!(
    ".section .start, \"ax\"",
    ".globl _start",
    "_start:",
    "mov esp, 0x90000",
    "push ebx",
    "call guest_main",
    "1: hlt",
    "jmp 1b",
    // Counts interrupts and tells the local APIC that each is done.
    ".globl interrupt",
    "interrupt:",
    "push eax",
    "lock inc dword ptr [0x7ff0]",
    "mov eax, 0xfee000b0",
    "mov dword ptr [eax], 0",
    "pop eax",
    // An iretd in pieces: KVM's emulator, which runs all of a guest on some hosts, does not know it in this mode.
    "push dword ptr [esp + 8]",
    "popfd",
    "ret 8",
);

#[unsafe(no_mangle)]
extern "C" fn guest_main(_start_info: u32) -> ! {
    crate::main();
    power_off()
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    say!("PANIC {}", info.message());
    power_off()
}

// The precompiled core names it, though nothing unwinds here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

pub struct Serial;

impl Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            out8(0x3f8, byte);
        }
        Ok(())
    }
}


pub fn out8(port: u16, value: u8) {
    unsafe { asm!("out dx, al", in("dx") port, in("al") value) }
}

pub fn in8(port: u16) -> u8 {
    let value: u8;
    unsafe { asm!("in al, dx", in("dx") port, out("al") value) }
    value
}

pub fn power_off() -> ! {
    loop {
        out8(0x600, 5 << 2 | 1 << 5);
    }
}

pub fn reset() -> ! {
    loop {
        out8(0x602, 1);
    }
}

pub fn read32(address: u32) -> u32 {
    unsafe { read_volatile(address as *const u32) }
}

pub fn write32(address: u32, value: u32) {
    unsafe { write_volatile(address as *mut u32, value) }
}

pub fn read16(address: u32) -> u16 {
    unsafe { read_volatile(address as *const u16) }
}

pub fn write16(address: u32, value: u16) {
    unsafe { write_volatile(address as *mut u16, value) }
}

pub fn read8(address: u32) -> u8 {
    unsafe { read_volatile(address as *const u8) }
}

pub fn write8(address: u32, value: u8) {
    unsafe { write_volatile(address as *mut u8, value) }
}

pub fn write64(address: u32, value: u64) {
    write32(address, value as u32);
    write32(address + 4, (value >> 32) as u32);
}

/// A virtio device on MMIO, with one queue in use at a time, at fixed places in memory.
pub struct Virtio {
    pub base: u32,
}

pub const QUEUE_SIZE: u32 = 8;

/// A queue at `at`: 4 KiB for descriptors, available ring, used ring.
pub struct Ring {
    pub base: u32,
    pub number: u32,
    pub at: u32,
    pub next: u16,
    pub seen: u16,
}

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;

impl Virtio {
    /// The device at place `number`, if it is of this kind.
    pub fn find(number: u32, kind: u32) -> Option<Self> {
        let base = 0xd000_0000 + number * 0x1000;
        (read32(base) == 0x7472_6976 && read32(base + 8) == kind).then_some(Self { base })
    }

    /// Resets and negotiates `low` (features 0 to 31) and version 1.
    pub fn begin(&self, low: u32) {
        write32(self.base + 0x70, 0);
        write32(self.base + 0x70, 1);
        write32(self.base + 0x70, 3);
        write32(self.base + 0x24, 0);
        write32(self.base + 0x20, low);
        write32(self.base + 0x24, 1);
        write32(self.base + 0x20, 1);
        write32(self.base + 0x70, 11);
        assert!(read32(self.base + 0x70) & 8 != 0, "features refused");
    }

    pub fn queue(&self, number: u32, at: u32) -> Ring {
        for offset in (0..0x1000).step_by(4) {
            write32(at + offset, 0);
        }
        write32(self.base + 0x30, number);
        write32(self.base + 0x38, QUEUE_SIZE);
        for (register, address) in [(0x80, at), (0x90, at + 0x400), (0xa0, at + 0x800)] {
            write32(self.base + register, address);
            write32(self.base + register + 4, 0);
        }
        write32(self.base + 0x44, 1);
        Ring { base: self.base, number, at, next: 0, seen: 0 }
    }

    pub fn go(&self) {
        write32(self.base + 0x70, 15);
        assert!(read32(self.base + 0x70) & 0x40 == 0, "device needs a reset");
    }
}

impl Ring {
    pub fn describe(&self, index: u32, address: u32, length: u32, flags: u16, next: u16) {
        let at = self.at + index * 16;
        write64(at, u64::from(address));
        write32(at + 8, length);
        write16(at + 12, flags);
        write16(at + 14, next);
    }

    /// Offers the chain that begins at descriptor `head`, without ringing.
    pub fn offer(&mut self, head: u16) {
        write16(self.at + 0x404 + u32::from(self.next) % QUEUE_SIZE * 2, head);
        self.next = self.next.wrapping_add(1);
        write16(self.at + 0x402, self.next);
    }

    pub fn ring(&self) {
        write32(self.base + 0x50, self.number);
    }

    pub fn used(&self) -> u16 {
        read16(self.at + 0x802)
    }

    /// Waits for the next used chain: its head and how many bytes were written.
    pub fn wait(&mut self) -> (u32, u32) {
        while self.used() == self.seen {}
        let at = self.at + 0x804 + u32::from(self.seen) % QUEUE_SIZE * 8;
        self.seen = self.seen.wrapping_add(1);
        (read32(at), read32(at + 4))
    }
}

/// One request to a block device: type, sector, data. Returns the status.
pub fn block_request(ring: &mut Ring, kind: u32, sector: u32, data: u32, length: u32) -> u8 {
    const HEADER: u32 = 0x30000;
    const STATUS: u32 = 0x30100;
    write32(HEADER, kind);
    write32(HEADER + 4, 0);
    write32(HEADER + 8, sector);
    write32(HEADER + 12, 0);
    write8(STATUS, 0xee);
    ring.describe(0, HEADER, 16, NEXT, 1);
    ring.describe(1, data, length, NEXT | if kind == 0 { WRITE } else { 0 }, 2);
    ring.describe(2, STATUS, 1, WRITE, 0);
    ring.offer(0);
    ring.ring();
    ring.wait();
    read8(STATUS)
}

/// The number after `name=` on the command line.
pub fn argument(name: &str) -> Option<u32> {
    const COMMAND_LINE: u32 = 0x20000;
    let name = name.as_bytes();
    let mut at = COMMAND_LINE;
    while read8(at) != 0 {
        let found = (0..name.len() as u32).all(|offset| read8(at + offset) == name[offset as usize]);
        if found && read8(at + name.len() as u32) == b'=' {
            at += name.len() as u32 + 1;
            let mut number = 0;
            while let digit @ b'0'..=b'9' = read8(at) {
                number = number * 10 + u32::from(digit - b'0');
                at += 1;
            }
            return Some(number);
        }
        at += 1;
    }
    None
}

unsafe extern "C" {
    fn interrupt();
}

const VECTOR: u32 = 0x40;

/// Takes interrupts of I/O APIC line `line` and of the local APIC's timer; [`interrupts`] counts them.
pub fn take_interrupts(line: u32) {
    const GDT: u32 = 0x80000;
    const IDT: u32 = 0x81000;
    const POINTER: u32 = 0x80100;
    write64(GDT, 0);
    write64(GDT + 8, 0x00cf_9b00_0000_ffff);
    write64(GDT + 16, 0x00cf_9300_0000_ffff);
    let handler = interrupt as *const () as u32;
    for vector in 0..256 {
        write32(IDT + vector * 8, 8 << 16 | handler & 0xffff);
        write32(IDT + vector * 8 + 4, handler & 0xffff_0000 | 0x8e00);
    }
    let load = |instruction_is_gdt: bool, base: u32, limit: u16| {
        write16(POINTER, limit);
        write32(POINTER + 2, base);
        if instruction_is_gdt {
            unsafe { asm!("lgdt [{}]", in(reg) POINTER) }
        } else {
            unsafe { asm!("lidt [{}]", in(reg) POINTER) }
        }
    };
    load(true, GDT, 23);
    load(false, IDT, 2047);
    // The local APIC on, spurious vector 0xff; the line to vector 0x40, edge, to processor 0.
    write32(0xfee0_00f0, 0x1ff);
    write32(0xfec0_0000, 0x10 + 2 * line + 1);
    write32(0xfec0_0010, 0);
    write32(0xfec0_0000, 0x10 + 2 * line);
    write32(0xfec0_0010, VECTOR);
    unsafe { asm!("sti") }
}

/// Interrupts so far.
pub fn interrupts() -> u32 {
    read32(0x7ff0)
}

/// Waits for an interrupt.
pub fn halt() {
    unsafe { asm!("hlt") }
}

/// The local APIC's timer, every `ticks` of its clock.
pub fn start_timer(ticks: u32) {
    write32(0xfee0_03e0, 0xb);
    write32(0xfee0_0320, 1 << 17 | VECTOR + 1);
    write32(0xfee0_0380, ticks);
}
