//! The guest's kernel: Debian's cloud kernel package, unpacked and decompressed.
//!
//! The bzImage under QEMU's microvm and TCG hangs in its own decompressor, and a VMM of ours loads no bzImage, so the
//! ELF inside is taken out once. In Debian's cloud kernel it is compressed as an LZ4 *legacy* frame: magic
//! `02 21 4c 18`, then blocks of a 32-bit little-endian length and that many bytes, each expanding to at most 8 MiB.
//! Devices are modules there (`virtio_mmio` and friends); [`MODULES`] and what they depend on go into the initramfs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Error, command};

/// What the guest needs before it has a root disk; dependencies are added by `modules.dep`.
pub const MODULES: [&str; 8] = [
    "virtio",
    "virtio_ring",
    "virtio_mmio",
    "virtio_blk",
    "virtio_net",
    "virtio_rng",
    "virtio_balloon",
    "overlay",
];

const LZ4_LEGACY_MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
const LZ4_LEGACY_BLOCK: usize = 8 << 20;
const ELF_MAGIC: &[u8] = b"\x7fELF";

/// Fetches Debian's cloud kernel into `work` and returns the unpacked package's root.
///
/// The meta package names the one with the files; `apt-get download` needs no root and installs nothing.
pub fn fetch_package(work: &Path) -> Result<PathBuf, Error> {
    let depends =
        command::run(Command::new("apt-cache").args(["depends", "linux-image-cloud-amd64"]), "apt")?;
    let depends = String::from_utf8_lossy(&depends);
    let name = depends
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .find(|name| name.starts_with("linux-image-"))
        .ok_or_else(|| {
            Error::format(
                Path::new("linux-image-cloud-amd64"),
                "a kernel package apt knows",
                "no dependency found; run `apt-get update`",
            )
        })?;
    command::run(
        Command::new("apt-get")
            .args(["-q", "-o", "APT::Sandbox::User=root", "download", name])
            .current_dir(work),
        "apt",
    )?;
    let package = only_file(work, ".deb")?;
    let unpacked = work.join("kernel");
    command::run(Command::new("dpkg-deb").arg("-x").arg(&package).arg(&unpacked), "dpkg")?;
    Ok(unpacked)
}

fn only_file(dir: &Path, suffix: &str) -> Result<PathBuf, Error> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(Error::io("list", dir))? {
        let path = entry.map_err(Error::io("list", dir))?.path();
        if path.to_string_lossy().ends_with(suffix) {
            found.push(path);
        }
    }
    match (found.pop(), found.is_empty()) {
        (Some(path), true) => Ok(path),
        (first, _) => Err(Error::format(
            dir,
            "a directory with one package",
            format!("{} files end with {suffix}", found.len() + usize::from(first.is_some())),
        )),
    }
}

/// The `vmlinuz` in an unpacked kernel package.
pub fn find_vmlinuz(package: &Path) -> Result<PathBuf, Error> {
    let boot = package.join("boot");
    for entry in std::fs::read_dir(&boot).map_err(Error::io("list", &boot))? {
        let path = entry.map_err(Error::io("list", &boot))?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-")) {
            return Ok(path);
        }
    }
    Err(Error::format(&boot, "a kernel package's boot directory", "no vmlinuz in it"))
}

/// Writes the ELF kernel in `image` (a `vmlinuz`, or a `vmlinux` as it is) to `target`.
pub fn extract_vmlinux(image: &Path, target: &Path) -> Result<(), Error> {
    let bytes = std::fs::read(image).map_err(Error::io("read", image))?;
    let elf = if bytes.starts_with(ELF_MAGIC) {
        bytes
    } else {
        bytes
            .windows(LZ4_LEGACY_MAGIC.len())
            .enumerate()
            .filter(|(_, window)| *window == LZ4_LEGACY_MAGIC)
            .find_map(|(at, _)| decompress_lz4_legacy(&bytes[at..]))
            .ok_or_else(|| {
                Error::format(
                    image,
                    "a kernel",
                    "neither an ELF nor an LZ4-compressed bzImage; name an uncompressed vmlinux with --kernel",
                )
            })?
    };
    std::fs::write(target, elf).map_err(Error::io("write", target))
}

