//! `pando logs`.

use std::time::Duration;

use anyhow::Result;
use proto::SandboxId;

use crate::output;
use crate::target::Target;

const POLL: Duration = Duration::from_secs(1);

/// Prints what a sandbox's machine and agent wrote.
#[derive(Debug, clap::Args)]
pub(crate) struct Logs {
    /// The sandbox
    sandbox: SandboxId,
    /// Go on printing until the sandbox ends
    #[arg(short, long)]
    follow: bool,
}

impl Logs {
    pub(crate) async fn execute(self, target: &Target) -> Result<u8> {
        let client = target.client()?;
        let mut printed = None;
        loop {
            let logs = match client.logs(&self.sandbox).await {
                Ok(logs) => logs,
                // The sandbox has ended: what it said was printed.
                Err(client::ClientError::Refused { status, .. }) if printed.is_some() && status == 404 => {
                    return Ok(0);
                }
                Err(error) => return Err(error.into()),
            };
            let fresh: Vec<_> =
                logs.log_entries.iter().filter(|entry| Some(entry.timestamp) > printed).collect();
            for entry in &fresh {
                if target.json {
                    output::line(&serde_json::to_string(entry)?)?;
                } else {
                    output::line(&format!("{} {}", entry.timestamp.strftime("%H:%M:%S%.3f"), entry.message))?;
                }
            }
            printed = fresh.last().map(|entry| entry.timestamp).or(printed).or(Some(jiff::Timestamp::MIN));
            if !self.follow {
                return Ok(0);
            }
            tokio::time::sleep(POLL).await;
        }
    }
}
