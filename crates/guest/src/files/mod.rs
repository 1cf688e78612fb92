//! Operations on files, with the caller's rights.
//!
//! Owns: what list, move, remove, make and open do, and their errors. Does not own: transport (`rpc`, `transfer`).
//!
//! Contract: every operation here runs inside [`run`], on a thread that has the caller's identity for file access, so the
//! kernel decides what links and permissions allow. Nothing opens a FIFO or a device in a way that could block.

pub(crate) mod entry;
pub(crate) mod rpc;

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use connectrpc::ConnectError;
use http::StatusCode;
use proto::rpc::filesystem as pb;

use crate::errors::chain;
use crate::paths::PathError;
use crate::sys::rights::as_user;
use crate::users::{Names, User};

/// Entries of one listing at most: a client that lists `/` to the bottom must not fill the agent's memory.
const LIST_MAX: usize = 200_000;

/// Why a file operation failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    /// The path has no meaning.
    #[error("invalid path")]
    Path(#[from] PathError),
    /// Nothing is there.
    #[error("path '{}' does not exist", .0.display())]
    NotFound(PathBuf),
    /// A directory was expected.
    #[error("path '{}' is not a directory", .0.display())]
    NotDirectory(PathBuf),
    /// A file was expected.
    #[error("path '{}' is a directory", .0.display())]
    IsDirectory(PathBuf),
    /// FIFOs, sockets and devices are not transferred.
    #[error("path '{}' is not a regular file", .0.display())]
    NotRegular(PathBuf),
    /// The directory to make is there.
    #[error("directory '{}' already exists", .0.display())]
    Exists(PathBuf),
    /// More entries than one answer holds.
    #[error("more than {LIST_MAX} entries; list with a smaller depth")]
    TooMany,
    /// What the root directory cannot be used for.
    #[error("the root directory cannot be removed")]
    Root,
    /// The thread that worked on it is gone.
    #[error("the operation was interrupted")]
    Interrupted,
    /// The kernel said no.
    #[error("cannot access '{}'", path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl FileError {
    /// An error at a path; the kinds that have a name of their own get it.
    pub(crate) fn at(path: &Path, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound => Self::NotFound(path.to_owned()),
            io::ErrorKind::NotADirectory => Self::NotDirectory(path.to_owned()),
            io::ErrorKind::IsADirectory => Self::IsDirectory(path.to_owned()),
            _ => Self::Io { path: path.to_owned(), source },
        }
    }

    /// The HTTP status of `/files`.
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::NotFound(_) => StatusCode::NOT_FOUND,
            Self::Interrupted => StatusCode::INTERNAL_SERVER_ERROR,
            Self::TooMany => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Io { source, .. } => match source.kind() {
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => StatusCode::FORBIDDEN,
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StatusCode::INSUFFICIENT_STORAGE,
                io::ErrorKind::InvalidFilename | io::ErrorKind::InvalidInput => StatusCode::BAD_REQUEST,
                _ if is_refusal(source) => StatusCode::BAD_REQUEST,
                _ => StatusCode::INTERNAL_SERVER_ERROR,
            },
            _ => StatusCode::BAD_REQUEST,
        }
    }
}

/// What the caller asked cannot be done to this kind of file: ELOOP, ENXIO, ETXTBSY, EPERM and the like.
fn is_refusal(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::ELOOP
                | libc::ENXIO
                | libc::ETXTBSY
                | libc::ENODEV
                | libc::ENOTEMPTY
                | libc::EXDEV
                | libc::EBUSY
        )
    )
}

impl From<FileError> for ConnectError {
    fn from(error: FileError) -> Self {
        let text = chain(&error);
        match &error {
            FileError::NotFound(_) => Self::not_found(text),
            FileError::Exists(_) => Self::already_exists(text),
            FileError::TooMany => Self::resource_exhausted(text),
            FileError::Interrupted => Self::internal(text),
            FileError::Io { source, .. } => match source.kind() {
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    Self::permission_denied(text)
                }
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::resource_exhausted(text),
                io::ErrorKind::InvalidFilename | io::ErrorKind::InvalidInput => Self::invalid_argument(text),
                _ if is_refusal(source) => Self::failed_precondition(text),
                _ => Self::internal(text),
            },
            _ => Self::invalid_argument(text),
        }
    }
}

/// Runs an operation on a thread of its own with the rights of `user`.
///
/// # Errors
/// The operation's own.
pub(crate) async fn run<T: Send + 'static>(
    user: &User,
    operation: impl FnOnce() -> Result<T, FileError> + Send + 'static,
) -> Result<T, FileError> {
    let credentials = user.credentials.clone();
    let done = tokio::task::spawn_blocking(move || as_user(&credentials, operation));
    match done.await {
        Ok(Ok(result)) => result,
        Ok(Err(source)) => Err(FileError::Io { path: PathBuf::new(), source }),
        Err(_) => Err(FileError::Interrupted),
    }
}

/// Makes a directory and its missing parents, 0755, the caller's. Directories that exist are left as they are.
///
/// # Errors
/// When a part of the path is no directory or may not be written.
pub(crate) fn make_parents(path: &Path) -> Result<(), FileError> {
    DirBuilder::new().recursive(true).mode(0o755).create(path).map_err(|source| {
        if source.kind() == io::ErrorKind::AlreadyExists {
            FileError::NotDirectory(path.to_owned())
        } else {
            FileError::at(path, source)
        }
    })
}

