//! What nodes report, written into the database.
//!
//! The node's list is compared with the database each time the stream of events begins, so that nothing is lost between
//! two streams; the same comparison runs every minute, as a net under it.

use std::time::Duration;

use futures::StreamExt;
use proto::chain;
use proto::node::{EndReason, Event, SandboxState};

use crate::app::Control;
use crate::error::ApiError;

const RETRY: Duration = Duration::from_secs(1);
const COMPARE: Duration = Duration::from_secs(60);

/// Follows the node until dropped.
pub async fn follow(control: Control) {
    loop {
        if let Err(error) = follow_once(&control).await {
            tracing::warn!(
                error = error.detail.as_deref().unwrap_or(&error.message),
                "the node's events broke off"
            );
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn follow_once(control: &Control) -> Result<(), ApiError> {
    let events = control.config.node.events().await?;
    tokio::pin!(events);
    let mut compare = tokio::time::interval(COMPARE);
    loop {
        tokio::select! {
            event = events.next() => match event {
                Some(event) => record(control, event?).await?,
                None => return Ok(()),
            },
            _ = compare.tick() => reconcile(control).await?,
        }
    }
}

async fn record(control: &Control, event: Event) -> Result<(), ApiError> {
    // Nobody can use it from the moment it is being taken down.
    if matches!(event.state, SandboxState::Killing | SandboxState::Gone) {
        let reason = event.reason.unwrap_or(EndReason::MachineDied);
        control.config.db.set_ended(&event.sandbox, reason).await?;
    }
    Ok(())
}

/// What the database believes in and the node does not have has ended, unseen.
async fn reconcile(control: &Control) -> Result<(), ApiError> {
    let there: Vec<_> =
        control.config.node.sandboxes().await?.into_iter().map(|sandbox| sandbox.id).collect();
    let ended = control.config.db.reconcile(&there, EndReason::MachineDied).await?;
    if ended > 0 {
        tracing::warn!(ended, "sandboxes were gone from the node without a word");
    }
    if let Err(error) = control.config.db.forget_old().await {
        tracing::warn!(error = chain(&error), "old records cannot be removed");
    }
    Ok(())
}
