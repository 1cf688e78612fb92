//! Users and groups of the guest's image.
//!
//! Owns: reading `/etc/passwd` and `/etc/group`. A static binary has no NSS, and an image may have none of its tools, so
//! the two files are read here, anew for each request: a user that a command has just added exists at once.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

use crate::sys::rights::Credentials;

/// A user as `/etc/passwd` describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    /// Login name.
    pub(crate) name: String,
    /// Home directory.
    pub(crate) home: PathBuf,
    /// IDs.
    pub(crate) credentials: Credentials,
}

/// Why a name could not be turned into a user.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UserError {
    /// The image has no such user.
    #[error("invalid username: '{0}'")]
    Unknown(String),
    /// A user database cannot be read.
    #[error("cannot read {path}")]
    Database {
        /// The file.
        path: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A line of `/etc/passwd`.
struct PasswdEntry<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

fn passwd(text: &str) -> impl Iterator<Item = PasswdEntry<'_>> {
    text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        let home = fields.nth(1)?;
        Some(PasswdEntry { name, uid, gid, home })
    })
}

/// A line of `/etc/group`: name, ID, members.
fn groups(text: &str) -> impl Iterator<Item = (&str, u32, &str)> {
    text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        let gid = fields.nth(1)?.parse().ok()?;
        Some((name, gid, fields.next().unwrap_or("")))
    })
}

fn find(passwd_text: &str, group_text: &str, wanted: &str) -> Option<User> {
    let entry = passwd(passwd_text).find(|entry| entry.name == wanted)?;
    let mut ids = vec![entry.gid];
    for (_, gid, members) in groups(group_text) {
        if members.split(',').any(|member| member == wanted) && !ids.contains(&gid) {
            ids.push(gid);
        }
    }
    let home = if entry.home.starts_with('/') { entry.home } else { "/" };
    Some(User {
        name: entry.name.to_owned(),
        home: home.into(),
        credentials: Credentials { uid: entry.uid, gid: entry.gid, groups: ids },
    })
}

fn read(path: &'static str) -> Result<String, UserError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(source) => Err(UserError::Database { path, source }),
    }
}

/// Looks a user up by name. root exists even in an image without `/etc/passwd`.
///
/// # Errors
/// When there is no such user.
pub(crate) fn lookup(name: &str) -> Result<User, UserError> {
    let passwd_text = read("/etc/passwd")?;
    if let Some(user) = find(&passwd_text, &read("/etc/group")?, name) {
        return Ok(user);
    }
    if name == "root" && passwd_text.is_empty() {
        let credentials = Credentials { uid: 0, gid: 0, groups: vec![0] };
        return Ok(User { name: name.to_owned(), home: "/root".into(), credentials });
    }
    Err(UserError::Unknown(name.to_owned()))
}

/// Names of user and group IDs, for listings.
#[derive(Default)]
pub(crate) struct Names {
    passwd: String,
    group: String,
}

impl Names {
    /// Reads both databases; one that cannot be read gives numbers instead of names.
    pub(crate) fn load() -> Self {
        Self {
            passwd: read("/etc/passwd").unwrap_or_default(),
            group: read("/etc/group").unwrap_or_default(),
        }
    }

    /// The user's name, or its number as text.
    pub(crate) fn user(&self, uid: u32) -> String {
        passwd(&self.passwd)
            .find(|entry| entry.uid == uid)
            .map_or_else(|| uid.to_string(), |e| e.name.to_owned())
    }

    /// The group's name, or its number as text.
    pub(crate) fn group(&self, gid: u32) -> String {
        groups(&self.group)
            .find(|(_, id, _)| *id == gid)
            .map_or_else(|| gid.to_string(), |(n, _, _)| n.to_owned())
    }
}

impl User {
    /// HOME, USER and LOGNAME.
    pub(crate) fn environment(&self) -> [(OsString, OsString); 3] {
        [
            ("HOME".into(), self.home.clone().into_os_string()),
            ("USER".into(), self.name.clone().into()),
            ("LOGNAME".into(), self.name.clone().into()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\n# comment\nbad:x:y:1::/:\nuser:x:1000:1001:,,,:/home/user:/bin/bash\nnohome:x:5:5:::\n";
    const GROUP: &str =
        "root:x:0:\nuser:x:1001:\ndocker:x:1234:other,user\nsudo:x:27:user\nsuper:x:28:superuser\n";

    #[test]
    fn supplementary_groups_come_with_the_user() {
        let user = find(PASSWD, GROUP, "user").unwrap();
        assert_eq!(user.credentials, Credentials { uid: 1000, gid: 1001, groups: vec![1001, 1234, 27] });
        assert_eq!(user.home, Path::new("/home/user"));
    }

    #[test]
    fn malformed_lines_are_no_users() {
        for name in ["bad", "# comment", "", "nobody", "user:x"] {
            assert!(find(PASSWD, GROUP, name).is_none(), "{name:?}");
        }
        assert_eq!(find(PASSWD, GROUP, "nohome").unwrap().home, Path::new("/"));
    }

    #[test]
    fn unknown_ids_are_numbers() {
        let names = Names { passwd: PASSWD.into(), group: GROUP.into() };
        assert_eq!(names.user(1000), "user");
        assert_eq!(names.user(77), "77");
        assert_eq!(names.group(27), "sudo");
        assert_eq!(names.group(77), "77");
    }
}
