//! From guest to host and back by TCP, beside QEMU's own `-netdev user`: the same kernel, initramfs and disk, the same
//! program in the guest, the same host at the other end, in turn.

use std::io::{BufRead, BufReader};
use std::process::{ChildStdout, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use systest::host::{Killed, OtherHost};
use systest::{Guest, Server};

use crate::commands::{COMMANDS, round_trip};
use crate::peer::Peer;
use crate::report::{Figure, Report};
use crate::traffic;

/// Enough for a second or so at either peer.
const MIB: usize = 128;
const SAMPLES: usize = 7;
const CONNECTIONS: usize = 200;
const TRIPS: usize = 50;

/// The host that guests talk to.
struct FarEnd {
    host: OtherHost,
    _process: Killed,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl FarEnd {
    fn start() -> Result<Self> {
        let host = OtherHost::new()?;
        let bench = std::env::current_exe()?;
        let mut child = host
            .command(bench.to_str().context("the bench's path is not UTF-8")?)
            .arg("traffic")
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("the far end has no output")?;
        let mut far = Self { host, _process: Killed(child), lines: BufReader::new(stdout).lines() };
        ensure!(far.line()? == "ready", "the far end did not start");
        Ok(far)
    }

    fn line(&mut self) -> Result<String> {
        Ok(self.lines.next().context("the far end has ended")??)
    }

    /// MB/s in one direction, `u` or `d`.
    async fn rate(&mut self, guest: &Guest, way: &str) -> Result<f64> {
        self.run(guest, way, MIB).await?;
        let line = self.line()?;
        match line.split_once(' ') {
            Some((what, seconds)) if what == way => Ok(MIB as f64 * 1.048_576 / seconds.parse::<f64>()?),
            _ => bail!("the far end said {line}"),
        }
    }

    /// Connections per second, each with a byte there and back. Measured here, less what starting Python takes.
    async fn connections(&self, guest: &Guest) -> Result<f64> {
        let begun = Instant::now();
        self.run(guest, "c", 0).await?;
        let start = begun.elapsed();
        let begun = Instant::now();
        self.run(guest, "c", CONNECTIONS).await?;
        Ok(CONNECTIONS as f64 / begun.elapsed().saturating_sub(start).as_secs_f64())
    }

    async fn run(&self, guest: &Guest, way: &str, count: usize) -> Result<()> {
        let words = ["/usr/bin/python3", "-c", traffic::SCRIPT, way, &self.host.address, &count.to_string()];
        let output = guest.run(&words, None).await?;
        ensure!(output.code == 0, "{way} failed in the guest: {output:?}");
        Ok(())
    }
}

pub(crate) async fn measure(server: &Server, report: &mut Report) -> Result<()> {
    let guest = server.create().await?;
    let peer = Peer::boot(server, &guest).await?;
    let mut far = FarEnd::start()?;
    let peers = [("pando", &guest), ("-netdev user", &peer.guest)];
    for (way, what) in [("u", "guest to host"), ("d", "host to guest")] {
        let mut rates = peers.map(|_| Vec::new());
        // The first round translates code.
        for sample in 0..=SAMPLES {
            for ((_, guest), rates) in peers.iter().zip(&mut rates) {
                let rate = far.rate(guest, way).await?;
                if sample > 0 {
                    rates.push(rate);
                }
            }
        }
        for ((name, _), rates) in peers.iter().zip(rates) {
            report.add(Figure::new(format!("{what}, {name}"), "MB/s", rates))?;
        }
    }
    let mut rates = peers.map(|_| Vec::new());
    for _ in 0..SAMPLES {
        for ((_, guest), rates) in peers.iter().zip(&mut rates) {
            rates.push(far.connections(guest).await?);
        }
    }
    for ((name, _), rates) in peers.iter().zip(rates) {
        report.add(Figure::new(format!("connect, one byte each way, close, {name}"), "1/s", rates))?;
    }
    let mut trips = peers.map(|_| Vec::new());
    for _ in 0..TRIPS {
        for ((_, guest), trips) in peers.iter().zip(&mut trips) {
            trips.push(round_trip(guest, COMMANDS[0]).await?);
        }
    }
    for ((name, _), trips) in peers.iter().zip(trips) {
        report.add(Figure::new(format!("round trip of {}, {name}", COMMANDS[0].join(" ")), "ms", trips))?;
    }
    Ok(())
}
