//! Bytes on a node's disk: kernel, initramfs, root disks, memory images, templates.
//!
//! Owns: the layout of the data directory ([`layout`]), how each file in it is made and checked. Does not own: when
//! (that is `node`), nor any running machine. Everything here is synchronous; callers on an async runtime use its
//! blocking pool.
//!
//! * [`layout`]: where everything lies.
//! * [`kernel`]: Debian's cloud kernel: package to `vmlinux` and modules.
//! * [`initramfs`]: the guest agent and the kernel's modules as an archive the kernel unpacks.
//! * [`rootfs`]: a Debian root disk.
//! * [`qcow2`]: an empty writable layer over a raw disk.
//! * [`memory`]: a template's memory as a sealed file in memory.
//! * [`template`]: a directory with a manifest, whole or not there.
//! * [`command`]: child programs with their errors told.

pub mod command;
pub mod initramfs;
pub mod kernel;
pub mod layout;
pub mod memory;
pub mod qcow2;
pub mod rootfs;
pub mod template;

mod digest;

use std::path::{Path, PathBuf};

pub use digest::sha256_file;

/// What can go wrong with the bytes on a node's disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file operation failed.
    #[error("cannot {verb} {path}")]
    Io {
        /// What was tried: "read", "create".
        verb: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A child program could not be run or failed.
    #[error(transparent)]
    Command(#[from] command::CommandError),
    /// A file does not have the content it must have.
    #[error("{path} is not {expected}: {problem}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What it was taken for.
        expected: &'static str,
        /// Where it differs.
        problem: String,
    },
    /// A template's file is not the one its manifest describes.
    #[error(
        "{path} differs from the template's manifest: {problem}; rebuild it with `pando setup --rebuild`"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What differs.
        problem: String,
    },
}

impl Error {
    /// For `map_err`: names the operation and the file.
    pub fn io(verb: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { verb, path, source }
    }

    fn format(path: &Path, expected: &'static str, problem: impl Into<String>) -> Self {
        Self::Format { path: path.to_owned(), expected, problem: problem.into() }
    }
}
