//! A string that must not be printed: keys and tokens. `Debug` hides it, `Display` does not exist, and comparing takes
//! the same time wherever the two differ.

use serde::{Deserialize, Serialize};

/// A secret value. Read it with [`Secret::expose`], at the one place that needs it.
#[derive(Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Wraps a value that must not be printed.
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value. The name makes every use easy to find.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether `other` is the same value, in time that depends on the lengths alone.
    pub fn matches(&self, other: &str) -> bool {
        let (a, b) = (self.0.as_bytes(), other.as_bytes());
        let mut difference = a.len() ^ b.len();
        for (at, byte) in b.iter().enumerate() {
            difference |= usize::from(byte ^ a.get(at % a.len().max(1)).copied().unwrap_or(0));
        }
        std::hint::black_box(difference) == 0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_only_the_same_value() {
        let secret = Secret::new("abc");
        assert!(secret.matches("abc"));
        for other in ["", "ab", "abd", "abcabc", "abca"] {
            assert!(!secret.matches(other), "{other:?}");
        }
        assert!(!Secret::new("").matches("a"));
        assert!(Secret::new("").matches(""));
    }

    #[test]
    fn debug_hides_the_value() {
        assert!(!format!("{:?}", Secret::new("hunter2")).contains("hunter2"));
    }
}
