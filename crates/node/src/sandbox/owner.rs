//! The owner: the one task that makes a sandbox, keeps its time, and takes it down.
//!
//! A start is a list of steps, each with its undo in [`Resources::release`]: user ID, directory, machine, link, guest
//! identity. Whatever ends the start (an error, a kill, the machine's death), release undoes what was done, in reverse,
//! and may be run again.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use edge::egress::EgressPolicy;
use edge::link::Link;
use jiff::Timestamp;
use proto::Secret;
use proto::guest::Init;
use proto::node::{EndReason, Event, SandboxState};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use super::state::{Input, next};
use super::{Entry, Node, Parked};
use crate::cgroup::Cgroup;
use crate::guest::Agent;
use crate::machine::{Exit, Machine, RestoreSpec, Started};
use crate::{NodeError, logs, metrics};

/// The system clock may be set while an owner sleeps, so it looks again at least this often.
const CLOCK_CHECK: Duration = Duration::from_secs(10);
const ENTROPY_BYTES: usize = 64;

/// A message to the owner.
pub(crate) enum Command {
    /// End the sandbox.
    Kill(EndReason),
    /// Set when it ends.
    SetDeadline {
        /// When.
        end_at: Timestamp,
        /// Done.
        reply: oneshot::Sender<()>,
    },
}

/// What the owner lets others see.
#[derive(Debug, Clone)]
pub(crate) struct Published {
    pub(crate) state: SandboxState,
    pub(crate) started_at: Timestamp,
    pub(crate) end_at: Timestamp,
    /// Why the start failed.
    pub(crate) error: Option<Arc<NodeError>>,
    /// Why it ends, from [`SandboxState::Killing`] on.
    pub(crate) reason: Option<EndReason>,
}

/// What a sandbox has on this host.
#[derive(Default)]
struct Resources {
    uid: Option<u32>,
    cgroup: Option<Cgroup>,
    dir: Option<PathBuf>,
    machine: Option<Box<dyn Machine>>,
    link: Option<Link>,
    tasks: Vec<JoinHandle<()>>,
}

impl Resources {
    /// Undoes what was done, last first. What cannot be removed is left to the sweep and said in the log.
    async fn release(&mut self, node: &Node) {
        for task in self.tasks.drain(..) {
            task.abort();
        }
        drop(self.link.take());
        if let Some(mut machine) = self.machine.take() {
            machine.stop().await;
        }
        if let Some(cgroup) = self.cgroup.take()
            && let Err(error) = cgroup.remove().await
        {
            tracing::error!(%error, "a sandbox's cgroup cannot be removed");
        }
        if let Some(dir) = self.dir.take()
            && let Err(error) = tokio::fs::remove_dir_all(&dir).await
        {
            tracing::error!(dir = %dir.display(), %error, "a sandbox's directory cannot be removed");
        }
        if let Some(uid) = self.uid.take() {
            node.inner().uids.give_back(uid);
        }
    }
}

/// Why the owner stopped waiting.
enum Ending {
    Asked(EndReason),
    Died(Exit),
}

struct Owner {
    node: Node,
    entry: Arc<Entry>,
    inbox: mpsc::Receiver<Command>,
    publish: watch::Sender<Published>,
}

