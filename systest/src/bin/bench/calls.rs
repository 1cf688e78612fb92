//! The API itself: `GET /sandboxes/{id}` over connections that are kept.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use systest::Server;

use crate::report::{Figure, Report};

const CLIENTS: [usize; 2] = [1, 8];
const ROUNDS: usize = 3;
const ROUND: Duration = Duration::from_secs(2);

pub(crate) async fn measure(server: &Server, report: &mut Report) -> Result<()> {
    let guest = server.create().await?;
    for clients in CLIENTS {
        let apis: Vec<_> = (0..clients).map(|_| server.api()).collect();
        let (mut rates, mut costs, mut times) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let (begun, cpu) = (Instant::now(), cpu_seconds(server.pid())?);
            let client = async |api: &client::api::ApiClient| {
                let mut times = Vec::new();
                while begun.elapsed() < ROUND {
                    let asked = Instant::now();
                    api.get(guest.id()).await?;
                    times.push(asked.elapsed().as_secs_f64() * 1e3);
                }
                anyhow::Ok(times)
            };
            let all = futures::future::try_join_all(apis.iter().map(client)).await?.concat();
            let (took, cpu) = (begun.elapsed().as_secs_f64(), cpu_seconds(server.pid())? - cpu);
            // The first round makes the connections.
            if round > 0 {
                rates.push(all.len() as f64 / took);
                costs.push(cpu * 1e6 / all.len() as f64);
                times.extend(all);
            }
        }
        report.add(Figure::new(format!("GET /sandboxes/{{id}}, clients: {clients}"), "calls/s", rates))?;
        report.add(Figure::new("  time to the answer", "ms", times))?;
        report.add(Figure::new("  CPU time of the server for each call", "us", costs))?;
    }
    Ok(())
}

/// CPU time that a process has used.
fn cpu_seconds(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in parentheses may hold spaces; user and system time are the 12th and 13th fields after it.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok());
    let (user, system) = ticks(11).zip(ticks(12)).context("/proc/PID/stat is not as expected")?;
    Ok((user + system) / rustix::param::clock_ticks_per_second() as f64)
}
