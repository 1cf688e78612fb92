//! The guest reaches the world.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use edge::egress::EgressPolicy;
use edge::link::frame;
use proto::guest;
use smoltcp::socket::tcp::State;

use crate::guest::{Guest, attach, config, pattern, take};

fn v4(address: SocketAddr) -> SocketAddrV4 {
    match address {
        SocketAddr::V4(v4) => v4,
        SocketAddr::V6(_) => panic!("not IPv4"),
    }
}

/// A server for one kind of conversation, one thread per connection.
pub(crate) fn server(talk: impl Fn(TcpStream) + Send + Sync + Clone + 'static) -> SocketAddrV4 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = v4(listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let talk = talk.clone();
            std::thread::spawn(move || talk(stream));
        }
    });
    address
}

pub(crate) fn echo_server() -> SocketAddrV4 {
    server(|mut stream| {
        let mut copy = stream.try_clone().unwrap();
        let _ = std::io::copy(&mut stream, &mut copy);
        let _ = copy.shutdown(Shutdown::Write);
    })
}

fn closed_port() -> SocketAddrV4 {
    v4(TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap())
}

/// Sends and receives at once, then closes and expects the end.
fn converse(guest: &mut Guest, to: SocketAddrV4, bytes: &[u8]) -> Vec<u8> {
    let handle = guest.open(to).expect("refused");
    let (mut sent, mut got) = (0, Vec::new());
    guest.wait(|guest| {
        let socket = guest.tcp(handle);
        if sent < bytes.len() {
            sent += socket.send_slice(&bytes[sent..]).unwrap();
            if sent == bytes.len() {
                socket.close();
            }
        }
        take(socket, &mut got);
        !socket.may_recv()
    });
    got
}

#[test]
fn echo_and_half_close_by_the_guest() {
    let (_links, link, mut guest) = attach(config(), EgressPolicy::OPEN);
    let bytes = pattern(3 << 20, 1);
    assert!(converse(&mut guest, echo_server(), &bytes) == bytes);
    guest.wait(|_| link.stats().connections == 0);
    assert_eq!(link.stats().opened, 1);
}

#[test]
fn late_answer_after_the_guests_fin() {
    let (_links, _link, mut guest) = attach(config(), EgressPolicy::OPEN);
    let to = server(|mut stream| {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        stream.write_all(&[b"late ", &all[..]].concat()).unwrap();
    });
    assert_eq!(converse(&mut guest, to, b"question"), b"late question");
}

#[test]
fn half_close_by_the_world() {
    let (_links, _link, mut guest) = attach(config(), EgressPolicy::OPEN);
    let (done, result) = std::sync::mpsc::channel();
    let to = server(move |mut stream| {
        stream.write_all(b"hello").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        done.send(all).unwrap();
    });
    let handle = guest.open(to).unwrap();
    assert_eq!(guest.receive_to_end(handle), b"hello");
    let bytes = pattern(1 << 20, 2);
    guest.send(handle, &bytes);
    guest.tcp(handle).close();
    guest.wait(|guest| matches!(guest.state(handle), State::Closed | State::TimeWait));
    assert!(result.recv_timeout(Duration::from_secs(5)).unwrap() == bytes);
}

#[test]
fn a_reset_by_the_world_reaches_the_guest() {
    let (_links, link, mut guest) = attach(config(), EgressPolicy::OPEN);
    let to = server(|stream| {
        std::thread::sleep(Duration::from_millis(50));
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
    });
    let handle = guest.open(to).unwrap();
    // Never through CLOSE-WAIT: no FIN came.
    guest.wait(|guest| {
        assert_ne!(guest.state(handle), State::CloseWait);
        guest.state(handle) == State::Closed
    });
    guest.wait(|_| link.stats().connections == 0);
}

#[test]
fn a_reset_by_the_guest_reaches_the_world() {
    let (_links, link, mut guest) = attach(config(), EgressPolicy::OPEN);
    let (done, result) = std::sync::mpsc::channel();
    let to = server(move |mut stream| {
        let mut all = Vec::new();
        done.send(stream.read_to_end(&mut all).map_err(|error| error.kind())).unwrap();
    });
    let handle = guest.open(to).unwrap();
    guest.send(handle, b"x");
    guest.tcp(handle).abort();
    guest.wait(|_| link.stats().connections == 0);
    let seen = result.recv_timeout(Duration::from_secs(5)).unwrap();
    assert_eq!(seen, Err(std::io::ErrorKind::ConnectionReset));
}

