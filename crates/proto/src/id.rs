//! Identifiers. Each is a type of its own, so that one cannot be passed for another, and is checked where it enters
//! the program: what parses here is safe as a file name, a DNS label and a process argument.
//!
//! Forms (E2B's, `e2b-protocol` 2.1 and 2.6): a sandbox is `i` and 20 of `[a-z0-9]`; a template is 20 of `[a-z0-9]`;
//! a build is a UUID.

use serde::{Deserialize, Serialize};

/// An identifier that does not have the form its kind requires.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind} must be {form}")]
pub struct IdError {
    /// The kind of identifier that was expected, for example `sandboxID`.
    pub kind: &'static str,
    /// The form it must have, in words.
    pub form: &'static str,
}

const ALPHABET: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";

/// Turns random bytes into characters of `[a-z0-9]`. 256 is not a multiple of 36, so the first four characters are
/// 1/64 more likely than the rest: of no consequence for an identifier.
fn letters(random: &[u8]) -> String {
    random.iter().map(|byte| ALPHABET[usize::from(*byte) % ALPHABET.len()] as char).collect()
}

fn is_lower_alphanumeric(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
}

macro_rules! id_type {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $form:literal, $valid:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The identifier as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::str::FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                let valid: fn(&str) -> bool = $valid;
                if valid(text) { Ok(Self(text.to_owned())) } else { Err(IdError { kind: $kind, form: $form }) }
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

id_type!(
    /// A sandbox, for as long as it exists. Also its host name and the DNS label of its ports.
    SandboxId,
    "sandboxID",
    "lower-case letters and digits, at most 40",
    |text| text.len() <= 40 && is_lower_alphanumeric(text)
);

id_type!(
    /// A template: a parked machine that sandboxes are copied from.
    TemplateId,
    "templateID",
    "lower-case letters and digits, at most 40",
    |text| text.len() <= 40 && is_lower_alphanumeric(text)
);

id_type!(
    /// One build of a template, a UUID (the Python SDK parses it as one).
    BuildId,
    "buildID",
    "a UUID",
    |text| {
        text.len() == 36
            && text.char_indices().all(|(at, c)| match at {
                8 | 13 | 18 | 23 => c == '-',
                _ => c.is_ascii_hexdigit() && !c.is_ascii_uppercase(),
            })
    }
);

id_type!(
    /// A team: the owner of keys, sandboxes and templates.
    TeamId,
    "teamID",
    "lower-case letters and digits, at most 40",
    |text| text.len() <= 40 && is_lower_alphanumeric(text)
);

id_type!(
    /// One HTTP request, named in its response and in every log line it causes.
    RequestId,
    "request ID",
    "lower-case letters and digits, at most 40",
    |text| text.len() <= 40 && is_lower_alphanumeric(text)
);

impl SandboxId {
    /// A sandbox ID from 20 random bytes.
    pub fn from_random(random: [u8; 20]) -> Self {
        Self(format!("i{}", letters(&random)))
    }

    /// Reads an ID as clients send it: old SDKs append `-<clientID>`, which is dropped (`e2b-protocol` 2.1).
    pub fn parse_lenient(text: &str) -> Result<Self, IdError> {
        text.split('-').next().unwrap_or(text).parse()
    }
}

impl TemplateId {
    /// A template ID from 20 random bytes.
    pub fn from_random(random: [u8; 20]) -> Self {
        Self(letters(&random))
    }
}

impl TeamId {
    /// A team ID from 12 random bytes.
    pub fn from_random(random: [u8; 12]) -> Self {
        Self(letters(&random))
    }
}

impl RequestId {
    /// A request ID from 12 random bytes.
    pub fn from_random(random: [u8; 12]) -> Self {
        Self(letters(&random))
    }
}

impl BuildId {
    /// A version 4 UUID from 16 random bytes.
    pub fn from_random(mut random: [u8; 16]) -> Self {
        random[6] = (random[6] & 0x0f) | 0x40;
        random[8] = (random[8] & 0x3f) | 0x80;
        let hex: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        Self(format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandbox_id_has_e2b_form() {
        let id = SandboxId::from_random([7; 20]);
        assert_eq!(id.as_str().len(), 21);
        assert_eq!(id.as_str().parse::<SandboxId>(), Ok(id));
    }

    #[test]
    fn client_suffix_is_dropped() {
        assert_eq!(SandboxId::parse_lenient("iabc-00000000").unwrap().as_str(), "iabc");
    }

    #[test]
    fn hostile_ids_are_refused() {
        let long = "a".repeat(41);
        for text in ["", "..", "../x", "a/b", "A", "i abc", "i\0", "é", "%2e%2e", "-", long.as_str()] {
            assert!(text.parse::<SandboxId>().is_err(), "{text:?}");
            assert!(text.parse::<TemplateId>().is_err(), "{text:?}");
            assert!(text.parse::<BuildId>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn build_id_is_a_version_4_uuid() {
        assert_eq!(BuildId::from_random([0xff; 16]).as_str(), "ffffffff-ffff-4fff-bfff-ffffffffffff");
    }
}
