//! The terminal we were started in, made raw while a command in a sandbox has it.

use anyhow::{Context, Result};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Raw while it lives; as it was before when dropped.
pub(crate) struct Terminal {
    before: Termios,
}

impl Terminal {
    /// Columns and rows, if standard input is a terminal.
    pub(crate) fn size() -> Option<(u16, u16)> {
        let size = tcgetwinsize(rustix::stdio::stdin()).ok()?;
        Some((size.ws_col.max(1), size.ws_row.max(1)))
    }

    /// Takes the terminal.
    pub(crate) fn raw() -> Result<Self> {
        let stdin = rustix::stdio::stdin();
        let before = tcgetattr(stdin).context("standard input is no terminal")?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin, OptionalActions::Now, &raw).context("the terminal cannot be made raw")?;
        Ok(Self { before })
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Nothing is left to try when this fails.
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &self.before);
    }
}
