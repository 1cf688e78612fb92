//! What the node and a `vmm` process say to each other, over one Unix socket per machine.
//!
//! The socket is of type SEQPACKET: one packet is one JSON document of at most [`MAX_PACKET`] bytes. A [`Request`]
//! carries the descriptors it names as [`Fd`] in the same packet (SCM_RIGHTS), at most [`MAX_FDS`]. The process answers
//! each request of a connection in order with one [`Answer`]; [`Answer::Event`]s come between, on every connection. The
//! process listens on a socket that it is given, so a node that was restarted connects again and finds the machine as
//! it is.
//!
//! ```text
//!            boot, restore                 resume                 shutdown, reset, fault
//!   empty ─────────────────► paused ◄────────────────► running ─────────────────────────► ended
//!                             │  ▲          pause          │
//!                             └──┘ save, fork              └── fork (pauses and goes on by itself)
//! ```

use serde::{Deserialize, Serialize};

/// Bytes of a packet, without descriptors.
pub const MAX_PACKET: usize = 64 * 1024;
/// Descriptors with a packet; the kernel's own limit is 253.
pub const MAX_FDS: usize = 250;
/// Children of one [`Request::Fork`].
pub const MAX_CHILDREN: usize = 32;
/// The version of this protocol and of the state file; a machine of another version is not restored.
pub const VERSION: u32 = 1;

/// The place of a descriptor among those that came with the packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fd(pub u32);

/// A bound on a flow of bytes and operations; 0 is none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rate {
    /// Bytes per second.
    pub bytes_per_second: u64,
    /// Bytes that may pass at once after a pause.
    pub burst_bytes: u64,
    /// Requests or frames per second.
    pub operations_per_second: u64,
    /// Operations that may pass at once after a pause.
    pub burst_operations: u64,
}

/// A block device: a chain of layers (crate `disk`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// Raw image at the bottom.
    pub base: Fd,
    /// The image itself is written. Only without layers above it.
    #[serde(default)]
    pub base_written: bool,
    /// Frozen deltas, the lowest first.
    #[serde(default)]
    pub frozen: Vec<Fd>,
    /// The delta that is written. None and not `base_written`: the disk is read-only.
    #[serde(default)]
    pub delta: Option<Fd>,
    /// What the guest flushes is on the host's disk before it is told so. A sandbox does not outlive its host and needs
    /// it not.
    #[serde(default)]
    pub durable: bool,
    /// Bound on it.
    #[serde(default)]
    pub rate: Rate,
}

/// The network card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CardSpec {
    /// Stream socket for frames: a length (32 bits, big-endian), then the frame; QEMU's stream netdev does the same.
    pub link: Fd,
    /// Its MAC.
    pub mac: [u8; 6],
    /// The largest packet the guest may send.
    pub mtu: u16,
    /// Each frame on the link begins with the 12 bytes of a `virtio_net_hdr_v1`, and the guest is offered checksum
    /// offload and TSO in both directions.
    #[serde(default)]
    pub offloads: bool,
    /// Bound on what the guest sends.
    #[serde(default)]
    pub rate: Rate,
}

/// What a machine has. Memory and vCPUs of a restored machine are those of its snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DevicesSpec {
    /// Block devices, in the order of `/dev/vda`, `/dev/vdb`.
    pub disks: Vec<DiskSpec>,
    /// The card, if there is one.
    #[serde(default)]
    pub card: Option<CardSpec>,
    /// Stream socket that the serial console is written to; what it does not take at once is kept in a ring.
    #[serde(default)]
    pub console: Option<Fd>,
}

/// A machine to boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootSpec {
    /// vCPUs, 1 to 32.
    pub vcpus: u8,
    /// Guest memory.
    pub memory_mib: u64,
    /// Ask the host for huge pages (transparent ones).
    #[serde(default)]
    pub huge_pages: bool,
    /// ELF kernel with a PVH note.
    pub kernel: Fd,
    /// Initramfs.
    #[serde(default)]
    pub initramfs: Option<Fd>,
    /// The kernel's command line.
    pub command_line: String,
    /// Its devices.
    pub devices: DevicesSpec,
}

/// A machine to make from a snapshot. It is paused afterwards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestoreSpec {
    /// The state file.
    pub state: Fd,
    /// The memory files, the oldest first: a full one, and those with what was written since. Mapped privately.
    pub memory: Vec<Fd>,
    /// The same devices as when it was saved; descriptors of today.
    pub devices: DevicesSpec,
}

