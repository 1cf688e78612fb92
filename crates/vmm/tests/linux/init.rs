//! /init of the Linux guests in the vmm's tests: counts on every processor, in memory and on disk, and says so.
//!
//! Built by `lab/build` with rustc alone, for musl: it has no dependencies. Once in 50 ms it says
//! `tick N cpus A,B… disk D frames F`: N in memory; A, B: what each processor has counted; D: N as it was read back from
//! /dev/vda, where it was written before; F: frames that came back from the link.

use std::ffi::{CString, c_char, c_int, c_long, c_ulong, c_void};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

unsafe extern "C" {
    fn mount(source: *const c_char, target: *const c_char, kind: *const c_char, flags: c_ulong, data: *const c_void) -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
    fn reboot(command: c_int) -> c_int;
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn ioctl(fd: c_int, request: c_int, ...) -> c_int;
    fn sendto(fd: c_int, bytes: *const c_void, length: usize, flags: c_int, address: *const c_void, size: u32) -> isize;
    fn recv(fd: c_int, bytes: *mut c_void, length: usize, flags: c_int) -> isize;
    fn bind(fd: c_int, address: *const c_void, size: u32) -> c_int;
    fn fsync(fd: c_int) -> c_int;
}

const FINIT_MODULE: c_long = 313;
const POWER_OFF: c_int = 0x4321_fedc_u32 as c_int;
/// An EtherType for experiments.
const PROTOCOL: u16 = 0x88b5;
const COUNTERS: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];
static COUNTS: [AtomicU64; 8] = COUNTERS;

fn main() {
    let text = |text: &str| CString::new(text).unwrap();
    for (kind, target) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        let _ = std::fs::create_dir_all(target);
        unsafe { mount(text(kind).as_ptr(), text(target).as_ptr(), text(kind).as_ptr(), 0, std::ptr::null()) };
    }
    for name in std::fs::read_to_string("/modules/order").unwrap().lines() {
        let module = File::open(format!("/modules/{name}")).unwrap();
        let parameters = text("");
        unsafe { syscall(FINIT_MODULE, module.as_raw_fd(), parameters.as_ptr(), 0) };
    }
    let command_line = std::fs::read_to_string("/proc/cmdline").unwrap();
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    println!("up: {cpus} cpus, random {}", random());
    if command_line.contains("test=power-off") {
        unsafe { reboot(POWER_OFF) };
    }
    for count in COUNTS.iter().take(cpus) {
        std::thread::spawn(move || {
            loop {
                count.fetch_add(1, Ordering::Relaxed);
                std::hint::spin_loop();
            }
        });
    }
    let disk = wait_for_disk();
    let card = Card::open();
    let mut frames = 0u64;
    for number in 1u64.. {
        disk.write_all_at(&number.to_le_bytes().repeat(512), 8192).unwrap();
        assert_eq!(unsafe { fsync(disk.as_raw_fd()) }, 0);
        let mut bytes = [0u8; 4096];
        File::open("/dev/vda").unwrap().read_exact_at(&mut bytes, 8192).unwrap();
        let read = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        if let Some(card) = &card {
            card.send(number);
            frames += card.receive();
        }
        let counts: Vec<String> = COUNTS.iter().take(cpus).map(|count| count.load(Ordering::Relaxed).to_string()).collect();
        println!("tick {number} cpus {} disk {read} frames {frames}", counts.join(","));
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Whether the entropy device gives bytes that are not all the same.
fn random() -> &'static str {
    for _ in 0..1000 {
        let mut bytes = [0u8; 32];
        if let Ok(device) = File::open("/dev/hwrng")
            && std::io::Read::read_exact(&mut &device, &mut bytes).is_ok()
        {
            return if bytes.iter().any(|byte| *byte != bytes[0]) { "works" } else { "is not random" };
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    "is missing"
}

fn wait_for_disk() -> File {
    for _ in 0..1000 {
        if let Ok(disk) = OpenOptions::new().read(true).write(true).open("/dev/vda") {
            return disk;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("no /dev/vda")
}

struct Card {
    fd: c_int,
    index: c_int,
}

impl Card {
    fn open() -> Option<Self> {
        let name = std::fs::read_dir("/sys/class/net").ok()?.flatten().find(|entry| entry.file_name() != "lo")?;
        let index: c_int = std::fs::read_to_string(name.path().join("ifindex")).ok()?.trim().parse().ok()?;
        // struct ifreq: name, then flags; IFF_UP.
        let mut request = [0u8; 40];
        let name = name.file_name().into_encoded_bytes();
        request[..name.len()].copy_from_slice(&name);
        request[16] = 1;
        let fd = unsafe { socket(17, 2 | 0o4000, i32::from(PROTOCOL.to_be())) };
        assert!(fd >= 0 && unsafe { ioctl(fd, 0x8914, request.as_mut_ptr()) } == 0, "the card does not come up");
        let card = Self { fd, index };
        assert_eq!(unsafe { bind(fd, card.address().as_ptr().cast(), 20) }, 0);
        Some(card)
    }

    /// struct sockaddr_ll: family, protocol, index, and a broadcast address of six bytes.
    fn address(&self) -> [u8; 20] {
        let mut address = [0u8; 20];
        address[0] = 17;
        address[2..4].copy_from_slice(&PROTOCOL.to_be_bytes());
        address[4..8].copy_from_slice(&self.index.to_ne_bytes());
        address[11] = 6;
        address[12..18].fill(0xff);
        address
    }

    fn send(&self, number: u64) {
        let mut payload = [0u8; 60];
        payload[..8].copy_from_slice(&number.to_le_bytes());
        unsafe { sendto(self.fd, payload.as_ptr().cast(), payload.len(), 0, self.address().as_ptr().cast(), 20) };
    }

    fn receive(&self) -> u64 {
        let mut bytes = [0u8; 2048];
        let mut count = 0;
        while unsafe { recv(self.fd, bytes.as_mut_ptr().cast(), bytes.len(), 0) } > 0 {
            count += 1;
        }
        count
    }
}
