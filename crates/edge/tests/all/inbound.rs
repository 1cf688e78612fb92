//! The host reaches the guest.

use std::time::{Duration, Instant};

use edge::egress::EgressPolicy;
use edge::link::{DialError, LinkConfig};
use proto::guest;
use smoltcp::socket::tcp::State;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::guest::{attach, config, echo, pattern, take};

#[tokio::test]
async fn echo_with_half_close() {
    let (_links, link, guest) = attach(config(), EgressPolicy::CLOSED);
    let _guest = guest.run_echo(8080);
    for seed in 0..4 {
        let bytes = pattern(3 << 20, seed);
        let (mut read, mut write) = tokio::io::split(link.dial(8080).await.unwrap());
        let copy = bytes.clone();
        let sender = tokio::spawn(async move {
            write.write_all(&copy).await.unwrap();
            write.shutdown().await.unwrap();
        });
        let mut got = Vec::new();
        read.read_to_end(&mut got).await.unwrap();
        sender.await.unwrap();
        assert_eq!(got.len(), bytes.len());
        assert!(got == bytes);
    }
}

#[tokio::test]
async fn a_slow_caller_loses_nothing() {
    let (_links, link, mut guest) = attach(config(), EgressPolicy::CLOSED);
    let bytes = pattern(24 << 20, 5);
    let copy = bytes.clone();
    let handle = guest.listen(80);
    let mut sent = 0;
    let _guest = guest.run(move |guest| {
        let socket = guest.tcp(handle);
        if socket.may_send() {
            sent += socket.send_slice(&copy[sent..]).unwrap();
            if sent == copy.len() {
                socket.close();
            }
        }
    });
    let mut stream = link.dial(80).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let mut got = Vec::new();
    let mut piece = vec![0; 40_000];
    loop {
        match stream.read(&mut piece).await.unwrap() {
            0 => break,
            length => got.extend_from_slice(&piece[..length]),
        }
        if got.len() % 7 == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    assert!(got == bytes);
}

#[tokio::test]
async fn closed_ports_are_refused_quickly() {
    let (_links, link, guest) = attach(config(), EgressPolicy::CLOSED);
    let _guest = guest.run(|_| {});
    let begin = Instant::now();
    for port in [80, guest::ENVD_PORT, guest::RELAY_PORT, 0] {
        assert!(matches!(link.dial(port).await, Err(DialError::Refused)), "{port}");
    }
    assert!(begin.elapsed() < Duration::from_secs(1));
}

#[tokio::test]
async fn loopback_ports_are_reached_through_the_relay() {
    let (_links, link, mut guest) = attach(config(), EgressPolicy::CLOSED);
    let mut handles: Vec<_> = (0..4).map(|_| (guest.listen(guest::RELAY_PORT), false)).collect();
    let _guest = guest.run(move |guest| {
        for (handle, greeted) in &mut handles {
            let socket = guest.tcp(*handle);
            if *greeted {
                echo(socket);
            } else if socket.recv_queue() >= 2 {
                let mut port = [0; 2];
                socket.recv_slice(&mut port).unwrap();
                let answer =
                    if u16::from_be_bytes(port) == 3000 { guest::RELAY_OK } else { guest::RELAY_REFUSED };
                socket.send_slice(&[answer]).unwrap();
                *greeted = true;
            }
        }
    });
    let mut stream = link.dial(3000).await.unwrap();
    stream.write_all(b"hello").await.unwrap();
    let mut got = [0; 5];
    stream.read_exact(&mut got).await.unwrap();
    assert_eq!(&got, b"hello");
    assert!(matches!(link.dial(3001).await, Err(DialError::Refused)));
    assert!(matches!(link.dial(guest::ENVD_PORT).await, Err(DialError::Refused)));
}

#[tokio::test]
async fn a_reset_by_the_guest_is_an_error_after_its_bytes() {
    let (_links, link, mut guest) = attach(config(), EgressPolicy::CLOSED);
    let handle = guest.listen(80);
    let mut step = 0;
    let _guest = guest.run(move |guest| {
        let socket = guest.tcp(handle);
        if step == 0 && socket.may_send() {
            socket.send_slice(b"before").unwrap();
            step = 1;
        } else if step == 1 && socket.send_queue() == 0 {
            socket.abort();
            step = 2;
        }
    });
    let mut stream = link.dial(80).await.unwrap();
    let mut got = Vec::new();
    let error = stream.read_to_end(&mut got).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(got, b"before");
}

#[tokio::test]
async fn a_dropped_stream_closes_the_guests_connection() {
    let (_links, link, mut guest) = attach(config(), EgressPolicy::CLOSED);
    let idle = guest.listen(80);
    let running = guest.run(|_| {});
    drop(link.dial(80).await.unwrap());
    let mut guest = running.stop();
    guest.wait(|guest| guest.state(idle) == State::CloseWait);
    // A guest that keeps talking is told that nobody listens.
    guest.send(idle, b"hello?");
    guest.wait(|guest| guest.state(idle) == State::Closed);
    guest.wait(|_| link.stats().connections == 0);
}

#[tokio::test]
async fn a_mute_guest_times_out() {
    let config = LinkConfig { connect_timeout: Duration::from_millis(300), ..config() };
    let (_links, link, guest) = attach(config, EgressPolicy::CLOSED);
    let begin = Instant::now();
    assert!(matches!(link.dial(80).await, Err(DialError::Timeout)));
    assert!(begin.elapsed() < Duration::from_secs(2));
    drop(guest);
}

#[tokio::test]
async fn detaching_cuts_everything_at_once() {
    let (_links, link, guest) = attach(config(), EgressPolicy::CLOSED);
    let running = guest.run_echo(80);
    let mut stream = link.dial(80).await.unwrap();
    let dialer = link.dialer();
    drop(link);
    let mut got = Vec::new();
    let begin = Instant::now();
    let error = stream.read_to_end(&mut got).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert!(matches!(dialer.dial(80).await, Err(DialError::Gone)));
    assert!(begin.elapsed() < Duration::from_secs(1));
    let mut guest = running.stop();
    guest.wait(|guest| guest.closed);
}

#[tokio::test]
async fn a_machine_that_dies_leaves_nothing() {
    let (_links, link, guest) = attach(config(), EgressPolicy::CLOSED);
    let running = guest.run_echo(80);
    let mut stream = link.dial(80).await.unwrap();
    drop(running.stop());
    let mut got = Vec::new();
    let error = stream.read_to_end(&mut got).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert!(matches!(link.dial(80).await, Err(DialError::Gone)));
}

#[tokio::test]
async fn shutdown_answers_every_dial() {
    let (links, link, guest) = attach(config(), EgressPolicy::CLOSED);
    let waiting = tokio::spawn({
        let dialer = link.dialer();
        async move { dialer.dial(80).await.map(drop) }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    tokio::task::spawn_blocking(move || links.shutdown()).await.unwrap();
    assert!(matches!(waiting.await.unwrap(), Err(DialError::Gone)));
    assert!(matches!(link.dial(80).await, Err(DialError::Gone)));
    drop(guest);
}

#[tokio::test]
async fn bytes_sent_with_the_handshake_are_not_lost() {
    let (_links, link, mut guest) = attach(config(), EgressPolicy::CLOSED);
    let handle = guest.listen(80);
    let mut done = false;
    let _guest = guest.run(move |guest| {
        let socket = guest.tcp(handle);
        if !done && socket.may_send() {
            socket.send_slice(b"banner").unwrap();
            socket.close();
            done = true;
        }
        take(socket, &mut Vec::new());
    });
    let mut got = Vec::new();
    link.dial(80).await.unwrap().read_to_end(&mut got).await.unwrap();
    assert_eq!(got, b"banner");
}

#[tokio::test]
#[ignore = "takes 12 s: longer than TIME-WAIT"]
async fn a_very_slow_caller_gets_the_end_of_a_closed_connection() {
    let (_links, link, guest) = attach(config(), EgressPolicy::CLOSED);
    let _guest = guest.run_echo(80);
    let mut stream = link.dial(80).await.unwrap();
    let bytes = pattern(900_000, 9);
    stream.write_all(&bytes).await.unwrap();
    stream.shutdown().await.unwrap();
    tokio::time::sleep(Duration::from_secs(12)).await;
    let mut got = Vec::new();
    stream.read_to_end(&mut got).await.unwrap();
    assert!(got == bytes);
}
