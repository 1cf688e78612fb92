//! Bytes across the border, both ways, through a real guest.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::process::Stdio;
use std::time::Duration;

use systest::host::{Killed, OtherHost};
use systest::{Guest, Server, eventually};

/// A script that runs on the other host until the test ends.
fn on(host: &OtherHost, script: &str) -> Killed {
    let mut command = host.command("python3");
    Killed(command.args(["-u", "-c", script]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
}

async fn python(guest: &Guest, script: &str) -> String {
    let output = guest.run(&["/usr/bin/python3", "-c", script], None).await.unwrap();
    assert_eq!(output.code, 0, "{}", output.stderr);
    output.stdout
}

#[tokio::test]
async fn guests_reach_other_hosts_by_tcp_and_udp() {
    let server = Server::start().unwrap();
    let host = OtherHost::new().unwrap();
    let _tcp = on(
        &host,
        "import socketserver,hashlib\n\
         class H(socketserver.BaseRequestHandler):\n  def handle(self):\n   h=hashlib.sha256()\n   \
         while (b:=self.request.recv(65536)): h.update(b)\n   self.request.sendall(h.hexdigest().encode())\n\
         socketserver.ThreadingTCPServer.allow_reuse_address=True\n\
         socketserver.ThreadingTCPServer(('',7000),H).serve_forever()",
    );
    let _udp = on(
        &host,
        "import socket\ns=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\ns.bind(('',7001))\n\
         while True:\n b,a=s.recvfrom(65536)\n s.sendto(b,a)",
    );
    let guest = server.create().await.unwrap();
    // Half-close: the digest comes after the guest has closed its side.
    let script = format!(
        "import socket,hashlib,os,time\nfor _ in range(50):\n try: s=socket.create_connection(('{0}',7000),5); break\n \
         except OSError: time.sleep(.1)\nd=os.urandom(5_000_000)\ns.sendall(d)\ns.shutdown(1)\n\
         assert s.recv(100).decode()==hashlib.sha256(d).hexdigest()\n\
         u=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\nu.settimeout(3)\n\
         for n in (1,100,1472,1473,8000,60000):\n  d=os.urandom(n)\n  u.sendto(d,('{0}',7001))\n  assert u.recv(65536)==d,n\n\
         try: socket.create_connection(('{0}',7009),5); print('open')\nexcept ConnectionRefusedError: print('refused')",
        host.address
    );
    assert_eq!(python(&guest, &script).await, "refused\n");
    let _allowed = PingAllowed::new();
    let pinged = guest.root_sh(&format!("ping -c 2 -W 2 {}", host.address)).await.unwrap();
    assert_eq!(pinged.code, 0, "{}{}", pinged.stdout, pinged.stderr);
}

/// The host lets its users ping while this lives; many hosts do not unless told so, and the edge asks as a user does.
struct PingAllowed(String);

const PING_GROUPS: &str = "/proc/sys/net/ipv4/ping_group_range";

impl PingAllowed {
    fn new() -> Self {
        let before = std::fs::read_to_string(PING_GROUPS).unwrap();
        std::fs::write(PING_GROUPS, "0 0").unwrap();
        Self(before)
    }
}

impl Drop for PingAllowed {
    fn drop(&mut self) {
        std::fs::write(PING_GROUPS, &self.0).unwrap();
    }
}

/// A name server of ours: answers A queries for names it knows, NXDOMAIN for others.
fn name_server(names: &'static [(&'static str, [u8; 4])]) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut query = [0u8; 512];
        while let Ok((length, from)) = socket.recv_from(&mut query) {
            let (mut name, mut at) = (Vec::new(), 12);
            while query[at] != 0 {
                name.push(
                    String::from_utf8_lossy(&query[at + 1..at + 1 + query[at] as usize]).to_lowercase(),
                );
                at += 1 + query[at] as usize;
            }
            let (name, wants_a) = (name.join("."), query[at + 1..at + 3] == [0, 1]);
            let found = names.iter().find(|(known, _)| *known == name);
            let mut answer = query[..at + 5].to_vec();
            let _ = length;
            answer[2..12].copy_from_slice(&[
                0x81,
                if found.is_some() { 0x80 } else { 0x83 },
                0,
                1,
                0,
                0,
                0,
                0,
                0,
                0,
            ]);
            if let (Some((_, ip)), true) = (found, wants_a) {
                answer[7] = 1;
                answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
                answer.extend(ip);
            }
            socket.send_to(&answer, from).unwrap();
        }
    });
    address
}

