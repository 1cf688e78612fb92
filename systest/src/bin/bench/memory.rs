//! What an idle sandbox costs the host while it lives.

use std::time::Duration;

use anyhow::{Result, ensure};
use systest::host::{machines, private_kib};
use systest::{Guest, Server};

use crate::report::{Figure, Report};

const SANDBOXES: usize = 10;
const IDLE: Duration = Duration::from_secs(5);

pub(crate) async fn measure(server: &Server, report: &mut Report) -> Result<()> {
    // What creating takes for a while stays with the server's allocator: as many have been there before.
    let guests = create_all(server).await?;
    kill_all(server, guests).await?;
    tokio::time::sleep(IDLE).await;
    let before = private_kib(server.pid());
    let guests = create_all(server).await?;
    tokio::time::sleep(IDLE).await;
    let found = machines(&server.data());
    ensure!(found.len() == SANDBOXES, "{} machines for {SANDBOXES} sandboxes", found.len());
    let private = found.iter().map(|pid| private_kib(*pid) as f64 * 1.024e-3).collect();
    let after = private_kib(server.pid());
    report.add(Figure::new("private memory of an idle sandbox's machine", "MB", private))?;
    let growth = (after as f64 - before as f64) * 1.024 / SANDBOXES as f64;
    report.add(Figure::new("growth of the server for each sandbox", "kB", vec![growth]))?;
    report.add(Figure::new("private memory of the server", "MB", vec![after as f64 * 1.024e-3]))?;
    kill_all(server, guests).await
}

async fn create_all(server: &Server) -> Result<Vec<Guest>> {
    let mut guests = Vec::new();
    for _ in 0..SANDBOXES {
        guests.push(server.create().await?);
    }
    Ok(guests)
}

async fn kill_all(server: &Server, guests: Vec<Guest>) -> Result<()> {
    for guest in guests {
        server.api().kill(guest.id()).await?;
    }
    Ok(())
}
