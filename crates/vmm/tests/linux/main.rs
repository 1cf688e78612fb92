//! Linux on the vmm. Needs a KVM that can run it: `make lab` runs this where there is one (docs/lab.md).
//!
//! In the environment: PANDO_GUEST, a directory with vmlinux, initramfs, base.raw and modules/ as `pando setup` makes it;
//! PANDO_INIT, the program built from init.rs; PANDO_VMM, the vmm.
#![allow(unsafe_code, clippy::unwrap_used, unreachable_pub)]

#[path = "../all/harness.rs"]
#[allow(dead_code, reason = "each of the two test programs uses a part")]
mod harness;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Instant;

use harness::{Console, Copied, Fds, Snapshot, Vmm, fork};
use proto::vmm::{BootSpec, CardSpec, DevicesSpec, DiskSpec, Ending, Rate, Request, RestoreSpec};

const DISK: u64 = 64 << 20;

fn path(variable: &str) -> PathBuf {
    PathBuf::from(
        std::env::var_os(variable).unwrap_or_else(|| panic!("{variable} is not set; see docs/lab.md")),
    )
}

/// An initramfs (newc) of init.rs and the guest's modules.
fn initramfs() -> File {
    let mut archive = Vec::new();
    let mut add = |name: &str, mode: u32, data: &[u8]| {
        let fields = [1, mode, 0, 0, 1, 0, data.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        archive.extend(b"070701");
        fields.iter().for_each(|field| archive.extend(format!("{field:08x}").bytes()));
        archive.extend(name.bytes());
        archive.push(0);
        archive.resize(archive.len().next_multiple_of(4), 0);
        archive.extend(data);
        archive.resize(archive.len().next_multiple_of(4), 0);
    };
    add("modules", 0o040_755, &[]);
    add("init", 0o100_755, &std::fs::read(path("PANDO_INIT")).unwrap());
    for entry in std::fs::read_dir(path("PANDO_GUEST").join("modules")).unwrap() {
        let entry = entry.unwrap();
        let name = format!("modules/{}", entry.file_name().to_string_lossy());
        add(&name, 0o100_644, &std::fs::read(entry.path()).unwrap());
    }
    add("TRAILER!!!", 0, &[]);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&archive).unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    file
}

/// Not a test: leaves the counting guest's initramfs where PANDO_INITRAMFS says, for lab/beside-qemu.
#[test]
#[ignore = "writes a file for another program"]
fn write_initramfs() {
    std::io::copy(&mut initramfs(), &mut File::create(path("PANDO_INITRAMFS")).unwrap()).unwrap();
}

fn delta(bytes: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    disk::create_delta(&file, bytes).unwrap();
    file
}

/// A link whose other end sends every frame back.
fn echo() -> UnixStream {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    std::thread::spawn(move || {
        let mut length = [0u8; 4];
        while ours.read_exact(&mut length).is_ok() {
            let mut frame = vec![0u8; u32::from_be_bytes(length) as usize];
            if ours.read_exact(&mut frame).is_err() {
                return;
            }
            // Not to its own address: the guest's stack would take it for a loop of its own.
            frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
            let _ = ours.write_all(&[&length[..], &frame].concat());
        }
    });
    theirs
}

fn card(fds: &mut Fds) -> CardSpec {
    CardSpec {
        link: fds.add(echo()),
        mac: [2, 0, 0, 0, 0, 9],
        mtu: 65520,
        offloads: false,
        rate: Rate::default(),
    }
}

fn blank() -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(DISK).unwrap();
    file
}

/// The counting guest on two processors.
fn counting(base: &File) -> (Vmm, Console) {
    Vmm::boot_with(&path("PANDO_GUEST").join("vmlinux"), 256, 2, |spec, fds| {
        counting_spec(spec, fds, base);
    })
}