#[tokio::test]
async fn names_are_resolved_and_private_answers_are_not_believed() {
    let good = name_server(&[
        ("good.test", [203, 0, 113, 250]),
        ("evil.test", [127, 0, 0, 1]),
        ("meta.test", [169, 254, 169, 254]),
    ]);
    let dead = UdpSocket::bind("127.0.0.1:0").unwrap();
    let dead = dead.local_addr().unwrap(); // closed at once: nobody answers there
    let server = Server::start_with(&format!("dns = [\"{dead}\", \"{good}\"]\n")).unwrap();
    let guest = server.create().await.unwrap();
    let script = "import socket,time\n\
        for n in ('good.test','evil.test','meta.test','none.test'):\n t=time.time()\n \
        try: r=socket.gethostbyname(n)\n except OSError: r='no'\n print(n,r)\n assert time.time()-t<3,n";
    assert_eq!(
        python(&guest, script).await,
        "good.test 203.0.113.250\nevil.test no\nmeta.test no\nnone.test no\n",
        "the first server is dead (B104), private addresses in answers are refused (S14)"
    );
}

#[tokio::test]
async fn ports_of_the_guest_are_reached_wherever_they_listen() {
    let server = Server::start().unwrap();
    let guest = server.create().await.unwrap();
    for (port, bind) in [(8001, "0.0.0.0"), (8002, "127.0.0.1"), (8003, "::")] {
        guest
            .sh(&format!("setsid python3 -m http.server {port} --bind {bind} >/dev/null 2>&1 & sleep 0.1"))
            .await
            .unwrap();
        let path = format!("/sandbox/{}/{port}/", guest.id());
        eventually(Duration::from_secs(15), "the port answers", async || {
            systest::raw::request(&server.url, "GET", &path, &[], "").await.unwrap().status == 200
        })
        .await;
    }
    let closed =
        systest::raw::request(&server.url, "GET", &format!("/sandbox/{}/8009/", guest.id()), &[], "")
            .await
            .unwrap();
    assert_eq!(closed.status, 502);
    assert_eq!(closed.json()["message"], "The sandbox is running but port is not open");
    assert_eq!(closed.json()["port"], 8009);
    server.api().kill(guest.id()).await.unwrap();
    let gone = systest::raw::request(&server.url, "GET", &format!("/sandbox/{}/8001/", guest.id()), &[], "")
        .await
        .unwrap();
    assert_eq!(gone.status, 502);
    assert_eq!(gone.json()["message"], "The sandbox was not found");
}

/// B110: a slow reader gets every byte, and the guest is slowed down instead.
#[tokio::test]
async fn slow_readers_lose_nothing() {
    let server = Server::start().unwrap();
    let guest = server.create().await.unwrap();
    guest.sh("head -c 30000000 /dev/urandom > big; setsid python3 -m http.server 8000 >/dev/null 2>&1 & sleep 1").await.unwrap();
    let digest = guest.sh("sha256sum < big").await.unwrap().stdout[..64].to_owned();
    let address = server.url.trim_start_matches("http://").to_owned();
    let readers: Vec<_> = (0..4)
        .map(|_| {
            let (address, id) = (address.clone(), guest.id().to_string());
            std::thread::spawn(move || {
                let mut stream = TcpStream::connect(address).unwrap();
                write!(stream, "GET /sandbox/{id}/8000/big HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                    .unwrap();
                let (mut all, mut buffer) = (Vec::new(), vec![0u8; 1 << 20]);
                loop {
                    let count = stream.read(&mut buffer).unwrap();
                    if count == 0 {
                        break;
                    }
                    all.extend_from_slice(&buffer[..count]);
                    std::thread::sleep(Duration::from_millis(20));
                }
                let body = all.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
                all.split_off(body)
            })
        })
        .collect();
    for reader in readers {
        let body = reader.join().unwrap();
        assert_eq!(body.len(), 30_000_000);
        let mut hash = std::process::Command::new("sha256sum")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        hash.stdin.take().unwrap().write_all(&body).unwrap();
        let output = hash.wait_with_output().unwrap();
        assert_eq!(&output.stdout[..64], digest.as_bytes());
    }
}

/// B29, B22: a stream that is silent lives; one whose sandbox is killed ends at once and is no success.
#[tokio::test]
async fn streams_end_with_their_sandbox() {
    let server = Server::start().unwrap();
    let guest = server.create().await.unwrap();
    let waiting = guest.sh("sleep 300");
    let killing = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        server.api().kill(guest.id()).await.unwrap();
        std::time::Instant::now()
    };
    let (outcome, killed_at) = tokio::join!(waiting, killing);
    assert!(outcome.is_err(), "{outcome:?}");
    assert!(killed_at.elapsed() < Duration::from_secs(5));
}
