//! What the program says: data on standard output, the rest on standard error; colours only on a terminal.

use std::io::{IsTerminal, Write};

use anyhow::Result;
use serde::Serialize;

/// Prints an error and its causes, one a line.
pub(crate) fn error(error: &anyhow::Error) {
    let mut stderr = std::io::stderr().lock();
    let (red, plain) = if std::io::stderr().is_terminal() { ("\x1b[31m", "\x1b[0m") } else { ("", "") };
    // A closed standard error leaves nobody to tell.
    let _ = writeln!(stderr, "{red}error{plain}: {error}");
    let mut last = error.to_string();
    for cause in error.chain().skip(1) {
        let text = cause.to_string();
        if !last.ends_with(&text) {
            let _ = writeln!(stderr, "  caused by: {text}");
        }
        last = text;
    }
}

/// Prints a remark for people.
pub(crate) fn note(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Prints a line of data.
pub(crate) fn line(text: &str) -> Result<()> {
    writeln!(std::io::stdout().lock(), "{text}")?;
    Ok(())
}

/// Prints a value as JSON.
pub(crate) fn json<T: Serialize>(value: &T) -> Result<()> {
    line(&serde_json::to_string_pretty(value)?)
}

/// Prints rows in columns under a heading.
pub(crate) fn table(heading: &[&str], rows: &[Vec<String>]) -> Result<()> {
    let mut widths: Vec<usize> = heading.iter().map(|cell| cell.len()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let print = |cells: Vec<&str>| {
        let padded: Vec<String> = cells
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:<width$}", width = *width))
            .collect();
        line(padded.join("  ").trim_end())
    };
    print(heading.to_vec())?;
    rows.iter().try_for_each(|row| print(row.iter().map(String::as_str).collect()))
}

/// The reader of our output has gone (`pando ls | head -1`): no error of ours.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|cause| cause.kind() == std::io::ErrorKind::BrokenPipe)
}
