//! From the request for a sandbox to the answer of its first command, with one client and with several.

use std::time::Instant;

use anyhow::{Result, ensure};
use systest::Server;

use crate::report::{Figure, Report};

const WARM: usize = 2;
const SAMPLES: usize = 40;
const CLIENTS: [usize; 2] = [1, 4];

/// Times of one create, in milliseconds.
struct Created {
    answered: f64,
    first_command: f64,
}

pub(crate) async fn measure(server: &Server, report: &mut Report) -> Result<()> {
    for _ in 0..WARM {
        create(server).await?;
    }
    for clients in CLIENTS {
        let client = async || {
            let mut all = Vec::new();
            for _ in 0..SAMPLES / clients {
                all.push(create(server).await?);
            }
            anyhow::Ok(all)
        };
        let all = futures::future::try_join_all((0..clients).map(|_| client())).await?;
        let times = |of: fn(&Created) -> f64| all.iter().flatten().map(of).collect();
        report.add(Figure::new(
            format!("create to first command answered, clients: {clients}"),
            "ms",
            times(|created| created.first_command),
        ))?;
        report.add(Figure::new(
            format!("  of which until create answered, clients: {clients}"),
            "ms",
            times(|created| created.answered),
        ))?;
    }
    Ok(())
}

/// The answer depends on restored memory (the shell, the agent) and on what create told the guest (its ID).
async fn create(server: &Server) -> Result<Created> {
    let begun = Instant::now();
    let guest = server.create().await?;
    let answered = begun.elapsed();
    let output = guest.run(&["/bin/bash", "-l", "-c", "echo $E2B_SANDBOX_ID"], None).await?;
    let first_command = begun.elapsed();
    ensure!(output.stdout.trim() == guest.id().as_str(), "the first command said {output:?}");
    server.api().kill(guest.id()).await?;
    Ok(Created { answered: answered.as_secs_f64() * 1e3, first_command: first_command.as_secs_f64() * 1e3 })
}
