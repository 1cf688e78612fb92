//! What a crash left: processes and directories of sandboxes that have no owner.
//!
//! Everything a sandbox has on this host carries its ID or lies in its directory, so nothing needs to be remembered:
//! a QEMU whose command line names this data directory belongs to a server that is gone, since this one holds the lock.

use std::path::Path;
use std::time::{Duration, Instant};

use store::layout::DataDir;

use crate::NodeError;

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
    let pids = machines_of(data.root());
    for pid in &pids {
        if rustix::process::kill_process(*pid, rustix::process::Signal::KILL).is_ok() {
            swept.processes += 1;
        }
    }
    // They are not our children: wait until /proc has forgotten them, so that their files are closed.
    let deadline = Instant::now() + Duration::from_secs(5);
    while !machines_of(data.root()).is_empty() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    let sandboxes = data.sandboxes();
    let io = |source| NodeError::Io { verb: "list", path: sandboxes.clone(), source };
    for entry in std::fs::read_dir(&sandboxes).map_err(io)? {
        let path = entry.map_err(io)?.path();
        std::fs::remove_dir_all(&path).map_err(|source| NodeError::Io { verb: "remove", path, source })?;
        swept.directories += 1;
    }
    data.empty_tmp()?;
    Ok(swept)
}

/// QEMU processes whose arguments name something in `root`.
fn machines_of(root: &Path) -> Vec<rustix::process::Pid> {
    let mut found = Vec::new();
    let Ok(entries) = std::fs::read_dir("/proc") else { return found };
    let needle = [root.as_os_str().as_encoded_bytes(), b"/"].concat();
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let Ok(arguments) = std::fs::read(entry.path().join("cmdline")) else { continue };
        let program = arguments.split(|byte| *byte == 0).next().unwrap_or_default();
        let is_machine =
            program.rsplit(|byte| *byte == b'/').next().is_some_and(|n| n.starts_with(b"qemu-system-"));
        if is_machine && arguments.windows(needle.len()).any(|window| window == needle.as_slice()) {
            found.extend(rustix::process::Pid::from_raw(pid));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;

    #[test]
    fn a_left_over_machine_and_its_directory_go_and_others_stay() {
        let root = tempfile::tempdir().unwrap();
        let data = DataDir::open(root.path()).unwrap();
        std::fs::create_dir(data.sandboxes().join("iabc")).unwrap();
        let path = data.sandboxes().join("iabc/delta.qcow2").display().to_string();
        // A shell that waits for input, under a machine's name and with `argument` among its arguments.
        let start = |argument: &str| {
            std::process::Command::new("sh")
                .arg0("qemu-system-x86_64")
                .args(["-c", "read line", argument])
                .stdin(std::process::Stdio::piped())
                .spawn()
                .unwrap()
        };
        let mut machine = start(&path);
        let mut other = start("/elsewhere/sandboxes/iabc/delta.qcow2");
        std::thread::sleep(Duration::from_millis(100));
        let reaper = std::thread::spawn(move || machine.wait());
        let swept = sweep(&data).unwrap();
        assert_eq!(swept, Swept { processes: 1, directories: 1 });
        reaper.join().unwrap().unwrap();
        assert!(other.try_wait().unwrap().is_none(), "a machine of another data directory is left alone");
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
