//! API keys, and the tokens that sandboxes demand.
//!
//! A key is `e2b_` and 40 hex digits, as the SDKs expect it (`e2b-protocol` 1.2); the database has its SHA-256 alone. A
//! sandbox's token is an HMAC of its ID under the installation's seed: nothing to store, and the same again after a
//! restart.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use hmac::{Hmac, KeyInit, Mac};
use proto::{SandboxId, Secret};
use sha2::{Digest, Sha256};

const SEED_BYTES: usize = 32;

/// Lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256 in hex: what is kept of a key.
pub fn hash(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

/// A new key.
pub fn new_key() -> std::io::Result<Secret> {
    Ok(Secret::new(format!("e2b_{}", hex(&random::<20>()?))))
}

/// `N` random bytes.
pub fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0u8; N];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    Ok(bytes)
}

/// The installation's seed.
#[derive(Clone)]
pub struct Seed([u8; SEED_BYTES]);

impl Seed {
    /// Reads the seed at `path`, or makes it there.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        match fs::read(path) {
            Ok(bytes) => bytes.try_into().map(Self).map_err(|_| {
                let problem = format!("{} does not hold {SEED_BYTES} bytes", path.display());
                std::io::Error::new(std::io::ErrorKind::InvalidData, problem)
            }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let seed = random::<SEED_BYTES>()?;
                write_secret(path, &seed)?;
                Ok(Self(seed))
            }
            Err(error) => Err(error),
        }
    }

    /// The token that the agent of `sandbox` demands.
    pub fn envd_token(&self, sandbox: &SandboxId) -> Secret {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes a key of any length");
        mac.update(sandbox.as_str().as_bytes());
        Secret::new(hex(&mac.finalize().into_bytes()))
    }
}

/// Writes a file that only its owner can read; fails when it exists.
pub fn write_secret(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// The signature of a signed file URL (`e2b-protocol` 3.4): what the SDK computes for the query parts given.
pub fn file_signature(
    token: &Secret,
    path: &str,
    operation: &str,
    user: &str,
    expiration: Option<&str>,
) -> String {
    let mut text = format!("{path}:{operation}:{user}:{}", token.expose());
    if let Some(expiration) = expiration {
        text.push(':');
        text.push_str(expiration);
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text.as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_has_the_form_sdks_check() {
        let key = new_key().unwrap();
        let digits = key.expose().strip_prefix("e2b_").unwrap();
        assert!(digits.len() == 40 && digits.bytes().all(|b| b.is_ascii_hexdigit()));
        assert_eq!(hash(key.expose()).len(), 64);
    }

    #[test]
    fn seed_is_made_once_and_private() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("seed");
        let id: SandboxId = "iabc".parse().unwrap();
        let token = Seed::open(&path).unwrap().envd_token(&id);
        assert!(Seed::open(&path).unwrap().envd_token(&id).matches(token.expose()));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::write(&path, b"short").unwrap();
        assert!(Seed::open(&path).is_err());
    }

    #[test]
    fn signature_is_the_sdks() {
        // Captured from the official SDK (`e2b-protocol`, appendix A).
        let signature = file_signature(&Secret::new("tok123"), "/a.txt", "read", "", None);
        assert_eq!(signature, "v1_aIQ9rS1/eGqhl6q22PRx0z8SQCKtU3zaOY+v5MvoO/g");
    }
}
