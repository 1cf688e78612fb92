//! Tiny guests, and real `vmm` processes to run them: what the tests here share.
//!
//! A guest is built by rustc for i586 when a test first needs it, and wrapped into an ELF with a PVH note, so that it
//! boots as a kernel does.

use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use proto::vmm::{
    Answer, BootSpec, ChildSpec, DevicesSpec, Ending, Fd, Phase, Request, RestoreSpec, SaveSpec, StatsReport,
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};

#[path = "elf.rs"]
mod elf;

/// Nothing here takes this long unless it hangs; a Linux in the lab on a busy host takes a minute.
pub const LIMIT: Duration = Duration::from_secs(150);

/// The kernel image of a guest in `tests/guests`.
pub fn guest(name: &str) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guests");
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("guests");
    std::fs::create_dir_all(&out).unwrap();
    // Tests run in processes of their own, and rustc names what it leaves on the way after the crate alone: each
    // builds in a directory of its own, and the finished kernel is moved to its name.
    let own = tempfile::tempdir_in(&out).unwrap();
    let flat = own.path().join("flat.bin");
    let built = Command::new("rustc")
        .args(["--edition=2024", "--target=i586-unknown-linux-gnu", "--crate-type=bin", "-Copt-level=2"])
        .args(["-Cpanic=abort", "-Crelocation-model=static", "-Clinker=rust-lld", "-Clinker-flavor=ld.lld"])
        .arg("-Clink-arg=--oformat=binary")
        .arg(format!("-Clink-arg=-T{}", sources.join("link.ld").display()))
        .arg("-o")
        .arg(&flat)
        .arg(sources.join(format!("{name}.rs")))
        .output()
        .expect("rustc");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let code = std::fs::read(&flat).unwrap();
    let elf = own.path().join("kernel.elf");
    std::fs::write(&elf, elf::pvh(&code)).unwrap();
    let target = out.join(format!("{name}.elf"));
    std::fs::rename(&elf, &target).unwrap();
    target
}

/// A listening control socket.
pub struct Control {
    /// What the process gets.
    pub listener: OwnedFd,
    path: PathBuf,
}

impl Control {
    /// In a directory of its own.
    pub fn new(dir: &Path, name: &str) -> Self {
        let path = dir.join(name);
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 8).unwrap();
        Self { listener, path }
    }

    /// Connects, and reads the greeting.
    pub fn connect(&self) -> Client {
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(&self.path).unwrap()).unwrap();
        let limit = Some(LIMIT);
        rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Recv, limit)
            .unwrap();
        let mut client = Client { socket, pid: 0, phase: Phase::Empty, events: Vec::new() };
        match client.receive() {
            Some(Answer::Hello { pid, phase, .. }) => (client.pid, client.phase) = (pid, phase),
            other => panic!("no greeting: {other:?}"),
        }
        client
    }
}

/// A connection to a process.
pub struct Client {
    socket: OwnedFd,
    /// The process.
    pub pid: u32,
    /// What it was doing when this connected.
    pub phase: Phase,
    events: Vec<Ending>,
}

impl Client {
    /// Sends any bytes with any descriptors.
    pub fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
        }
        rustix::net::sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)
            .unwrap();
    }

    /// The next packet; None when the process is gone.
    pub fn receive(&mut self) -> Option<Answer> {
        let mut bytes = vec![0u8; proto::vmm::MAX_PACKET];
        let received = rustix::net::recvmsg(
            &self.socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut RecvAncillaryBuffer::default(),
            RecvFlags::empty(),
        );
        match received {
            Ok(message) if message.bytes > 0 => {
                Some(serde_json::from_slice(&bytes[..message.bytes]).unwrap())
            }
            Ok(_) | Err(rustix::io::Errno::CONNRESET) => None,
            Err(error) => panic!("no answer: {error}"),
        }
    }

    /// Asks and waits for the answer.
    pub fn ask(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> Answer {
        self.send_raw(&serde_json::to_vec(request).unwrap(), fds);
        loop {
            match self.receive() {
                Some(Answer::Event(ending)) => self.events.push(ending),
                Some(answer) => return answer,
                None => panic!("the process went away before it answered"),
            }
        }
    }

    /// Asks for something that must work.
    pub fn done(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) {
        let answer = self.ask(request, fds);
        assert_eq!(answer, Answer::Done, "{request:?}");
    }

    /// What it has used.
    pub fn stats(&mut self) -> StatsReport {
        match self.ask(&Request::Stats, &[]) {
            Answer::Stats(report) => report,
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the guest has ended.
    pub fn ending(&mut self) -> Ending {
        if let Some(ending) = self.events.pop() {
            return ending;
        }
        match self.receive() {
            Some(Answer::Event(ending)) => ending,
            other => panic!("instead of an ending: {other:?}"),
        }
    }
}

/// The descriptors of one request.
#[derive(Default)]
pub struct Fds(Vec<OwnedFd>);

impl Fds {
    /// Adds one; its place.
    pub fn add(&mut self, fd: impl Into<OwnedFd>) -> Fd {
        self.0.push(fd.into());
        Fd(self.0.len() as u32 - 1)
    }

    /// For sending.
    pub fn borrow(&self) -> Vec<BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd).collect()
    }
}