/// Owns the sandbox of `entry` from its first step to its last.
pub(crate) async fn own(
    node: Node,
    entry: Arc<Entry>,
    parked: Arc<Parked>,
    inbox: mpsc::Receiver<Command>,
    publish: watch::Sender<Published>,
) {
    let mut owner = Owner { node, entry, inbox, publish };
    let mut resources = Resources::default();
    let started = {
        let (node, entry) = (owner.node.clone(), owner.entry.clone());
        let start = start(&node, &entry, &parked, &mut resources);
        tokio::pin!(start);
        loop {
            tokio::select! {
                biased;
                outcome = &mut start => break outcome.map_err(Some),
                reason = owner.command() => if let Some(reason) = reason { break Ok(Some(reason)) },
            }
        }
    };
    let reason = match started {
        Ok(None) => {
            owner.advance(Input::GuestReady, None);
            owner.run(&mut resources).await
        }
        Ok(Some(reason)) => {
            owner.advance(Input::Kill, Some(reason));
            reason
        }
        Err(error) => {
            let error: Option<NodeError> = error;
            if let Some(error) = &error {
                let chain = error as &dyn std::error::Error;
                tracing::warn!(sandbox = %owner.entry.spec.id, error = chain, "a sandbox could not be created");
            }
            owner.publish.send_modify(|published| published.error = error.map(Arc::new));
            owner.advance(Input::StartFailed, Some(EndReason::CreateFailed));
            EndReason::CreateFailed
        }
    };
    resources.release(&owner.node).await;
    owner.node.forget(&owner.entry.spec.id);
    owner.advance(Input::Released, Some(reason));
}

/// Makes the machine and gives it its identity. What it makes is in `resources` at each step. Ok(None) to have one type
/// with a start that was cut short by a kill.
async fn start(
    node: &Node,
    entry: &Entry,
    parked: &Parked,
    resources: &mut Resources,
) -> Result<Option<EndReason>, NodeError> {
    let spec = &entry.spec;
    let _turn = node.inner().starts.acquire().await.map_err(|_| NodeError::Stopping)?;
    check_space(node)?;
    let uid = node.inner().uids.take().ok_or(NodeError::Busy("each of its user IDs is taken"))?;
    resources.uid = Some(uid);
    let dir = node.inner().data.sandbox(&spec.id);
    make_private_dir(&dir, uid)?;
    let dir = resources.dir.insert(dir).clone();

    let source = parked.source().await?;
    let bounds = node.inner().driver.bounds();
    let cgroup = node
        .inner()
        .cgroups
        .make(spec.id.as_str(), source.shape.memory_mib, bounds)
        .map_err(|source| NodeError::Io { verb: "make a cgroup for", path: dir.clone(), source })?;
    let cgroup = resources.cgroup.insert(cgroup).clone();
    let machine_spec = RestoreSpec { name: spec.id.to_string(), dir, uid, source, cgroup };
    let Started { machine, link, console } = node.inner().driver.restore(&machine_spec).await?;
    let machine = resources.machine.insert(machine);
    let follow = logs::follow_console(console, entry.logs.clone(), |_| ());
    resources.tasks.push(tokio::spawn(follow));

    let link = node.inner().links.attach(spec.id.clone(), link, EgressPolicy { internet: spec.internet })?;
    let agent = Agent::new(link.dialer(), spec.access_token.clone());
    // Others reach it through the table once the state says `running`.
    let _ = entry.dialer.set(link.dialer());
    resources.link = Some(link);
    let init = identity(entry, parked)?;
    tokio::select! {
        outcome = agent.init(&init) => outcome?,
        exit = machine.exited() => {
            return Err(crate::machine::MachineError::Died(exit.description).into());
        }
    }
    resources.tasks.push(tokio::spawn(metrics::sample(agent, entry.samples.clone())));
    Ok(None)
}

/// A sandbox writes to the host's disk as it likes, up to its own disk's size: none is begun when little is left.
fn check_space(node: &Node) -> Result<(), NodeError> {
    let dir = node.inner().data.sandboxes();
    let stat = rustix::fs::statvfs(&dir).map_err(|errno| NodeError::Io {
        verb: "look at the disk under",
        path: dir,
        source: errno.into(),
    })?;
    let (free_mib, needed_mib) = ((stat.f_bavail * stat.f_frsize) >> 20, node.inner().min_free_mib);
    if free_mib < needed_mib { Err(NodeError::DiskFull { free_mib, needed_mib }) } else { Ok(()) }
}