/// Expands a legacy LZ4 frame that starts at `bytes`, up to the first thing that is no block of it. None unless the
/// result is an ELF: the magic may stand in code by chance.
fn decompress_lz4_legacy(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut rest = bytes.get(LZ4_LEGACY_MAGIC.len()..)?;
    let mut out = Vec::new();
    while let Some((length, tail)) = rest.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        let Some(block) = tail.get(..length).filter(|block| !block.is_empty()) else { break };
        let Ok(part) = lz4_flex::block::decompress(block, LZ4_LEGACY_BLOCK) else { break };
        out.extend_from_slice(&part);
        rest = &tail[length..];
        if part.len() < LZ4_LEGACY_BLOCK {
            break;
        }
    }
    out.starts_with(ELF_MAGIC).then_some(out)
}

/// Copies [`MODULES`] and all they depend on from an unpacked kernel package into `target`, and writes `target/order`:
/// file names in an order in which each finds what it needs.
pub fn collect_modules(package: &Path, target: &Path) -> Result<(), Error> {
    let lib = package.join("lib/modules");
    let mut entries = std::fs::read_dir(&lib).map_err(Error::io("list", &lib))?;
    let version = match entries.next() {
        Some(entry) => entry.map_err(Error::io("list", &lib))?.path(),
        None => return Err(Error::format(&lib, "a kernel package's modules", "it is empty")),
    };
    let version_name =
        version.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    command::run(Command::new("depmod").arg("-b").arg(package).arg(&version_name), "kmod")?;
    let dep_file = version.join("modules.dep");
    let dependencies = std::fs::read_to_string(&dep_file).map_err(Error::io("read", &dep_file))?;
    std::fs::create_dir_all(target).map_err(Error::io("create", target))?;
    let mut names = Vec::new();
    for path in load_order(&dependencies, &MODULES) {
        let source = version.join(&path);
        let name = source.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        std::fs::copy(&source, target.join(&name)).map_err(Error::io("copy", &source))?;
        names.push(name);
    }
    let order = target.join("order");
    std::fs::write(&order, names.join("\n") + "\n").map_err(Error::io("write", &order))
}

/// From `modules.dep` (`path: dependency dependency…`, the nearest dependency first) the paths to load, in order. A
/// wanted module that is not listed is built in. A module's name has underscores, its file may have hyphens instead.
fn load_order(modules_dep: &str, wanted: &[&str]) -> Vec<String> {
    let mut order = Vec::new();
    let mut seen = BTreeSet::new();
    for module in wanted {
        let file = format!("/{module}.ko").replace('-', "_");
        for line in modules_dep.lines() {
            let Some((path, needs)) = line.split_once(':') else { continue };
            if path.replace('-', "_").ends_with(&file) {
                for path in needs.split_whitespace().rev().chain([path]) {
                    if seen.insert(path.to_owned()) {
                        order.push(path.to_owned());
                    }
                }
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_load_after_what_they_need() {
        let dep = "kernel/net/failover.ko:\nkernel/d/net_failover.ko: kernel/net/failover.ko\n\
                   kernel/d/virtio_net.ko: kernel/d/net_failover.ko kernel/net/failover.ko kernel/v/virtio.ko\n\
                   kernel/v/virtio.ko:\nkernel/c/virtio-rng.ko: kernel/v/virtio.ko\n";
        assert_eq!(load_order(dep, &["virtio_rng"]), ["kernel/v/virtio.ko", "kernel/c/virtio-rng.ko"]);
        assert_eq!(
            load_order(dep, &["virtio", "virtio_net", "built_in"]),
            [
                "kernel/v/virtio.ko",
                "kernel/net/failover.ko",
                "kernel/d/net_failover.ko",
                "kernel/d/virtio_net.ko"
            ]
        );
    }

    #[test]
    fn vmlinux_is_found_in_a_compressed_image() {
        let elf: Vec<u8> = ELF_MAGIC.iter().copied().chain((0..100_000u32).map(|n| (n / 7) as u8)).collect();
        let block = lz4_flex::block::compress(&elf);
        let mut image = b"MZ boot sector \x02\x21\x4c\x18 by chance".to_vec();
        image.extend(LZ4_LEGACY_MAGIC);
        image.extend((block.len() as u32).to_le_bytes());
        image.extend(block);
        image.extend(b"\xff\xff\xff\xfftrailer");
        let dir = tempfile::tempdir().unwrap();
        let (source, target) = (dir.path().join("vmlinuz"), dir.path().join("vmlinux"));
        std::fs::write(&source, &image).unwrap();
        extract_vmlinux(&source, &target).unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), elf);
        std::fs::write(&source, b"no kernel").unwrap();
        assert!(matches!(extract_vmlinux(&source, &target), Err(Error::Format { .. })));
    }
}
