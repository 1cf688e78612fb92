//! Guest memory: where it is, and how it gets into files and out of them.
//!
//! ```text
//! guest physical   0 ───────────────── low end     3 GiB ── 4 GiB            4 GiB ───── high end
//!                  RAM                             devices (see `layout`)    RAM
//! memory file      0 ───────────────── low end ............................. (low end) ── size
//! ```
//!
//! A memory file is as large as guest memory and has holes. The memory of a restored machine is one private mapping of
//! the first file; what later files of the chain changed is mapped or read over it. What this machine has written since
//! is known to the kernel: such pages are not the file's any more (`/proc/pid/pagemap`).
//!
//! Contract: the mapping lives as long as the process, in forked children too, at the same address. Everything here that
//! reads or writes much of it does so while no vCPU runs.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};
use vm_memory::mmap::MmapRegion;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use crate::Error;
use crate::sys::{self, Advice};

/// Places in guest physical memory.
pub mod layout {
    /// RAM below 4 GiB ends here at the latest.
    pub const LOW_END: u64 = 0xc000_0000;
    /// RAM above goes on here.
    pub const HIGH_START: u64 = 1 << 32;
    /// The first virtio device; each has [`DEVICE_SIZE`].
    pub const DEVICES: u64 = 0xd000_0000;
    /// Registers of one device.
    pub const DEVICE_SIZE: u64 = 0x1000;
    /// KVM's own pages on Intel processors: a page table and a task state segment.
    pub const IDENTITY_MAP: u64 = 0xfffb_c000;
    /// As above.
    pub const TASK_STATE: u64 = 0xfffb_d000;
    /// I/O interrupt controller.
    pub const IO_APIC: u32 = 0xfec0_0000;
    /// Each processor's own.
    pub const LOCAL_APIC: u32 = 0xfee0_0000;
    /// Interrupt line of the first virtio device. From 16 on lines belong to the I/O APIC alone.
    pub const FIRST_LINE: u32 = 16;
    /// Lines of the I/O APIC.
    pub const LINES: u32 = 24;
}

/// Page size; guest memory is a multiple of it.
pub const PAGE: u64 = 4096;
/// Mappings that parts of later memory files may have; smaller or further parts are read instead.
const MAX_OVERLAYS: usize = 4096;
const OVERLAY_BYTES: u64 = 64 * 1024;
/// Smallest machine.
const MIN_BYTES: u64 = 1 << 20;

/// A range of guest memory, in the memory file's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Offset in the memory file.
    pub offset: u64,
    /// Bytes, whole pages.
    pub bytes: u64,
}

/// One contiguous piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Guest physical address.
    pub guest: u64,
    /// Address in this process.
    pub host: usize,
    /// Size.
    pub bytes: u64,
    /// Offset in the memory file.
    pub offset: u64,
}

/// A part of an extent that is contiguous in this process.
struct Part {
    address: usize,
    bytes: usize,
    /// In the memory file.
    offset: u64,
}

/// Guest memory.
#[derive(Debug)]
pub struct Memory {
    /// As devices see it.
    pub map: GuestMemoryMmap,
    regions: Vec<Region>,
    bytes: u64,
    /// What each file of the snapshot's chain holds; empty for a machine that was booted.
    layers: Vec<Vec<Extent>>,
}

impl Memory {
    /// Memory of zeros.
    ///
    /// # Errors
    /// When the size is no multiple of a page or the host refuses it.
    pub fn zeroed(bytes: u64, huge_pages: bool) -> Result<Self, Error> {
        let memory = Self::map(bytes, None)?;
        if huge_pages {
            for region in &memory.regions {
                // SAFETY: the region is guest memory.
                unsafe { sys::advise(region.host, region.bytes as usize, Advice::Huge) }
                    .map_err(Error::io("use huge pages"))?;
            }
        }
        Ok(memory)
    }

