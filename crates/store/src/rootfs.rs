//! The Debian root disk that the template `base` is booted from: mmdebstrap into a directory, `mke2fs -d` into a disk.
//!
//! Nothing in it is needed by the agent; the packages are what users of such sandboxes expect (row A22), and `user`
//! (1000, passwordless sudo) is E2B's.

use std::path::Path;
use std::process::Command;

use crate::{Error, command};

/// Debian release of the disk.
const SUITE: &str = "bookworm";

const PACKAGES: [&str; 19] = [
    "bash",
    "ca-certificates",
    "curl",
    "git",
    "iproute2",
    "iputils-ping",
    "less",
    "nano",
    "ncurses-bin",
    "nodejs",
    "npm",
    "openssh-client",
    "procps",
    "python3",
    "python3-pip",
    "python3-venv",
    "sudo",
    "unzip",
    "xz-utils",
];

/// Run in the new root by `/bin/sh -e`. `/code` and the open `/usr/local` are E2B's. The SDKs run every command by
/// `bash -l`, and Debian's `/etc/profile` and root's `.profile` start a program each (`id`, `mesg`), which is half of a
/// short command's time under TCG: bash knows its own user ID.
const CUSTOMIZE: &str = r#"
useradd --uid 1000 --user-group --create-home --shell /bin/bash user
passwd -l root >/dev/null
echo 'user ALL=(ALL) NOPASSWD:ALL' > /etc/sudoers.d/user
chmod 0440 /etc/sudoers.d/user
mkdir -p /code /usr/local/bin
chown user:user /code
chmod 0777 /usr/local /usr/local/bin /usr/local/lib /usr/local/share
rm -f /usr/lib/python3*/EXTERNALLY-MANAGED
printf '127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n' > /etc/hosts
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/dpkg.log /etc/machine-id
: > /etc/machine-id
ln -sf /proc/self/mounts /etc/mtab
sed -i 's/`id -u`/${EUID:-`id -u`}/; s/$(id -u)/${EUID:-$(id -u)}/' /etc/profile
sed -i '/^mesg /d' /root/.profile
"#;

/// Makes `disk`, a raw ext4 image of `size_mib`, from Debian packages, using `work` for what is half-made.
pub fn build_debian(work: &Path, disk: &Path, size_mib: u64) -> Result<(), Error> {
    let tree = work.join("root");
    let script = work.join("customize.sh");
    std::fs::write(&script, CUSTOMIZE).map_err(Error::io("write", &script))?;
    let mut mmdebstrap = Command::new("mmdebstrap");
    mmdebstrap
        .args(["--quiet", "--variant=minbase", "--components=main"])
        .arg(format!("--include={}", PACKAGES.join(",")))
        .args(["--aptopt=Acquire::Retries \"3\"", "--dpkgopt=path-exclude=/usr/share/man/*"])
        .args([
            "--dpkgopt=path-exclude=/usr/share/doc/*",
            "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        ])
        .args(["--dpkgopt=path-exclude=/usr/share/locale/*"])
        .arg(format!("--customize-hook=chroot \"$1\" /bin/sh -e < '{}'", script.display()))
        .arg(SUITE)
        .arg(&tree);
    command::run(&mut mmdebstrap, "mmdebstrap")?;
    let result = make_ext4(&tree, disk, size_mib);
    std::fs::remove_dir_all(&tree).map_err(Error::io("remove", &tree))?;
    result
}

/// Makes a raw ext4 image of `size_mib` with the content of `tree`. No blocks are reserved for root: the disk is the
/// sandbox user's.
fn make_ext4(tree: &Path, disk: &Path, size_mib: u64) -> Result<(), Error> {
    let file = std::fs::File::create_new(disk).map_err(Error::io("create", disk))?;
    file.set_len(size_mib << 20).map_err(Error::io("size", disk))?;
    let mut mke2fs = Command::new("mke2fs");
    mke2fs
        .args(["-q", "-F", "-t", "ext4", "-L", "pando", "-m", "0", "-b", "4096"])
        .args(["-E", "lazy_itable_init=1,lazy_journal_init=1,discard", "-J", "size=32"])
        .arg("-d")
        .arg(tree)
        .arg(disk);
    command::run(&mut mke2fs, "e2fsprogs")?;
    Ok(())
}
