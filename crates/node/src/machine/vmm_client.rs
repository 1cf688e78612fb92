//! A client of one `vmm` process: its control socket (`proto::vmm`), with descriptors beside the packets.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use proto::vmm::{Answer, Ending, Fd, MAX_FDS, MAX_PACKET, Phase, Request, VERSION};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::MachineError;

/// The control socket's name in its machine's directory.
pub(super) const SOCKET: &str = "vmm.sock";
const BACKLOG: i32 = 8;

/// The descriptors of one request.
#[derive(Default)]
pub(super) struct Fds<'a>(Vec<BorrowedFd<'a>>);

impl<'a> Fds<'a> {
    /// Adds one; its place.
    pub(super) fn add(&mut self, fd: &'a impl AsFd) -> Fd {
        self.0.push(fd.as_fd());
        // At most a handful.
        Fd(u32::try_from(self.0.len()).unwrap_or(u32::MAX) - 1)
    }
}

/// A listening control socket in `dir`, for a process, and a connection to it that waits to be taken. It is made before
/// the process, so that it breaks when the process ends without having taken it.
pub(super) fn listen(dir: &Path) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(dir, flags, Mode::empty())?;
    match rustix::fs::unlinkat(&dir, SOCKET, AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    // A socket's address has 108 bytes, a data directory's path may have more.
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}/{SOCKET}", dir.as_raw_fd()))?;
    let socket = |more| {
        rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | more,
            None,
        )
    };
    let listener = socket(SocketFlags::empty())?;
    rustix::net::bind(&listener, &address)?;
    rustix::net::listen(&listener, BACKLOG)?;
    let connection = socket(SocketFlags::NONBLOCK)?;
    rustix::net::connect(&connection, &address)?;
    Ok((listener, connection))
}

/// A connection to a process.
pub(super) struct Control {
    socket: AsyncFd<OwnedFd>,
    ending: Option<Ending>,
    closed: bool,
}

impl Control {
    pub(super) fn new(connection: OwnedFd) -> Result<Self, MachineError> {
        let socket =
            AsyncFd::with_interest(connection, Interest::READABLE | Interest::WRITABLE).map_err(control)?;
        Ok(Self { socket, ending: None, closed: false })
    }

    /// How the guest ended, if that was said.
    pub(super) fn ending(&self) -> Option<&Ending> {
        self.ending.as_ref()
    }

    /// Waits for the process's greeting.
    pub(super) async fn greeted(&mut self) -> Result<u32, MachineError> {
        match self.receive().await.map_err(control)? {
            Answer::Hello { version: VERSION, pid, phase } => {
                if phase == Phase::Ended {
                    self.heard().await;
                    return Err(MachineError::Died(describe(self.ending.as_ref())));
                }
                Ok(pid)
            }
            Answer::Hello { version, .. } => {
                Err(protocol(format!("it speaks version {version} of the protocol, not {VERSION}")))
            }
            other => Err(protocol(format!("it did not greet, but said {other:?}"))),
        }
    }

    /// Asks and waits for the answer. Not cancel-safe: the answer would be taken for the next request's.
    pub(super) async fn ask(
        &mut self,
        command: &'static str,
        request: &Request,
        fds: &Fds<'_>,
    ) -> Result<Answer, MachineError> {
        let bytes = serde_json::to_vec(request).map_err(|error| control(error.into()))?;
        self.send(&bytes, &fds.0).await.map_err(control)?;
        loop {
            match self.receive().await.map_err(control)? {
                Answer::Event(ending) => self.ending = Some(ending),
                Answer::Failed { message, .. } => return Err(MachineError::Refused { command, message }),
                answer => return Ok(answer),
            }
        }
    }

    /// Asks for something that has no other answer than that it is done.
    pub(super) async fn done(
        &mut self,
        command: &'static str,
        request: &Request,
        fds: &Fds<'_>,
    ) -> Result<(), MachineError> {
        match self.ask(command, request, fds).await? {
            Answer::Done => Ok(()),
            other => Err(protocol(format!("it answered {command} with {other:?}"))),
        }
    }

    /// Returns when the guest's ending was told or the connection was closed, once; never again afterwards. Cancel-safe.
    pub(super) async fn heard(&mut self) {
        while self.ending.is_none() && !self.closed {
            match self.receive().await {
                Ok(Answer::Event(ending)) => {
                    self.ending = Some(ending);
                    return;
                }
                Ok(_) => {}
                Err(_) => {
                    self.closed = true;
                    return;
                }
            }
        }
        std::future::pending().await
    }

    /// Takes what was said and not read yet, without waiting.
    pub(super) fn drain(&mut self) {
        while let Ok(answer) = receive_now(self.socket.get_ref()) {
            if let Answer::Event(ending) = answer {
                self.ending = Some(ending);
            }
        }
    }

    async fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let send = |socket: &OwnedFd| {
            let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags)?;
            Ok(())
        };
        self.socket.async_io(Interest::WRITABLE, send).await
    }

    /// The next packet. Cancel-safe.
    async fn receive(&self) -> io::Result<Answer> {
        self.socket.async_io(Interest::READABLE, receive_now).await
    }
}

fn receive_now(socket: &OwnedFd) -> io::Result<Answer> {
    let mut bytes = vec![0u8; MAX_PACKET];
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut RecvAncillaryBuffer::default(),
        RecvFlags::DONTWAIT,
    )?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&bytes[..received.bytes])?)
}

fn control(error: io::Error) -> MachineError {
    MachineError::Control(error)
}

fn protocol(message: String) -> MachineError {
    MachineError::Control(io::Error::new(io::ErrorKind::InvalidData, message))
}

/// An ending in words.
pub(super) fn describe(ending: Option<&Ending>) -> String {
    match ending {
        Some(Ending::PowerOff) => "the guest switched itself off".to_owned(),
        Some(Ending::Reset) => "the guest asked for a reset".to_owned(),
        Some(Ending::TripleFault) => "the guest's kernel broke: triple fault".to_owned(),
        Some(Ending::Fault { detail }) => format!("KVM could not go on: {detail}"),
        Some(Ending::Stopped) => "it was stopped".to_owned(),
        _ => "its process was killed, or ended without a word".to_owned(),
    }
}
