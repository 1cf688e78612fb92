//! One delta: its header and its map.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::{BLOCK, DiskError};

const MAGIC: [u8; 8] = *b"PANDODLT";
const VERSION: u32 = 1;
const HEADER: usize = 28;
const MAP: u64 = BLOCK;
const DATA_ALIGNMENT: u64 = 1 << 20;
/// A disk of 64 TiB has a map of 2 GiB; nothing larger is believed.
const MAX_BYTES: u64 = 1 << 46;

/// A layer above the image.
#[derive(Debug)]
pub(crate) struct Delta {
    file: File,
    map: Vec<u8>,
    data: u64,
}

fn map_bytes(disk: u64) -> u64 {
    (disk / BLOCK).div_ceil(8)
}

fn data_offset(disk: u64) -> u64 {
    (MAP + map_bytes(disk)).next_multiple_of(DATA_ALIGNMENT)
}

fn header(disk: u64) -> [u8; HEADER] {
    let mut header = [0u8; HEADER];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&(BLOCK as u32).to_le_bytes());
    header[16..24].copy_from_slice(&disk.to_le_bytes());
    let checksum = crc32fast::hash(&header[..24]);
    header[24..].copy_from_slice(&checksum.to_le_bytes());
    header
}

/// Makes an empty file the delta of a disk of `bytes` that has no block yet.
///
/// # Errors
/// When the size is none that a disk has, or the file cannot be written.
pub fn create(file: &File, bytes: u64) -> Result<(), DiskError> {
    if bytes == 0 || !bytes.is_multiple_of(BLOCK) || bytes > MAX_BYTES {
        return Err(DiskError::Unaligned(bytes));
    }
    file.set_len(data_offset(bytes) + bytes).map_err(DiskError::io("size a delta"))?;
    file.write_all_at(&header(bytes), 0).map_err(DiskError::io("write a delta's header"))
}

impl Delta {
    /// Opens the delta of a disk of `bytes`.
    pub(crate) fn open(file: File, bytes: u64) -> Result<Self, DiskError> {
        let mut found = [0u8; HEADER];
        match file.read_exact_at(&mut found, 0) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(DiskError::Format("it is too short"));
            }
            Err(error) => return Err(DiskError::io("read a delta's header")(error)),
        }
        if found[..8] != MAGIC {
            return Err(DiskError::Format("it does not begin like one"));
        }
        let [.., s0, s1, s2, s3, s4, s5, s6, s7, _, _, _, _] = found;
        let disk = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        if found != header(disk) {
            return Err(DiskError::Format("its header is damaged, or of another version"));
        }
        if disk != bytes || bytes > MAX_BYTES {
            return Err(DiskError::Size { layer: disk, disk: bytes });
        }
        let mut map = vec![0u8; map_bytes(bytes) as usize];
        match file.read_exact_at(&mut map, MAP) {
            Ok(()) => Ok(Self { file, map, data: data_offset(bytes) }),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(DiskError::Format("its map is cut off"))
            }
            Err(error) => Err(DiskError::io("read a delta's map")(error)),
        }
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Where the disk's byte `offset` is in the file, if this layer has its block.
    pub(crate) fn place(&self, offset: u64) -> u64 {
        self.data + offset
    }

    pub(crate) fn has(&self, block: u64) -> bool {
        self.map.get((block / 8) as usize).is_some_and(|byte| byte >> (block % 8) & 1 == 1)
    }

    /// From now on this layer has the blocks `first..end`: in the file first.
    pub(crate) fn mark(&mut self, first: u64, end: u64) -> Result<(), DiskError> {
        if (first..end).all(|block| self.has(block)) {
            return Ok(());
        }
        let (from, to) = ((first / 8) as usize, end.div_ceil(8) as usize);
        let mut bytes = self.map[from..to].to_vec();
        for block in first..end {
            bytes[(block / 8) as usize - from] |= 1 << (block % 8);
        }
        self.file.write_all_at(&bytes, MAP + from as u64).map_err(DiskError::io("write a delta's map"))?;
        self.map[from..to].copy_from_slice(&bytes);
        Ok(())
    }
}
