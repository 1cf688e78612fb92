//! The driver `kvm` with real `vmm` processes and a guest of 32 bytes: they need a `/dev/kvm` that makes machines, not one
//! that runs Linux. Where there is none, or no `vmm` beside the tests (`cargo build -p vmm`), nothing is tested.
#![allow(clippy::unwrap_used, unreachable_pub)]

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use node::cgroup::Cgroup;
use node::machine::kvm::Kvm;
use node::machine::{BootSpec, Driver, Machine, MachineError, RestoreSpec, Source, Started};
use node::uids::Uids;
use proto::manifest::MachineShape;
use store::layout::DataDir;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;

#[path = "../../vmm/tests/all/elf.rs"]
mod elf;

/// Nothing here takes this long unless it hangs.
const LIMIT: Duration = Duration::from_secs(60);
/// Above what others on this host have; each test has a process of its own, and reserves its own range from here on.
const UIDS: u32 = 1_800_000_000;

/// Counts in memory and says the number's last six bits, from `0` on, a line each.
const COUNTING: [u8; 32] = [
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xa1, 0x00, 0x00, 0x20, 0x00, // mov eax, [0x200000]
    0x40, // inc eax
    0xa3, 0x00, 0x00, 0x20, 0x00, // mov [0x200000], eax
    0x24, 0x3f, // and al, 63
    0x04, 0x30, // add al, '0'
    0xee, // out dx, al
    0xb0, 0x0a, // mov al, '\n'
    0xee, // out dx, al
    0xb9, 0x00, 0x00, 0x04, 0x00, // mov ecx, 0x40000
    0xe2, 0xfe, // loop here
    0xeb, 0xe0, // jmp to the beginning
];

/// A data directory with the parts of a template, and the driver.
struct Fixture {
    root: tempfile::TempDir,
    data: DataDir,
    driver: Arc<Kvm>,
    uids: Uids,
    /// What the template's machine said last.
    last: u8,
}

impl Fixture {
    /// None where it cannot be tested. `zygotes` is how many user IDs the driver has.
    async fn new(zygotes: u32) -> Option<Self> {
        let vmm = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("vmm");
        if !vmm.exists() || !Path::new("/dev/kvm").exists() || !rustix::process::geteuid().is_root() {
            eprintln!("not tested: no {}, no /dev/kvm, or not root", vmm.display());
            return None;
        }
        let root = tempfile::tempdir().unwrap();
        let data = DataDir::open(root.path()).unwrap();
        let driver = Kvm::new(vmm, data.run(), Uids::reserve(UIDS, zygotes).unwrap());
        let uids = Uids::reserve(UIDS, 32).unwrap();
        let mut fixture = Self { root, data, driver: Arc::new(driver), uids, last: 0 };
        fixture.park().await;
        Some(fixture)
    }

    fn dir(&self) -> PathBuf {
        self.data.root().join("tmp")
    }

    /// Boots the guest and saves it.
    async fn park(&mut self) {
        let dir = self.dir();
        std::fs::write(dir.join("kernel"), elf::pvh(&COUNTING)).unwrap();
        std::fs::write(dir.join("initramfs"), "nothing").unwrap();
        std::fs::File::create(dir.join("disk.raw")).unwrap().set_len(1 << 20).unwrap();
        let spec = BootSpec {
            name: "template".to_owned(),
            dir: dir.clone(),
            uid: self.uids.take().unwrap(),
            kernel: dir.join("kernel"),
            initramfs: dir.join("initramfs"),
            disk: dir.join("disk.raw"),
            memory: dir.join("memory"),
            vcpus: 1,
            memory_mib: 64,
        };
        let Started { mut machine, mut console, .. } = self.driver.boot(&spec).await.unwrap();
        assert_eq!(user_of(machine.pid()), spec.uid);
        for expected in b"12345" {
            assert_eq!(next(&mut console).await, *expected);
        }
        machine.save(&dir.join("state")).await.unwrap();
        assert!(!is_there(machine.pid()), "it has ended");
        let mut rest = Vec::new();
        console.read_to_end(&mut rest).await.unwrap();
        self.last = rest.into_iter().rfind(|byte| *byte != b'\n').unwrap_or(b'5');
        assert!(!dir.join("vmm.sock").exists(), "a template has no socket");
    }

    fn spec(&self, name: &str) -> RestoreSpec {
        let dir = self.data.sandboxes().join(name);
        let uid = self.uids.take().unwrap();
        std::fs::DirBuilder::new().mode(0o700).create(&dir).unwrap();
        std::os::unix::fs::chown(&dir, Some(uid), Some(uid)).unwrap();
        let (driver, driver_version) = self.driver.identity();
        RestoreSpec {
            name: name.to_owned(),
            dir,
            uid,
            source: Source {
                memory: Arc::new(std::fs::File::open(self.dir().join("memory")).unwrap().into()),
                state: self.dir().join("state"),
                disk: self.dir().join("disk.raw"),
                shape: MachineShape {
                    driver: driver.to_owned(),
                    driver_version: driver_version.to_owned(),
                    vcpus: 1,
                    memory_mib: 64,
                    disk_mib: 1,
                    kernel: String::new(),
                    initramfs: String::new(),
                },
            },
            cgroup: Cgroup::default(),
        }
    }

