//! A bound on bytes and operations per second: two token buckets.
//!
//! Contract: ask [`Limiter::allow`] before each operation with the time now; when it says no, ask again at the time it
//! gives. It does not wait or wake by itself. An operation larger than a whole bucket passes when the bucket is full and
//! leaves a debt, so that nothing waits for ever.

use std::time::{Duration, Instant};

use proto::vmm::Rate;

#[derive(Debug, Clone)]
struct Bucket {
    per_second: u64,
    size: u64,
    /// Tokens, times a thousand million, so that slow rates lose nothing to rounding; negative is a debt.
    level: i128,
    filled: Instant,
}

const UNIT: i128 = 1_000_000_000;

impl Bucket {
    fn new(per_second: u64, burst: u64, now: Instant) -> Option<Self> {
        let size = burst.max(1);
        (per_second > 0).then(|| Self { per_second, size, level: i128::from(size) * UNIT, filled: now })
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.filled);
        self.filled = self.filled.max(now);
        let gained = passed.as_nanos() as i128 * i128::from(self.per_second);
        self.level = self.level.saturating_add(gained).min(i128::from(self.size) * UNIT);
    }

    /// How long until `amount` may pass; zero when it may now.
    fn wait(&self, amount: u64) -> Duration {
        let needed = i128::from(amount.min(self.size)) * UNIT - self.level;
        if needed <= 0 {
            return Duration::ZERO;
        }
        let nanoseconds = needed / i128::from(self.per_second) + 1;
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}

/// Both buckets of a device. The default lets everything pass.
#[derive(Debug, Clone, Default)]
pub struct Limiter {
    bytes: Option<Bucket>,
    operations: Option<Bucket>,
}

impl Limiter {
    /// Full buckets.
    pub fn new(rate: Rate, now: Instant) -> Self {
        Self {
            bytes: Bucket::new(rate.bytes_per_second, rate.burst_bytes, now),
            operations: Bucket::new(rate.operations_per_second, rate.burst_operations, now),
        }
    }

    /// Takes one operation of `bytes` out of the buckets, or says when to ask again.
    ///
    /// # Errors
    /// The time from which on it may pass.
    pub fn allow(&mut self, bytes: u64, now: Instant) -> Result<(), Instant> {
        let mut wait = Duration::ZERO;
        for (bucket, amount) in [(&mut self.bytes, bytes), (&mut self.operations, 1)] {
            if let Some(bucket) = bucket {
                bucket.fill(now);
                wait = wait.max(bucket.wait(amount));
            }
        }
        if !wait.is_zero() {
            return Err(now + wait);
        }
        for (bucket, amount) in [(&mut self.bytes, bytes), (&mut self.operations, 1)] {
            if let Some(bucket) = bucket {
                bucket.level -= i128::from(amount) * UNIT;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever is asked and whenever, no more passes than rate times time plus one burst and one operation, and
        /// what was refused passes at the time that was given.
        #[test]
        fn never_more_than_the_rate(
            asks in prop::collection::vec((0u64..5_000_000, 0u64..200_000_000), 1..200),
            rate in 1u64..10_000_000, burst in 1u64..1_000_000,
        ) {
            let begin = Instant::now();
            let rate = Rate { bytes_per_second: rate, burst_bytes: burst, ..Rate::default() };
            let mut limiter = Limiter::new(rate, begin);
            let (mut now, mut passed, mut largest) = (begin, 0u128, 0u64);
            for (bytes, pause) in asks {
                now += Duration::from_nanos(pause);
                if let Err(later) = limiter.allow(bytes, now) {
                    prop_assert!(later > now);
                    now = later;
                    prop_assert!(limiter.allow(bytes, now).is_ok());
                }
                largest = largest.max(bytes);
                passed += u128::from(bytes);
                let allowed = u128::from(rate.bytes_per_second) * (now - begin).as_nanos() / 1_000_000_000
                    + u128::from(burst) + u128::from(largest) + 1;
                prop_assert!(passed <= allowed, "{passed} bytes of {allowed}");
            }
        }
    }

    #[test]
    fn no_rate_is_no_limit() {
        let mut limiter = Limiter::new(Rate::default(), Instant::now());
        assert!((0..1000).all(|_| limiter.allow(u64::MAX, Instant::now()).is_ok()));
    }
}
