//! Hostile and greedy guests, and what is left when they have gone.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, Instant};

use edge::egress::EgressPolicy;
use edge::link::{Budget, Limits, LinkConfig, Links, frame};
use proto::guest;
use smoltcp::socket::tcp::State;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::guest::{attach, attach_to, config, take};
use crate::outbound::{echo_server, server};

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn descriptors_return_to_the_baseline_after_churn() {
    let (_links, link, mut guest) = attach(config(), EgressPolicy::OPEN);
    let to = server(|mut stream| {
        let mut byte = [0];
        if stream.read_exact(&mut byte).is_ok() && byte[0] % 2 == 0 {
            let _ = stream.write_all(&byte);
        }
    });
    guest.open(to);
    std::thread::sleep(Duration::from_millis(100));
    let before = open_descriptors();
    for number in 0..500u32 {
        let handle = guest.open(to).unwrap();
        guest.send(handle, &[number as u8]);
        match number % 3 {
            0 => guest.tcp(handle).close(),
            1 => guest.tcp(handle).abort(),
            _ => drop(guest.receive_to_end(handle)),
        }
        guest.poll();
        guest.tcp(handle).close();
        guest.wait(|guest| !matches!(guest.state(handle), State::Established | State::SynSent));
        if number % 3 != 0 {
            guest.sockets.remove(handle);
        }
    }
    guest.wait(|_| link.stats().connections <= 1);
    let end = Instant::now() + Duration::from_secs(5);
    while open_descriptors() > before && Instant::now() < end {
        guest.poll();
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(open_descriptors() <= before, "{} > {before}", open_descriptors());
}

#[test]
fn five_thousand_half_closes_and_then_a_fetch() {
    let (_links, link, mut guest) = attach(config(), EgressPolicy::OPEN);
    let to = server(|mut stream| {
        let mut all = Vec::new();
        let _ = stream.read_to_end(&mut all);
        let _ = stream.write_all(b"late");
    });
    for _ in 0..100 {
        let handles: Vec<_> = (0..50).map(|_| guest.connect_with(to, 4096)).collect();
        for handle in &handles {
            guest.wait(|guest| guest.tcp(*handle).may_send());
            guest.tcp(*handle).close();
        }
        for handle in handles {
            let mut got = Vec::new();
            guest.wait(|guest| {
                take(guest.tcp(handle), &mut got);
                got.len() == 4
            });
            guest.wait(|guest| matches!(guest.state(handle), State::TimeWait | State::Closed));
            guest.sockets.remove(handle);
        }
        assert!(link.stats().connections <= 200, "{}", link.stats().connections);
    }
    let handle = guest.open(to).unwrap();
    guest.tcp(handle).close();
    let mut got = Vec::new();
    guest.wait(|guest| {
        take(guest.tcp(handle), &mut got);
        got == b"late"
    });
    guest.wait(|_| link.stats().connections == 0);
}

#[test]
fn connections_are_capped_and_the_rest_refused() {
    let limits = Limits { connections: 10, ..Limits::default() };
    let (_links, link, mut guest) = attach(LinkConfig { limits, ..config() }, EgressPolicy::OPEN);
    let to = echo_server();
    let handles: Vec<_> = (0..30).map(|_| guest.connect(to)).collect();
    guest.wait(|guest| handles.iter().all(|handle| guest.state(*handle) != State::SynSent));
    let open = handles.iter().filter(|handle| guest.state(**handle) == State::Established).count();
    assert_eq!(open, 10);
    assert_eq!(link.stats().limited, 20);
}

/// Sockets are the host's: one guest that takes all it can get leaves some to the others.
#[test]
fn guests_share_the_hosts_sockets() {
    let links = Links::start(LinkConfig { budget: Budget::new(20), ..config() }).unwrap();
    let (greedy_link, mut greedy) = attach_to(&links, EgressPolicy::OPEN);
    let (_link, mut modest) = attach_to(&links, EgressPolicy::OPEN);
    let to = echo_server();
    let handles: Vec<_> = (0..60).map(|_| greedy.connect_with(to, 4096)).collect();
    greedy.wait(|guest| handles.iter().all(|handle| guest.state(*handle) != State::SynSent));
    let open = handles.iter().filter(|handle| greedy.state(**handle) == State::Established).count();
    assert_eq!((open, greedy_link.stats().limited), (10, 50));
    assert!(modest.open(to).is_some());
    // Nor do datagrams get around it.
    let nobody = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9);
    for port in 1000..1100 {
        let packet = frame::build_udp(SocketAddrV4::new(guest::ADDRESS, port), nobody, b"x").unwrap();
        greedy.send_packet(&packet);
    }
    greedy.wait(|_| greedy_link.stats().limited >= 150);
    assert!(modest.open(to).is_some());
    // What they have is given back.
    for handle in handles {
        greedy.tcp(handle).abort();
    }
    greedy.wait(|_| greedy_link.stats().connections == 0);
    assert!(greedy.open(to).is_some());
}

