//! Watched directories.
//!
//! Owns: inotify, and the names that its events stand for. Does not own: how events reach a client (`files::rpc`).
//!
//! Contract:
//! * Events are those of fsnotify, which E2B's clients know: one for each inotify record. A rename is RENAME of the old
//!   name and CREATE of the new one.
//! * Recursive watching misses nothing: when a directory appears, it is watched and then read, and what is found in it is
//!   reported as created. The same records from the kernel, if they come too, are dropped.
//! * After a directory was renamed, events in it have its new name; when it was moved away, there are none.
//! * Memory is bounded: [`EVENTS_MAX`] events wait in a watcher. What comes then is lost, and the next read says so with
//!   [`WatchError::Overflow`]; the one after goes on with what happened since.
//!
//! A watcher's records are taken from the kernel when they arrive, when a client asks, and after each change made through
//! the agent ([`Watchers::settle`]), always by [`Watcher::pump`].

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use proto::rpc::filesystem as pb;
use rustix::fs::inotify::{self, ReadFlags, WatchFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::files::{FileError, entry};
use crate::sys::rights::as_user;
use crate::users::{Names, User};

/// Events that wait in one watcher.
pub(crate) const EVENTS_MAX: usize = 16_384;
/// How long the new name of a renamed directory may come after the old one.
const RENAME_WAIT: Duration = Duration::from_millis(2);
/// Watchers for clients that poll; they live until they are removed.
const KEPT_MAX: usize = 256;

/// Why something is not watched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WatchError {
    /// The path cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// Only directories are watched.
    #[error("path '{}' not a directory", .0.display())]
    NotDirectory(PathBuf),
    /// A network file system does not report what others do.
    #[error("path '{}' is on a network file system, which cannot be watched reliably", .0.display())]
    Network(PathBuf),
    /// More happened than fits.
    #[error("events were lost: more happened than the watcher can hold")]
    Overflow,
    /// Too many watchers.
    #[error("too many watchers; remove some")]
    TooMany,
    /// No such watcher.
    #[error("watcher with id {0} not found")]
    Unknown(String),
    /// The kernel has no watch left.
    #[error("cannot watch")]
    Io(#[source] io::Error),
}

/// What to watch.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// The directory.
    pub(crate) path: PathBuf,
    /// What is below it as well.
    pub(crate) recursive: bool,
    /// Add a description of the file to each event.
    pub(crate) include_entry: bool,
    /// Watch network file systems all the same.
    pub(crate) allow_network_mounts: bool,
}

struct Change {
    name: PathBuf,
    kind: pb::EventType,
}

#[derive(Default)]
struct State {
    // Watch descriptor to directory, relative to the root.
    directories: HashMap<i32, PathBuf>,
    events: VecDeque<Change>,
    overflow: bool,
    // A directory that was renamed away and whose new name has not come yet.
    leaving: Option<(u32, PathBuf)>,
    // Found by reading a new directory; the kernel may report them too.
    synthesised: HashSet<PathBuf>,
}

/// One watched directory.
pub(crate) struct Watcher {
    fd: AsyncFd<OwnedFd>,
    options: Options,
    user: User,
    state: Mutex<State>,
    arrived: Notify,
    stop: CancellationToken,
}

/// All watchers.
#[derive(Default)]
pub(crate) struct Watchers {
    live: Mutex<Vec<Weak<Watcher>>>,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    watchers: HashMap<String, Arc<Watcher>>,
    next: u64,
}

fn is_network(path: &Path) -> io::Result<bool> {
    const NFS: u64 = 0x6969;
    const SMB: u64 = 0x517b;
    const CIFS: u64 = 0xff53_4d42;
    const SMB2: u64 = 0xfe53_4d42;
    const FUSE: u64 = 0x6573_5546;
    let kind = rustix::fs::statfs(path)?.f_type as u64 & 0xffff_ffff;
    Ok([NFS, SMB, CIFS, SMB2, FUSE].contains(&kind))
}