#[test]
fn refused_and_denied_connections_fail_at_once() {
    let (_links, link, mut guest) = attach(config(), EgressPolicy::OPEN);
    let begin = Instant::now();
    assert!(guest.open(closed_port()).is_none());
    for address in ["10.1.2.3:80", "169.254.169.254:80", "127.0.0.2:80", "192.168.0.1:443", "10.0.2.2:80"] {
        let handle = guest.connect(address.parse().unwrap());
        guest.wait(|guest| guest.state(handle) == State::Closed);
    }
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    guest.wait(|_| link.stats().denied == 4 && link.stats().connections == 0);
}

#[test]
fn without_internet_nothing_is_reached() {
    let (_links, _link, mut guest) = attach(config(), EgressPolicy::CLOSED);
    let to = echo_server();
    assert!(guest.open(to).is_none());
    assert!(guest.open("1.1.1.1:443".parse().unwrap()).is_none());
}

#[test]
fn a_closed_policy_cuts_what_is_open() {
    let (_links, link, mut guest) = attach(config(), EgressPolicy::OPEN);
    let to = echo_server();
    let handle = guest.open(to).unwrap();
    guest.send(handle, b"x");
    guest.receive(handle, 1);
    link.set_policy(EgressPolicy::CLOSED);
    guest.wait(|guest| guest.state(handle) == State::Closed);
    assert!(guest.open(to).is_none());
    link.set_policy(EgressPolicy::OPEN);
    guest.wait(|guest| guest.open(to).is_some());
}

#[test]
fn a_slow_world_holds_the_guest_back_and_loses_nothing() {
    let (_links, _link, mut guest) = attach(config(), EgressPolicy::OPEN);
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let (done, result) = std::sync::mpsc::channel();
    let wait = std::sync::Arc::new(parking_lot::Mutex::new(wait));
    let to = server(move |mut stream| {
        wait.lock().recv().unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        done.send(all).unwrap();
    });
    let bytes = pattern(64 << 20, 3);
    let handle = guest.open(to).unwrap();
    let mut sent = 0;
    let stuck = |guest: &mut Guest, sent: &mut usize| {
        *sent += guest.tcp(handle).send_slice(&bytes[*sent..]).unwrap();
        *sent == bytes.len()
    };
    assert!(!guest.wait_for(Duration::from_secs(2), |guest| stuck(guest, &mut sent)));
    assert!(sent < 32 << 20, "{sent} bytes were swallowed");
    go.send(()).unwrap();
    guest.wait(|guest| stuck(guest, &mut sent));
    guest.tcp(handle).close();
    guest.wait(|guest| matches!(guest.state(handle), State::Closed | State::TimeWait));
    assert!(result.recv_timeout(Duration::from_secs(20)).unwrap() == bytes);
}

#[test]
fn a_slow_guest_loses_nothing() {
    let (_links, _link, mut guest) = attach(config(), EgressPolicy::OPEN);
    let bytes = pattern(16 << 20, 4);
    let copy = bytes.clone();
    let to = server(move |mut stream| stream.write_all(&copy).unwrap());
    let handle = guest.open(to).unwrap();
    guest.wait_for(Duration::from_millis(500), |_| false);
    let mut got = Vec::new();
    guest.wait(|guest| {
        let mut piece = vec![0; 20_000];
        if guest.tcp(handle).can_recv() {
            let length = guest.tcp(handle).recv_slice(&mut piece).unwrap();
            got.extend_from_slice(&piece[..length]);
        }
        !guest.tcp(handle).may_recv()
    });
    assert!(got == bytes);
}