/// A port that lets a few connections in and answers nobody after that.
fn mute_port() -> (std::os::fd::OwnedFd, SocketAddrV4) {
    use rustix::net::{AddressFamily, SocketType};
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let address = SocketAddrV4::try_from(rustix::net::getsockname(&socket).unwrap()).unwrap();
    (socket, address)
}

#[test]
fn a_syn_flood_is_bounded() {
    let limits = Limits { half_open: 20, ..Limits::default() };
    let config = LinkConfig { limits, connect_timeout: Duration::from_millis(500), ..config() };
    let (_links, link, mut guest) = attach(config, EgressPolicy::OPEN);
    let (_socket, to) = mute_port();
    let before = open_descriptors();
    let handles: Vec<_> = (0..200).map(|_| guest.connect_with(to, 4096)).collect();
    for _ in 0..200 {
        guest.poll();
        assert!(open_descriptors() <= before + 30, "{} > {before}", open_descriptors());
    }
    guest.wait(|_| link.stats().limited >= 150);
    for handle in handles {
        guest.tcp(handle).abort();
    }
    guest.wait(|_| link.stats().connections == 0);
}

#[test]
fn spoofed_and_senseless_frames_are_dropped_and_counted() {
    let (_links, link, mut guest) = attach(config(), EgressPolicy::OPEN);
    let to = SocketAddrV4::new(guest::GATEWAY, 53);
    let good = frame::build_udp(SocketAddrV4::new(guest::ADDRESS, 1), to, b"x").unwrap();
    let spoofed = frame::build_udp(SocketAddrV4::new(Ipv4Addr::new(10, 0, 2, 99), 1), to, b"x").unwrap();
    guest.send_frame(guest::GATEWAY_MAC, [2, 9, 9, 9, 9, 9], frame::TYPE_IPV4, &good);
    guest.send_packet(&spoofed);
    guest.wait(|_| link.stats().spoofed == 2);
    let mut fragment = good.clone();
    fragment[6] = 0x20;
    for packet in [&[][..], &[0x45], &[0xff; 100], &fragment, &good[..25]] {
        guest.send_packet(packet);
    }
    guest.send_frame(guest::GATEWAY_MAC, guest::MAC, 0x86dd, &[0x60; 60]);
    guest.send_raw(&[0, 0, 0, 3, 1, 2, 3]);
    guest.wait(|_| link.stats().dropped == 7);
    assert!(guest.open(echo_server()).is_some());
}

#[test]
fn broken_framing_ends_the_link_alone() {
    let links = Links::start(config()).unwrap();
    let (_bad_link, mut bad) = attach_to(&links, EgressPolicy::OPEN);
    let (_good_link, mut good) = attach_to(&links, EgressPolicy::OPEN);
    bad.send_raw(&[0xff; 64]);
    bad.wait(|guest| guest.closed);
    assert!(good.open(echo_server()).is_some());
}

#[test]
fn a_flooding_neighbour_costs_little() {
    let links = Links::start(config()).unwrap();
    let (_flood_link, mut flood) = attach_to(&links, EgressPolicy::OPEN);
    let (_link, mut guest) = attach_to(&links, EgressPolicy::OPEN);
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = std::sync::Arc::clone(&stop);
    let thread = std::thread::spawn(move || {
        let to = SocketAddrV4::new(Ipv4Addr::new(10, 9, 9, 9), 9);
        let packet = frame::build_udp(SocketAddrV4::new(guest::ADDRESS, 1), to, &[0; 32]).unwrap();
        while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
            flood.send_packet(&packet);
            flood.poll();
            flood.other.clear();
        }
    });
    let handle = guest.open(echo_server()).unwrap();
    let begin = Instant::now();
    for _ in 0..50 {
        guest.send(handle, b"x");
        guest.receive(handle, 1);
    }
    let each = begin.elapsed() / 50;
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    thread.join().unwrap();
    assert!(each < Duration::from_millis(50), "{each:?} for one round trip");
}

#[tokio::test]
async fn dials_are_capped() {
    let limits = Limits { connections: 4, ..Limits::default() };
    let (_links, link, guest) = attach(LinkConfig { limits, ..config() }, EgressPolicy::OPEN);
    let _guest = guest.run_echo(80);
    let mut streams = Vec::new();
    for _ in 0..4 {
        streams.push(link.dial(80).await.unwrap());
    }
    assert!(matches!(link.dial(80).await, Err(edge::link::DialError::Limit)));
    let mut stream = streams.pop().unwrap();
    stream.write_all(b"x").await.unwrap();
    stream.shutdown().await.unwrap();
    let mut got = Vec::new();
    stream.read_to_end(&mut got).await.unwrap();
    drop(stream);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(link.dial(80).await.is_ok());
}

#[tokio::test]
async fn attach_and_detach_leave_no_descriptors() {
    let links = Links::start(config()).unwrap();
    let before = open_descriptors();
    for _ in 0..100 {
        let (link, guest) = attach_to(&links, EgressPolicy::OPEN);
        let running = guest.run_echo(80);
        let stream = link.dial(80).await.unwrap();
        drop(link);
        drop(stream);
        drop(running.stop());
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(open_descriptors() <= before + 1, "{} > {before}", open_descriptors());
}
