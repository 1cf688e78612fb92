//! Templates on a node: a directory with a manifest, whole or not there.
//!
//! A template is made in `tmp/`, its manifest written last, and the directory renamed into `templates/`: a crash leaves
//! something in `tmp/`, which the next start empties, and never half a template.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use proto::TemplateId;
use proto::manifest::{self, FileDigest, GuestDefaults, MachineShape, Manifest};

use crate::layout::DataDir;
use crate::{Error, sha256_file};

/// The manifest's file name.
pub const MANIFEST: &str = "manifest.json";
/// The root disk, frozen at the instant of the memory image.
pub const DISK: &str = "disk.raw";
/// Guest memory, sparse.
pub const MEMORY: &str = "memory";
/// Device state, in the driver's own format.
pub const STATE: &str = "state";

/// A whole template.
#[derive(Debug, Clone)]
pub struct Template {
    /// Its manifest.
    pub manifest: Manifest,
    dir: PathBuf,
}

impl Template {
    /// Opens the template in `dir`: reads the manifest, and compares the files' sizes with it. Digests are not computed
    /// here, as it is done at every start; [`Template::verify`] does.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let path = dir.join(MANIFEST);
        let bytes = std::fs::read(&path).map_err(Error::io("read", &path))?;
        let manifest: Manifest = serde_json::from_slice(&bytes)
            .map_err(|error| Error::format(&path, "a template's manifest", error.to_string()))?;
        if manifest.version != manifest::VERSION {
            let problem = format!("version {}, this program reads {}", manifest.version, manifest::VERSION);
            return Err(Error::format(&path, "a template's manifest", problem));
        }
        for (name, digest) in &manifest.files {
            let file = dir.join(name);
            let length = std::fs::metadata(&file).map_err(Error::io("read", &file))?.len();
            if length != digest.bytes {
                let problem = format!("{length} bytes instead of {}", digest.bytes);
                return Err(Error::Damaged { path: file, problem });
            }
        }
        Ok(Self { manifest, dir: dir.to_owned() })
    }

    /// Compares every file with the digest in the manifest.
    pub fn verify(&self) -> Result<(), Error> {
        for (name, digest) in &self.manifest.files {
            let file = self.dir.join(name);
            if sha256_file(&file)? != digest.sha256 {
                return Err(Error::Damaged { path: file, problem: "its SHA-256 differs".to_owned() });
            }
        }
        Ok(())
    }

    /// The root disk.
    pub fn disk(&self) -> PathBuf {
        self.dir.join(DISK)
    }
    /// The memory image.
    pub fn memory(&self) -> PathBuf {
        self.dir.join(MEMORY)
    }
    /// The device state.
    pub fn state(&self) -> PathBuf {
        self.dir.join(STATE)
    }

    /// Bytes on the disk, holes not counted.
    pub fn bytes(&self) -> Result<u64, Error> {
        let mut sum = 0;
        for name in self.manifest.files.keys() {
            let file = self.dir.join(name);
            sum += std::fs::metadata(&file).map_err(Error::io("read", &file))?.blocks() * 512;
        }
        Ok(sum)
    }
}

/// All whole templates; a damaged one is left out and returned as an error beside them.
pub fn list(data: &DataDir) -> Result<(Vec<Template>, Vec<Error>), Error> {
    let dir = data.templates();
    let (mut whole, mut damaged) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(&dir).map_err(Error::io("list", &dir))? {
        match Template::open(&entry.map_err(Error::io("list", &dir))?.path()) {
            Ok(template) => whole.push(template),
            Err(error) => damaged.push(error),
        }
    }
    whole.sort_by_key(|a| a.manifest.created_at);
    Ok((whole, damaged))
}

/// What a new template is besides its files.
#[derive(Debug)]
pub struct Description {
    /// Its ID.
    pub id: TemplateId,
    /// The build.
    pub build: proto::BuildId,
    /// Names.
    pub aliases: Vec<String>,
    /// The machine it was taken from.
    pub machine: MachineShape,
    /// Defaults for commands.
    pub defaults: GuestDefaults,
}