fn counting_spec(spec: &mut BootSpec, fds: &mut Fds, base: &File) {
    spec.command_line = "console=ttyS0 reboot=a panic=-1 quiet pci=off".to_owned();
    spec.initramfs = Some(fds.add(initramfs()));
    let base = fds.add(base.try_clone().unwrap());
    let disk = DiskSpec {
        base,
        base_written: false,
        frozen: Vec::new(),
        delta: Some(fds.add(delta(DISK))),
        durable: false,
        rate: Rate::default(),
    };
    spec.devices.disks.push(disk);
    spec.devices.card = Some(card(fds));
}

/// One line of the counting guest.
#[derive(Debug)]
struct Tick {
    number: u64,
    cpus: Vec<u64>,
    disk: u64,
    frames: u64,
}

fn tick(console: &mut Console) -> Tick {
    parse(&console.until("tick "))
}

fn parse(line: &str) -> Tick {
    let words: Vec<&str> = line.split_whitespace().collect();
    let value = |name: &str| {
        let at = words.iter().position(|word| *word == name).unwrap_or_else(|| panic!("{line:?}"));
        words[at + 1]
    };
    Tick {
        number: value("tick").parse().unwrap(),
        cpus: value("cpus").split(',').map(|count| count.parse().unwrap()).collect(),
        disk: value("disk").parse().unwrap(),
        frames: value("frames").parse().unwrap(),
    }
}

/// The machine goes on from `before`: nothing is lost, repeated or stands still.
fn goes_on(console: &mut Console, before: &Tick) -> Tick {
    let mut last = tick(console);
    assert!(last.number > before.number && last.number <= before.number + 3, "{before:?} then {last:?}");
    for _ in 0..3 {
        let next = tick(console);
        assert_eq!(next.number, last.number + 1);
        assert_eq!(next.disk, next.number);
        for (now, then) in next.cpus.iter().zip(&before.cpus) {
            assert!(now > then, "a processor stands still: {before:?} then {next:?}");
        }
        last = next;
    }
    assert!(last.frames > before.frames, "no frames: {before:?} then {last:?}");
    last
}

#[test]
fn debian_and_the_agent_come_up() {
    let begun = Instant::now();
    let guest = path("PANDO_GUEST");
    let (mut vmm, mut console) = Vmm::boot_with(&guest.join("vmlinux"), 512, 2, |spec, fds| {
        spec.command_line = "console=ttyS0 reboot=a panic=-1 quiet random.trust_cpu=on pci=off".to_owned();
        spec.initramfs = Some(fds.add(File::open(guest.join("initramfs")).unwrap()));
        let base = File::open(guest.join("base.raw")).unwrap();
        let top = delta(base.metadata().unwrap().len());
        let disk = DiskSpec {
            base: fds.add(base),
            base_written: false,
            frozen: Vec::new(),
            delta: Some(fds.add(top)),
            durable: false,
            rate: Rate::default(),
        };
        spec.devices.disks.push(disk);
        spec.devices.card = Some(card(fds));
    });
    console.until("pando-guest: ready");
    println!("agent ready after {:?}", begun.elapsed());
    let stats = vmm.client.stats();
    assert!(stats.disk_read > 1 << 20 && stats.disk_written > 0, "{stats:?}");
    assert_eq!(stats.refused_chains, 0, "{stats:?}");
}

#[test]
fn linux_switches_itself_off() {
    let (mut vmm, mut console) = Vmm::boot_with(&path("PANDO_GUEST").join("vmlinux"), 256, 1, |spec, fds| {
        counting_spec(spec, fds, &blank());
        spec.command_line += " test=power-off";
    });
    let line = console.until("up: ");
    assert!(line.contains("1 cpus, random works"), "{line}");
    assert_eq!(vmm.client.ending(), Ending::PowerOff);
}

/// A snapshot as files.
struct Saved {
    state: File,
    memory: Vec<File>,
    frozen: Vec<File>,
}

/// Saves a paused machine, on top of the files it came from.
fn save(vmm: &mut Vmm, memory: &[File], frozen: &[File]) -> Saved {
    let Snapshot { state, memory: delta } = vmm.save();
    let copies = |files: &[File]| files.iter().map(|file| file.try_clone().unwrap()).collect::<Vec<_>>();
    let mut memory = copies(memory);
    memory.push(delta);
    Saved { state, memory, frozen: copies(frozen) }
}