/// A snapshot to write. The machine must be paused and stays so.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SaveSpec {
    /// Empty file for device and vCPU state.
    pub state: Fd,
    /// Empty file for memory: as large as guest memory, with holes.
    pub memory: Fd,
    /// `/proc/<pid>/pagemap` of the process, opened by the caller, as the process can open nothing. With it only what
    /// was written since the snapshot it came from is saved; without it, all that is not zero.
    #[serde(default)]
    pub pagemap: Option<Fd>,
}

/// One copy to make by [`Request::Fork`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChildSpec {
    /// Its listening control socket.
    pub control: Fd,
    /// An empty delta for each disk that is written.
    pub deltas: Vec<Fd>,
    /// Its link, if the machine has a card.
    #[serde(default)]
    pub link: Option<Fd>,
    /// Its console.
    #[serde(default)]
    pub console: Option<Fd>,
    /// User and group it runs under from its first step on. Only a process that was started with `--zygote` can do
    /// this; the children of others keep its user.
    #[serde(default)]
    pub uid: Option<u32>,
    /// Let it run at once; otherwise it waits for [`Request::Resume`].
    #[serde(default)]
    pub run: bool,
}

/// What a machine is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Request {
    /// Makes a machine from a kernel and lets it run.
    Boot(BootSpec),
    /// Makes a machine from a snapshot; paused.
    Restore(RestoreSpec),
    /// Stops all vCPUs; nothing of the guest runs and nothing of it is in flight when this is answered.
    Pause,
    /// Lets the vCPUs run.
    Resume,
    /// Writes a snapshot.
    Save(SaveSpec),
    /// Copies the machine as it is now. Answered with the children's processes.
    Fork {
        /// The copies.
        children: Vec<ChildSpec>,
        /// New deltas for the disks of the machine itself: what it has written is under all copies and may not change
        /// any more. Empty for a machine that never runs again (a zygote) or has no written disk.
        #[serde(default)]
        deltas: Vec<Fd>,
    },
    /// What it has used.
    Stats,
    /// Asks the guest to give back memory until it has this much less; it may take its time.
    Balloon {
        /// How much less.
        mib: u64,
    },
    /// Ends the process.
    Stop,
}

/// What the machine is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// There is no machine yet.
    Empty,
    /// vCPUs stand still.
    Paused,
    /// vCPUs run.
    Running,
    /// The guest has ended.
    Ended,
}

/// Counters of a machine since it began (a copy begins at its parent's).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatsReport {
    /// Exits of vCPUs to this process.
    pub exits: u64,
    /// Bytes read from disks, and written to them.
    pub disk_read: u64,
    /// As above.
    pub disk_written: u64,
    /// Frames from the guest, and to it.
    pub frames_sent: u64,
    /// As above.
    pub frames_received: u64,
    /// Chains that a device refused because they broke the rules.
    pub refused_chains: u64,
    /// Memory the guest has given back through the balloon now.
    pub balloon_mib: u64,
    /// Bytes of free pages that were given back to the host so far.
    pub reported_free: u64,
    /// Bytes of console output that were dropped because nobody read them.
    pub console_dropped: u64,
}

/// Why the guest ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Ending {
    /// It switched itself off.
    PowerOff,
    /// It asked for a reset.
    Reset,
    /// Three faults in a row: the guest's kernel is broken.
    TripleFault,
    /// KVM could not go on.
    Fault {
        /// What KVM said.
        detail: String,
    },
    /// The process was asked to stop.
    Stopped,
}

/// What the machine says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Answer {
    /// First packet of every connection.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// The process.
        pid: u32,
        /// What it is doing.
        phase: Phase,
    },
    /// Done.
    Done,
    /// To [`Request::Stats`].
    Stats(StatsReport),
    /// To [`Request::Fork`]: a process for each child, in order.
    Forked {
        /// Process IDs; fewer than children were asked for when there is a `failure`.
        pids: Vec<u32>,
        /// Why there are no more children.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failure: Option<String>,
        /// How long vCPUs stood still, in microseconds.
        paused_us: u64,
    },
    /// Refused or failed; the machine is as it was unless `ended` says otherwise.
    Failed {
        /// Stable word for programs.
        code: FailureCode,
        /// For people, with all causes.
        message: String,
    },
    /// The guest ended; the process ends after this.
    Event(Ending),
}

/// Kinds of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FailureCode {
    /// Not now: see the diagram of phases.
    WrongPhase,
    /// The request is not what this protocol says.
    BadRequest,
    /// The snapshot cannot be read.
    BadSnapshot,
    /// The snapshot needs CPU features that this host has not.
    CpuFeatures,
    /// KVM, memory or a file failed.
    Host,
}