/// Makes `dir`, which holds disk, memory and state, into the template `description`: everything is flushed, the
/// manifest written, and the directory renamed into place.
pub fn publish(data: &DataDir, dir: &Path, description: Description) -> Result<Template, Error> {
    let mut files = BTreeMap::new();
    for name in [DISK, MEMORY, STATE] {
        let path = dir.join(name);
        let file = File::open(&path).map_err(Error::io("read", &path))?;
        file.sync_all().map_err(Error::io("flush", &path))?;
        let bytes = file.metadata().map_err(Error::io("read", &path))?.len();
        files.insert(name.to_owned(), FileDigest { bytes, sha256: sha256_file(&path)? });
    }
    let manifest = Manifest {
        version: manifest::VERSION,
        template_id: description.id,
        build_id: description.build,
        aliases: description.aliases,
        created_at: jiff::Timestamp::now(),
        machine: description.machine,
        defaults: description.defaults,
        files,
    };
    let path = dir.join(MANIFEST);
    let text = serde_json::to_vec_pretty(&manifest)
        .map_err(|error| Error::format(&path, "a template's manifest", error.to_string()))?;
    let mut file = File::create_new(&path).map_err(Error::io("create", &path))?;
    file.write_all(&text).and_then(|()| file.sync_all()).map_err(Error::io("write", &path))?;
    let target = data.template(&manifest.template_id);
    std::fs::rename(dir, &target).map_err(Error::io("move", dir))?;
    sync_dir(&data.templates())?;
    Ok(Template { manifest, dir: target })
}

/// Makes a rename in `dir` durable.
fn sync_dir(dir: &Path) -> Result<(), Error> {
    File::open(dir).and_then(|file| file.sync_all()).map_err(Error::io("flush", dir))
}

/// Removes a template: first the manifest, so that it ceases to exist at once, then its files.
pub fn remove(data: &DataDir, id: &TemplateId) -> Result<(), Error> {
    let dir = data.template(id);
    let manifest = dir.join(MANIFEST);
    std::fs::remove_file(&manifest).map_err(Error::io("remove", &manifest))?;
    std::fs::remove_dir_all(&dir).map_err(Error::io("remove", &dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn description() -> Description {
        Description {
            id: TemplateId::from_random([3; 20]),
            build: proto::BuildId::from_random([4; 16]),
            aliases: vec!["base".to_owned()],
            machine: MachineShape {
                driver: "qemu-tcg".to_owned(),
                driver_version: "7.2".to_owned(),
                vcpus: 1,
                memory_mib: 512,
                disk_mib: 1024,
                kernel: "k".to_owned(),
                initramfs: "i".to_owned(),
            },
            defaults: GuestDefaults { user: "user".to_owned(), workdir: String::new(), env: BTreeMap::new() },
        }
    }

    #[test]
    fn published_template_is_listed_and_damage_is_noticed() {
        let root = tempfile::tempdir().unwrap();
        let data = DataDir::open(root.path()).unwrap();
        let dir = data.tmp().join("new");
        std::fs::create_dir(&dir).unwrap();
        for name in [DISK, MEMORY, STATE] {
            std::fs::write(dir.join(name), name).unwrap();
        }
        let template = publish(&data, &dir, description()).unwrap();
        assert!(!dir.exists());
        template.verify().unwrap();
        assert_eq!(list(&data).unwrap().0.len(), 1);

        std::fs::write(template.disk(), b"DISK.raw").unwrap();
        assert!(matches!(template.verify(), Err(Error::Damaged { .. })), "same size, other bytes");
        std::fs::write(template.disk(), b"short").unwrap();
        let (whole, damaged) = list(&data).unwrap();
        assert!(whole.is_empty() && damaged.len() == 1);

        remove(&data, &template.manifest.template_id).unwrap();
        assert!(list(&data).unwrap().1.is_empty());
    }

    #[test]
    fn half_made_template_does_not_exist() {
        let root = tempfile::tempdir().unwrap();
        let data = DataDir::open(root.path()).unwrap();
        let dir = data.tmp().join("new");
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join(DISK), b"d").unwrap();
        assert!(publish(&data, &dir, description()).is_err());
        assert!(list(&data).unwrap().0.is_empty());
        data.empty_tmp().unwrap();
        assert!(!dir.exists());
    }
}