/// A new process goes on from a snapshot; its own delta is returned too.
fn restore(saved: &Saved, base: &File) -> (Vmm, Console, File) {
    let mut vmm = Vmm::start(&[]);
    let (console, theirs) = Console::new();
    let top = delta(DISK);
    let mut fds = Fds::default();
    let mut add = |file: &File| fds.add(file.try_clone().unwrap());
    let spec = RestoreSpec {
        state: add(&saved.state),
        memory: saved.memory.iter().map(&mut add).collect(),
        devices: DevicesSpec {
            disks: vec![DiskSpec {
                base: add(base),
                base_written: false,
                frozen: saved.frozen.iter().map(&mut add).collect(),
                delta: Some(add(&top)),
                durable: false,
                rate: Rate::default(),
            }],
            card: Some(card(&mut fds)),
            console: Some(fds.add(theirs)),
        },
    };
    vmm.client.done(&Request::Restore(spec), &fds.borrow());
    (vmm, console, top)
}

fn allocated(file: &File) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) * 512
}

#[test]
fn a_saved_machine_goes_on_in_another_process_and_again() {
    let base = blank();
    let first_delta = delta(DISK);
    let (mut vmm, mut console) = Vmm::boot_with(&path("PANDO_GUEST").join("vmlinux"), 256, 2, |spec, fds| {
        counting_spec(spec, fds, &base);
        spec.devices.disks[0].delta = Some(fds.add(first_delta.try_clone().unwrap()));
    });
    let mut before = tick(&mut console);
    while before.number < 5 {
        before = tick(&mut console);
    }
    vmm.client.done(&Request::Pause, &[]);
    let first = save(&mut vmm, &[], &[first_delta]);
    // What it said before the pause is still to be read.
    vmm.client.done(&Request::Stop, &[]);
    before = console.rest().into_iter().next_back().map_or(before, |line| parse(&line));

    let begun = Instant::now();
    let (mut vmm, mut console, second_delta) = restore(&first, &base);
    vmm.client.done(&Request::Resume, &[]);
    let last = goes_on(&mut console, &before);
    println!("restored and four ticks after {:?}", begun.elapsed());
    vmm.client.done(&Request::Pause, &[]);
    let frozen = [first.frozen[0].try_clone().unwrap(), second_delta];
    let second = save(&mut vmm, &first.memory, &frozen);
    vmm.client.done(&Request::Stop, &[]);
    let last = console.rest().into_iter().next_back().map_or(last, |line| parse(&line));
    let (full, written) = (allocated(&second.memory[0]), allocated(&second.memory[1]));
    println!("memory files: {full} bytes, then {written}");
    assert!(written < full / 2, "only what was written is saved: {written} of {full}");

    let (mut vmm, mut console, _) = restore(&second, &base);
    vmm.client.done(&Request::Resume, &[]);
    goes_on(&mut console, &last);
    // The older snapshot is as it was.
    let (mut vmm, mut console, _) = restore(&first, &base);
    vmm.client.done(&Request::Resume, &[]);
    goes_on(&mut console, &before);
}

#[test]
fn twenty_copies_of_a_running_linux() {
    let base = blank();
    let (mut vmm, mut console) = counting(&base);
    let before = tick(&mut console);
    let mut fds = Fds::default();
    let own = fds.add(delta(DISK));
    let begun = Instant::now();
    let (mut copies, paused_us) = fork(&mut vmm, 20, &[own], &mut fds, |child, fds| {
        child.deltas.push(fds.add(delta(DISK)));
        child.link = Some(fds.add(echo()));
    });
    println!("20 copies after {:?}, paused for {paused_us} us", begun.elapsed());
    let mut numbers = Vec::new();
    for Copied { console, .. } in &mut copies {
        let first = tick(console);
        assert!(first.number > before.number, "{first:?}");
        numbers.push(first.number);
        let last = goes_on(console, &first);
        assert!(last.cpus.len() == 2);
    }
    numbers.dedup();
    assert_eq!(numbers.len(), 1, "all copies go on from the same number: {numbers:?}");
    goes_on(&mut console, &before);
}
