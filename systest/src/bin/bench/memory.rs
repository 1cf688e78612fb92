//! What an idle sandbox costs the host while it lives.

use std::time::Duration;

use anyhow::{Result, ensure};
use systest::host::{machines, private_kib};
use systest::{Guest, Server};

use crate::report::{Figure, Report};

const SANDBOXES: usize = 10;
const IDLE: Duration = Duration::from_secs(5);

pub(crate) async fn measure(server: &Server, report: &mut Report) -> Result<()> {
    // The first create allocates what all others use.
    let first = server.create().await?;
    server.api().kill(first.id()).await?;
    tokio::time::sleep(IDLE).await;
    let before = private_kib(server.pid());
    let mut guests: Vec<Guest> = Vec::new();
    for _ in 0..SANDBOXES {
        guests.push(server.create().await?);
    }
    tokio::time::sleep(IDLE).await;
    let found = machines(&server.data());
    ensure!(found.len() == SANDBOXES, "{} machines for {SANDBOXES} sandboxes", found.len());
    let private = found.iter().map(|pid| private_kib(*pid) as f64 * 1.024e-3).collect();
    let growth = private_kib(server.pid()) as f64 - before as f64;
    report.add(Figure::new("private memory of an idle sandbox's machine", "MB", private))?;
    report.add(Figure::new(
        "growth of the server for each sandbox",
        "kB",
        vec![growth * 1.024 / SANDBOXES as f64],
    ))?;
    for guest in guests {
        server.api().kill(guest.id()).await?;
    }
    Ok(())
}
