//! One cgroup for each command.
//!
//! Owns: `/sys/fs/cgroup/user/cmd-N`. A kill is one write to `cgroup.kill`, which no fork can outrun. Where there is no
//! cgroup v2 of ours (tests on a host) commands have none and a kill goes to the process group.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Where commands' cgroups are made.
#[derive(Default, Clone)]
pub(crate) struct Cgroups {
    root: Option<PathBuf>,
    next: Arc<AtomicU64>,
    // Cgroups of commands that left something running; removed when they are empty at last.
    leftover: Arc<Mutex<Vec<PathBuf>>>,
}

/// The cgroup of one command; removed when dropped, or later when something in it still runs.
pub(crate) struct Cgroup {
    path: PathBuf,
    directory: File,
    leftover: Arc<Mutex<Vec<PathBuf>>>,
}

impl Cgroups {
    /// Commands get cgroups under `root`.
    pub(crate) fn under(root: PathBuf) -> Self {
        Self { root: Some(root), ..Self::default() }
    }

    /// A cgroup for one command, or `None` where there are none.
    ///
    /// # Errors
    /// When the kernel refuses one more.
    pub(crate) fn create(&self) -> io::Result<Option<Cgroup>> {
        let Some(root) = &self.root else { return Ok(None) };
        self.leftover.lock().retain(|path| !gone(path));
        let path = root.join(format!("cmd-{}", self.next.fetch_add(1, Ordering::Relaxed)));
        std::fs::create_dir(&path)?;
        let directory = File::open(&path)?;
        Ok(Some(Cgroup { path, directory, leftover: Arc::clone(&self.leftover) }))
    }
}

/// Removes an empty cgroup; true when it no longer exists.
fn gone(path: &PathBuf) -> bool {
    match std::fs::remove_dir(path) {
        Ok(()) => true,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

impl Cgroup {
    /// Kills everything in it.
    pub(crate) fn kill(&self) -> bool {
        std::fs::write(self.path.join("cgroup.kill"), "1").is_ok()
    }

    /// The directory, to be born into.
    pub(crate) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if !gone(&self.path) {
            self.leftover.lock().push(std::mem::take(&mut self.path));
        }
    }
}
