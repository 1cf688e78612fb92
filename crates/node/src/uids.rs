//! User IDs for machines, one each: what keeps one machine's process from another's.
//!
//! Owns: a range of IDs that nobody else on this host has, and who has which of it. Two servers with two data
//! directories must not give out the same ID, so a range is a lock on as many bytes of one file of the host, each ID
//! its own byte. The system lets go of it when its holder ends, however that happens; machines that a killed server
//! left still run then, so IDs that processes run under are passed over as well.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use parking_lot::Mutex;

use crate::{NodeError, sys};

/// The host's, whatever the data directory.
const LOCKS: &str = "/run/pando/uids";
/// The last user ID that every program takes for one: some read them as signed numbers.
pub const LAST: u32 = i32::MAX as u32 - 1;
/// `nobody`, and the 16-bit form of "no user": a range that touches them is passed over.
pub const NOBODY: std::ops::RangeInclusive<u32> = 65534..=65535;

/// A range of user IDs, this process's alone until dropped. The lowest free one is given out.
pub struct Uids {
    first: u32,
    count: u32,
    used: Mutex<BTreeSet<u32>>,
    _lock: File,
}

impl Uids {
    /// Takes the first `count` IDs from `base` on that nobody has.
    pub fn reserve(base: u32, count: u32) -> Result<Self, NodeError> {
        Self::reserve_in(Path::new(LOCKS), base, count)
    }

    fn reserve_in(locks: &Path, base: u32, count: u32) -> Result<Self, NodeError> {
        let io = |source| NodeError::Io { verb: "lock user IDs in", path: locks.to_owned(), source };
        if let Some(dir) = locks.parent() {
            std::fs::DirBuilder::new().recursive(true).mode(0o755).create(dir).map_err(io)?;
        }
        let lock = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(locks)
            .map_err(io)?;
        let none_left = NodeError::NoUids { base, count };
        let Some(mut first) = Some(base).filter(|_| count > 0) else { return Err(none_left) };
        loop {
            // The next range begins behind whatever is in the way of this one.
            let next = match first.checked_add(count - 1) {
                Some(last) if last <= LAST => {
                    if *NOBODY.start() <= last && first <= *NOBODY.end() {
                        *NOBODY.end() + 1
                    } else if let Some(behind) =
                        sys::lock_bytes(&lock, first.into(), count.into()).map_err(io)?
                    {
                        u32::try_from(behind).unwrap_or(u32::MAX)
                    } else if let Some(taken) = users().range(first..=last).next_back() {
                        sys::unlock_bytes(&lock).map_err(io)?;
                        taken.saturating_add(1)
                    } else {
                        break;
                    }
                }
                _ => return Err(none_left),
            };
            tracing::debug!(first, next, "user IDs are taken");
            first = next;
        }
        Ok(Self { first, count, used: Mutex::default(), _lock: lock })
    }

    /// The first of the range.
    pub fn first(&self) -> u32 {
        self.first
    }

    /// An ID that no machine has; None when each has one.
    pub fn take(&self) -> Option<u32> {
        let mut used = self.used.lock();
        let free = (0..self.count).map(|offset| self.first + offset).find(|uid| !used.contains(uid))?;
        used.insert(free);
        Some(free)
    }

    pub(crate) fn give_back(&self, uid: u32) {
        self.used.lock().remove(&uid);
    }
}

/// The user IDs that processes of this host run under, or could change to.
fn users() -> BTreeSet<u32> {
    let mut users = BTreeSet::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        // Not a process, or one that has ended meanwhile.
        let Ok(status) = std::fs::read_to_string(entry.path().join("status")) else { continue };
        let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
        users.extend(line.split_whitespace().filter_map(|uid| uid.parse::<u32>().ok()));
    }
    users
}

#[cfg(test)]
mod tests {
    use super::*;

    const FREE: u32 = 1_700_000_000;

    fn reserve(dir: &Path, base: u32, count: u32) -> Result<Uids, NodeError> {
        Uids::reserve_in(&dir.join("run/uids"), base, count)
    }

    #[test]
    fn ranges_never_overlap_and_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let a = reserve(dir.path(), FREE, 1000).unwrap();
        let b = reserve(dir.path(), FREE + 500, 100).unwrap();
        let c = reserve(dir.path(), FREE - 5, 10).unwrap();
        assert_eq!((a.first(), b.first(), c.first()), (FREE, FREE + 1000, FREE + 1100));
        let below = reserve(dir.path(), FREE - 10, 10).unwrap();
        assert_eq!(below.first(), FREE - 10);
        drop(a);
        assert_eq!(reserve(dir.path(), FREE, 1000).unwrap().first(), FREE);
    }

    #[test]
    fn ids_of_processes_and_of_nobody_are_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let ours = rustix::process::geteuid().as_raw();
        assert!(reserve(dir.path(), ours, 1).unwrap().first() > ours);
        assert_eq!(reserve(dir.path(), 65_500, 100).unwrap().first(), 65_536);
    }

    #[test]
    fn each_is_given_once_and_none_beyond_the_last() {
        let dir = tempfile::tempdir().unwrap();
        let uids = reserve(dir.path(), LAST - 1, 2).unwrap();
        assert_eq!((uids.take(), uids.take(), uids.take()), (Some(LAST - 1), Some(LAST), None));
        uids.give_back(LAST - 1);
        assert_eq!(uids.take(), Some(LAST - 1));
        for (base, count) in [(LAST, 2), (u32::MAX, 1), (u32::MAX, u32::MAX), (5000, 0)] {
            assert!(
                matches!(reserve(dir.path(), base, count), Err(NodeError::NoUids { .. })),
                "{base} {count}"
            );
        }
    }
}
