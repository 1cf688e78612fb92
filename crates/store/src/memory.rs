//! A template's memory, loaded once and shared by every copy.
//!
//! It is a file in memory (memfd) sealed against writing: each sandbox's machine maps it privately, and not even a
//! machine process that a guest has taken over can change what the others map. The seal is needed because QEMU opens
//! memory files for writing also when it maps them privately. Holes stay holes.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{MemfdFlags, SealFlags, SeekFrom as FdSeek};

use crate::Error;

/// Loads the memory image at `path` into a sealed file in memory.
pub fn load_sealed(path: &Path) -> Result<OwnedFd, Error> {
    let mut source = File::open(path).map_err(Error::io("read", path))?;
    let length = source.metadata().map_err(Error::io("read", path))?.len();
    let fd = rustix::fs::memfd_create("pando-memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(|errno| Error::Io { verb: "load", path: path.to_owned(), source: errno.into() })?;
    let mut target = File::from(fd);
    target.set_len(length).map_err(Error::io("load", path))?;
    copy_sparse(&mut source, &mut target).map_err(Error::io("load", path))?;
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&target, seals).map_err(|errno| Error::Io {
        verb: "seal",
        path: path.to_owned(),
        source: errno.into(),
    })?;
    Ok(target.into())
}

/// Copies the parts of `source` that hold data; pages of zeros become holes too.
fn copy_sparse(source: &mut File, target: &mut File) -> std::io::Result<()> {
    const PAGE: usize = 4096;
    let mut buffer = vec![0u8; 1 << 20];
    let mut at = 0u64;
    loop {
        let start = match rustix::fs::seek(source.as_fd(), FdSeek::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        let end = rustix::fs::seek(source.as_fd(), FdSeek::Hole(start))?;
        source.seek(SeekFrom::Start(start))?;
        at = start;
        while at < end {
            let want = buffer.len().min((end - at) as usize);
            let count = source.read(&mut buffer[..want])?;
            if count == 0 {
                return Ok(());
            }
            for (index, page) in buffer[..count].chunks(PAGE).enumerate() {
                if page.iter().any(|byte| *byte != 0) {
                    target.seek(SeekFrom::Start(at + (index * PAGE) as u64))?;
                    target.write_all(page)?;
                }
            }
            at += count as u64;
        }
    }
}

/// Copies a file, leaving holes where the source has holes or zeros; returns when the copy is on the disk.
pub fn copy_file_sparse(source: &Path, target: &Path) -> Result<(), Error> {
    let mut from = File::open(source).map_err(Error::io("read", source))?;
    let length = from.metadata().map_err(Error::io("read", source))?.len();
    let mut to = File::create_new(target).map_err(Error::io("create", target))?;
    to.set_len(length).map_err(Error::io("size", target))?;
    copy_sparse(&mut from, &mut to).map_err(Error::io("copy", source))?;
    to.sync_all().map_err(Error::io("flush", target))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_copy_is_exact_sparse_and_cannot_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("memory");
        let mut file = File::create(&path).unwrap();
        file.set_len(64 << 20).unwrap();
        for at in [0u64, 5000, (32 << 20) - 3, (64 << 20) - 8] {
            file.seek(SeekFrom::Start(at)).unwrap();
            file.write_all(b"12345678").unwrap();
        }
        let mut sealed = File::from(load_sealed(&path).unwrap());
        let stat = rustix::fs::fstat(&sealed).unwrap();
        assert!(stat.st_blocks * 512 < 1 << 20, "holes are kept: {} blocks", stat.st_blocks);
        let mut copy = Vec::new();
        sealed.seek(SeekFrom::Start(0)).unwrap();
        sealed.read_to_end(&mut copy).unwrap();
        assert!(copy == std::fs::read(&path).unwrap());
        assert!(sealed.write_all(b"x").is_err());
        assert!(sealed.set_len(1).is_err());
    }
}
