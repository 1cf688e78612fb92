//! Samples of what a guest uses, asked of its agent and kept for an hour.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;
use proto::api::SandboxMetric;
use proto::guest::Metrics;

use crate::guest::Agent;

/// Time between samples; E2B's.
pub const INTERVAL: Duration = Duration::from_secs(5);
/// Samples kept: an hour's.
pub const KEPT: usize = 720;

/// The samples of one sandbox. Clones are the same record.
#[derive(Debug, Clone, Default)]
pub struct Samples(Arc<Mutex<VecDeque<SandboxMetric>>>);

impl Samples {
    fn push(&self, sample: SandboxMetric) {
        let mut samples = self.0.lock();
        if samples.len() == KEPT {
            samples.pop_front();
        }
        samples.push_back(sample);
    }

    /// The samples from `start` to `end`, Unix seconds, both inclusive, oldest first. A sample belongs to its second as a
    /// whole: clients cut off the fraction of the time they ask with.
    pub fn between(&self, start: Option<i64>, end: Option<i64>) -> Vec<SandboxMetric> {
        let inside = |sample: &&SandboxMetric| {
            start.is_none_or(|start| sample.timestamp_unix >= start)
                && end.is_none_or(|end| sample.timestamp_unix <= end)
        };
        self.0.lock().iter().filter(inside).cloned().collect()
    }
}

/// Asks the agent again and again until dropped. An agent that does not answer leaves a gap.
pub async fn sample(agent: Agent, samples: Samples) {
    loop {
        if let Ok(metrics) = agent.metrics().await {
            samples.push(from_guest(metrics, Timestamp::now()));
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// The time is the host's: a guest can set its own clock.
fn from_guest(metrics: Metrics, now: Timestamp) -> SandboxMetric {
    SandboxMetric {
        timestamp: now,
        timestamp_unix: now.as_second(),
        cpu_count: metrics.cpu_count,
        cpu_used_pct: metrics.cpu_used_pct,
        mem_used: metrics.mem_used,
        mem_total: metrics.mem_total,
        mem_cache: metrics.mem_cache,
        disk_used: metrics.disk_used,
        disk_total: metrics.disk_total,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_and_bound_hold() {
        let samples = Samples::default();
        let at = |second: i64| Timestamp::from_second(second).unwrap();
        for second in 0..(KEPT as i64 + 10) {
            samples.push(from_guest(Metrics::default(), at(second)));
        }
        assert_eq!(samples.between(None, None).len(), KEPT);
        assert_eq!(samples.between(Some(100), Some(104)).len(), 5);
        assert!(samples.between(None, Some(5)).is_empty());
    }
}
