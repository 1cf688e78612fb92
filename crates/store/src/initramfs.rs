//! The initramfs: a cpio archive ("newc", the kernel's own format) with the guest agent as `/init` and the kernel's
//! modules. Not compressed: unpacking costs more than reading under TCG.

use std::path::Path;

use crate::Error;

const DIRECTORY: u32 = 0o040_755;
const EXECUTABLE: u32 = 0o100_755;
const REGULAR: u32 = 0o100_644;
const CHARACTER: u32 = 0o020_600;

/// Writes to `target` the archive of the agent at `agent` and the files of the directory `modules`.
pub fn write(agent: &Path, modules: &Path, target: &Path) -> Result<(), Error> {
    let mut archive = Archive::default();
    for name in ["dev", "proc", "sys", "newroot", "modules"] {
        archive.add(name, DIRECTORY, &[], (0, 0));
    }
    // The kernel opens the console before /init mounts anything.
    archive.add("dev/console", CHARACTER, &[], (5, 1));
    let read = |path: &Path| std::fs::read(path).map_err(Error::io("read", path));
    archive.add("init", EXECUTABLE, &read(agent)?, (0, 0));
    let mut names = Vec::new();
    for entry in std::fs::read_dir(modules).map_err(Error::io("list", modules))? {
        names.push(entry.map_err(Error::io("list", modules))?.file_name());
    }
    names.sort();
    for name in names {
        archive.add(
            &format!("modules/{}", name.to_string_lossy()),
            REGULAR,
            &read(&modules.join(&name))?,
            (0, 0),
        );
    }
    std::fs::write(target, archive.finish()).map_err(Error::io("write", target))
}

/// A cpio archive being written. Every header field is eight hex digits; names and data are padded to four bytes.
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn add(&mut self, name: &str, mode: u32, data: &[u8], device: (u32, u32)) {
        self.entries += 1;
        let links = if mode & 0o040_000 != 0 { 2 } else { 1 };
        let fields = [
            self.entries,
            mode,
            0, // uid
            0, // gid
            links,
            0, // mtime: the same input gives the same archive
            data.len() as u32,
            0, // device of the file
            0,
            device.0,
            device.1,
            name.len() as u32 + 1,
            0, // checksum, unused in this format
        ];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(name.bytes().chain([0]));
        self.pad();
        self.bytes.extend(data);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, &[], (0, 0));
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_is_what_cpio_reads() {
        let dir = tempfile::tempdir().unwrap();
        let modules = dir.path().join("m");
        std::fs::create_dir(&modules).unwrap();
        std::fs::write(modules.join("a.ko"), b"module").unwrap();
        std::fs::write(dir.path().join("agent"), b"agent").unwrap();
        let target = dir.path().join("initramfs");
        write(&dir.path().join("agent"), &modules, &target).unwrap();
        let bytes = std::fs::read(&target).unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let mut names = Vec::new();
        let mut at = 0;
        while bytes[at..].starts_with(b"070701") {
            let field = |n: usize| {
                let start = at + 6 + n * 8;
                usize::from_str_radix(std::str::from_utf8(&bytes[start..start + 8]).unwrap(), 16).unwrap()
            };
            let (size, name_size) = (field(6), field(11));
            names.push(String::from_utf8(bytes[at + 110..at + 110 + name_size - 1].to_vec()).unwrap());
            at = (at + 110 + name_size).next_multiple_of(4);
            at = (at + size).next_multiple_of(4);
        }
        assert_eq!(at, bytes.len());
        assert_eq!(
            names,
            ["dev", "proc", "sys", "newroot", "modules", "dev/console", "init", "modules/a.ko", "TRAILER!!!"]
        );
    }
}
