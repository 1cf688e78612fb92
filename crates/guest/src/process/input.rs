//! A command's input: a pipe, a terminal, or nothing.
//!
//! Contract: a write returns when every byte has been taken, so a sender is held up by a slow command and loses nothing.
//! Closing never waits for a blocked write: it ends that write instead. After the command's end nothing can be written.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::termios::Winsize;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::unix::pipe;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

/// Why input was not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InputError {
    /// Never asked for, or closed.
    #[error("stdin not enabled or closed")]
    Closed,
    /// stdin was sent to a command that has a terminal.
    #[error("tty assigned to process — input must be sent as pty")]
    HasTerminal,
    /// Terminal input or a size was sent to a command that has no terminal.
    #[error("tty not assigned to process")]
    NoTerminal,
    /// A terminal's input has no end of its own.
    #[error("cannot close stdin for PTY process — send Ctrl+D (0x04) instead")]
    CloseTerminal,
    /// The command does not read any more.
    #[error("cannot write to the process")]
    Io(#[source] io::Error),
}

enum Kind {
    None,
    Pipe(Mutex<Option<pipe::Sender>>),
    Terminal(Arc<AsyncFd<OwnedFd>>, Mutex<()>),
}

/// The input of one command.
pub(crate) struct Input {
    kind: Kind,
    closed: CancellationToken,
}

impl Input {
    fn new(kind: Kind) -> Self {
        Self { kind, closed: CancellationToken::new() }
    }

    /// No input: the command reads `/dev/null`.
    pub(crate) fn none() -> Self {
        Self::new(Kind::None)
    }

    /// The write end of a pipe.
    pub(crate) fn pipe(sender: pipe::Sender) -> Self {
        Self::new(Kind::Pipe(Mutex::new(Some(sender))))
    }

    /// The master of a terminal.
    pub(crate) fn terminal(master: Arc<AsyncFd<OwnedFd>>) -> Self {
        Self::new(Kind::Terminal(master, Mutex::new(())))
    }

    /// Writes to standard input.
    ///
    /// # Errors
    /// When there is none, or the command does not take it.
    pub(crate) async fn write_stdin(&self, data: &[u8]) -> Result<(), InputError> {
        let sender = match &self.kind {
            Kind::Pipe(sender) => sender,
            Kind::None => return Err(InputError::Closed),
            Kind::Terminal(..) => return Err(InputError::HasTerminal),
        };
        let mut sender = tokio::select! {
            biased;
            () = self.closed.cancelled() => return Err(InputError::Closed),
            sender = sender.lock() => sender,
        };
        let pipe = sender.as_mut().ok_or(InputError::Closed)?;
        tokio::select! {
            biased;
            () = self.closed.cancelled() => Err(InputError::Closed),
            written = pipe.write_all(data) => written.map_err(InputError::Io),
        }
    }

    /// Writes to the terminal.
    ///
    /// # Errors
    /// When there is none, or the command has ended.
    pub(crate) async fn write_pty(&self, mut data: &[u8]) -> Result<(), InputError> {
        let Kind::Terminal(master, order) = &self.kind else { return Err(InputError::NoTerminal) };
        let _order = order.lock().await;
        while !data.is_empty() {
            let write = master.async_io(Interest::WRITABLE, |fd| Ok(rustix::io::write(fd, data)?));
            let written = tokio::select! {
                biased;
                () = self.closed.cancelled() => return Err(InputError::Closed),
                written = write => written.map_err(InputError::Io)?,
            };
            data = &data[written..];
        }
        Ok(())
    }

    /// Closes standard input; again is fine.
    ///
    /// # Errors
    /// For a terminal.
    pub(crate) async fn close(&self) -> Result<(), InputError> {
        match &self.kind {
            Kind::Terminal(..) => Err(InputError::CloseTerminal),
            Kind::None => Ok(()),
            Kind::Pipe(sender) => {
                self.closed.cancel();
                // Short: every holder of the lock gives up on the line above.
                *sender.lock().await = None;
                Ok(())
            }
        }
    }

    /// The command has ended: releases whoever is writing, and the descriptor.
    pub(crate) async fn end(&self) {
        self.closed.cancel();
        if let Kind::Pipe(sender) = &self.kind {
            *sender.lock().await = None;
        }
    }

    /// Changes the terminal's size.
    ///
    /// # Errors
    /// When there is no terminal.
    pub(crate) fn resize(&self, cols: u16, rows: u16) -> Result<(), InputError> {
        let Kind::Terminal(master, _) = &self.kind else { return Err(InputError::NoTerminal) };
        set_size(master.get_ref(), cols, rows).map_err(InputError::Io)
    }
}

/// Sets the size of a terminal.
///
/// # Errors
/// When `fd` is no terminal.
pub(crate) fn set_size(fd: impl AsFd, cols: u16, rows: u16) -> io::Result<()> {
    Ok(rustix::termios::tcsetwinsize(fd, Winsize { ws_col: cols, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 })?)
}
