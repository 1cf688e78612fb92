//! A disk as a chain of layers: a raw image at the bottom, frozen deltas, one delta that is written.
//!
//! Owns: the format of a delta, and the answer to where a byte of the disk is. Does not own: moving bytes between files
//! and a guest (`vmm` does that in place), or which layers make which disk (`store`).
//!
//! ```text
//! delta file   0        header: magic, version, block size, disk size, CRC-32     4 KiB
//!              4 KiB    map: one bit for each block of 4 KiB, 1 = this layer has it
//!              data     block n at data + n × 4 KiB, sparse; data is the next MiB after the map
//! ```
//!
//! A block whose bit is set and whose data is a hole is zeros: so a discard gives space back and still hides what is
//! below. Freezing copies nothing: the layer that was written is from then on only read, by as many disks as stand on it.
//!
//! Contract: the bit of a block is set after its data is written. A writer that dies loses at most the request it was at,
//! for blocks that the layer did not have: the map says that it still has not, and the block reads as before. Writing a
//! block the layer has goes in place, as on a disk. Sizes are multiples of 4 KiB.

mod delta;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::FallocateFlags;

use delta::Delta;
pub use delta::create as create_delta;

/// Bytes of a block.
pub const BLOCK: u64 = 4096;

/// A disk could not be opened, or a request not be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// A file failed. `ENOSPC` is here: the disk is as it was before the request, but for blocks it had already.
    #[error("cannot {what}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// A file is no delta, or one that is damaged or of another version.
    #[error("a layer is no delta of this version: {0}")]
    Format(&'static str),
    /// Layers of different sizes.
    #[error("a layer is of a disk of {layer} bytes, this disk has {disk}")]
    Size {
        /// The layer's.
        layer: u64,
        /// The disk's.
        disk: u64,
    },
    /// Not a multiple of a block, or nothing.
    #[error("a disk has a multiple of {BLOCK} bytes, not {0}")]
    Unaligned(u64),
    /// A request beyond the end.
    #[error("{bytes} bytes at {offset} are not on the disk")]
    Beyond {
        /// Where it begins.
        offset: u64,
        /// How many.
        bytes: u64,
    },
    /// Nothing of this disk is written.
    #[error("the disk is read-only")]
    ReadOnly,
}

impl DiskError {
    fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

/// The image at the bottom.
#[derive(Debug)]
pub enum Base {
    /// Only read.
    ReadOnly(File),
    /// Written in place; nothing may stand on it.
    Written(File),
}

/// Where bytes are.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// In a file, from this offset on. What is beyond the file's end is zeros.
    File {
        /// The file.
        file: &'a File,
        /// Where in it.
        offset: u64,
    },
    /// Nowhere: they are zeros.
    Zero,
}

/// A run of bytes in one place.
#[derive(Debug, Clone, Copy)]
pub struct Extent<'a> {
    /// Bytes.
    pub len: u64,
    /// Where.
    pub source: Source<'a>,
}

/// A disk.
#[derive(Debug)]
pub struct Disk {
    base: Base,
    /// The lowest first.
    frozen: Vec<Delta>,
    top: Option<Delta>,
    bytes: u64,
}

impl Disk {
    /// Puts layers together, the lowest of `frozen` first.
    ///
    /// # Errors
    /// When they do not belong to a disk of one size, or are no layers.
    pub fn open(base: Base, frozen: Vec<File>, top: Option<File>) -> Result<Self, DiskError> {
        let (file, is_written) = match &base {
            Base::ReadOnly(file) => (file, false),
            Base::Written(file) => (file, true),
        };
        let bytes = file.metadata().map_err(DiskError::io("look at the image"))?.len();
        if bytes == 0 || bytes % BLOCK != 0 {
            return Err(DiskError::Unaligned(bytes));
        }
        if is_written && (!frozen.is_empty() || top.is_some()) {
            return Err(DiskError::Format("nothing may stand on an image that is written itself"));
        }
        let open = |file| Delta::open(file, bytes);
        let frozen = frozen.into_iter().map(open).collect::<Result<_, _>>()?;
        let top = top.map(open).transpose()?;
        Ok(Self { base, frozen, top, bytes })
    }

