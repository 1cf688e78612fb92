//! Where everything lies under the data directory.
//!
//! ```text
//! lock                     held by the one server of this directory
//! guest/vmlinux            the kernel, uncompressed        guest/modules/…   its modules in load order
//! guest/initramfs          agent and modules
//! guest/base.raw           Debian root disk before its first boot
//! templates/<id>/          manifest.json disk.raw memory state
//! sandboxes/<id>/          delta, sockets: what one sandbox has on this host, removed with it
//! control.sqlite           the control plane's database
//! secrets/                 mode 0700: seed of tokens, first API key
//! run/node.sock            the node's API               run/zygote-<uid>/  a machine that a template is copied from
//! tmp/                     half-made things; emptied at start
//! ```

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use proto::{SandboxId, TemplateId};

use crate::Error;

const VMLINUX: &str = "guest/vmlinux";

/// The data directory.
#[derive(Debug, Clone)]
pub struct DataDir(PathBuf);

impl DataDir {
    /// Opens the directory and makes what is missing of its structure.
    pub fn open(root: &Path) -> Result<Self, Error> {
        let make = |path: &Path, mode: u32| {
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(mode)
                .create(path)
                .map_err(Error::io("create", path))
        };
        make(root, 0o755)?;
        let root = root.canonicalize().map_err(Error::io("find", root))?;
        for name in ["guest", "templates", "sandboxes", "run", "tmp"] {
            make(&root.join(name), 0o711)?;
        }
        make(&root.join("secrets"), 0o700)?;
        Ok(Self(root))
    }

    /// Whether `root` is a directory that was set up: nothing can be served without a kernel. Makes nothing.
    pub fn is_set_up(root: &Path) -> bool {
        root.join(VMLINUX).exists()
    }

    /// The directory itself.
    pub fn root(&self) -> &Path {
        &self.0
    }
    /// The file whose lock the server holds.
    pub fn lock(&self) -> PathBuf {
        self.0.join("lock")
    }
    /// The kernel.
    pub fn vmlinux(&self) -> PathBuf {
        self.0.join(VMLINUX)
    }
    /// The kernel's modules.
    pub fn modules(&self) -> PathBuf {
        self.0.join("guest/modules")
    }
    /// The initramfs.
    pub fn initramfs(&self) -> PathBuf {
        self.0.join("guest/initramfs")
    }
    /// The Debian root disk that `base` is booted from.
    pub fn base_disk(&self) -> PathBuf {
        self.0.join("guest/base.raw")
    }
    /// All templates.
    pub fn templates(&self) -> PathBuf {
        self.0.join("templates")
    }
    /// One template.
    pub fn template(&self, id: &TemplateId) -> PathBuf {
        self.templates().join(id.as_str())
    }
    /// All sandboxes.
    pub fn sandboxes(&self) -> PathBuf {
        self.0.join("sandboxes")
    }
    /// One sandbox.
    pub fn sandbox(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes().join(id.as_str())
    }
    /// The control plane's database.
    pub fn database(&self) -> PathBuf {
        self.0.join("control.sqlite")
    }
    /// Files only the server may read.
    pub fn secrets(&self) -> PathBuf {
        self.0.join("secrets")
    }
    /// The node's API socket.
    pub fn node_socket(&self) -> PathBuf {
        self.0.join("run/node.sock")
    }
    /// The directory in which the machines that templates are copied from have theirs.
    pub fn run(&self) -> PathBuf {
        self.0.join("run")
    }
    /// Directories of such machines: `run/zygote-…`.
    pub fn zygotes(&self) -> Result<Vec<PathBuf>, Error> {
        let run = self.run();
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&run).map_err(Error::io("list", &run))? {
            let entry = entry.map_err(Error::io("list", &run))?;
            if entry.file_name().as_encoded_bytes().starts_with(b"zygote-") {
                found.push(entry.path());
            }
        }
        Ok(found)
    }
    /// Half-made things.
    pub fn tmp(&self) -> PathBuf {
        self.0.join("tmp")
    }

    /// Removes what a crash left half-made.
    pub fn empty_tmp(&self) -> Result<(), Error> {
        let tmp = self.tmp();
        for entry in std::fs::read_dir(&tmp).map_err(Error::io("list", &tmp))? {
            let path = entry.map_err(Error::io("list", &tmp))?.path();
            let removed =
                if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            removed.map_err(Error::io("remove", &path))?;
        }
        Ok(())
    }
}
