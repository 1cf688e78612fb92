//! The table of a host's sandboxes, and the one task that owns each.
//!
//! A request finds or starts the owner task ([`owner`]) and sends it messages; nothing else touches a sandbox's
//! machine, link or files. The data path does not go through the owner: [`Node::dial`] takes a handle to the link from
//! the table.

pub mod owner;
pub mod state;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use edge::ingress::{Dial, OpenError};
use edge::link::{Dialer, GuestStream, Links};
use futures::future::BoxFuture;
use jiff::Timestamp;
use parking_lot::Mutex;
use proto::manifest::Manifest;
use proto::node::{EndReason, Event, SandboxSpec, SandboxState, SandboxView, TemplateView};
use proto::{SandboxId, TemplateId};
use store::layout::DataDir;
use store::template::Template;
use tokio::sync::{OnceCell, Semaphore, broadcast, mpsc, oneshot, watch};

use crate::NodeError;
use crate::cgroup::Cgroups;
use crate::logs::Logs;
use crate::machine::{Driver, Source};
use crate::metrics::Samples;
use crate::uids::Uids;
use owner::{Command, Published};

/// Messages an owner may have waiting; more is a client that does not wait for answers.
const QUEUE: usize = 32;
/// Events a reader may be behind before it is told to look again.
const EVENTS: usize = 4096;

/// How a node is set up.
pub struct NodeConfig {
    /// Its data directory; the caller holds the lock.
    pub data: DataDir,
    /// Makes machines.
    pub driver: Arc<dyn Driver>,
    /// Carries frames.
    pub links: Links,
    /// Sandboxes at once; more are refused.
    pub max_sandboxes: usize,
    /// Machines that may be starting at the same time; more wait. A start is mostly CPU time.
    pub starts_at_once: usize,
    /// Disk that must be free for a sandbox to be made.
    pub min_free_mib: u64,
    /// The user IDs that machines run under, one each.
    pub uids: Uids,
    /// Bounds machines' processes.
    pub cgroups: Cgroups,
}

/// The sandboxes of this host. Clones are the same node.
#[derive(Clone)]
pub struct Node(Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) data: DataDir,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) links: Links,
    pub(crate) starts: Semaphore,
    pub(crate) uids: Uids,
    pub(crate) cgroups: Cgroups,
    pub(crate) min_free_mib: u64,
    max_sandboxes: usize,
    templates: HashMap<TemplateId, Arc<Parked>>,
    sandboxes: Mutex<HashMap<SandboxId, Arc<Entry>>>,
    events: broadcast::Sender<Event>,
    stopping: AtomicBool,
}

/// A template ready to be copied.
pub(crate) struct Parked {
    pub(crate) template: Template,
    memory: OnceCell<Arc<OwnedFd>>,
}

impl Parked {
    /// What copies are made from; its memory is loaded when first wanted.
    pub(crate) async fn source(&self) -> Result<Source, NodeError> {
        let path = self.template.memory();
        let load = || async move {
            tokio::task::spawn_blocking(move || store::memory::load_sealed(&path))
                .await
                .map_err(|_| NodeError::OwnerLost)?
                .map(Arc::new)
                .map_err(NodeError::from)
        };
        Ok(Source {
            memory: self.memory.get_or_try_init(load).await.cloned()?,
            state: self.template.state(),
            disk: self.template.disk(),
            shape: self.template.manifest.machine.clone(),
        })
    }
}

/// What others may see and reach of a sandbox without asking its owner.
pub(crate) struct Entry {
    pub(crate) spec: SandboxSpec,
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) published: watch::Receiver<Published>,
    pub(crate) dialer: std::sync::OnceLock<Dialer>,
    pub(crate) logs: Logs,
    pub(crate) samples: Samples,
}

impl Entry {
    fn view(&self) -> SandboxView {
        let published = self.published.borrow();
        SandboxView {
            id: self.spec.id.clone(),
            state: published.state,
            started_at: published.started_at,
            end_at: published.end_at,
        }
    }
}