/// `MakeDir`.
///
/// # Errors
/// When the directory exists, or something else has its name.
pub(crate) fn make_dir(path: &Path) -> Result<pb::EntryInfo, FileError> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => return Err(FileError::Exists(path.to_owned())),
        Ok(_) => return Err(FileError::NotDirectory(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(FileError::at(path, error)),
    }
    make_parents(path)?;
    stat(path)
}

/// `Stat`.
///
/// # Errors
/// When nothing is there.
pub(crate) fn stat(path: &Path) -> Result<pb::EntryInfo, FileError> {
    entry::entry(path, &Names::load()).map_err(|error| FileError::at(path, error))
}

/// `Move`: rename, with the destination's parents made.
///
/// # Errors
/// When the source does not exist, or the kernel cannot rename.
pub(crate) fn rename(source: &Path, destination: &Path) -> Result<pb::EntryInfo, FileError> {
    std::fs::symlink_metadata(source).map_err(|error| FileError::at(source, error))?;
    if let Some(parent) = destination.parent() {
        make_parents(parent)?;
    }
    std::fs::rename(source, destination).map_err(|error| FileError::at(destination, error))?;
    stat(destination)
}

/// `Remove`: recursively, never through links; what is not there is removed already.
///
/// # Errors
/// When something may not be removed.
pub(crate) fn remove(path: &Path) -> Result<(), FileError> {
    if path.components().all(|part| part == std::path::Component::RootDir) {
        return Err(FileError::Root);
    }
    let removed = match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(|error| FileError::at(path, error)),
    }
}

/// `ListDir`: depth first, in the order of names, a directory before what is in it, links not followed.
///
/// # Errors
/// When the directory itself cannot be listed. What vanishes or may not be read on the way is left out.
pub(crate) fn list(root: &Path, depth: u32) -> Result<Vec<pb::EntryInfo>, FileError> {
    let found = std::fs::metadata(root).map_err(|error| FileError::at(root, error))?;
    if !found.is_dir() {
        return Err(FileError::NotDirectory(root.to_owned()));
    }
    let names = Names::load();
    let mut entries = Vec::new();
    let mut stack = vec![(children(root).map_err(|error| FileError::at(root, error))?, 1)];
    while let Some((directory, level)) = stack.last_mut() {
        let Some((path, is_dir)) = directory.pop() else {
            stack.pop();
            continue;
        };
        let level = *level;
        match entry::entry(&path, &names) {
            Ok(entry) => entries.push(entry),
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) if error.raw_os_error() == Some(libc::ELOOP) => continue,
            Err(error) => return Err(FileError::at(&path, error)),
        }
        if entries.len() > LIST_MAX {
            return Err(FileError::TooMany);
        }
        if is_dir && level < depth.max(1) {
            stack.push((children(&path).unwrap_or_default(), level + 1));
        }
    }
    Ok(entries)
}

/// What is in a directory, last name first.
fn children(directory: &Path) -> io::Result<Vec<(PathBuf, bool)>> {
    let mut found = Vec::new();
    for child in std::fs::read_dir(directory)? {
        let child = child?;
        found.push((directory.join(child.file_name()), child.file_type().is_ok_and(|kind| kind.is_dir())));
    }
    found.sort_by(|a, b| b.0.file_name().cmp(&a.0.file_name()));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listing_is_depth_first_in_order_of_names() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["b/x/deep", "a", "c"] {
            std::fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        std::fs::write(dir.path().join("b/file"), "").unwrap();
        let names = |depth| -> Vec<_> {
            list(dir.path(), depth)
                .unwrap()
                .into_iter()
                .map(|e| Path::new(&e.path).strip_prefix(dir.path()).unwrap().to_str().unwrap().to_owned())
                .collect()
        };
        assert_eq!(names(0), ["a", "b", "c"]);
        assert_eq!(names(2), ["a", "b", "b/file", "b/x", "c"]);
        assert_eq!(names(9), ["a", "b", "b/file", "b/x", "b/x/deep", "c"]);
    }

    #[test]
    fn make_dir_tells_directories_from_files() {
        let dir = tempfile::tempdir().unwrap();
        assert!(make_dir(&dir.path().join("a/b")).is_ok());
        assert!(matches!(make_dir(&dir.path().join("a/b")), Err(FileError::Exists(_))));
        std::fs::write(dir.path().join("f"), "").unwrap();
        assert!(matches!(make_dir(&dir.path().join("f")), Err(FileError::NotDirectory(_))));
        assert!(matches!(make_dir(&dir.path().join("f/x")), Err(FileError::NotDirectory(_))));
    }

    #[test]
    fn remove_takes_the_link_and_not_its_target() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("target");
        std::fs::create_dir(&target).unwrap();
        std::fs::write(target.join("kept"), "").unwrap();
        std::os::unix::fs::symlink(&target, dir.path().join("link")).unwrap();
        remove(&dir.path().join("link")).unwrap();
        assert!(target.join("kept").exists());
        remove(&target).unwrap();
        remove(&target).unwrap();
        assert!(remove(Path::new("//")).is_err());
    }
}
