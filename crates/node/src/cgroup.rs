//! Bounds on machines' processes, kept by the host's kernel where it lets us: how many tasks each may have, and how much
//! memory.
//!
//! Owns: a group `pando/<data directory>-<sandbox>` for each machine, in every hierarchy there is. Does not own: what a
//! machine needs ([`crate::machine::Bounds`]). A host without such groups is no error: machines are then bounded by what
//! their guests have, and by nothing else.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use store::layout::DataDir;

use crate::machine::Bounds;

/// Where Linux distributions mount the hierarchies.
const MOUNT: &str = "/sys/fs/cgroup";
const PARENT: &str = "pando";
/// What bounds something here; `cpu` beside them gives each machine the same share.
const CONTROLLERS: [&str; 3] = ["pids", "memory", "cpu"];
/// A group can be removed when its last task has left it, a moment after the process has ended.
const REMOVE_TRIES: u32 = 100;
const REMOVE_PAUSE: Duration = Duration::from_millis(10);

/// One mounted hierarchy, or the unified one.
#[derive(Debug, Clone)]
struct Hierarchy {
    root: PathBuf,
    unified: bool,
    controllers: Vec<&'static str>,
}

/// The groups of one data directory's machines.
#[derive(Debug, Clone)]
pub struct Cgroups {
    hierarchies: Vec<Hierarchy>,
    prefix: String,
    found: String,
}

/// The group of one machine; nothing where the host has none. Clones are the same group.
#[derive(Debug, Clone, Default)]
pub struct Cgroup(Vec<PathBuf>);

impl Cgroups {
    /// Looks at what the host has and changes nothing.
    pub fn look(data: &DataDir) -> Self {
        Self::look_in(Path::new(MOUNT), data.root())
    }

    /// Looks, and switches on what the unified hierarchy has for groups in it.
    pub fn open(data: &DataDir) -> Self {
        let mut groups = Self::look(data);
        for hierarchy in groups.hierarchies.clone().iter().filter(|hierarchy| hierarchy.unified) {
            if let Err(error) = enable(hierarchy) {
                groups.hierarchies.clear();
                groups.found = format!("none: the controllers cannot be switched on for others ({error})");
            }
        }
        groups
    }

    fn look_in(mount: &Path, data: &Path) -> Self {
        let mut hierarchies = Vec::new();
        if let Ok(listed) = std::fs::read_to_string(mount.join("cgroup.controllers")) {
            let has = |name: &&&str| listed.split_whitespace().any(|word| word == **name);
            let controllers: Vec<_> = CONTROLLERS.iter().filter(has).copied().collect();
            hierarchies.push(Hierarchy { root: mount.to_owned(), unified: true, controllers });
        } else {
            for name in CONTROLLERS {
                let root = mount.join(name);
                if root.join("cgroup.procs").exists() {
                    hierarchies.push(Hierarchy { root, unified: false, controllers: vec![name] });
                }
            }
        }
        // Without a right to write there is nothing to be had (a container's are often mounted read-only).
        hierarchies.retain(|hierarchy| {
            !hierarchy.controllers.is_empty()
                && rustix::fs::access(&hierarchy.root, rustix::fs::Access::WRITE_OK).is_ok()
        });
        let names: Vec<_> = hierarchies.iter().flat_map(|hierarchy| hierarchy.controllers.clone()).collect();
        let lacks = ["pids", "memory"].into_iter().filter(|name| !names.contains(name)).collect::<Vec<_>>();
        let found = match (names.is_empty(), lacks.is_empty()) {
            (true, _) => "none: this host has no cgroup controllers that can be written".to_owned(),
            (false, true) => names.join(", "),
            (false, false) => format!("{}; not {}", names.join(", "), lacks.join(", ")),
        };
        Self { hierarchies, prefix: format!("{:016x}-", hash(data)), found }
    }

    /// What there is, for the log and for `pando doctor`.
    pub fn found(&self) -> &str {
        &self.found
    }

    /// Whether tasks and memory are bounded.
    pub fn is_whole(&self) -> bool {
        ["pids", "memory"]
            .iter()
            .all(|name| self.hierarchies.iter().any(|hierarchy| hierarchy.controllers.contains(name)))
    }

    /// Removes what an earlier server left. Its processes must be gone.
    pub fn sweep(&self) -> usize {
        let mut removed = 0;
        for hierarchy in &self.hierarchies {
            let parent = hierarchy.root.join(PARENT);
            for entry in std::fs::read_dir(&parent).into_iter().flatten().flatten() {
                let ours = entry.file_name().to_string_lossy().starts_with(&self.prefix);
                if ours && std::fs::remove_dir(entry.path()).is_ok() {
                    removed += 1;
                }
            }
        }
        removed
    }