impl Watchers {
    /// Starts watching.
    ///
    /// # Errors
    /// When the path is no directory that the user may read.
    pub(crate) async fn watch(&self, options: Options, user: User) -> Result<Arc<Watcher>, WatchError> {
        let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
        let fd = inotify::init(flags).map_err(|error| WatchError::Io(error.into()))?;
        let watcher = Arc::new(Watcher {
            fd: crate::sys::events::asynchronous(fd).map_err(WatchError::Io)?,
            options,
            user,
            state: Mutex::default(),
            arrived: Notify::new(),
            stop: CancellationToken::new(),
        });
        let own = Arc::clone(&watcher);
        let opened = tokio::task::spawn_blocking(move || {
            as_user(&own.user.credentials, || own.open()).map_err(WatchError::Io)?
        });
        opened.await.map_err(|_| FileError::Interrupted)??;
        let mut live = self.live.lock();
        live.retain(|watcher| watcher.strong_count() > 0);
        live.push(Arc::downgrade(&watcher));
        Ok(watcher)
    }

    /// Keeps a watcher for a client that polls, under the returned name.
    ///
    /// # Errors
    /// When there are too many.
    pub(crate) fn keep(&self, watcher: Arc<Watcher>) -> Result<String, WatchError> {
        let mut kept = self.kept.lock();
        if kept.watchers.len() >= KEPT_MAX {
            return Err(WatchError::TooMany);
        }
        kept.next += 1;
        let id = format!("w{}", kept.next);
        kept.watchers.insert(id.clone(), Arc::clone(&watcher));
        tokio::spawn(async move { watcher.collect().await });
        Ok(id)
    }

    /// A kept watcher.
    ///
    /// # Errors
    /// When there is none of that name.
    pub(crate) fn kept(&self, id: &str) -> Result<Arc<Watcher>, WatchError> {
        self.kept.lock().watchers.get(id).cloned().ok_or_else(|| WatchError::Unknown(id.to_owned()))
    }

    /// Ends a kept watcher.
    ///
    /// # Errors
    /// When there is none of that name.
    pub(crate) fn release(&self, id: &str) -> Result<(), WatchError> {
        let watcher =
            self.kept.lock().watchers.remove(id).ok_or_else(|| WatchError::Unknown(id.to_owned()))?;
        watcher.stop.cancel();
        Ok(())
    }

    /// Lets recursive watchers see what has just been changed, so that they watch new directories before a client's next
    /// request can write into them.
    pub(crate) async fn settle(&self) {
        let watchers: Vec<_> = self.live.lock().iter().filter_map(Weak::upgrade).collect();
        for watcher in watchers.into_iter().filter(|watcher| watcher.options.recursive) {
            watcher.take().await;
        }
    }
}

impl Watcher {
    fn open(&self) -> Result<(), WatchError> {
        let root = &self.options.path;
        let found = std::fs::metadata(root).map_err(|error| FileError::at(root, error))?;
        if !found.is_dir() {
            return Err(WatchError::NotDirectory(root.clone()));
        }
        if !self.options.allow_network_mounts && is_network(root).map_err(WatchError::Io)? {
            return Err(WatchError::Network(root.clone()));
        }
        let mut state = self.state.lock();
        let wd = self.add(Path::new("")).map_err(|error| match error {
            Errno::NOSPC | Errno::MFILE | Errno::NOMEM => WatchError::Io(error.into()),
            other => FileError::at(root, other.into()).into(),
        })?;
        state.directories.insert(wd, PathBuf::new());
        if self.options.recursive {
            self.enter(&mut state, PathBuf::new(), false);
        }
        Ok(())
    }

    fn add(&self, relative: &Path) -> Result<i32, Errno> {
        let flags = WatchFlags::CREATE
            | WatchFlags::MOVED_TO
            | WatchFlags::MOVED_FROM
            | WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        inotify::add_watch(self.fd.get_ref(), self.options.path.join(relative), flags)
    }

