//! The world's end of a connection into a guest.
//!
//! Owns: the byte stream handed to whoever dialled. Does not own: the guest's end (the worker splices it).
//!
//! Contract: shutting down the write half sends the guest a FIN and leaves the other direction open; the guest's FIN is
//! an end of file here; a reset by the guest, or the loss of the whole machine, is `ConnectionReset` after the bytes
//! that arrived before it; dropping the stream closes the guest's connection.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;

/// A connection to a port of a guest.
#[derive(Debug)]
pub struct GuestStream {
    inner: UnixStream,
    reset: Arc<AtomicBool>,
}

impl GuestStream {
    pub(crate) fn new(inner: UnixStream, reset: Arc<AtomicBool>) -> Self {
        Self { inner, reset }
    }

    /// Any stream socket as a stream to a guest: for other machines than ours, and for tests.
    pub fn from_unix(inner: UnixStream) -> Self {
        Self { inner, reset: Arc::default() }
    }
}

impl AsyncRead for GuestStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let wanted = buf.remaining();
        std::task::ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        if wanted > 0 && buf.filled().len() == before && self.reset.load(Ordering::Acquire) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for GuestStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}