    /// Memory as a chain of files holds it. `layers` says what is in each; a file that is shorter than it says is
    /// refused, as touching what is not there would kill the process.
    ///
    /// # Errors
    /// When files and `layers` do not fit each other, or the host refuses a mapping.
    pub fn from_files(bytes: u64, files: &[File], layers: Vec<Vec<Extent>>) -> Result<Self, Error> {
        if files.is_empty() || files.len() != layers.len() {
            return Err(Error::BadRequest(format!(
                "the snapshot has {} memory files, {} came",
                layers.len(),
                files.len()
            )));
        }
        for file in files {
            let length = file.metadata().map_err(Error::io("look at a memory file"))?.len();
            if length != bytes {
                return Err(Error::BadSnapshot(format!(
                    "a memory file has {length} bytes instead of {bytes}"
                )));
            }
        }
        for Extent { offset, bytes: length } in layers.iter().flatten() {
            let end = offset.checked_add(*length).filter(|end| *end <= bytes);
            if end.is_none() || !offset.is_multiple_of(PAGE) || !length.is_multiple_of(PAGE) {
                return Err(Error::BadSnapshot(format!("a range of memory at {offset} is not in it")));
            }
        }
        let mut memory = Self::map(bytes, Some(&files[0]))?;
        let mut overlays = 0;
        for (file, extents) in files.iter().zip(&layers).skip(1) {
            for extent in extents {
                memory.lay_over(file, *extent, &mut overlays)?;
            }
        }
        memory.layers = layers;
        Ok(memory)
    }

    /// No memory: what a parent's machine is left with in a child that has taken it over.
    pub(crate) fn none() -> Self {
        Self { map: GuestMemoryMmap::new(), regions: Vec::new(), bytes: 0, layers: Vec::new() }
    }

    fn map(bytes: u64, file: Option<&File>) -> Result<Self, Error> {
        if bytes < MIN_BYTES || !bytes.is_multiple_of(PAGE) {
            return Err(Error::BadRequest(format!(
                "guest memory of {bytes} bytes: at least 1 MiB, whole pages"
            )));
        }
        let low = bytes.min(layout::LOW_END);
        let mut regions = Vec::new();
        for (guest, bytes, offset) in [(0, low, 0), (layout::HIGH_START, bytes - low, low)] {
            if bytes == 0 {
                continue;
            }
            let size =
                usize::try_from(bytes).map_err(|_| Error::DoesNotFit { what: "memory", needed: bytes })?;
            let host = sys::map_private(size, file.map(|file| (file.as_fd(), offset)))
                .map_err(Error::io("map guest memory"))?;
            regions.push(Region { guest, host, bytes, offset });
        }
        let mapped = regions
            .iter()
            .map(|region| {
                // SAFETY: this range was just mapped, readable and writable, and is never unmapped.
                let mapping = unsafe {
                    MmapRegion::build_raw(
                        region.host as *mut u8,
                        region.bytes as usize,
                        libc::PROT_READ | libc::PROT_WRITE,
                        libc::MAP_PRIVATE,
                    )
                };
                mapping.ok().and_then(|mapping| GuestRegionMmap::new(mapping, GuestAddress(region.guest)))
            })
            .collect::<Option<Vec<_>>>();
        let map = mapped
            .and_then(|mapped| GuestMemoryMmap::from_regions(mapped).ok())
            .ok_or(Error::DoesNotFit { what: "memory", needed: bytes })?;
        Ok(Self { map, regions, bytes, layers: Vec::new() })
    }

    fn lay_over(&self, file: &File, extent: Extent, overlays: &mut usize) -> Result<(), Error> {
        for Part { address, bytes, offset } in self.parts(extent) {
            if bytes as u64 >= OVERLAY_BYTES && *overlays < MAX_OVERLAYS {
                *overlays += 1;
                // SAFETY: the part is guest memory.
                unsafe { sys::map_over(address, bytes, file.as_fd(), offset) }
                    .map_err(Error::io("map a memory file"))?;
            } else {
                let piece = sys::Piece { iov_base: address as *mut libc::c_void, iov_len: bytes };
                // SAFETY: the part is guest memory.
                let read = unsafe { sys::read_pieces(file.as_raw_fd(), &[piece], offset) }
                    .map_err(Error::io("read a memory file"))?;
                if read != bytes {
                    return Err(Error::BadSnapshot("a memory file has become shorter".to_owned()));
                }
            }
        }
        Ok(())
    }

