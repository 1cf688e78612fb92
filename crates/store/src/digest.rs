//! SHA-256 of files.

use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::Error;

/// SHA-256 of a file in lower-case hex.
pub fn sha256_file(path: &Path) -> Result<String, Error> {
    let mut file = std::fs::File::open(path).map_err(Error::io("read", path))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        let count = file.read(&mut buffer).map_err(Error::io("read", path))?;
        if count == 0 {
            break;
        }
        hash.update(&buffer[..count]);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