    /// Watches a directory that was found, and everything in it. With `report`, its content is new.
    fn enter(&self, state: &mut State, directory: PathBuf, report: bool) {
        let mut todo = vec![directory];
        while let Some(directory) = todo.pop() {
            match self.add(&directory) {
                Ok(wd) => {
                    state.directories.insert(wd, directory.clone());
                }
                Err(Errno::NOSPC | Errno::NOMEM) => state.overflow = true,
                // It has gone, or the caller may not read it.
                Err(_) => continue,
            }
            let Ok(children) = std::fs::read_dir(self.options.path.join(&directory)) else { continue };
            for child in children.flatten() {
                let name = directory.join(child.file_name());
                let Ok(kind) = child.file_type() else { continue };
                if report && state.synthesised.insert(name.clone()) {
                    state.push(&name, pb::EventType::EVENT_TYPE_CREATE);
                    if kind.is_file() && child.metadata().is_ok_and(|found| found.len() > 0) {
                        state.push(&name, pb::EventType::EVENT_TYPE_WRITE);
                    }
                }
                if kind.is_dir() {
                    todo.push(name);
                }
            }
        }
    }

    /// Takes everything the kernel has. Blocks only on directories it has to read.
    fn pump(&self) {
        let mut state = self.state.lock();
        let mut buffer = [MaybeUninit::uninit(); 16 << 10];
        let mut reader = inotify::Reader::new(self.fd.get_ref(), &mut buffer);
        let mut waited = false;
        loop {
            match reader.next() {
                Ok(event) => {
                    let name = event.file_name().map(|name| {
                        use std::os::unix::ffi::OsStrExt;
                        PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes()))
                    });
                    self.record(&mut state, event.wd(), event.events(), event.cookie(), name.as_deref());
                }
                Err(Errno::INTR) => {}
                // The two records of a rename come one right after the other, but not at one instant.
                Err(Errno::AGAIN) if state.leaving.is_some() && !waited => {
                    waited = true;
                    std::thread::sleep(RENAME_WAIT);
                }
                Err(_) => break,
            }
        }
        if let Some((_, lost)) = state.leaving.take() {
            self.leave(&mut state, &lost);
        }
        // Everything queued between watching and reading a new directory has been seen by now.
        state.synthesised.clear();
        if !state.events.is_empty() || state.overflow {
            self.arrived.notify_one();
        }
    }

    fn record(&self, state: &mut State, wd: i32, flags: ReadFlags, cookie: u32, name: Option<&Path>) {
        use pb::EventType as Type;
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            state.overflow = true;
        }
        if flags.contains(ReadFlags::IGNORED) {
            state.directories.remove(&wd);
            return;
        }
        let Some(directory) = state.directories.get(&wd) else { return };
        let Some(name) = name else {
            // About the directory itself: its parent's watch reports it, except for the root.
            if directory.as_os_str().is_empty() {
                if flags.contains(ReadFlags::DELETE_SELF) {
                    state.push(Path::new("."), Type::EVENT_TYPE_REMOVE);
                } else if flags.contains(ReadFlags::MOVE_SELF) {
                    state.push(Path::new("."), Type::EVENT_TYPE_RENAME);
                }
            }
            return;
        };
        let name = directory.join(name);
        let enters = self.options.recursive && flags.contains(ReadFlags::ISDIR);
        if flags.contains(ReadFlags::CREATE) {
            if state.synthesised.remove(&name) {
                return;
            }
            state.push(&name, Type::EVENT_TYPE_CREATE);
            if enters {
                self.enter(state, name, true);
            }
        } else if flags.contains(ReadFlags::MOVED_TO) {
            let known = state.synthesised.remove(&name);
            if !known {
                state.push(&name, Type::EVENT_TYPE_CREATE);
            }
            match state.leaving.take() {
                Some((from, old)) if enters && from == cookie => state.renamed(&old, &name),
                other => {
                    state.leaving = other;
                    if enters && !known {
                        self.enter(state, name, true);
                    }
                }
            }
        } else if flags.contains(ReadFlags::MOVED_FROM) {
            state.synthesised.remove(&name);
            state.push(&name, Type::EVENT_TYPE_RENAME);
            if enters && let Some((_, lost)) = state.leaving.replace((cookie, name)) {
                self.leave(state, &lost);
            }
        } else if flags.contains(ReadFlags::ATTRIB) {
            state.push(&name, Type::EVENT_TYPE_CHMOD);
        } else if flags.contains(ReadFlags::MODIFY) {
            state.push(&name, Type::EVENT_TYPE_WRITE);
        } else if flags.contains(ReadFlags::DELETE) {
            state.synthesised.remove(&name);
            state.push(&name, Type::EVENT_TYPE_REMOVE);
        }
    }

    /// A directory was moved out of the tree: its events are none of ours any more.
    fn leave(&self, state: &mut State, lost: &Path) {
        let gone: Vec<i32> =
            state.directories.iter().filter(|(_, dir)| dir.starts_with(lost)).map(|(wd, _)| *wd).collect();
        for wd in gone {
            state.directories.remove(&wd);
            // It may be gone by itself.
            let _ = inotify::remove_watch(self.fd.get_ref(), wd);
        }
    }

    async fn take(self: &Arc<Self>) {
        let own = Arc::clone(self);
        // Only a panic ends it early, and then the next one tries again.
        let _ = tokio::task::spawn_blocking(move || as_user(&own.user.credentials, || own.pump())).await;
    }

    /// Collects in the background for a client that polls.
    async fn collect(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return,
                ready = self.fd.readable() => match ready {
                    Ok(mut ready) => {
                        self.take().await;
                        ready.clear_ready();
                    }
                    Err(_) => return,
                },
            }
        }
    }

    /// What has happened until now.
    ///
    /// # Errors
    /// [`WatchError::Overflow`] once after events were lost.
    pub(crate) async fn drain(self: &Arc<Self>) -> Result<Vec<pb::FilesystemEvent>, WatchError> {
        let own = Arc::clone(self);
        let drained = tokio::task::spawn_blocking(move || {
            as_user(&own.user.credentials, || {
                own.pump();
                own.events()
            })
            .map_err(WatchError::Io)?
        });
        drained.await.map_err(|_| FileError::Interrupted)?
    }

    /// The next events, as soon as there is one.
    ///
    /// # Errors
    /// As [`Watcher::drain`].
    pub(crate) async fn next(self: &Arc<Self>) -> Result<Vec<pb::FilesystemEvent>, WatchError> {
        loop {
            tokio::select! {
                () = self.arrived.notified() => {}
                ready = self.fd.readable() => ready.map_err(WatchError::Io)?.clear_ready(),
            }
            let events = self.drain().await?;
            if !events.is_empty() {
                return Ok(events);
            }
        }
    }

    fn events(&self) -> Result<Vec<pb::FilesystemEvent>, WatchError> {
        let changes = {
            let mut state = self.state.lock();
            if std::mem::take(&mut state.overflow) {
                state.events.clear();
                return Err(WatchError::Overflow);
            }
            std::mem::take(&mut state.events)
        };
        let names = if self.options.include_entry { Names::load() } else { Names::default() };
        let describe = |change: &Change| {
            use pb::EventType as Type;
            let kinds = [Type::EVENT_TYPE_CREATE, Type::EVENT_TYPE_WRITE, Type::EVENT_TYPE_CHMOD];
            (self.options.include_entry && kinds.contains(&change.kind))
                .then(|| entry::entry(&self.options.path.join(&change.name), &names).ok())
                .flatten()
        };
        Ok(changes
            .into_iter()
            .map(|change| pb::FilesystemEvent {
                entry: describe(&change).map(Into::into).unwrap_or_default(),
                name: change.name.to_string_lossy().into_owned(),
                r#type: change.kind.into(),
                ..Default::default()
            })
            .collect())
    }
}

impl State {
    fn push(&mut self, name: &Path, kind: pb::EventType) {
        if self.events.len() < EVENTS_MAX {
            self.events.push_back(Change { name: name.to_owned(), kind });
        } else {
            self.overflow = true;
        }
    }

    /// A directory of the tree has a new name in it.
    fn renamed(&mut self, old: &Path, new: &Path) {
        for directory in self.directories.values_mut() {
            if let Ok(rest) = directory.strip_prefix(old) {
                *directory = if rest.as_os_str().is_empty() { new.to_owned() } else { new.join(rest) };
            }
        }
    }
}