/// A machine of no disk and no card as files.
pub struct Snapshot {
    /// Everything but memory.
    pub state: std::fs::File,
    /// Memory.
    pub memory: std::fs::File,
}

/// A child without disk, card and console, that listens on `control`.
pub fn bare_child(control: &Control, fds: &mut Fds) -> ChildSpec {
    ChildSpec {
        control: fds.add(control.listener.try_clone().unwrap()),
        deltas: Vec::new(),
        link: None,
        console: None,
        uid: None,
        run: true,
    }
}

/// A `vmm` process and what the test holds of it.
pub struct Vmm {
    /// Its directory.
    pub dir: tempfile::TempDir,
    /// The process.
    pub process: Child,
    /// Its control socket.
    pub control: Control,
    /// A connection.
    pub client: Client,
}

impl Vmm {
    /// A process without a machine.
    pub fn start(arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let control = Control::new(dir.path(), "control");
        let kvm = std::fs::File::options().read(true).write(true).open("/dev/kvm").expect("/dev/kvm");
        let listener = control.listener.try_clone().unwrap();
        let process = spawn(arguments, &listener, &kvm);
        let client = control.connect();
        Self { dir, process, control, client }
    }

    /// A process that runs the guest `name` with `memory_mib`.
    pub fn boot(name: &str, memory_mib: u64) -> (Self, Console) {
        Self::boot_with(&guest(name), memory_mib, 1, |_, _| ())
    }

    /// The same with everything to choose.
    pub fn boot_with(
        kernel: &Path,
        memory_mib: u64,
        vcpus: u8,
        change: impl FnOnce(&mut BootSpec, &mut Fds),
    ) -> (Self, Console) {
        let mut vmm = Self::start(&[]);
        let mut fds = Fds::default();
        let (console, theirs) = Console::new();
        let mut spec = BootSpec {
            vcpus,
            memory_mib,
            huge_pages: false,
            kernel: fds.add(std::fs::File::open(kernel).unwrap()),
            initramfs: None,
            command_line: "console=ttyS0".to_owned(),
            devices: DevicesSpec { disks: Vec::new(), card: None, console: Some(fds.add(theirs)) },
        };
        change(&mut spec, &mut fds);
        vmm.client.done(&Request::Boot(spec), &fds.borrow());
        (vmm, console)
    }

    /// Saves the paused machine: its state, and what it has written since the files it came from.
    pub fn save(&mut self) -> Snapshot {
        let (state, memory) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let mut fds = Fds::default();
        let spec = SaveSpec {
            state: fds.add(state.try_clone().unwrap()),
            memory: fds.add(memory.try_clone().unwrap()),
            pagemap: Some(fds.add(self.pagemap())),
        };
        self.client.done(&Request::Save(spec), &fds.borrow());
        Snapshot { state, memory }
    }

    /// A process that was asked to go on from `snapshot`, and what it answered.
    pub fn restore(arguments: &[&str], snapshot: &Snapshot) -> (Self, Console, Answer) {
        let mut vmm = Self::start(arguments);
        let (console, theirs) = Console::new();
        let mut fds = Fds::default();
        let spec = RestoreSpec {
            state: fds.add(snapshot.state.try_clone().unwrap()),
            memory: vec![fds.add(snapshot.memory.try_clone().unwrap())],
            devices: DevicesSpec { disks: Vec::new(), card: None, console: Some(fds.add(theirs)) },
        };
        let answer = vmm.client.ask(&Request::Restore(spec), &fds.borrow());
        (vmm, console, answer)
    }

    /// Tries to boot a machine of nothing but a kernel.
    pub fn try_boot(&mut self, kernel: &Path, memory_mib: u64, vcpus: u8) -> Answer {
        let mut fds = Fds::default();
        let spec = BootSpec {
            vcpus,
            memory_mib,
            huge_pages: false,
            kernel: fds.add(std::fs::File::open(kernel).unwrap()),
            initramfs: None,
            command_line: String::new(),
            devices: DevicesSpec { disks: Vec::new(), card: None, console: None },
        };
        self.client.ask(&Request::Boot(spec), &fds.borrow())
    }

