//! The manifest: the file whose presence makes a directory a template. It is written last and renamed into place, so a
//! half-built template does not exist.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{BuildId, TemplateId};

/// The newest manifest version this program reads and the one it writes.
pub const VERSION: u32 = 1;

/// `manifest.json` of a template directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Manifest {
    /// [`VERSION`] when it was written.
    pub version: u32,
    /// The template.
    #[serde(rename = "templateID")]
    pub template_id: TemplateId,
    /// The build that made it.
    #[serde(rename = "buildID")]
    pub build_id: BuildId,
    /// Names it can be created by.
    pub aliases: Vec<String>,
    /// When it was built.
    pub created_at: jiff::Timestamp,
    /// The machine that the memory image was taken from; a restore must have the same.
    pub machine: MachineShape,
    /// User and directory of commands that name none, and environment of all.
    pub defaults: GuestDefaults,
    /// File name to size in bytes and SHA-256, for every file that is mapped or copied from.
    pub files: BTreeMap<String, FileDigest>,
}

/// What must be the same between a memory image and the machine it is restored into.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MachineShape {
    /// `qemu-tcg`, `qemu-kvm`.
    pub driver: String,
    /// The driver's version: device state of one QEMU version is not for another.
    pub driver_version: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Guest memory.
    pub memory_mib: u64,
    /// Size of the root disk.
    pub disk_mib: u64,
    /// SHA-256 of the kernel.
    pub kernel: String,
    /// SHA-256 of the initramfs, which holds the guest agent.
    pub initramfs: String,
}

impl MachineShape {
    /// Whether it was a machine of this driver in this version.
    pub fn is_for(&self, driver: &str, version: &str) -> bool {
        (self.driver.as_str(), self.driver_version.as_str()) == (driver, version)
    }
}

/// Defaults for commands in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GuestDefaults {
    /// User of commands that name none.
    pub user: String,
    /// Working directory of commands that name none.
    pub workdir: String,
    /// Environment of every command.
    pub env: BTreeMap<String, String>,
}

/// A file as it was when the manifest was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FileDigest {
    /// Length in bytes, holes included.
    pub bytes: u64,
    /// SHA-256, lower-case hex.
    pub sha256: String,
}
