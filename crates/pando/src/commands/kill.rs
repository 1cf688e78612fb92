//! `pando kill`.

use anyhow::{Result, bail};
use proto::SandboxId;

use crate::output;
use crate::target::Target;

/// Ends sandboxes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  pando kill ikq0c4p2v8m1x7z5b3n9d\n  pando kill --all")]
pub(crate) struct Kill {
    /// Sandboxes to end
    #[arg(required_unless_present = "all", value_name = "SANDBOX")]
    sandboxes: Vec<SandboxId>,
    /// End every sandbox of this key's team
    #[arg(long, conflicts_with = "sandboxes")]
    all: bool,
}

impl Kill {
    pub(crate) async fn execute(self, target: &Target) -> Result<u8> {
        let client = target.client()?;
        let sandboxes = if self.all {
            client.list().await?.into_iter().map(|sandbox| sandbox.sandbox_id).collect()
        } else {
            self.sandboxes
        };
        let mut failed = 0;
        for id in &sandboxes {
            match client.kill(id).await {
                Ok(()) if target.json => {}
                Ok(()) => output::line(id.as_str())?,
                Err(error) => {
                    failed += 1;
                    output::error(&anyhow::Error::new(error));
                }
            }
        }
        if target.json {
            output::json(&serde_json::json!({ "killed": sandboxes.len() - failed, "failed": failed }))?;
        }
        if failed > 0 {
            bail!("{failed} of {} sandboxes could not be ended", sandboxes.len());
        }
        Ok(0)
    }
}
