//! An empty qcow2 layer over a raw disk: what one sandbox writes.
//!
//! Written here rather than by `qemu-img`, because it is on the path of every create: three clusters, no process. The
//! format of the layer underneath is *named* in the header, never guessed: a guest can write a qcow2 header into its
//! raw disk, and a guess would open what that names (S62).

use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use crate::Error;

const CLUSTER_BITS: u32 = 16;
const CLUSTER: u64 = 1 << CLUSTER_BITS;
const VERSION_3: u32 = 3;
const HEADER_LENGTH: u32 = 104;
const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
const EXTENSION_END: u32 = 0;
const REFCOUNT_ORDER_16_BIT: u32 = 4;
/// A header, the backing file's name and its format must fit one cluster; QEMU allows a name of 1,023 bytes.
const NAME_LIMIT: usize = 1023;

/// Creates `layer`, of `size` bytes, that reads through to the raw disk `backing`. Fails when `layer` exists.
pub fn create(layer: &Path, backing: &Path, size: u64) -> Result<(), Error> {
    let name = backing.as_os_str().as_encoded_bytes();
    if name.len() > NAME_LIMIT {
        return Err(Error::format(backing, "a disk's path", format!("longer than {NAME_LIMIT} bytes")));
    }
    // One L2 table maps a cluster's worth of 8-byte entries.
    let l1_entries = size.div_ceil(CLUSTER * (CLUSTER / 8)).max(1);
    let l1_clusters = (l1_entries * 8).div_ceil(CLUSTER);
    // Clusters: header, refcount table, refcount block, L1 table.
    let used_clusters = 3 + l1_clusters;
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(layer)
        .map_err(Error::io("create", layer))?;
    let mut write_at = |offset: u64, bytes: &[u8]| {
        file.seek(SeekFrom::Start(offset))
            .and_then(|_| file.write_all(bytes))
            .map_err(Error::io("write", layer))
    };
    write_at(0, &header(name, size, l1_entries as u32))?;
    write_at(CLUSTER, &(2 * CLUSTER).to_be_bytes())?;
    let refcounts: Vec<u8> = (0..used_clusters).flat_map(|_| 1u16.to_be_bytes()).collect();
    write_at(2 * CLUSTER, &refcounts)?;
    file.set_len(used_clusters * CLUSTER).map_err(Error::io("size", layer))
}

fn header(backing: &[u8], size: u64, l1_entries: u32) -> Vec<u8> {
    let extensions: Vec<u8> = [
        &EXTENSION_BACKING_FORMAT.to_be_bytes()[..],
        &3u32.to_be_bytes(),
        b"raw\0\0\0\0\0",
        &EXTENSION_END.to_be_bytes(),
        &0u32.to_be_bytes(),
    ]
    .concat();
    let name_offset = u64::from(HEADER_LENGTH) + extensions.len() as u64;
    let mut out = b"QFI\xfb".to_vec();
    out.extend(VERSION_3.to_be_bytes());
    out.extend(name_offset.to_be_bytes());
    out.extend((backing.len() as u32).to_be_bytes());
    out.extend(CLUSTER_BITS.to_be_bytes());
    out.extend(size.to_be_bytes());
    out.extend(0u32.to_be_bytes()); // no encryption
    out.extend(l1_entries.to_be_bytes());
    out.extend((3 * CLUSTER).to_be_bytes()); // L1 table
    out.extend(CLUSTER.to_be_bytes()); // refcount table
    out.extend(1u32.to_be_bytes()); // of one cluster
    out.extend(0u32.to_be_bytes()); // no snapshots
    out.extend(0u64.to_be_bytes());
    out.extend(0u64.to_be_bytes()); // incompatible, compatible, autoclear features
    out.extend(0u64.to_be_bytes());
    out.extend(0u64.to_be_bytes());
    out.extend(REFCOUNT_ORDER_16_BIT.to_be_bytes());
    out.extend(HEADER_LENGTH.to_be_bytes());
    out.extend(extensions);
    out.extend(backing);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_fields_are_where_the_format_says() {
        let head = header(b"/disk.raw", 8 << 30, 16);
        assert_eq!(&head[..8], b"QFI\xfb\0\0\0\x03");
        assert_eq!(u32::from_be_bytes(head[100..104].try_into().unwrap()), HEADER_LENGTH);
        let name_at = u64::from_be_bytes(head[8..16].try_into().unwrap()) as usize;
        assert_eq!(&head[name_at..], b"/disk.raw");
    }

    #[test]
    fn qemu_reads_it() {
        if std::process::Command::new("qemu-img").arg("--version").output().is_err() {
            return; // qemu-utils is not needed to run Pando
        }
        let dir = tempfile::tempdir().unwrap();
        let (base, layer) = (dir.path().join("base.raw"), dir.path().join("layer.qcow2"));
        let size = 10u64 << 30;
        std::fs::File::create(&base).unwrap().set_len(size).unwrap();
        create(&layer, &base, size).unwrap();
        let check = std::process::Command::new("qemu-img").arg("check").arg(&layer).output().unwrap();
        assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
        let info = std::process::Command::new("qemu-img")
            .args(["info", "--output=json"])
            .arg(&layer)
            .output()
            .unwrap();
        let info = String::from_utf8_lossy(&info.stdout).into_owned();
        assert!(info.contains("\"backing-filename-format\": \"raw\""), "{info}");
        assert!(create(&layer, &base, size).is_err(), "an existing layer is never overwritten");
    }
}