    /// Makes the group of the machine `name`, which has `memory_mib` and may have what `bounds` allows beside it.
    ///
    /// # Errors
    /// The kernel's; nothing is left then.
    pub fn make(&self, name: &str, memory_mib: u64, bounds: Bounds) -> io::Result<Cgroup> {
        let mut made = Cgroup::default();
        for hierarchy in &self.hierarchies {
            let dir = hierarchy.root.join(PARENT).join(format!("{}{name}", self.prefix));
            let outcome = std::fs::create_dir_all(&dir).and_then(|()| {
                made.0.push(dir.clone());
                let limit = (memory_mib + bounds.memory_mib) << 20;
                for controller in &hierarchy.controllers {
                    let (file, value) = match (*controller, hierarchy.unified) {
                        ("pids", _) => ("pids.max", u64::from(bounds.tasks)),
                        ("memory", true) => ("memory.max", limit),
                        ("memory", false) => ("memory.limit_in_bytes", limit),
                        _ => continue,
                    };
                    std::fs::write(dir.join(file), value.to_string())?;
                }
                Ok(())
            });
            if let Err(error) = outcome {
                made.0.iter().for_each(|dir| drop(std::fs::remove_dir(dir)));
                return Err(error);
            }
        }
        Ok(made)
    }
}

impl Cgroup {
    /// Puts a process in.
    ///
    /// # Errors
    /// The kernel's.
    pub fn add(&self, pid: u32) -> io::Result<()> {
        self.0.iter().try_for_each(|dir| std::fs::write(dir.join("cgroup.procs"), pid.to_string()))
    }

    /// Removes the group; its processes must have ended.
    ///
    /// # Errors
    /// The kernel's, when it is still in use after a second.
    pub async fn remove(&self) -> io::Result<()> {
        for dir in &self.0 {
            let mut tries = 0;
            loop {
                match std::fs::remove_dir(dir) {
                    Err(error) if error.kind() == io::ErrorKind::ResourceBusy && tries < REMOVE_TRIES => {
                        tries += 1;
                        tokio::time::sleep(REMOVE_PAUSE).await;
                    }
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => break,
                }
            }
        }
        Ok(())
    }
}

/// Lets groups below the root, and below ours, have the controllers.
fn enable(hierarchy: &Hierarchy) -> io::Result<()> {
    let words = hierarchy.controllers.iter().map(|name| format!("+{name}")).collect::<Vec<_>>().join(" ");
    std::fs::write(hierarchy.root.join("cgroup.subtree_control"), &words)?;
    let parent = hierarchy.root.join(PARENT);
    std::fs::create_dir_all(&parent)?;
    std::fs::write(parent.join("cgroup.subtree_control"), &words)
}

/// FNV-1a: the same in every version of this program, as a sweep looks for what an older one left.
fn hash(path: &Path) -> u64 {
    path.as_os_str()
        .as_encoded_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { tasks: 7, memory_mib: 3 };

    #[test]
    fn hosts_differ() {
        let mount = tempfile::tempdir().unwrap();
        let look = || Cgroups::look_in(mount.path(), Path::new("/data"));
        assert!(!look().is_whole() && look().found().starts_with("none"));
        std::fs::create_dir(mount.path().join("pids")).unwrap();
        std::fs::write(mount.path().join("pids/cgroup.procs"), "").unwrap();
        assert_eq!(look().found(), "pids; not memory");
        std::fs::write(mount.path().join("cgroup.controllers"), "cpuset cpu io memory pids\n").unwrap();
        let unified = look();
        assert!(unified.is_whole(), "{unified:?}");
        enable(&unified.hierarchies[0]).unwrap();
        let group = unified.make("iabc", 5, BOUNDS).unwrap();
        group.add(1234).unwrap();
        let read = |name: &str| std::fs::read_to_string(group.0[0].join(name)).unwrap();
        assert_eq!((read("memory.max"), read("pids.max")), ((8 << 20).to_string(), "7".to_owned()));
        assert_eq!(read("cgroup.procs"), "1234");
        let enabled = std::fs::read_to_string(mount.path().join("pando/cgroup.subtree_control")).unwrap();
        assert_eq!(enabled, "+pids +memory +cpu");
    }

    #[tokio::test]
    async fn a_process_is_bounded_and_nothing_stays() {
        let root = tempfile::tempdir().unwrap();
        let groups = Cgroups::open(&DataDir::open(root.path()).unwrap());
        if !groups.is_whole() {
            eprintln!("not tested: {}", groups.found());
            return;
        }
        let group = groups.make("iabc", 16, BOUNDS).unwrap();
        let mut child = tokio::process::Command::new("sleep").arg("60").kill_on_drop(true).spawn().unwrap();
        group.add(child.id().unwrap()).unwrap();
        let listed = std::fs::read_to_string(group.0[0].join("cgroup.procs")).unwrap();
        assert_eq!(listed.trim(), child.id().unwrap().to_string());
        assert_eq!(groups.sweep(), 0, "a group in use stays");
        child.kill().await.unwrap();
        group.remove().await.unwrap();
        group.remove().await.unwrap();
        groups.make("idef", 16, BOUNDS).unwrap();
        assert_eq!(groups.sweep(), groups.hierarchies.len());
    }
}