    /// Where an extent, which lies in the memory file, is in this process.
    fn parts(&self, extent: Extent) -> impl Iterator<Item = Part> {
        self.regions.iter().filter_map(move |region| {
            let start = extent.offset.max(region.offset);
            let end = (extent.offset + extent.bytes).min(region.offset + region.bytes);
            (start < end).then(|| Part {
                address: region.host + (start - region.offset) as usize,
                bytes: (end - start) as usize,
                offset: start,
            })
        })
    }

    /// Size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Its pieces.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The end of RAM below 4 GiB.
    pub fn low_end(&self) -> u64 {
        self.bytes.min(layout::LOW_END)
    }

    /// Maps all that the snapshot holds, for a machine that will be copied: copies find the page tables filled.
    pub fn populate(&self) {
        for part in self.layers.iter().flatten().flat_map(|extent| self.parts(*extent)) {
            // SAFETY: the part is guest memory. An older kernel does not know the advice: only slower.
            let _ = unsafe { sys::advise(part.address, part.bytes, Advice::Populate) };
        }
    }

    /// Writes to `file` what is not zero, or, with `pagemap` of this process, what was written since the snapshot that
    /// this machine came from. Returns what each file of the new snapshot's chain holds, this one last.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, file: &File, pagemap: Option<&File>) -> Result<Vec<Vec<Extent>>, Error> {
        file.set_len(self.bytes).map_err(Error::io("size the memory file"))?;
        let mut extents: Vec<Extent> = Vec::new();
        let mut layers = self.layers.clone();
        if pagemap.is_none() {
            layers.clear();
        }
        let is_full = layers.is_empty();
        for region in &self.regions {
            let mut page = 0;
            while page < region.bytes {
                // One read of the page map answers for 2 MiB.
                let batch = (region.bytes - page).min(512 * PAGE);
                let present =
                    pagemap.map(|map| written(map, region.host + page as usize, batch)).transpose()?;
                for number in 0..(batch / PAGE) {
                    let at = page + number * PAGE;
                    let is_written = present.as_ref().is_none_or(|present| present[number as usize]);
                    // SAFETY: the page lies in this region and no vCPU runs.
                    if is_written && !(is_full && unsafe { sys::is_zero_page(region.host + at as usize) }) {
                        push(&mut extents, region.offset + at);
                    }
                }
                page += batch;
            }
        }
        for extent in &extents {
            self.write_extent(file, *extent)?;
        }
        layers.push(extents);
        Ok(layers)
    }

    fn write_extent(&self, file: &File, extent: Extent) -> Result<(), Error> {
        for Part { mut address, mut bytes, mut offset } in self.parts(extent) {
            while bytes > 0 {
                let piece = sys::Piece { iov_base: address as *mut libc::c_void, iov_len: bytes };
                // SAFETY: the part is guest memory.
                let written = unsafe { sys::write_pieces(file.as_raw_fd(), &[piece], offset) };
                let written = written.map_err(Error::io("write the memory file"))?;
                if written == 0 {
                    return Err(Error::io("write the memory file")(std::io::ErrorKind::WriteZero));
                }
                (address, bytes, offset) = (address + written, bytes - written, offset + written as u64);
            }
        }
        Ok(())
    }
}

fn push(extents: &mut Vec<Extent>, offset: u64) {
    match extents.last_mut() {
        Some(last) if last.offset + last.bytes == offset => last.bytes += PAGE,
        _ => extents.push(Extent { offset, bytes: PAGE }),
    }
}

