//! The control socket: packets in, packets out (`proto::vmm`).
//!
//! Owns: connections and their bounds. Does not own: what a request does (`server`). The one who connects is the node,
//! as nobody else can reach the socket's directory; it is believed as far as the jail goes, but a malformed packet gets
//! an answer and not a crash.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use proto::vmm::{Answer, MAX_FDS, MAX_PACKET, Request};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendFlags,
    SocketFlags,
};

use crate::Error;
use crate::devices::would_block;
use crate::machine::Descriptors;

/// Connections at once; a further one waits in the socket's queue.
pub const MAX_CONNECTIONS: usize = 8;

/// What a connection had for us.
pub enum Received {
    /// A request with its descriptors.
    Request(Box<Request>, Descriptors),
    /// A packet that is none.
    Malformed(Error),
    /// Nothing now.
    Nothing,
    /// It is closed.
    Closed,
}

/// One connection.
pub struct Connection(OwnedFd);

impl Connection {
    /// Takes a waiting connection, if there is one.
    pub fn accept(listener: BorrowedFd<'_>) -> Option<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // What went wrong with this one does not matter to others.
        rustix::net::accept_with(listener, flags).ok().map(Self)
    }

    /// For poll.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Takes one packet.
    pub fn receive(&self) -> Received {
        let mut bytes = vec![0u8; MAX_PACKET];
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received =
            rustix::net::recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags);
        // Taken in any case: what is not used is closed when this goes.
        let fds: Vec<OwnedFd> = ancillary
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        match received {
            Ok(message) if message.bytes == 0 => Received::Closed,
            Ok(message) if message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) => {
                Received::Malformed(Error::BadRequest("the packet is too large".to_owned()))
            }
            Ok(message) => match serde_json::from_slice::<Request>(&bytes[..message.bytes]) {
                Ok(request) => Received::Request(Box::new(request), Descriptors::new(fds)),
                Err(error) => Received::Malformed(Error::BadRequest(error.to_string())),
            },
            Err(error) if would_block(&error.into()) => Received::Nothing,
            Err(_) => Received::Closed,
        }
    }

    /// Sends one packet; false when the other end is gone or does not read: then the connection is of no use.
    pub fn send(&self, answer: &Answer) -> bool {
        let Ok(bytes) = serde_json::to_vec(answer) else { return false };
        send(self.fd(), &bytes).is_ok()
    }
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut SendAncillaryBuffer::default(), flags)?;
    Ok(())
}