#[test]
fn many_streams_at_once() {
    let (_links, link, mut guest) = attach(config(), EgressPolicy::OPEN);
    let to = echo_server();
    let all: Vec<Vec<u8>> = (0..64).map(|seed| pattern(1 << 20, seed + 10)).collect();
    let handles: Vec<_> = all.iter().map(|_| guest.connect(to)).collect();
    let mut sent = [0; 64];
    let mut got = vec![Vec::new(); 64];
    guest.wait(|guest| {
        let mut finished = 0;
        for (at, handle) in handles.iter().enumerate() {
            let socket = guest.tcp(*handle);
            if socket.may_send() && sent[at] < all[at].len() {
                sent[at] += socket.send_slice(&all[at][sent[at]..]).unwrap();
                if sent[at] == all[at].len() {
                    socket.close();
                }
            }
            take(socket, &mut got[at]);
            finished += usize::from(got[at].len() >= all[at].len());
        }
        finished == 64
    });
    assert!(got == all);
    guest.wait(|_| link.stats().connections == 0);
}

#[test]
fn datagrams_of_any_size() {
    let (_links, link, mut guest) = attach(config(), EgressPolicy::OPEN);
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let to = v4(socket.local_addr().unwrap());
    std::thread::spawn(move || {
        let mut bytes = vec![0; 65536];
        while let Ok((got, from)) = socket.recv_from(&mut bytes) {
            socket.send_to(&bytes[..got], from).unwrap();
        }
    });
    for size in [0, 1, 100, 1472, 1473, 8000, 60000, 65492] {
        let bytes = pattern(size, size as u64);
        guest.send_packet(&frame::build_udp(SocketAddrV4::new(guest::ADDRESS, 999), to, &bytes).unwrap());
        guest.wait(|guest| !guest.other.is_empty());
        let packet = guest.other.pop().unwrap();
        let ip = frame::ipv4(&packet).unwrap();
        let datagram = frame::udp(&ip).unwrap();
        assert_eq!((ip.source, datagram.source, datagram.destination), (*to.ip(), to.port(), 999));
        assert!(datagram.payload == bytes, "{size}");
    }
    assert_eq!(link.stats().datagram_flows, 1);
}

#[test]
fn denied_datagrams_are_answered_with_port_unreachable() {
    let (_links, link, mut guest) = attach(config(), EgressPolicy::OPEN);
    for to in ["10.0.0.1:53", "10.0.2.2:99", "169.254.169.254:80"] {
        let to: SocketAddrV4 = to.parse().unwrap();
        guest.send_packet(&frame::build_udp(SocketAddrV4::new(guest::ADDRESS, 999), to, b"x").unwrap());
        guest.wait(|guest| !guest.other.is_empty());
        let packet = guest.other.pop().unwrap();
        let ip = frame::ipv4(&packet).unwrap();
        assert_eq!((ip.source, ip.protocol), (*to.ip(), frame::ICMP_PROTOCOL));
        assert_eq!(ip.payload[..2], [3, 3]);
    }
    assert_eq!(link.stats().datagram_flows, 0);
}

#[test]
fn a_closed_udp_port_is_reported() {
    let (_links, _link, mut guest) = attach(config(), EgressPolicy::OPEN);
    let to = v4(UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
    guest.send_packet(&frame::build_udp(SocketAddrV4::new(guest::ADDRESS, 999), to, b"x").unwrap());
    guest.wait(|guest| !guest.other.is_empty());
    let packet = guest.other.pop().unwrap();
    assert_eq!(frame::ipv4(&packet).unwrap().payload[..2], [3, 3]);
}

#[test]
fn the_gateway_answers_arp_and_ping() {
    let (_links, _link, mut guest) = attach(config(), EgressPolicy::CLOSED);
    let ping = frame::build_echo(8, 5, 1, b"are you there");
    guest.send_packet(&frame::build_icmp(guest::ADDRESS, guest::GATEWAY, &ping).unwrap());
    guest.wait(|guest| !guest.other.is_empty());
    let packet = guest.other.pop().unwrap();
    let ip = frame::ipv4(&packet).unwrap();
    assert_eq!(frame::echo(ip.payload, 0).unwrap().payload, b"are you there");

    let mut request = vec![0, 1, 8, 0, 6, 4, 0, 1];
    request.extend_from_slice(&guest::MAC);
    request.extend_from_slice(&guest::ADDRESS.octets());
    request.extend_from_slice(&[0; 6]);
    request.extend_from_slice(&Ipv4Addr::new(10, 0, 2, 2).octets());
    guest.send_frame([0xff; 6], guest::MAC, frame::TYPE_ARP, &request);
    guest.wait(|guest| !guest.arp.is_empty());
    assert_eq!(guest.arp[0][8..14], guest::GATEWAY_MAC);
}