    /// Size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it can be written.
    pub fn writable(&self) -> bool {
        self.top.is_some() || self.is_base_written()
    }

    /// Whether its image is written in place.
    pub fn is_base_written(&self) -> bool {
        matches!(self.base, Base::Written(_))
    }

    /// All its files.
    pub fn files(&self) -> impl Iterator<Item = &File> {
        let (Base::ReadOnly(base) | Base::Written(base)) = &self.base;
        std::iter::once(base).chain(self.frozen.iter().chain(&self.top).map(Delta::file))
    }

    /// Where `len` bytes from `offset` on are, in order.
    ///
    /// # Errors
    /// When they are not on the disk.
    pub fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent<'_>>, DiskError> {
        let end = self.end(offset, len)?;
        let mut extents: Vec<Extent<'_>> = Vec::new();
        let (mut at, mut last_layer) = (offset, None);
        while at < end {
            let block = at / BLOCK;
            let here = ((block + 1) * BLOCK).min(end) - at;
            let layer = self.layer_of(block);
            match extents.last_mut() {
                // The same layer goes on: data is where it is on the disk, plus a constant.
                Some(last) if last_layer == Some(layer) => last.len += here,
                _ => {
                    let source = match layer {
                        Some(number) => {
                            let delta = self.delta(number);
                            Source::File { file: delta.file(), offset: delta.place(at) }
                        }
                        None => {
                            let (Base::ReadOnly(file) | Base::Written(file)) = &self.base;
                            Source::File { file, offset: at }
                        }
                    };
                    extents.push(Extent { len: here, source });
                    last_layer = Some(layer);
                }
            }
            at += here;
        }
        Ok(extents)
    }

    /// Writes `len` bytes at `offset`: `write` is called once, with the file and the offset in it where all of them go.
    ///
    /// # Errors
    /// When the disk cannot be written there, or `write` fails: then no block that was not the layer's has become so.
    pub fn write_at(
        &mut self,
        offset: u64,
        len: u64,
        write: impl FnOnce(&File, u64) -> io::Result<()>,
    ) -> Result<(), DiskError> {
        let end = self.end(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        if let Base::Written(file) = &self.base {
            return write(file, offset).map_err(DiskError::io("write the image"));
        }
        self.copy_up_ends(offset, end)?;
        let Some(top) = &mut self.top else { return Err(DiskError::ReadOnly) };
        write(top.file(), top.place(offset)).map_err(DiskError::io("write a delta"))?;
        top.mark(offset / BLOCK, end.div_ceil(BLOCK))
    }

    /// Makes `len` bytes at `offset` zeros, giving back the space of whole blocks.
    ///
    /// # Errors
    /// When the disk cannot be written there.
    pub fn zero(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        let end = self.end(offset, len)?;
        if !self.writable() {
            return Err(DiskError::ReadOnly);
        }
        let (first, last) = (offset.next_multiple_of(BLOCK), end / BLOCK * BLOCK);
        if first >= last {
            return self.write_zeros(offset, end);
        }
        self.write_zeros(offset, first)?;
        self.write_zeros(last, end)?;
        match (&self.base, &mut self.top) {
            (Base::Written(file), _) => punch(file, first, last - first),
            (_, Some(top)) => {
                punch(top.file(), top.place(first), last - first)?;
                top.mark(first / BLOCK, last / BLOCK)
            }
            _ => Err(DiskError::ReadOnly),
        }
    }

    /// Returns when all that was written is on the host's disk.
    ///
    /// # Errors
    /// The kernel's.
    pub fn flush(&self) -> Result<(), DiskError> {
        let file = match (&self.base, &self.top) {
            (Base::Written(file), _) => file,
            (_, Some(top)) => top.file(),
            _ => return Ok(()),
        };
        file.sync_data().map_err(DiskError::io("write through to the host's disk"))
    }

    /// What was written becomes the highest frozen layer; `top`, an empty delta or one of the same size, takes what is
    /// written from now on.
    ///
    /// # Errors
    /// When `top` is no delta of this disk; the disk is as it was.
    pub fn freeze(&mut self, top: File) -> Result<(), DiskError> {
        if self.is_base_written() {
            return Err(DiskError::Format("nothing may stand on an image that is written itself"));
        }
        let top = Delta::open(top, self.bytes)?;
        self.frozen.extend(self.top.replace(top));
        Ok(())
    }

    /// Puts `top` in the place of the writable delta, which then has no part in this disk: for the copy of a disk that was
    /// just frozen, or of one that was never written.
    ///
    /// # Errors
    /// When `top` is no delta of this disk; the disk is as it was.
    pub fn replace_top(&mut self, top: File) -> Result<(), DiskError> {
        if self.is_base_written() {
            return Err(DiskError::Format("nothing may stand on an image that is written itself"));
        }
        self.top = Some(Delta::open(top, self.bytes)?);
        Ok(())
    }

    fn end(&self, offset: u64, len: u64) -> Result<u64, DiskError> {
        let end = offset.checked_add(len).filter(|end| *end <= self.bytes);
        end.ok_or(DiskError::Beyond { offset, bytes: len })
    }

    /// The highest layer that has a block: frozen layers by number, then the top; None for the image.
    fn layer_of(&self, block: u64) -> Option<usize> {
        (0..self.frozen.len() + usize::from(self.top.is_some()))
            .rev()
            .find(|number| self.delta(*number).has(block))
    }

    fn delta(&self, number: usize) -> &Delta {
        match (&self.top, self.frozen.get(number)) {
            (_, Some(delta)) | (Some(delta), None) => delta,
            // Numbers come from `layer_of`, which counts a top only if there is one.
            (None, None) => unreachable!("layer {number} of {}", self.frozen.len()),
        }
    }

    /// A request that begins or ends within a block which the top has not: the rest of that block comes from below.
    fn copy_up_ends(&mut self, offset: u64, end: u64) -> Result<(), DiskError> {
        let (first, last) = (offset / BLOCK, end / BLOCK);
        if !offset.is_multiple_of(BLOCK) || (last == first && !end.is_multiple_of(BLOCK)) {
            self.copy_up(first)?;
        }
        if !end.is_multiple_of(BLOCK) && last != first {
            self.copy_up(last)?;
        }
        Ok(())
    }

    fn copy_up(&mut self, block: u64) -> Result<(), DiskError> {
        if self.top.as_ref().is_none_or(|top| top.has(block)) {
            return Ok(());
        }
        let mut bytes = vec![0u8; BLOCK as usize];
        for extent in self.extents(block * BLOCK, BLOCK)? {
            if let Source::File { file, offset } = extent.source {
                read_or_zeros(file, &mut bytes, offset)?;
            }
        }
        let Some(top) = &self.top else { return Ok(()) };
        // Not marked yet: it is the request's own write that makes the block this layer's.
        top.file().write_all_at(&bytes, top.place(block * BLOCK)).map_err(DiskError::io("write a delta"))
    }

    fn write_zeros(&mut self, from: u64, to: u64) -> Result<(), DiskError> {
        let zeros = [0u8; 2 * BLOCK as usize];
        let bytes = zeros.get(..(to.saturating_sub(from)) as usize).unwrap_or(&zeros);
        self.write_at(from, bytes.len() as u64, |file, at| file.write_all_at(bytes, at))
    }
}

/// A whole block lies in one layer, so this reads all of it; a file's end is followed by zeros.
fn read_or_zeros(file: &File, bytes: &mut [u8], offset: u64) -> Result<(), DiskError> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(DiskError::io("read a layer")(error)),
        }
    }
    Ok(())
}

/// Makes a hole. File systems that cannot are written to instead.
fn punch(file: &File, offset: u64, bytes: u64) -> Result<(), DiskError> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(file, flags, offset, bytes) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP) => {
            let zeros = vec![0u8; 64 * 1024];
            let mut at = 0;
            while at < bytes {
                let count = (bytes - at).min(zeros.len() as u64);
                file.write_all_at(&zeros[..count as usize], offset + at)
                    .map_err(DiskError::io("write zeros"))?;
                at += count;
            }
            Ok(())
        }
        Err(error) => Err(DiskError::io("give back space")(error.into())),
    }
}

#[cfg(test)]
mod tests;
