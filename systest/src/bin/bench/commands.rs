//! Commands in a running sandbox: a round trip, and how fast output comes.

use std::time::Instant;

use anyhow::{Result, ensure};
use systest::{Guest, Server};

use crate::report::{Figure, Report};

/// The shortest command, and one in the form that the SDKs give every command.
pub(crate) const COMMANDS: [&[&str]; 2] = [&["/bin/true"], &["/bin/bash", "-l", "-c", "true"]];
const WARM: usize = 5;
const SAMPLES: usize = 100;
const OUTPUT_MIB: usize = 32;
const OUTPUTS: usize = 7;

pub(crate) async fn measure(server: &Server, report: &mut Report) -> Result<()> {
    let guest = server.create().await?;
    let mut trips = COMMANDS.map(|_| Vec::new());
    for sample in 0..WARM + SAMPLES {
        for (words, trips) in COMMANDS.iter().zip(&mut trips) {
            let trip = round_trip(&guest, words).await?;
            if sample >= WARM {
                trips.push(trip);
            }
        }
    }
    for (words, trips) in COMMANDS.iter().zip(trips) {
        report.add(Figure::new(format!("round trip of {}", words.join(" ")), "ms", trips))?;
    }
    let mut rates = Vec::new();
    for _ in 0..OUTPUTS {
        let begun = Instant::now();
        let output =
            guest.run(&["/usr/bin/head", "-c", &format!("{OUTPUT_MIB}M"), "/dev/zero"], None).await?;
        rates.push(OUTPUT_MIB as f64 * 1.048_576 / begun.elapsed().as_secs_f64());
        ensure!(output.stdout.len() == OUTPUT_MIB << 20, "{} bytes came", output.stdout.len());
    }
    report.add(Figure::new("stdout", "MB/s", rates))
}

/// Milliseconds from the request to the end of the stream of events.
pub(crate) async fn round_trip(guest: &Guest, words: &[&str]) -> Result<f64> {
    let begun = Instant::now();
    let output = guest.run(words, None).await?;
    let took = begun.elapsed();
    ensure!(output.code == 0, "{words:?} came to {output:?}");
    Ok(took.as_secs_f64() * 1e3)
}
