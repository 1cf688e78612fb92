//! Measures the link with a real TCP stack as the guest: a TAP in a network namespace, whose frames are pumped to the
//! link over a socket pair, as QEMU would send them.
//!
//! `unshare -n target/release/examples/throughput [seconds]` as root (a namespace of its own keeps the machine's network
//! as it is). The guest's side runs in the same process, in a second namespace. Prints one line per measurement; the CPU
//! is that of the link's worker thread.
//!
//! The frames cross one more process border than with QEMU (the pump), so figures are lower bounds.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measuring program, not part of the crate")]

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use edge::egress::{EgressPolicy, Floor};
use edge::link::{LinkConfig, Links};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// The world: an address of this namespace, opened in the floor.
const WORLD: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const MAC: &str = "02:50:41:4e:44:4f";

fn ip(arguments: &str) {
    assert!(
        Command::new("ip").args(arguments.split_whitespace()).status().unwrap().success(),
        "ip {arguments}"
    );
}

/// CPU time of a thread by name, in milliseconds.
fn cpu(name: &str) -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let mut total = 0;
    for task in tasks.flatten() {
        let comm = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if comm.trim() == name {
            let stat = std::fs::read_to_string(task.path().join("schedstat")).unwrap();
            total += stat.split(' ').next().unwrap().parse::<u64>().unwrap() / 1_000_000;
        }
    }
    total
}

/// Passes frames between a TAP and the link.
fn pump(tap: OwnedFd, link: UnixStream) {
    let (mut from_tap, mut to_tap) = (File::from(tap.try_clone().unwrap()), File::from(tap));
    let (mut to_link, mut from_link) = (link.try_clone().unwrap(), link);
    std::thread::spawn(move || {
        let mut frame = vec![0; 4 + 70000];
        while let Ok(length) = from_tap.read(&mut frame[4..]) {
            frame[..4].copy_from_slice(&(length as u32).to_be_bytes());
            if to_link.write_all(&frame[..4 + length]).is_err() {
                return;
            }
        }
    });
    std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 20];
        let mut filled = 0;
        while let Ok(got) = from_link.read(&mut buffer[filled..]) {
            if got == 0 {
                return;
            }
            filled += got;
            let mut at = 0;
            while let Ok(Some((frame, used))) = edge::link::frame::split(&buffer[at..filled]) {
                // A TAP that is down refuses frames.
                let _ = to_tap.write(frame);
                at += used;
            }
            buffer.copy_within(at..filled, 0);
            filled -= at;
        }
    });
}

