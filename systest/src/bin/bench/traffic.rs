//! The far end of a measurement of the network, and what the guest runs for it.
//!
//! One port. A connection begins with a letter and a number of MiB in four bytes, big-endian: `u`, and that many MiB
//! follow and are answered with one byte; `d`, and that many MiB are sent and answered with one byte; `c`, answered with
//! one byte. The far end holds the clock, since a guest's own may be translated: it stops when the last byte has come, up,
//! or when the guest has said that it has, down. For each it prints a line, `u SECONDS`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use anyhow::{Result, bail};

pub(crate) const PORT: u16 = 7000;
const PIECE: usize = 1 << 20;

/// The guest's side: direction, host, MiB.
pub(crate) const SCRIPT: &str = "\
import socket, sys
way, host, mib = sys.argv[1], sys.argv[2], int(sys.argv[3])
piece = bytearray(1 << 20)
if way == 'c':
    for _ in range(mib):
        with socket.create_connection((host, 7000)) as s:
            s.sendall(b'c' + bytes(4))
            assert s.recv(1)
    sys.exit()
s = socket.create_connection((host, 7000))
s.sendall(way.encode() + mib.to_bytes(4, 'big'))
if way == 'u':
    for _ in range(mib):
        s.sendall(piece)
    assert s.recv(1)
else:
    left = mib << 20
    while left:
        got = s.recv_into(piece)
        assert got
        left -= got
    s.sendall(b'k')
    s.recv(1)
";

/// Serves until killed.
pub(crate) fn serve() -> Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", PORT))?;
    say("ready")?;
    for stream in listener.incoming() {
        if let Err(error) = answer(stream?) {
            eprintln!("traffic: {error:#}");
        }
    }
    Ok(())
}

fn answer(mut stream: TcpStream) -> Result<()> {
    let mut head = [0u8; 5];
    stream.read_exact(&mut head)?;
    let bytes = u64::from(u32::from_be_bytes([head[1], head[2], head[3], head[4]])) << 20;
    let mut piece = vec![0u8; PIECE];
    let begun = Instant::now();
    match head[0] {
        b'c' => return Ok(stream.write_all(b"k")?),
        b'u' => {
            let mut left = bytes;
            while left > 0 {
                match stream.read(&mut piece)? {
                    0 => bail!("the guest broke off, {left} bytes before the end"),
                    count => left = left.saturating_sub(count as u64),
                }
            }
        }
        b'd' => {
            for _ in 0..bytes / PIECE as u64 {
                stream.write_all(&piece)?;
            }
            stream.read_exact(&mut [0])?;
        }
        other => bail!("nothing begins with {other}"),
    }
    let took = begun.elapsed().as_secs_f64();
    stream.write_all(b"k")?;
    say(&format!("{} {took}", head[0] as char))
}

fn say(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()?;
    Ok(())
}