/// A directory that only `uid` (and root) can enter.
fn make_private_dir(dir: &std::path::Path, uid: u32) -> Result<(), NodeError> {
    use std::os::unix::fs::DirBuilderExt;
    let io = |source| NodeError::Io { verb: "create", path: dir.to_owned(), source };
    std::fs::DirBuilder::new().mode(0o700).create(dir).map_err(io)?;
    std::os::unix::fs::chown(dir, Some(uid), Some(uid)).map_err(io)
}

/// Who this copy of the template is.
fn identity(entry: &Entry, parked: &Parked) -> Result<Init, NodeError> {
    let spec = &entry.spec;
    let mut entropy = [0u8; ENTROPY_BYTES];
    getrandom::fill(&mut entropy).map_err(|_| NodeError::Busy("the host has no random bytes"))?;
    let defaults = &parked.template.manifest.defaults;
    let mut env_vars = defaults.env.clone();
    env_vars.extend(spec.env.clone());
    Ok(Init {
        env_vars,
        access_token: Some(spec.access_token.clone()),
        timestamp: Some(Timestamp::now()),
        default_user: Some(defaults.user.clone()),
        default_workdir: Some(defaults.workdir.clone()).filter(|dir| !dir.is_empty()),
        sandbox_id: Some(spec.id.clone()),
        template_id: Some(spec.template.clone()),
        generation: 1,
        entropy: Some(Secret::new(STANDARD.encode(entropy))),
    })
}

impl Owner {
    /// Keeps the sandbox until something ends it.
    async fn run(&mut self, resources: &mut Resources) -> EndReason {
        let Some(machine) = resources.machine.as_mut() else { return EndReason::CreateFailed };
        let ending = loop {
            let time_left = self.time_left();
            tokio::select! {
                biased;
                reason = self.command() => if let Some(reason) = reason { break Ending::Asked(reason) },
                exit = machine.exited() => break Ending::Died(exit),
                () = tokio::time::sleep(time_left.min(CLOCK_CHECK)) => {
                    if self.time_left().is_zero() {
                        break Ending::Asked(EndReason::TimedOut);
                    }
                }
            }
        };
        match ending {
            Ending::Asked(reason) => {
                self.advance(Input::Kill, Some(reason));
                reason
            }
            Ending::Died(exit) => {
                let id = &self.entry.spec.id;
                tracing::warn!(sandbox = %id, exit = exit.description, "a sandbox's machine ended by itself");
                self.advance(Input::MachineEnded, Some(EndReason::MachineDied));
                EndReason::MachineDied
            }
        }
    }

    fn time_left(&self) -> Duration {
        let left = self.publish.borrow().end_at.duration_since(Timestamp::now());
        Duration::try_from(left).unwrap_or(Duration::ZERO)
    }

    /// Takes one message; a reason to end when it says so. Cancel-safe.
    async fn command(&mut self) -> Option<EndReason> {
        match self.inbox.recv().await {
            Some(Command::Kill(reason)) => Some(reason),
            Some(Command::SetDeadline { end_at, reply }) => {
                self.publish.send_modify(|published| published.end_at = end_at);
                // Nobody waiting for the answer is no error.
                let _ = reply.send(());
                None
            }
            // Not while the table holds the entry; without it nobody could end the sandbox any more.
            None => Some(EndReason::NodeStopped),
        }
    }

    fn advance(&self, input: Input, reason: Option<EndReason>) {
        let mut changed = None;
        self.publish.send_if_modified(|published| {
            changed = next(published.state, input);
            if let Some(state) = changed {
                published.state = state;
                published.reason = published.reason.or(reason);
                if state == SandboxState::Running {
                    published.started_at = Timestamp::now();
                }
            }
            changed.is_some()
        });
        if let Some(state) = changed {
            let sandbox = self.entry.spec.id.clone();
            tracing::info!(sandbox = %sandbox, ?state, ?reason, "sandbox");
            self.node.tell(Event { at: Timestamp::now(), sandbox, state, reason });
        }
    }
}