impl Node {
    /// Opens the templates of the data directory and loads their memory. Sandboxes of an earlier server must have been
    /// swept away ([`crate::sweep`]).
    pub async fn start(config: NodeConfig) -> Result<Self, NodeError> {
        let (templates, damaged) = store::template::list(&config.data)?;
        for error in damaged {
            tracing::error!(error = &error as &dyn std::error::Error, "a template cannot be used");
        }
        let parked = templates.into_iter().map(|template| {
            let id = template.manifest.template_id.clone();
            (id, Arc::new(Parked { template, memory: OnceCell::new() }))
        });
        let templates: HashMap<_, _> = parked.collect();
        for (id, parked) in &templates {
            if let Err(error) = config.driver.check(&parked.template.manifest.machine) {
                tracing::warn!(template = %id, error = &error as &dyn std::error::Error, "a template cannot be used");
                continue;
            }
            // Not waited for: a create that comes earlier waits for it, and is told what is wrong.
            let (driver, source) = (config.driver.clone(), parked.source().await?);
            let id = id.clone();
            tokio::spawn(async move {
                if let Err(error) = driver.prepare(&source).await {
                    let error = &error as &dyn std::error::Error;
                    tracing::error!(template = %id, error, "a template could not be prepared");
                }
            });
        }
        Ok(Self(Arc::new(Inner {
            data: config.data,
            driver: config.driver,
            links: config.links,
            starts: Semaphore::new(config.starts_at_once.max(1)),
            uids: config.uids,
            cgroups: config.cgroups,
            min_free_mib: config.min_free_mib,
            max_sandboxes: config.max_sandboxes,
            templates,
            sandboxes: Mutex::default(),
            events: broadcast::channel(EVENTS).0,
            stopping: AtomicBool::new(false),
        })))
    }

    /// Makes the sandbox unless it is there, and returns when its guest is ready. If the caller gives up waiting, the
    /// sandbox is made all the same.
    pub async fn ensure(&self, spec: SandboxSpec) -> Result<SandboxView, NodeError> {
        let entry = self.find_or_start(spec)?;
        let mut published = entry.published.clone();
        let settled = published
            .wait_for(|published| published.state != SandboxState::Creating)
            .await
            .map_err(|_| NodeError::OwnerLost)?;
        match (settled.state, &settled.error, settled.reason) {
            (SandboxState::Running, ..) => {}
            (_, Some(error), _) => return Err(NodeError::Shared(error.clone())),
            (_, None, Some(EndReason::NodeStopped)) => return Err(NodeError::Stopping),
            (_, None, Some(reason)) => return Err(NodeError::Ended(reason)),
            // Whatever ends a sandbox has a reason.
            (_, None, None) => return Err(NodeError::OwnerLost),
        }
        drop(settled);
        Ok(entry.view())
    }

    fn find_or_start(&self, spec: SandboxSpec) -> Result<Arc<Entry>, NodeError> {
        let Some(parked) = self.0.templates.get(&spec.template).cloned() else {
            return Err(NodeError::UnknownTemplate(spec.template));
        };
        let mut sandboxes = self.0.sandboxes.lock();
        // Checked under the lock that `shutdown` takes to list what it must end.
        if self.0.stopping.load(Ordering::Relaxed) {
            return Err(NodeError::Stopping);
        }
        if let Some(entry) = sandboxes.get(&spec.id) {
            return Ok(entry.clone());
        }
        if sandboxes.len() >= self.0.max_sandboxes {
            return Err(NodeError::Busy("it has as many sandboxes as it may have"));
        }
        let (commands, inbox) = mpsc::channel(QUEUE);
        let now = Timestamp::now();
        let (publish, published) = watch::channel(Published {
            state: SandboxState::Creating,
            started_at: now,
            end_at: spec.end_at,
            error: None,
            reason: None,
        });
        let entry = Arc::new(Entry {
            spec,
            commands,
            published,
            dialer: std::sync::OnceLock::new(),
            logs: Logs::default(),
            samples: Samples::default(),
        });
        sandboxes.insert(entry.spec.id.clone(), entry.clone());
        tokio::spawn(owner::own(self.clone(), entry.clone(), parked, inbox, publish));
        Ok(entry)
    }

