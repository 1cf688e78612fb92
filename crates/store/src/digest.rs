//! SHA-256 of files. Holes are hashed as the zeros they stand for but not read: reading them would fill the page cache
//! with as many zeros as a sparse disk is large.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::SeekFrom;
use sha2::{Digest, Sha256};

use crate::Error;

const CHUNK: usize = 1 << 20;

/// SHA-256 of a file in lower-case hex.
pub fn sha256_file(path: &Path) -> Result<String, Error> {
    let file = File::open(path).map_err(Error::io("read", path))?;
    let digest = hash(&file).map_err(Error::io("read", path))?;
    Ok(digest.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn hash(file: &File) -> std::io::Result<Vec<u8>> {
    let length = file.metadata()?.len();
    let mut hash = Sha256::new();
    let (mut buffer, zeros) = (vec![0u8; CHUNK], vec![0u8; CHUNK]);
    let mut at = 0;
    while at < length {
        let (data, hole) = next_extent(file, at, length)?;
        while at < data {
            let count = zeros.len().min((data - at) as usize);
            hash.update(&zeros[..count]);
            at += count as u64;
        }
        while at < hole {
            let count = buffer.len().min((hole - at) as usize);
            file.read_exact_at(&mut buffer[..count], at)?;
            hash.update(&buffer[..count]);
            at += count as u64;
        }
    }
    Ok(hash.finalize().to_vec())
}

/// Begin and end of the first data at or after `at`; both `length` if there is none.
fn next_extent(file: &File, at: u64, length: u64) -> std::io::Result<(u64, u64)> {
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(data) => Ok((data, rustix::fs::seek(file, SeekFrom::Hole(data))?)),
        Err(rustix::io::Errno::NXIO) => Ok((length, length)),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_hash_as_zeros() {
        let dir = tempfile::tempdir().unwrap();
        let (sparse, full) = (dir.path().join("sparse"), dir.path().join("full"));
        let file = File::create(&sparse).unwrap();
        file.set_len((3 << 20) + 17).unwrap();
        file.write_all_at(b"data", 2 << 20).unwrap();
        std::fs::write(&full, std::fs::read(&sparse).unwrap()).unwrap();
        assert_eq!(sha256_file(&sparse).unwrap(), sha256_file(&full).unwrap());
        let empty = dir.path().join("empty");
        File::create(&empty).unwrap();
        assert!(sha256_file(&empty).unwrap().starts_with("e3b0c44298fc1c14"));
    }
}
