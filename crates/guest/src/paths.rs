//! How a path in a request becomes a path in the guest (`e2b-protocol` 3.2 and 3.3).
//!
//! Owns: the rules, as pure functions of text. Does not own: what is at the path; links are the kernel's business, which
//! follows them with the caller's rights.

use std::path::{Component, Path, PathBuf};

use crate::users::User;

/// A path that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PathError {
    /// `~name`.
    #[error("cannot expand the home directory of another user: '{0}'")]
    OtherHome(String),
    /// The kernel's strings end at NUL.
    #[error("path contains a NUL byte")]
    Nul,
}

/// Removes `.` and resolves `..` by text, as is done for relative paths only.
fn clean(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                out.pop();
            }
            other => out.push(other),
        }
    }
    out
}

/// Resolves a path: empty is the default directory (or home), `~` is home, relative is relative to home, absolute is
/// taken as it is, without cleaning.
///
/// # Errors
/// For `~name` and for NUL bytes.
pub(crate) fn resolve(path: &str, user: &User, default_workdir: Option<&str>) -> Result<PathBuf, PathError> {
    if path.contains('\0') {
        return Err(PathError::Nul);
    }
    if path.is_empty() {
        return Ok(match default_workdir {
            Some(dir) if !dir.is_empty() => resolve(dir, user, None)?,
            _ => user.home.clone(),
        });
    }
    if path.starts_with('/') {
        return Ok(path.into());
    }
    let relative = match path.strip_prefix('~') {
        None => path,
        Some("") => "",
        Some(rest) => rest.strip_prefix('/').ok_or_else(|| PathError::OtherHome(path.to_owned()))?,
    };
    Ok(clean(&user.home.join(relative.trim_start_matches('/'))))
}

/// The last component, `/` for the root.
pub(crate) fn name(path: &Path) -> String {
    path.file_name().map_or_else(|| "/".to_owned(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::rights::Credentials;

    fn user() -> User {
        User {
            name: "user".into(),
            home: "/home/user".into(),
            credentials: Credentials { uid: 1000, gid: 1000, groups: vec![1000] },
        }
    }

    #[test]
    fn paths_resolve_as_documented() {
        let cases = [
            ("", "/home/user"),
            ("a.txt", "/home/user/a.txt"),
            ("./a/../b", "/home/user/b"),
            ("../x", "/home/x"),
            ("../../../../etc", "/etc"),
            ("~", "/home/user"),
            ("~/", "/home/user"),
            ("~/a", "/home/user/a"),
            ("~//etc", "/home/user/etc"),
            ("/a/../b", "/a/../b"),
            ("/", "/"),
            ("/home/user/", "/home/user/"),
            ("a~b", "/home/user/a~b"),
        ];
        for (input, expected) in cases {
            assert_eq!(resolve(input, &user(), None).unwrap(), Path::new(expected), "{input:?}");
        }
    }

    #[test]
    fn default_directory_replaces_only_the_empty_path() {
        assert_eq!(resolve("", &user(), Some("/app")).unwrap(), Path::new("/app"));
        assert_eq!(resolve("", &user(), Some("")).unwrap(), Path::new("/home/user"));
        assert_eq!(resolve("x", &user(), Some("/app")).unwrap(), Path::new("/home/user/x"));
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        assert_eq!(resolve("~bob", &user(), None), Err(PathError::OtherHome("~bob".into())));
        assert_eq!(resolve("a\0b", &user(), None), Err(PathError::Nul));
    }

    #[test]
    fn names() {
        assert_eq!(name(Path::new("/")), "/");
        assert_eq!(name(Path::new("/a/b")), "b");
        assert_eq!(name(Path::new("/a/b/")), "b");
    }
}
