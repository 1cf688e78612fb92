//! Which crate may use which: the table of the design's section 2. A process boundary means no link.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

/// Crate, and the crates of this workspace that it may use.
const ALLOWED: [(&str, &[&str]); 12] = [
    ("proto", &[]),
    ("client", &["proto"]),
    ("disk", &[]),
    ("store", &["proto", "disk"]),
    ("vmm", &["proto", "disk"]),
    ("guest", &["proto"]),
    ("edge", &["proto"]),
    ("node", &["proto", "disk", "store", "edge"]),
    ("control", &["proto", "client", "edge"]),
    ("pando", &["proto", "client", "store", "edge", "node", "control"]),
    ("systest", &["proto", "client"]),
    ("xtask", &[]),
];

/// Locked packages; may only fall. 450 is the house's limit.
const LOCKED_PACKAGES: usize = 400;

pub(crate) fn check(root: &Path) -> Result<Vec<String>> {
    let output = Command::new("cargo")
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(root)
        .output()
        .context("cannot run cargo metadata")?;
    let metadata: Value = serde_json::from_slice(&output.stdout).context("cargo metadata is not JSON")?;
    let packages = metadata["packages"].as_array().cloned().unwrap_or_default();
    let ours: BTreeSet<String> =
        packages.iter().filter_map(|p| p["name"].as_str().map(str::to_owned)).collect();
    let mut faults = Vec::new();
    for package in &packages {
        let name = package["name"].as_str().unwrap_or_default();
        let Some((_, allowed)) = ALLOWED.iter().find(|(known, _)| *known == name) else {
            faults.push(format!("{name}: a crate that the table of rooms does not know"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let used = dependency["name"].as_str().unwrap_or_default();
            if ours.contains(used) && !allowed.contains(&used) {
                faults.push(format!("{name}: may not use {used}"));
            }
        }
    }
    let lock = std::fs::read_to_string(root.join("Cargo.lock")).context("cannot read Cargo.lock")?;
    let locked = lock.matches("[[package]]").count();
    if locked > LOCKED_PACKAGES {
        faults.push(format!("Cargo.lock: {locked} packages, the ratchet stands at {LOCKED_PACKAGES}"));
    }
    Ok(faults)
}
