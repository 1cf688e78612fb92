//! Signed `/files` URLs: a link that works without the token, for one path, operation and user.
//!
//! `signature = "v1_" + base64(sha256("path:operation:user:token[:expiration]"))` without padding; the path as it stands in
//! the query.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use proto::Secret;
use sha2::{Digest, Sha256};

/// What is signed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Claim<'a> {
    /// `path` of the query, or empty.
    pub(crate) path: &'a str,
    /// `read` or `write`.
    pub(crate) operation: &'static str,
    /// `username` of the query, or empty.
    pub(crate) user: &'a str,
    /// `signature_expiration` of the query, Unix time in seconds.
    pub(crate) expiration: Option<i64>,
}

/// Why a signature is not accepted. The texts are E2B's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SignatureError {
    /// There is none.
    #[error("missing signature query parameter")]
    Missing,
    /// It is for something else, or made with another token.
    #[error("invalid signature")]
    Invalid,
    /// It was right once.
    #[error("signature is already expired")]
    Expired,
}

fn sign(claim: Claim<'_>, token: &str) -> String {
    let Claim { path, operation, user, expiration } = claim;
    let mut text = format!("{path}:{operation}:{user}:{token}");
    if let Some(expiration) = expiration {
        text.push_str(&format!(":{expiration}"));
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)))
}

/// Checks a signature at the time `now`.
///
/// # Errors
/// When it does not allow what is claimed.
pub(crate) fn verify(
    claim: Claim<'_>,
    signature: Option<&str>,
    token: &Secret,
    now: i64,
) -> Result<(), SignatureError> {
    let signature = signature.ok_or(SignatureError::Missing)?;
    if !Secret::new(sign(claim, token.expose())).matches(signature) {
        return Err(SignatureError::Invalid);
    }
    // An expiration of 0 is one that passed long ago, not "never".
    match claim.expiration {
        Some(at) if at <= now => Err(SignatureError::Expired),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLAIM: Claim<'_> = Claim { path: "/a.txt", operation: "read", user: "", expiration: None };

    #[test]
    fn the_sdks_signature_is_accepted() {
        let token = Secret::new("tok123");
        let signature = "v1_aIQ9rS1/eGqhl6q22PRx0z8SQCKtU3zaOY+v5MvoO/g";
        assert_eq!(verify(CLAIM, Some(signature), &token, 0), Ok(()));
        assert_eq!(verify(CLAIM, None, &token, 0), Err(SignatureError::Missing));
        for other in [
            Claim { path: "/b.txt", ..CLAIM },
            Claim { operation: "write", ..CLAIM },
            Claim { user: "root", ..CLAIM },
            Claim { expiration: Some(9), ..CLAIM },
        ] {
            assert_eq!(verify(other, Some(signature), &token, 0), Err(SignatureError::Invalid));
        }
        assert!(verify(CLAIM, Some(signature), &Secret::new("other"), 0).is_err());
    }

    #[test]
    fn expiration_zero_is_in_the_past() {
        let token = Secret::new("t");
        for (expiration, expected) in
            [(0, Err(SignatureError::Expired)), (100, Err(SignatureError::Expired)), (101, Ok(()))]
        {
            let claim = Claim { expiration: Some(expiration), ..CLAIM };
            assert_eq!(verify(claim, Some(&sign(claim, "t")), &token, 100), expected);
        }
    }
}
