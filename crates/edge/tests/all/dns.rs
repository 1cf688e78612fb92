//! Names, with name servers of our own.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, UdpSocket};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use edge::egress::EgressPolicy;
use edge::link::{LinkConfig, frame};
use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{Name, RData, Record, RecordType};
use proto::guest;

use crate::guest::{Guest, attach, config};

const GATEWAY: SocketAddrV4 = SocketAddrV4::new(guest::GATEWAY, 53);

fn query(name: &str, kind: RecordType, id: u16) -> Vec<u8> {
    let mut message = Message::new(id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_str(name).unwrap(), kind));
    message.to_vec().unwrap()
}

/// `rebind.*` leads to the metadata address, `fail.*` fails, anything else to 192.0.2.7.
fn answer(query: &[u8]) -> Vec<u8> {
    let mut message = Message::from_vec(query).unwrap();
    message.metadata.message_type = MessageType::Response;
    let name = message.queries[0].name().clone();
    let address = match name.to_string() {
        name if name.starts_with("rebind") => Ipv4Addr::new(169, 254, 169, 254),
        name if name.starts_with("fail") => {
            message.metadata.response_code = ResponseCode::ServFail;
            return message.to_vec().unwrap();
        }
        _ => Ipv4Addr::new(192, 0, 2, 7),
    };
    message.add_answer(Record::from_rdata(name, 60, RData::A(A(address))));
    message.to_vec().unwrap()
}

/// A name server for UDP and TCP, and how many queries it has seen.
fn name_server() -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let socket = UdpSocket::bind(address).unwrap();
    let seen = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&seen);
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok((got, from)) = socket.recv_from(&mut bytes) {
            count.fetch_add(1, Ordering::SeqCst);
            // A forged answer first: it must be ignored.
            let mut forged = answer(&bytes[..got]);
            forged[0] ^= 0x55;
            socket.send_to(&forged, from).unwrap();
            socket.send_to(&answer(&bytes[..got]), from).unwrap();
        }
    });
    let count = Arc::clone(&seen);
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut length = [0; 2];
            while stream.read_exact(&mut length).is_ok() {
                count.fetch_add(1, Ordering::SeqCst);
                let mut bytes = vec![0; usize::from(u16::from_be_bytes(length))];
                stream.read_exact(&mut bytes).unwrap();
                let answer = answer(&bytes);
                stream.write_all(&(answer.len() as u16).to_be_bytes()).unwrap();
                stream.write_all(&answer).unwrap();
            }
        }
    });
    (address, seen)
}

fn with_servers(servers: &[SocketAddr]) -> LinkConfig {
    LinkConfig { upstream_dns: servers.to_vec(), ..config() }
}

/// Asks by UDP.
fn ask(guest: &mut Guest, to: SocketAddrV4, query: &[u8]) -> Message {
    guest.send_packet(&frame::build_udp(SocketAddrV4::new(guest::ADDRESS, 5353), to, query).unwrap());
    guest.wait(|guest| !guest.other.is_empty());
    let packet = guest.other.pop().unwrap();
    let ip = frame::ipv4(&packet).unwrap();
    let datagram = frame::udp(&ip).expect("an answer, not an ICMP error");
    assert_eq!((*to.ip(), datagram.source, datagram.destination), (ip.source, to.port(), 5353));
    Message::from_vec(datagram.payload).unwrap()
}

fn address(message: &Message) -> Option<std::net::IpAddr> {
    message.answers.first().and_then(|record| record.data.ip_addr())
}

#[test]
fn names_resolve_by_udp() {
    let (server, _) = name_server();
    let (_links, link, mut guest) = attach(with_servers(&[server]), EgressPolicy::OPEN);
    let reply = ask(&mut guest, GATEWAY, &query("ok.test.", RecordType::A, 77));
    assert_eq!(reply.metadata.id, 77);
    assert_eq!(address(&reply), Some([192, 0, 2, 7].into()));
    let reply = ask(&mut guest, GATEWAY, &query("ok.test.", RecordType::AAAA, 78));
    assert_eq!((reply.metadata.response_code, reply.answers.len()), (ResponseCode::NoError, 0));
    guest.wait(|_| link.stats().dns_queries == 2);
}