/// Runs `work` in the guest's namespace, in a thread of its own.
fn in_guest<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> std::thread::JoinHandle<T> {
    std::thread::spawn(move || {
        let namespace = File::open("/run/netns/edge-guest").unwrap();
        let flags = Some(rustix::thread::LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(namespace.as_fd(), flags).unwrap();
        work()
    })
}

fn open_tap() -> OwnedFd {
    in_guest(|| {
        // `ip tuntap add` makes it; attaching to it is one request.
        let tap =
            rustix::fs::open("/dev/net/tun", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()).unwrap();
        tun::attach(&tap, "tap0");
        tap
    })
    .join()
    .unwrap()
}

#[allow(unsafe_code)]
mod tun {
    use std::os::fd::{AsRawFd, OwnedFd};

    /// TUNSETIFF for a TAP without packet information.
    pub(super) fn attach(fd: &OwnedFd, name: &str) {
        let mut request = [0u8; 40];
        request[..name.len()].copy_from_slice(name.as_bytes());
        request[16..18].copy_from_slice(&0x1002u16.to_ne_bytes());
        // SAFETY: the request is an ifreq, 40 bytes, that outlives the call.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), 0x4004_54ca, request.as_mut_ptr()) };
        assert_eq!(result, 0, "TUNSETIFF: {}", std::io::Error::last_os_error());
    }
}

/// Prints what `bytes` in `time` are, and what they cost.
fn report(what: &str, bytes: u64, time: Duration, busy: u64) {
    let gigabits = bytes as f64 * 8.0 / 1e9 / time.as_secs_f64();
    let cost = busy as f64 / 1e3 / (bytes as f64 / 1e9);
    println!("{what:<28} {gigabits:6.2} Gbit/s   worker {cost:.2} CPU-s/GB");
}

/// Reads until the end.
fn drain(mut stream: TcpStream) -> u64 {
    let mut buffer = vec![0; 256 * 1024];
    let mut total = 0;
    while let Ok(got) = stream.read(&mut buffer) {
        if got == 0 {
            break;
        }
        total += got as u64;
    }
    total
}

/// Writes until the time is over. What was written is counted by the reader.
fn flood(mut stream: TcpStream, time: Duration) -> u64 {
    let buffer = vec![7; 256 * 1024];
    let end = Instant::now() + time;
    while Instant::now() < end && stream.write_all(&buffer).is_ok() {}
    0
}

/// One direction, some streams. Bytes count where they arrive.
fn bulk(listener: &TcpListener, streams: usize, up: bool, time: Duration) {
    let server = listener.local_addr().unwrap();
    let send_or_drain = move |stream, send| if send { flood(stream, time) } else { drain(stream) };
    let begin = Instant::now();
    let before = cpu("edge-link-0");
    let guests: Vec<_> = (0..streams)
        .map(|_| in_guest(move || send_or_drain(TcpStream::connect(server).unwrap(), up)))
        .collect();
    let hosts: Vec<_> = (0..streams)
        .map(|_| {
            let stream = listener.accept().unwrap().0;
            std::thread::spawn(move || send_or_drain(stream, !up))
        })
        .collect();
    let total = guests.into_iter().chain(hosts).map(|thread| thread.join().unwrap()).sum();
    let name = format!("{} {streams} stream(s)", if up { "guest to world," } else { "world to guest," });
    report(&name, total, begin.elapsed(), cpu("edge-link-0") - before);
}

fn main() {
    let seconds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(3);
    let time = Duration::from_secs(seconds);
    let _ = Command::new("ip").args(["netns", "del", "edge-guest"]).status();
    ip("link set lo up");
    ip(&format!("addr add {WORLD}/32 dev lo"));
    ip("netns add edge-guest");
    ip("-n edge-guest tuntap add tap0 mode tap");
    let config =
        LinkConfig { workers: 1, floor: Floor::with_opened(&[(WORLD, 32)]), ..LinkConfig::default() };
    let links = Links::start(config).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let link = links.attach("ibench".parse().unwrap(), theirs.into(), EgressPolicy::OPEN).unwrap();
    pump(open_tap(), ours);
    ip(&format!("-n edge-guest link set tap0 address {MAC} mtu 65520 up"));
    ip("-n edge-guest link set lo up");
    ip("-n edge-guest addr add 10.0.2.15/24 dev tap0");
    ip("-n edge-guest route add default via 10.0.2.2");
    let listener = TcpListener::bind((WORLD, 0)).unwrap();
    for (streams, up) in [(1, true), (1, false), (8, true), (8, false)] {
        bulk(&listener, streams, up, time);
    }
    dials(&link, time);
    drop(link);
    ip("netns del edge-guest");
}

/// Connections into the guest, one after the other, each with one byte both ways.
fn dials(link: &edge::link::Link, time: Duration) {
    in_guest(|| {
        let listener = TcpListener::bind("0.0.0.0:7000").unwrap();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().map_while(Result::ok) {
                let mut byte = [0];
                if stream.read_exact(&mut byte).is_ok() {
                    let _ = stream.write_all(&byte);
                }
            }
        });
    })
    .join()
    .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (count, elapsed) = runtime.block_on(async {
        let begin = Instant::now();
        let mut count = 0u32;
        while begin.elapsed() < time {
            let mut stream = link.dial(7000).await.unwrap();
            stream.write_all(b"x").await.unwrap();
            stream.read_u8().await.unwrap();
            count += 1;
        }
        (count, begin.elapsed())
    });
    println!("dial, 1 byte, answer, close   {:6.0}/s", f64::from(count) / elapsed.as_secs_f64());
}
