//! QEMU's control protocol: JSON objects, a line each, over a socket pair that no one else can reach.
//!
//! Only what is needed: commands in order, events passed over. A line longer than [`LINE_LIMIT`] ends the connection:
//! a QEMU that a guest has taken over must not fill the daemon's memory.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::MachineError;

const LINE_LIMIT: u64 = 1 << 20;

pub(super) struct Qmp {
    reader: BufReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
}

impl Qmp {
    /// Takes QEMU's greeting and ends the negotiation of capabilities.
    pub(super) async fn open(socket: UnixStream) -> Result<Self, MachineError> {
        let (reader, writer) = socket.into_split();
        let mut qmp = Self { reader: BufReader::new(reader), writer };
        qmp.read().await?;
        qmp.execute("qmp_capabilities", json!({})).await?;
        Ok(qmp)
    }

    /// Runs one command to its answer.
    pub(super) async fn execute(
        &mut self,
        command: &'static str,
        arguments: Value,
    ) -> Result<Value, MachineError> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        self.writer.write_all(line.as_bytes()).await.map_err(MachineError::Control)?;
        self.answer(command).await
    }

    /// The answer to the last command, past events.
    async fn answer(&mut self, command: &'static str) -> Result<Value, MachineError> {
        loop {
            let mut answer = self.read().await?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get("error") {
                let message =
                    error.get("desc").and_then(Value::as_str).unwrap_or("no reason given").to_owned();
                return Err(MachineError::Refused { command, message });
            }
        }
    }

    /// Gives QEMU a descriptor, under a name for later commands. It goes with the command's bytes (SCM_RIGHTS).
    pub(super) async fn give_fd(
        &mut self,
        name: &'static str,
        fd: BorrowedFd<'_>,
    ) -> Result<(), MachineError> {
        let line = json!({ "execute": "getfd", "arguments": { "fdname": name } }).to_string() + "\n";
        let socket: &UnixStream = self.writer.as_ref();
        let send = || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut rights = SendAncillaryBuffer::new(&mut space);
            let fds = [fd];
            if !rights.push(SendAncillaryMessage::ScmRights(&fds)) {
                return Err(std::io::ErrorKind::InvalidInput.into());
            }
            let bytes = [IoSlice::new(line.as_bytes())];
            Ok(rustix::net::sendmsg(socket, &bytes, &mut rights, SendFlags::empty())?)
        };
        let sent = socket.async_io(Interest::WRITABLE, send).await.map_err(MachineError::Control)?;
        // The descriptor went with the first part, whatever its length.
        self.writer.write_all(&line.as_bytes()[sent..]).await.map_err(MachineError::Control)?;
        self.answer("getfd").await.map(|_| ())
    }

    /// Waits until an outgoing or incoming migration is over.
    pub(super) async fn migrated(&mut self, command: &'static str) -> Result<(), MachineError> {
        loop {
            let status = self.execute("query-migrate", json!({})).await?;
            match status.get("status").and_then(Value::as_str) {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled") => {
                    let message =
                        status.get("error-desc").and_then(Value::as_str).unwrap_or("migration failed");
                    return Err(MachineError::Refused { command, message: message.to_owned() });
                }
                _ => tokio::time::sleep(std::time::Duration::from_millis(1)).await,
            }
        }
    }

    async fn read(&mut self) -> Result<Value, MachineError> {
        let mut line = Vec::new();
        let mut limited = (&mut self.reader).take(LINE_LIMIT);
        let count = limited.read_until(b'\n', &mut line).await.map_err(MachineError::Control)?;
        if count == 0 || !line.ends_with(b"\n") {
            return Err(MachineError::Control(std::io::ErrorKind::UnexpectedEof.into()));
        }
        serde_json::from_slice(&line).map_err(|error| MachineError::Control(error.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn answers_are_found_among_events_and_errors_are_typed() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let peer = tokio::spawn(async move {
            theirs.write_all(b"{\"QMP\": {}}\n").await.unwrap();
            let mut lines = BufReader::new(&mut theirs);
            for answer in [
                "{\"return\": {}}\n",
                "{\"event\": \"STOP\"}\n{\"return\": {\"a\": 1}}\n",
                "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\"}}\n",
            ] {
                let mut line = String::new();
                lines.read_line(&mut line).await.unwrap();
                lines.get_mut().write_all(answer.as_bytes()).await.unwrap();
            }
        });
        let mut qmp = Qmp::open(ours).await.unwrap();
        assert_eq!(qmp.execute("query", json!({})).await.unwrap()["a"], 1);
        assert!(
            matches!(qmp.execute("bad", json!({})).await, Err(MachineError::Refused { message, .. }) if message == "no")
        );
        peer.await.unwrap();
        assert!(matches!(qmp.execute("gone", json!({})).await, Err(MachineError::Control(_))));
    }
}