#[test]
fn names_resolve_by_tcp() {
    let (server, _) = name_server();
    let (_links, _link, mut guest) = attach(with_servers(&[server]), EgressPolicy::OPEN);
    let handle = guest.open(GATEWAY).unwrap();
    for id in [1, 2] {
        let query = query("ok.test.", RecordType::A, id);
        guest.send(handle, &[&(query.len() as u16).to_be_bytes()[..], &query].concat());
        let length = guest.receive(handle, 2);
        let message = Message::from_vec(&length[2..]).unwrap();
        assert_eq!((message.metadata.id, address(&message)), (id, Some([192, 0, 2, 7].into())));
    }
}

#[test]
fn names_that_lead_below_the_floor_do_not_exist() {
    let (server, _) = name_server();
    let (_links, _link, mut guest) = attach(with_servers(&[server]), EgressPolicy::OPEN);
    let reply = ask(&mut guest, GATEWAY, &query("rebind.test.", RecordType::A, 1));
    assert_eq!((reply.metadata.response_code, reply.answers.len()), (ResponseCode::NXDomain, 0));
}

#[test]
fn a_dead_first_server_costs_less_than_three_seconds_and_only_once() {
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let (server, _) = name_server();
    let servers = [silent.local_addr().unwrap(), server];
    let (_links, _link, mut guest) = attach(with_servers(&servers), EgressPolicy::OPEN);
    let begin = Instant::now();
    assert!(address(&ask(&mut guest, GATEWAY, &query("ok.test.", RecordType::A, 1))).is_some());
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    let begin = Instant::now();
    assert!(address(&ask(&mut guest, GATEWAY, &query("ok.test.", RecordType::A, 2))).is_some());
    assert!(begin.elapsed() < Duration::from_millis(300), "{:?}", begin.elapsed());
}

#[test]
fn a_closed_or_failing_first_server_costs_nothing() {
    let closed = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (server, seen) = name_server();
    let (_links, _link, mut guest) = attach(with_servers(&[closed, server]), EgressPolicy::OPEN);
    let begin = Instant::now();
    assert!(address(&ask(&mut guest, GATEWAY, &query("ok.test.", RecordType::A, 1))).is_some());
    let reply = ask(&mut guest, GATEWAY, &query("fail.test.", RecordType::A, 1));
    assert_eq!(reply.metadata.response_code, ResponseCode::ServFail);
    assert!(seen.load(Ordering::SeqCst) >= 2);
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
}

#[test]
fn without_internet_every_name_is_unknown_and_nothing_is_forwarded() {
    let (server, seen) = name_server();
    let (_links, _link, mut guest) = attach(with_servers(&[server]), EgressPolicy::CLOSED);
    let begin = Instant::now();
    for kind in [RecordType::A, RecordType::AAAA, RecordType::TXT, RecordType::NULL] {
        let reply = ask(&mut guest, GATEWAY, &query("data.evil.test.", kind, 1));
        assert_eq!(reply.metadata.response_code, ResponseCode::NXDomain);
    }
    let handle = guest.open(GATEWAY).unwrap();
    let query = query("data.evil.test.", RecordType::A, 9);
    guest.send(handle, &[&(query.len() as u16).to_be_bytes()[..], &query].concat());
    let reply = guest.receive(handle, 3);
    assert_eq!(Message::from_vec(&reply[2..]).unwrap().metadata.response_code, ResponseCode::NXDomain);
    assert!(begin.elapsed() < Duration::from_secs(1));
    assert_eq!(seen.load(Ordering::SeqCst), 0);
}

#[test]
fn other_name_servers_follow_the_policy() {
    let (server, seen) = name_server();
    let SocketAddr::V4(server) = server else { panic!() };
    let (_links, _link, mut guest) = attach(config(), EgressPolicy::OPEN);
    let reply = ask(&mut guest, server, &query("ok.test.", RecordType::A, 1));
    // The forged answer came first: it was sent to the guest, which has to look itself.
    assert!(address(&reply).is_some());
    assert_eq!(seen.load(Ordering::SeqCst), 1);
}

#[test]
fn queries_that_are_none_do_no_harm() {
    let (server, _) = name_server();
    let (_links, _link, mut guest) = attach(with_servers(&[server]), EgressPolicy::OPEN);
    for bytes in [&[][..], &[0; 12], &[0xff; 40], b"x"] {
        let packet = frame::build_udp(SocketAddrV4::new(guest::ADDRESS, 5353), GATEWAY, bytes).unwrap();
        guest.send_packet(&packet);
    }
    guest.other.clear();
    guest.wait(|guest| {
        guest.other.clear();
        let reply = ask(guest, GATEWAY, &query("ok.test.", RecordType::A, 321));
        reply.metadata.id == 321
    });
}