    fn entry(&self, id: &SandboxId) -> Result<Arc<Entry>, NodeError> {
        self.0.sandboxes.lock().get(id).cloned().ok_or(NodeError::NotFound)
    }

    /// Ends a sandbox and returns when nothing of it is left.
    pub async fn kill(&self, id: &SandboxId) -> Result<(), NodeError> {
        let entry = self.entry(id)?;
        end(&entry, EndReason::Killed).await;
        Ok(())
    }

    /// Sets when a sandbox ends.
    pub async fn set_deadline(&self, id: &SandboxId, end_at: Timestamp) -> Result<(), NodeError> {
        let entry = self.entry(id)?;
        let (reply, done) = oneshot::channel();
        entry.commands.try_send(Command::SetDeadline { end_at, reply }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => {
                NodeError::Busy("the sandbox has too many requests waiting")
            }
            mpsc::error::TrySendError::Closed(_) => NodeError::NotFound,
        })?;
        done.await.map_err(|_| NodeError::NotFound)
    }

    /// One sandbox.
    pub fn view(&self, id: &SandboxId) -> Result<SandboxView, NodeError> {
        Ok(self.entry(id)?.view())
    }

    /// All sandboxes.
    pub fn views(&self) -> Vec<SandboxView> {
        self.0.sandboxes.lock().values().map(|entry| entry.view()).collect()
    }

    /// What a sandbox's machine said.
    pub fn logs(&self, id: &SandboxId) -> Result<Logs, NodeError> {
        Ok(self.entry(id)?.logs.clone())
    }

    /// What a sandbox used.
    pub fn samples(&self, id: &SandboxId) -> Result<Samples, NodeError> {
        Ok(self.entry(id)?.samples.clone())
    }

    /// The templates that sandboxes can be made from.
    pub fn templates(&self) -> Result<Vec<TemplateView>, NodeError> {
        let view = |parked: &Arc<Parked>| {
            let manifest: Manifest = parked.template.manifest.clone();
            Ok(TemplateView { manifest, bytes: parked.template.bytes()? })
        };
        self.0.templates.values().map(view).collect()
    }

    /// What happens from now on. A reader that falls behind is told so by the channel and must look at [`Node::views`].
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.0.events.subscribe()
    }

    /// Ends all sandboxes and returns when nothing of them is left; refuses new ones from now on.
    pub async fn shutdown(&self) {
        let entries: Vec<_> = {
            let sandboxes = self.0.sandboxes.lock();
            self.0.stopping.store(true, Ordering::Relaxed);
            sandboxes.values().cloned().collect()
        };
        futures::future::join_all(entries.iter().map(|entry| end(entry, EndReason::NodeStopped))).await;
        self.0.driver.close().await;
        self.0.links.shutdown();
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.0
    }

    /// For the owner: the sandbox is gone.
    pub(crate) fn forget(&self, id: &SandboxId) {
        self.0.sandboxes.lock().remove(id);
    }

    /// For the owner: tells whoever listens. Nobody listening is no error.
    pub(crate) fn tell(&self, event: Event) {
        let _ = self.0.events.send(event);
    }
}

/// Asks the owner to end the sandbox and waits until it is gone. An owner that no longer listens is already ending it.
async fn end(entry: &Entry, reason: EndReason) {
    let _ = entry.commands.send(Command::Kill(reason)).await;
    let mut published = entry.published.clone();
    // An error means that the owner has finished and dropped its end.
    let _ = published.wait_for(|published| published.state == SandboxState::Gone).await;
}

impl Dial for Node {
    fn dial(&self, sandbox: &SandboxId, port: u16) -> BoxFuture<'_, Result<GuestStream, OpenError>> {
        let found = self.entry(sandbox);
        Box::pin(async move {
            let entry = found.map_err(|_| OpenError::NotFound)?;
            // Before the guest has its identity nobody may talk to it.
            let dialer = match entry.published.borrow().state {
                SandboxState::Creating => return Err(OpenError::Transition),
                SandboxState::Running => entry.dialer.get().cloned(),
                SandboxState::Killing | SandboxState::Gone => None,
            };
            let dialer = dialer.ok_or(OpenError::NotFound)?;
            Ok(dialer.dial(port).await?)
        })
    }
}
