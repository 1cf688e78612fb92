//! Each device as a guest sees it, and what a hostile guest gets out of them.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use proto::vmm::{BootSpec, CardSpec, DiskSpec, Rate, Request};

use crate::harness::{Console, Fds, Vmm, guest};

const DISK: u64 = 1 << 20;

fn image() -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(DISK).unwrap();
    file.write_all_at(&0xabcd_u32.to_le_bytes(), 8 * 512).unwrap();
    file
}

fn delta() -> File {
    let file = tempfile::tempfile().unwrap();
    disk::create_delta(&file, DISK).unwrap();
    file
}

fn add_devices(spec: &mut BootSpec, fds: &mut Fds, image: &File, link: UnixStream, rate: Rate) {
    spec.devices.disks.push(DiskSpec {
        base: fds.add(image.try_clone().unwrap()),
        base_written: false,
        frozen: Vec::new(),
        delta: Some(fds.add(delta())),
        durable: false,
        rate,
    });
    let link = fds.add(link);
    spec.devices.card =
        Some(CardSpec { link, mac: [2, 0, 0, 0, 0, 1], mtu: 65520, offloads: false, rate: Rate::default() });
}

fn boot(kernel: &Path, line: &str, rate: Rate) -> (Vmm, Console, UnixStream, File) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let image = image();
    let (vmm, console) = Vmm::boot_with(kernel, 128, 1, |spec, fds| {
        spec.command_line = line.to_owned();
        add_devices(spec, fds, &image, theirs, rate);
    });
    (vmm, console, ours, image)
}

#[test]
fn every_device_does_what_it_says() {
    let (mut vmm, mut console, mut link, image) = boot(&guest("devices"), "", Rate::default());
    for expected in [
        "disk 2048 sectors",
        "read 0 0xabcd",
        "write 0",
        "again 0 0xfeed",
        "beyond 1",
        "unknown 2",
        "flush 0",
        "zeroes 0",
        "zeroed 0 0x0",
        "interrupt status 1",
        "acknowledged 0",
        "sent",
    ] {
        assert_eq!(console.line(), expected);
    }
    let mut first = [0u8; 4];
    image.read_exact_at(&mut first, 8 * 512).unwrap();
    assert_eq!(u32::from_le_bytes(first), 0xabcd, "the image below is only read");

    let mut frame = vec![0u8; 4 + 2500];
    link.read_exact(&mut frame).unwrap();
    assert_eq!(frame[..4], 2500u32.to_be_bytes());
    assert!(frame[4..].iter().enumerate().all(|(at, byte)| *byte == at as u8));
    // In two parts, the first of which ends within the length.
    link.write_all(&frame[..2]).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    link.write_all(&frame[2..]).unwrap();
    assert_eq!(console.line(), "received 3 1000 1000 512 true");
    assert_eq!(console.line(), "random 64 true");
    assert_eq!(console.line(), "inflated 0");
    assert_eq!(console.line(), "reported 0");
    vmm.client.done(&Request::Balloon { mib: 1000 }, &[]);
    assert_eq!(console.line(), "asked for 16384", "a machine of 128 MiB keeps 64");
}

#[test]
fn a_hostile_guest_harms_only_itself() {
    let kernel = guest("hostile");
    for seed in 1..4 {
        let (mut vmm, mut console, link, _) =
            boot(&kernel, &format!("seed={} rounds=6", seed * 7919), Rate::default());
        // Whatever it sends is taken.
        std::thread::spawn(move || std::io::copy(&mut &link, &mut std::io::sink()));
        assert_eq!(console.line(), "disk works: 0", "seed {seed}");
        let stats = vmm.client.stats();
        assert!(stats.refused_chains > 0, "{stats:?}");
        vmm.client.done(&Request::Stop, &[]);
    }
}

#[test]
fn a_link_that_speaks_nonsense_is_cut_and_the_machine_runs_on() {
    let (mut vmm, mut console, mut link, _) = boot(&guest("devices"), "", Rate::default());
    console.until("sent");
    let mut frame = vec![0u8; 4 + 2500];
    link.read_exact(&mut frame).unwrap();
    link.write_all(&u32::MAX.to_be_bytes()).unwrap();
    assert_eq!(link.read(&mut [0u8; 16]).unwrap(), 0, "the machine closes the link");
    assert_eq!(vmm.client.stats().frames_received, 0);
}

#[test]
fn a_rate_bounds_the_disk() {
    let operations = |rate: Rate| {
        let (mut vmm, mut console, _link, _) = boot(&guest("writer"), "", rate);
        console.line();
        std::thread::sleep(std::time::Duration::from_millis(500));
        vmm.client.stats().disk_written / 4096
    };
    let slow = operations(Rate { operations_per_second: 10, burst_operations: 1, ..Rate::default() });
    // Half a second at ten each second, one burst, and what the machine did before and after.
    assert!(slow <= 8, "{slow} writes");
}

/// The guest never looks at its card; who sends to it waits, and the process sleeps.
#[test]
fn a_link_that_nobody_listens_to_costs_nothing() {
    let (mut vmm, mut console, link, _) = boot(&guest("spin"), "", Rate::default());
    console.line();
    link.set_nonblocking(true).unwrap();
    while std::io::Write::write(&mut &link, &[0u8; 4096]).is_ok() {}
    // The server's thread is the process's first.
    let cpu_ticks = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/stat")).unwrap();
        let fields: Vec<u64> = stat.split_whitespace().filter_map(|field| field.parse().ok()).collect();
        // utime and stime, counted from the end of the numbers before them: pid, ppid, pgrp, ...
        fields[10] + fields[11]
    };
    let before = cpu_ticks(vmm.client.pid);
    std::thread::sleep(std::time::Duration::from_secs(1));
    let used = cpu_ticks(vmm.client.pid) - before;
    assert!(used < 20, "{used} ticks of 10 ms in a second");
    drop(link);
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert!(cpu_ticks(vmm.client.pid) - before < 30, "nor when it is closed");
    vmm.client.done(&Request::Stop, &[]);
}
