//! What a machine said: its console and the node's own remarks, bounded in lines and in length.
//!
//! The console is always read, whatever the guest writes to it: a full pipe would stop the guest, and an unbounded
//! record would fill the host (S61).

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use proto::node::LogLine;
use tokio::io::AsyncReadExt;

/// Lines kept for each sandbox.
pub const LINES: usize = 1000;
/// Bytes kept of each line.
pub const LINE_BYTES: usize = 2048;

/// The record of one sandbox. Clones are the same record.
#[derive(Debug, Clone, Default)]
pub struct Logs(Arc<Mutex<VecDeque<LogLine>>>);

impl Logs {
    /// Adds a line, cut at [`LINE_BYTES`]; the oldest goes when there are [`LINES`].
    pub fn push(&self, source: &str, text: &str) {
        let end =
            text.char_indices().map(|(at, _)| at).take_while(|at| *at <= LINE_BYTES).last().unwrap_or(0);
        let text = if text.len() > LINE_BYTES { &text[..end] } else { text };
        let mut lines = self.0.lock();
        if lines.len() == LINES {
            lines.pop_front();
        }
        lines.push_back(LogLine {
            at: jiff::Timestamp::now(),
            source: source.to_owned(),
            text: text.to_owned(),
        });
    }

    /// All lines, oldest first.
    pub fn lines(&self) -> Vec<LogLine> {
        self.0.lock().iter().cloned().collect()
    }
}

/// Reads a console to its end into `logs`. `on_line` sees each line first.
pub async fn follow_console(
    mut console: tokio::net::UnixStream,
    logs: Logs,
    mut on_line: impl FnMut(&str) + Send,
) {
    let mut line = Vec::new();
    let mut buffer = [0u8; 4096];
    while let Ok(count @ 1..) = console.read(&mut buffer).await {
        for byte in &buffer[..count] {
            match byte {
                b'\n' => {
                    let text = String::from_utf8_lossy(&line);
                    let text = text.trim_end_matches('\r');
                    on_line(text);
                    logs.push("console", text);
                    line.clear();
                }
                _ if line.len() < LINE_BYTES => line.push(*byte),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    #[tokio::test]
    async fn a_flood_is_bounded() {
        let (mut guest, host) = tokio::net::UnixStream::pair().unwrap();
        let logs = Logs::default();
        let reader = tokio::spawn(follow_console(host, logs.clone(), |_| ()));
        guest.write_all(&vec![b'x'; 1 << 20]).await.unwrap();
        for number in 0..2000 {
            guest.write_all(format!("\nline {number} \u{e9}").as_bytes()).await.unwrap();
        }
        guest.write_all(b"\r\n").await.unwrap();
        drop(guest);
        reader.await.unwrap();
        let lines = logs.lines();
        assert_eq!(lines.len(), LINES);
        assert_eq!(lines[LINES - 1].text, "line 1999 \u{e9}");
        assert!(lines.iter().all(|line| line.text.len() <= LINE_BYTES));
    }

    #[test]
    fn long_lines_are_cut_at_a_character() {
        let logs = Logs::default();
        logs.push("node", &"\u{e9}".repeat(LINE_BYTES));
        assert!(logs.lines()[0].text.len() <= LINE_BYTES);
    }
}
