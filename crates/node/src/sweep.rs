//! What a crash left: processes and directories of sandboxes that have no owner.
//!
//! Everything a sandbox has on this host carries its ID or lies in its directory, so nothing needs to be remembered: each
//! machine has its directory in its environment, and one in this data directory belongs to a server that is gone, since
//! this one holds the lock.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};
use store::layout::DataDir;

use crate::NodeError;
use crate::machine::process::marked;

/// A killed process that has not ended by then waits for a disk that is broken; the start does not wait with it.
const LIMIT: Duration = Duration::from_secs(5);

/// What was removed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Processes that were killed.
    pub processes: usize,
    /// Directories that were removed.
    pub directories: usize,
}

/// Kills every machine of this data directory and removes what belonged to it. Only for the holder of the lock, before
/// it starts machines of its own.
pub fn sweep(data: &DataDir) -> Result<Swept, NodeError> {
    let mut swept = Swept::default();
    let deadline = Instant::now() + LIMIT;
    // Again and again, as a machine may have made a copy of itself while the list was read.
    loop {
        let killed: Vec<_> = machines_of(data.root()).into_iter().filter_map(kill).collect();
        if killed.is_empty() {
            break;
        }
        swept.processes += killed.len();
        // They are not our children. Their memory goes first, their files and groups later.
        if !killed.iter().all(|process| ends_before(process, deadline)) {
            break;
        }
    }
    crate::cgroup::Cgroups::look(data).sweep();
    let sandboxes = data.sandboxes();
    let io = |source| NodeError::Io { verb: "list", path: sandboxes.clone(), source };
    for entry in std::fs::read_dir(&sandboxes).map_err(io)? {
        let path = entry.map_err(io)?.path();
        std::fs::remove_dir_all(&path).map_err(|source| NodeError::Io { verb: "remove", path, source })?;
        swept.directories += 1;
    }
    for path in data.zygotes()? {
        std::fs::remove_dir_all(&path).map_err(|source| NodeError::Io { verb: "remove", path, source })?;
        swept.directories += 1;
    }
    data.empty_tmp()?;
    Ok(swept)
}

/// Kills a process; None if it has ended already.
fn kill(pid: Pid) -> Option<OwnedFd> {
    let process = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()?;
    rustix::process::pidfd_send_signal(&process, Signal::KILL).ok()?;
    Some(process)
}

fn ends_before(process: &OwnedFd, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match rustix::event::poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            outcome => return outcome.is_ok_and(|ready| ready > 0),
        }
    }
}

/// Machines whose directory is in `root`.
fn machines_of(root: &Path) -> Vec<Pid> {
    let mut found = Vec::new();
    let Ok(entries) = std::fs::read_dir("/proc") else { return found };
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        // A zombie's is empty: it holds nothing any more.
        let Ok(Some(dir)) = marked(pid) else { continue };
        if dir.starts_with(root) && dir != root {
            found.extend(Pid::from_raw(pid));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::process::MARK;

    #[test]
    fn a_left_over_machine_and_its_directory_go_and_others_stay() {
        let root = tempfile::tempdir().unwrap();
        let data = DataDir::open(root.path()).unwrap();
        std::fs::create_dir(data.sandboxes().join("iabc")).unwrap();
        // A shell that waits for input, in a machine's environment.
        let start = |dir: &Path| {
            std::process::Command::new("sh")
                .args(["-c", "read line"])
                .env(MARK, dir)
                .stdin(std::process::Stdio::piped())
                .spawn()
                .unwrap()
        };
        let mut machine = start(&data.sandboxes().join("iabc"));
        // Waiting for a child closes its input.
        let _input = machine.stdin.take();
        let mut other = start(Path::new("/elsewhere/sandboxes/iabc"));
        // A child has its environment once it has begun its program.
        while machines_of(data.root()).is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let reaper = std::thread::spawn(move || machine.wait());
        let swept = sweep(&data).unwrap();
        assert_eq!(swept, Swept { processes: 1, directories: 1 });
        reaper.join().unwrap().unwrap();
        assert!(other.try_wait().unwrap().is_none(), "a machine of another data directory is left alone");
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