/// For each page of a range, whether this process has a page of its own there instead of the file's. One entry of
/// pagemap is 64 bits: 63 present, 62 swapped, 61 belongs to a file or is shared (kernel documentation, pagemap).
fn written(pagemap: &File, address: usize, bytes: u64) -> Result<Vec<bool>, Error> {
    let pages = (bytes / PAGE) as usize;
    let mut entries = vec![0u8; pages * 8];
    pagemap.read_exact_at(&mut entries, address as u64 / PAGE * 8).map_err(Error::io("read the page map"))?;
    Ok(entries
        .chunks_exact(8)
        .map(|entry| {
            let entry = entry.iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte));
            let (present, swapped, of_file) = (entry >> 63 & 1, entry >> 62 & 1, entry >> 61 & 1);
            (present | swapped) == 1 && of_file == 0
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    fn own_pagemap() -> File {
        File::open("/proc/self/pagemap").unwrap()
    }

    #[test]
    fn a_chain_of_files_is_restored_and_only_what_was_written_is_saved() {
        let bytes = 8 << 20;
        let first = Memory::zeroed(bytes, false).unwrap();
        for page in [0u64, 5, 100, 101, 102] {
            first.map.write_obj(page + 1, GuestAddress(page * PAGE)).unwrap();
        }
        // Written, but zero: not in a full file.
        first.map.write_obj(0u64, GuestAddress(50 * PAGE)).unwrap();
        let base = tempfile::tempfile().unwrap();
        let layers = first.save(&base, Some(&own_pagemap())).unwrap();
        assert_eq!(layers[0].len(), 3);
        assert_eq!(layers[0][2], Extent { offset: 100 * PAGE, bytes: 3 * PAGE });

        let second = Memory::from_files(bytes, &[base.try_clone().unwrap()], layers).unwrap();
        assert_eq!(second.map.read_obj::<u64>(GuestAddress(101 * PAGE)).unwrap(), 102);
        second.map.write_obj(7u64, GuestAddress(5 * PAGE)).unwrap();
        // Zero over something: must be in the delta.
        second.map.write_obj(0u64, GuestAddress(100 * PAGE)).unwrap();
        for page in 200..240u64 {
            second.map.write_obj(page, GuestAddress(page * PAGE)).unwrap();
        }
        let delta = tempfile::tempfile().unwrap();
        let layers = second.save(&delta, Some(&own_pagemap())).unwrap();
        assert_eq!(layers.len(), 2);
        assert_eq!(layers[1].iter().map(|extent| extent.bytes / PAGE).collect::<Vec<_>>(), [1, 1, 40]);

        let third = Memory::from_files(bytes, &[base, delta], layers).unwrap();
        for (page, value) in [(0u64, 1u64), (5, 7), (100, 0), (101, 102), (200, 200), (239, 239)] {
            assert_eq!(third.map.read_obj::<u64>(GuestAddress(page * PAGE)).unwrap(), value, "page {page}");
        }
    }

    #[test]
    fn files_that_do_not_fit_are_refused() {
        let short = tempfile::tempfile().unwrap();
        short.set_len(4096).unwrap();
        assert!(matches!(
            Memory::from_files(8 << 20, &[short], vec![Vec::new()]),
            Err(Error::BadSnapshot(_))
        ));
        let file = || {
            let file = tempfile::tempfile().unwrap();
            file.set_len(8 << 20).unwrap();
            file
        };
        for extent in [
            Extent { offset: 8 << 20, bytes: PAGE },
            Extent { offset: u64::MAX - 4095, bytes: PAGE },
            Extent { offset: 1, bytes: PAGE },
            Extent { offset: 0, bytes: u64::MAX },
        ] {
            for layers in [vec![Vec::new(), vec![extent]], vec![vec![extent], Vec::new()]] {
                assert!(matches!(
                    Memory::from_files(8 << 20, &[file(), file()], layers),
                    Err(Error::BadSnapshot(_))
                ));
            }
        }
    }
}