    /// Writes all guest memory from 16 MiB on, as a guest of `bytes` would that has used all of it: from outside, so that
    /// it takes no longer than it must, through the process's own page tables.
    pub fn touch(&self, bytes: u64) {
        use std::os::unix::fs::FileExt as _;
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.client.pid)).unwrap();
        let regions = maps.lines().filter_map(|line| {
            let (range, rest) = line.split_once(' ')?;
            let (from, to) = range.split_once('-')?;
            let range = u64::from_str_radix(from, 16).ok()?..u64::from_str_radix(to, 16).ok()?;
            // Nothing else that can be written is as large.
            (rest.starts_with("rw-p") && range.end - range.start >= bytes.min(128 << 20)).then_some(range)
        });
        let memory =
            std::fs::File::options().write(true).open(format!("/proc/{}/mem", self.client.pid)).unwrap();
        let pattern = vec![0x55u8; 1 << 20];
        let regions: Vec<std::ops::Range<u64>> = regions.collect();
        // The kernel maps downwards: what was mapped first, the memory below 3 GiB, ends last. The guest is in there.
        let end = regions.iter().map(|region| region.end).max().unwrap();
        let guest = end - bytes.min(3 << 30)..end - bytes.min(3 << 30) + (16 << 20);
        for region in regions {
            let mut at = region.start;
            while at < region.end {
                let count = (region.end - at).min(1 << 20);
                if !(at < guest.end && at + count > guest.start) {
                    memory.write_all_at(&pattern[..count as usize], at).unwrap();
                }
                at += count;
            }
        }
    }

    /// Its `/proc/<pid>/pagemap`.
    pub fn pagemap(&self) -> std::fs::File {
        std::fs::File::open(format!("/proc/{}/pagemap", self.client.pid)).unwrap()
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn spawn(arguments: &[&str], listener: &OwnedFd, kvm: &std::fs::File) -> Child {
    use std::os::unix::process::CommandExt as _;
    let (listener, kvm) = (listener.as_raw_fd(), kvm.as_raw_fd());
    let mut command = Command::new(std::env::var_os("PANDO_VMM").unwrap_or(env!("CARGO_BIN_EXE_vmm").into()));
    command
        .args(["--control", &listener.to_string(), "--kvm", &kvm.to_string()])
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    // SAFETY: plain system calls between fork and exec, on descriptors that are open until then.
    unsafe {
        command.pre_exec(move || {
            for fd in [listener, kvm] {
                let fd = std::mem::ManuallyDrop::new(OwnedFd::from_raw_fd(fd));
                rustix::io::fcntl_setfd(&*fd, rustix::io::FdFlags::empty())?;
            }
            Ok(())
        });
    }
    command.spawn().unwrap()
}

/// The other end of a guest's console.
pub struct Console {
    socket: UnixStream,
    text: String,
}

impl Console {
    /// A console and the machine's end of it.
    pub fn new() -> (Self, UnixStream) {
        let (socket, theirs) = UnixStream::pair().unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        (Self { socket, text: String::new() }, theirs)
    }

    /// The next line, without its end.
    pub fn line(&mut self) -> String {
        loop {
            if let Some((line, rest)) = self.text.split_once('\n') {
                let line = line.to_owned();
                self.text = rest.to_owned();
                return line;
            }
            let mut bytes = [0u8; 4096];
            let count = self.socket.read(&mut bytes).expect("the guest says nothing");
            assert!(count > 0, "the console is closed after {:?}", self.text);
            self.text.push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
    }

    /// The next line as a number.
    pub fn number(&mut self) -> u64 {
        let line = self.line();
        line.parse().unwrap_or_else(|_| panic!("no number: {line:?}"))
    }

    /// The next number of a copy, which begins within a line.
    pub fn fresh_number(&mut self) -> u64 {
        self.line();
        self.number()
    }

    /// All whole lines until the machine closes the console.
    pub fn rest(&mut self) -> Vec<String> {
        let mut bytes = Vec::new();
        let _ = self.socket.read_to_end(&mut bytes);
        self.text.push_str(&String::from_utf8_lossy(&bytes));
        let whole = self.text.rfind('\n').map_or(0, |end| end + 1);
        std::mem::take(&mut self.text)[..whole].lines().map(str::to_owned).collect()
    }

    /// Reads up to a line that contains `text`.
    pub fn until(&mut self, text: &str) -> String {
        loop {
            let line = self.line();
            if line.contains(text) {
                return line;
            }
        }
    }
}

/// Copies of `vmm`'s machine.
pub fn fork(
    vmm: &mut Vmm,
    count: usize,
    deltas: &[Fd],
    fds: &mut Fds,
    change: impl Fn(&mut ChildSpec, &mut Fds),
) -> (Vec<Copied>, u64) {
    let mut children = Vec::new();
    let mut copies = Vec::new();
    for _ in 0..count {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let name = format!("child-{}", NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        let control = Control::new(vmm.dir.path(), &name);
        let (console, theirs) = Console::new();
        let mut child = bare_child(&control, fds);
        child.console = Some(fds.add(theirs));
        change(&mut child, fds);
        children.push(child);
        copies.push((control, console));
    }
    let request = Request::Fork { children, deltas: deltas.to_vec() };
    let (pids, paused_us) = match vmm.client.ask(&request, &fds.borrow()) {
        Answer::Forked { pids, paused_us, failure: None } => (pids, paused_us),
        other => panic!("{other:?}"),
    };
    let copies = copies.into_iter().zip(pids);
    let copies = copies
        .map(|((control, console), pid)| Copied { client: control.connect(), console, pid })
        .collect::<Vec<_>>();
    for copy in &copies {
        assert_eq!(copy.client.pid, copy.pid);
    }
    (copies, paused_us)
}

/// A copy.
pub struct Copied {
    /// A connection to it.
    pub client: Client,
    /// Its console.
    pub console: Console,
    /// The process.
    pub pid: u32,
}

impl Drop for Copied {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.pid as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}
