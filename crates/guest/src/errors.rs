//! How errors are told to a client: the whole chain of causes in one line.

use std::error::Error;
use std::fmt::Write as _;

use connectrpc::ConnectError;

/// `outer: cause: its cause`.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Writing to a String does not fail.
        let _ = write!(text, ": {error}");
        cause = error.source();
    }
    text
}

/// A task of the agent panicked.
pub(crate) fn joined(error: tokio::task::JoinError) -> ConnectError {
    ConnectError::internal(format!("the operation failed: {error}"))
}
