//! The host's sockets that guests may have open, all guests together.
//!
//! Owns: a count, and who may add to it. Each guest may have as many as there are left for others, so that one that
//! takes all it can leaves half, two leave a third, and a modest one always finds some. Does not own: limits of one guest
//! ([`super::Limits`]), sockets.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A number of sockets. Clones share it.
#[derive(Debug, Clone)]
pub struct Budget(Arc<Count>);

#[derive(Debug)]
struct Count {
    most: usize,
    used: AtomicUsize,
}

/// One socket's place in the budget, given back when dropped.
#[derive(Debug)]
pub(super) struct Slot(Arc<Count>);

impl Budget {
    /// Room for `most` sockets.
    pub fn new(most: usize) -> Self {
        Self(Arc::new(Count { most, used: AtomicUsize::new(0) }))
    }

    /// A place for one more socket of a guest that has `own` of them.
    pub(super) fn take(&self, own: usize) -> Option<Slot> {
        let one_more = |used: usize| (own < self.0.most.saturating_sub(used)).then_some(used + 1);
        self.0.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(Slot(self.0.clone()))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_greedy_leave_some_to_the_modest() {
        let budget = Budget::new(90);
        let fill = || {
            let mut slots = Vec::new();
            while let Some(slot) = budget.take(slots.len()) {
                slots.push(slot);
            }
            slots
        };
        let one = fill();
        assert_eq!(one.len(), 45);
        let two = fill();
        assert!((20..=23).contains(&two.len()), "{}", two.len());
        assert!(!fill().is_empty());
        drop((one, two));
        assert_eq!(fill().len(), 45);
        assert!(Budget::new(0).take(0).is_none());
    }
}
