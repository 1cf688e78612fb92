//! What a path is, as `EntryInfo` says it.
//!
//! Owns: lstat, links, permissions as Go prints them, metadata. Contract (`e2b-protocol` 3.3): of a link, type and mode
//! are the target's and all else is the link's own; `symlink_target` is the resolved path, or the link's own when it
//! leads nowhere. All of it is done with the caller's rights: call inside `sys::rights::as_user`.

use std::collections::HashMap;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use buffa_types::google::protobuf::Timestamp;
use proto::rpc::filesystem as pb;

use crate::paths;
use crate::users::Names;

/// Prefix of the extended attributes that hold a file's metadata.
pub(crate) const METADATA_PREFIX: &str = "user.e2b.";

fn kind(metadata: &Metadata) -> pb::FileType {
    let kind = metadata.file_type();
    if kind.is_dir() {
        pb::FileType::FILE_TYPE_DIRECTORY
    } else if kind.is_file() {
        pb::FileType::FILE_TYPE_FILE
    } else {
        pb::FileType::FILE_TYPE_UNSPECIFIED
    }
}

/// Go's `FileMode.String()`.
fn permissions(metadata: &Metadata) -> String {
    let kind = metadata.file_type();
    let mode = metadata.mode();
    let mut text = String::with_capacity(12);
    // Go prints one letter for each property, in the order of its own bits.
    if kind.is_dir() {
        text.push('d');
    }
    if kind.is_symlink() {
        text.push('L');
    }
    if kind.is_block_device() || kind.is_char_device() {
        text.push('D');
    }
    if kind.is_fifo() {
        text.push('p');
    }
    if kind.is_socket() {
        text.push('S');
    }
    if mode & 0o4000 != 0 {
        text.push('u');
    }
    if mode & 0o2000 != 0 {
        text.push('g');
    }
    if kind.is_char_device() {
        text.push('c');
    }
    if mode & 0o1000 != 0 {
        text.push('t');
    }
    if text.is_empty() {
        text.push('-');
    }
    for (at, letter) in "rwxrwxrwx".chars().enumerate() {
        text.push(if mode & (0o400 >> at) == 0 { '-' } else { letter });
    }
    text
}

/// The metadata set of a file; empty where the file system keeps none.
pub(crate) fn metadata(path: &Path) -> HashMap<String, String> {
    let mut found = HashMap::new();
    // The kernel's limit for the list of names.
    let mut names = vec![0; 64 << 10];
    let Ok(length) = rustix::fs::llistxattr(path, &mut names[..]) else { return found };
    for name in names[..length].split(|byte| *byte == 0) {
        let Ok(name) = std::str::from_utf8(name) else { continue };
        let Some(key) = name.strip_prefix(METADATA_PREFIX) else { continue };
        let mut value = vec![0; 4096];
        if let Ok(length) = rustix::fs::lgetxattr(path, name, &mut value[..]) {
            value.truncate(length);
            found.insert(key.to_owned(), String::from_utf8_lossy(&value).into_owned());
        }
    }
    found
}

/// Describes what is at `path`.
///
/// # Errors
/// What lstat says; ELOOP for a link that leads to itself.
pub(crate) fn entry(path: &Path, names: &Names) -> io::Result<pb::EntryInfo> {
    let own = std::fs::symlink_metadata(path)?;
    let mut kind = kind(&own);
    let mut mode = own.mode() & 0o777;
    let mut target = None;
    let is_symlink = own.file_type().is_symlink();
    if is_symlink {
        (kind, mode) = (pb::FileType::FILE_TYPE_UNSPECIFIED, 0);
        let resolved = match std::fs::canonicalize(path) {
            Ok(resolved) => {
                if let Ok(found) = std::fs::symlink_metadata(&resolved) {
                    kind = self::kind(&found);
                    mode = found.mode() & 0o777;
                }
                resolved
            }
            Err(error) if error.raw_os_error() == Some(libc::ELOOP) => return Err(error),
            Err(_) => path.to_owned(),
        };
        target = Some(resolved.to_string_lossy().into_owned());
    }
    Ok(pb::EntryInfo {
        name: paths::name(path),
        r#type: kind.into(),
        path: path.to_string_lossy().into_owned(),
        size: own.size().cast_signed(),
        mode,
        permissions: permissions(&own),
        owner: names.user(own.uid()),
        group: names.group(own.gid()),
        modified_time: Timestamp {
            seconds: own.mtime(),
            nanos: i32::try_from(own.mtime_nsec()).unwrap_or(0),
            ..Default::default()
        }
        .into(),
        symlink_target: target,
        metadata: metadata(path).into_iter().collect(),
        is_symlink,
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn links_show_their_target() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "12345").unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o640)).unwrap();
        let link = dir.path().join("link");
        symlink("file", &link).unwrap();
        let names = Names::default();
        let seen = entry(&link, &names).unwrap();
        assert_eq!(seen.r#type.as_known(), Some(pb::FileType::FILE_TYPE_FILE));
        assert_eq!((seen.mode, seen.size), (0o640, 4));
        assert!(seen.is_symlink && seen.permissions.starts_with("Lrwx"));
        assert_eq!(seen.symlink_target.as_deref(), file.canonicalize().unwrap().to_str());

        let dangling = dir.path().join("dangling");
        symlink("nowhere", &dangling).unwrap();
        let seen = entry(&dangling, &names).unwrap();
        assert_eq!(seen.r#type.as_known(), Some(pb::FileType::FILE_TYPE_UNSPECIFIED));
        assert_eq!(seen.mode, 0);
        assert_eq!(seen.symlink_target.as_deref(), dangling.to_str());

        let cycle = dir.path().join("cycle");
        symlink("cycle", &cycle).unwrap();
        assert_eq!(entry(&cycle, &names).unwrap_err().raw_os_error(), Some(libc::ELOOP));
    }

    #[test]
    fn permissions_are_go_text() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d");
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o1777)).unwrap();
        assert_eq!(permissions(&std::fs::symlink_metadata(&path).unwrap()), "dtrwxrwxrwx");
        let file = dir.path().join("f");
        std::fs::write(&file, "").unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o4755)).unwrap();
        assert_eq!(permissions(&std::fs::symlink_metadata(&file).unwrap()), "urwxr-xr-x");
        assert_eq!(permissions(&std::fs::metadata("/dev/null").unwrap()), "Dcrw-rw-rw-");
    }
}
