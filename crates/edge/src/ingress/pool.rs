//! Idle connections to the agents of sandboxes.
//!
//! Owns: keeping a connection alive between requests, for the agent's port alone: a user's server gets a fresh
//! connection for each request, so that nothing of one request can reach another. Does not own: opening connections.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::client::conn::http1::SendRequest;
use parking_lot::Mutex;
use proto::SandboxId;

use super::Body;

/// Shorter than any idle timeout of the agent.
const IDLE: Duration = Duration::from_secs(30);
const PER_SANDBOX: usize = 16;
const PRUNE: Duration = Duration::from_secs(10);

/// Ends a connection's task when it is dropped.
pub(super) struct Task(tokio::task::AbortHandle);

impl Task {
    pub(super) fn new(task: &tokio::task::JoinHandle<()>) -> Self {
        Self(task.abort_handle())
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A connection to a port of a sandbox. Dropping it closes it.
pub(super) struct Connection {
    pub(super) sender: SendRequest<Body>,
    pub(super) _task: Task,
}

struct Idle {
    connection: Connection,
    since: Instant,
}

#[derive(Default)]
struct Shelves {
    by_sandbox: HashMap<SandboxId, Vec<Idle>>,
    pruned: Option<Instant>,
}

/// The idle connections.
#[derive(Clone, Default)]
pub(super) struct Pool {
    shelves: Arc<Mutex<Shelves>>,
}

impl Pool {
    /// The connection that was used last and is still good.
    pub(super) fn take(&self, sandbox: &SandboxId) -> Option<Connection> {
        let mut shelves = self.shelves.lock();
        let shelf = shelves.by_sandbox.get_mut(sandbox)?;
        let found = std::iter::from_fn(|| shelf.pop())
            .find(|idle| idle.since.elapsed() < IDLE && idle.connection.sender.is_ready());
        if shelf.is_empty() {
            shelves.by_sandbox.remove(sandbox);
        }
        found.map(|idle| idle.connection)
    }

    /// Takes a connection back as soon as it can serve another request.
    pub(super) fn put(&self, sandbox: SandboxId, mut connection: Connection) {
        if connection.sender.is_ready() {
            return self.shelve(sandbox, connection);
        }
        let pool = self.clone();
        tokio::spawn(async move {
            let ready = tokio::time::timeout(Duration::from_secs(1), connection.sender.ready()).await;
            if matches!(ready, Ok(Ok(()))) {
                pool.shelve(sandbox, connection);
            }
        });
    }

    fn shelve(&self, sandbox: SandboxId, connection: Connection) {
        let mut shelves = self.shelves.lock();
        let now = Instant::now();
        if shelves.pruned.is_none_or(|pruned| now - pruned > PRUNE) {
            shelves.pruned = Some(now);
            shelves.by_sandbox.retain(|_, shelf| {
                shelf.retain(|idle| now - idle.since < IDLE && !idle.connection.sender.is_closed());
                !shelf.is_empty()
            });
        }
        let shelf = shelves.by_sandbox.entry(sandbox).or_default();
        if shelf.len() < PER_SANDBOX {
            shelf.push(Idle { connection, since: now });
        }
    }
}