    /// A copy that was heard to go on where the template's machine stood.
    async fn copy(&self, name: &str) -> (Box<dyn Machine>, UnixStream) {
        let spec = self.spec(name);
        let started = self.driver.restore(&spec).await;
        let Started { machine, mut console, .. } = started.unwrap_or_else(|error| panic!("{error:?}"));
        let following = b'0' + (self.last - b'0' + 1) % 64;
        assert_eq!(next(&mut console).await, following);
        assert_eq!(user_of(machine.pid()), spec.uid);
        (machine, console)
    }

    /// Processes of this data directory's machines.
    fn processes(&self) -> Vec<u32> {
        let mark = format!("PANDO_MACHINE_DIR={}/", self.data.root().display());
        let pids = std::fs::read_dir("/proc").unwrap().flatten();
        pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .filter(|pid| {
                let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
                environment.windows(mark.len()).any(|window| window == mark.as_bytes())
            })
            .collect()
    }

    async fn until(&self, what: &str, mut holds: impl FnMut(&[u32]) -> bool) {
        let begun = Instant::now();
        while !holds(&self.processes()) {
            assert!(begun.elapsed() < LIMIT, "{what}: {:?}", self.processes());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

async fn next(console: &mut UnixStream) -> u8 {
    loop {
        let byte =
            tokio::time::timeout(LIMIT, console.read_u8()).await.expect("the guest is silent").unwrap();
        if byte != b'\n' {
            return byte;
        }
    }
}

fn status(pid: u32, field: &str) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse().ok()
}

fn user_of(pid: u32) -> u32 {
    status(pid, "Uid:").unwrap()
}

fn is_there(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_are_apart_and_end_as_they_are_told_or_by_themselves() {
    let Some(fixture) = Fixture::new(4).await else { return };
    let (mut one, mut console) = fixture.copy("one").await;
    let (mut two, _console) = fixture.copy("two").await;
    assert_eq!(status(one.pid(), "PPid:"), status(two.pid(), "PPid:"), "one zygote for both");
    let waiting = tokio::time::timeout(Duration::from_millis(50), two.exited()).await;
    assert!(waiting.is_err(), "it runs");
    one.stop().await;
    assert!(!is_there(one.pid()));
    let mut rest = Vec::new();
    console.read_to_end(&mut rest).await.unwrap();
    kill(two.pid());
    let exit = tokio::time::timeout(LIMIT, two.exited()).await.unwrap();
    assert!(exit.description.contains("killed"), "{}", exit.description);
    let (three, _console) = fixture.copy("three").await;
    let pid = three.pid();
    drop(three);
    fixture.until("a dropped machine ends", |pids| !pids.contains(&pid)).await;
    fixture.driver.close().await;
    assert!(fixture.processes().is_empty());
    assert!(fixture.data.zygotes().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_zygote_is_made_anew_within_the_same_create() {
    let Some(fixture) = Fixture::new(1).await else { return };
    let (one, _console) = fixture.copy("one").await;
    let zygote = status(one.pid(), "PPid:").unwrap();
    kill(zygote);
    fixture.until("it ends", |_| !is_there(zygote)).await;
    let (two, _console) = fixture.copy("two").await;
    assert_ne!(status(two.pid(), "PPid:").unwrap(), zygote);
    assert!(is_there(one.pid()), "its copies live on");
    fixture.driver.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_zygote_that_cannot_be_made_leaves_nothing() {
    let Some(fixture) = Fixture::new(1).await else { return };
    for name in ["one", "two", "three"] {
        let mut spec = fixture.spec(name);
        // A snapshot that is none.
        spec.source.state = fixture.dir().join("initramfs");
        match fixture.driver.restore(&spec).await.err() {
            Some(MachineError::Refused { message, .. }) => assert!(!message.is_empty()),
            other => panic!("{other:?}"),
        }
        fixture.until("nothing is left", <[u32]>::is_empty).await;
        assert!(fixture.data.zygotes().unwrap().is_empty());
    }
    let (_machine, _console) = fixture.copy("four").await;
    fixture.driver.close().await;
}

/// A kill may end a create at any moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_create_cut_short_leaves_no_process() {
    let Some(fixture) = Fixture::new(1).await else { return };
    // Before there is a zygote, while it is made, and at moments of the fork.
    for (number, micros) in [0, 1000, 0, 100, 200, 400, 800, 1600, 3200].into_iter().enumerate() {
        if number == 2 {
            drop(fixture.copy("first").await);
        }
        let spec = fixture.spec(&format!("cut-{number}"));
        let cut = tokio::time::timeout(Duration::from_micros(micros), fixture.driver.restore(&spec)).await;
        drop(cut);
        fixture.until("only the zygote is left", |pids| pids.len() <= 1).await;
    }
    // Answers are still those of the questions.
    let (_machine, _console) = fixture.copy("last").await;
    fixture.driver.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sweep_finds_zygotes_and_copies() {
    let Some(fixture) = Fixture::new(1).await else { return };
    let (one, _console) = fixture.copy("one").await;
    assert_eq!(fixture.processes().len(), 2);
    let swept = node::sweep::sweep(&fixture.data).unwrap();
    assert_eq!(swept, node::sweep::Swept { processes: 2, directories: 2 });
    assert!(fixture.processes().is_empty() && !is_there(one.pid()));
    assert!(fixture.data.zygotes().unwrap().is_empty());
    drop(fixture.root);
}
