//! The node's end of a `vmm` process's control socket (`proto::vmm`): one packet for each request, with descriptors.
//!
//! Requests of one connection are answered in order; what the machine says by itself (how its guest ended) comes between
//! and is kept for [`Control::ended`].

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use proto::vmm::{Answer, Ending, Fd, MAX_FDS, MAX_PACKET, Phase, Request, VERSION};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::MachineError;

/// Connections that may wait.
const BACKLOG: i32 = 4;

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// A socket's address has room for 108 bytes, and a data directory may lie deeper: so it is named through its directory.
fn at(dir: &OwnedFd, name: &str) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new(format!("/proc/self/fd/{}/{name}", dir.as_raw_fd()))?)
}

fn directory(dir: &Path) -> io::Result<OwnedFd> {
    Ok(std::fs::File::open(dir)?.into())
}

/// A listening socket `name` in `dir`, for a process that is about to be made.
pub(super) fn listen(dir: &Path, name: &str) -> io::Result<OwnedFd> {
    let socket = socket()?;
    rustix::net::bind(&socket, &at(&directory(dir)?, name)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// The descriptors of one request, in the order in which it names them.
#[derive(Default)]
pub(super) struct Descriptors<'a>(Vec<BorrowedFd<'a>>);

impl<'a> Descriptors<'a> {
    pub(super) fn add(&mut self, fd: &'a impl AsFd) -> Fd {
        self.0.push(fd.as_fd());
        Fd(u32::try_from(self.0.len() - 1).unwrap_or(u32::MAX))
    }
}

/// What a request is called in messages.
fn name(request: &Request) -> &'static str {
    match request {
        Request::Boot(_) => "boot",
        Request::Restore(_) => "restore",
        Request::Pause => "pause",
        Request::Resume => "resume",
        Request::Save(_) => "save",
        Request::Fork { .. } => "fork",
        _ => "a request",
    }
}

/// A connection.
pub(super) struct Control {
    socket: AsyncFd<OwnedFd>,
    pid: u32,
    ending: Option<Ending>,
}

impl Control {
    /// Connects to the process that listens on `name` in `dir`, and reads its greeting.
    pub(super) async fn connect(dir: &Path, name: &str) -> Result<Self, MachineError> {
        let open = || {
            let socket = socket()?;
            rustix::net::connect(&socket, &at(&directory(dir)?, name)?)?;
            crate::sys::watch(socket, Interest::READABLE | Interest::WRITABLE)
        };
        let mut control = Self { socket: open().map_err(MachineError::Control)?, pid: 0, ending: None };
        match control.receive().await? {
            // A copy that could not be made into a machine lives long enough to say why.
            Some(Answer::Hello { version: VERSION, phase: Phase::Ended, .. }) => {
                return Err(MachineError::Died(control.ended().await));
            }
            Some(Answer::Hello { version: VERSION, pid, .. }) => control.pid = pid,
            Some(Answer::Hello { version, .. }) => {
                return Err(MachineError::Died(format!(
                    "the vmm speaks version {version} of the protocol, not {VERSION}; install the two of one build"
                )));
            }
            _ => return Err(MachineError::Died("it closed its control socket".to_owned())),
        }
        Ok(control)
    }

    /// The process.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Asks, and returns what is answered. Not cancel-safe: an answer that nobody waits for would be taken for the next
    /// request's.
    pub(super) async fn ask(
        &mut self,
        request: &Request,
        fds: &Descriptors<'_>,
    ) -> Result<Answer, MachineError> {
        let bytes =
            serde_json::to_vec(request).map_err(|error| MachineError::Control(io::Error::other(error)))?;
        self.send(&bytes, &fds.0).await.map_err(MachineError::Control)?;
        loop {
            match self.receive().await? {
                Some(Answer::Event(ending)) => self.ending = Some(ending),
                Some(Answer::Failed { message, .. }) => {
                    return Err(MachineError::Refused { command: name(request), message });
                }
                Some(answer) => return Ok(answer),
                None => return Err(MachineError::Died(self.last_words())),
            }
        }
    }

    /// Resolves when the guest has ended or the process is gone; what is known of why. Cancel-safe.
    pub(super) async fn ended(&mut self) -> String {
        loop {
            if self.ending.is_some() {
                return self.last_words();
            }
            match self.receive().await {
                Ok(Some(Answer::Event(ending))) => self.ending = Some(ending),
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return self.last_words(),
            }
        }
    }

    fn last_words(&self) -> String {
        match &self.ending {
            None => "its process ended without a word: it was killed".to_owned(),
            Some(Ending::PowerOff) => "the guest switched itself off".to_owned(),
            Some(Ending::Reset) => "the guest asked for a reset".to_owned(),
            Some(Ending::TripleFault) => "the guest's kernel failed (triple fault)".to_owned(),
            Some(Ending::Fault { detail }) => format!("the machine could not go on: {detail}"),
            Some(_) => "it was stopped".to_owned(),
        }
    }

    async fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.socket
            .async_io(Interest::WRITABLE, |socket| {
                let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
                let mut ancillary = SendAncillaryBuffer::new(&mut space);
                if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
                    return Err(io::Error::other("too many descriptors for one request"));
                }
                let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags).map(|_| ())?)
            })
            .await
    }

    /// The next packet; None when the process has closed the socket. Cancel-safe: a packet is taken whole.
    async fn receive(&self) -> Result<Option<Answer>, MachineError> {
        let received = self
            .socket
            .async_io(Interest::READABLE, |socket| {
                let mut bytes = vec![0u8; MAX_PACKET];
                let message = rustix::net::recvmsg(
                    socket,
                    &mut [IoSliceMut::new(&mut bytes)],
                    &mut RecvAncillaryBuffer::default(),
                    RecvFlags::DONTWAIT,
                )?;
                bytes.truncate(message.bytes);
                Ok(bytes)
            })
            .await;
        match received {
            Ok(bytes) if bytes.is_empty() => Ok(None),
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map(Some)
                .map_err(|error| MachineError::Control(io::Error::other(error))),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(None),
            Err(error) => Err(MachineError::Control(error)),
        }
    }
}
