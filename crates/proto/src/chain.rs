//! An error and its causes in one line, for logs and for the other side of a process boundary.

/// The error's text and those of its causes, joined; a cause that its parent already tells is left out.
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let next = cause.to_string();
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        source = cause.source();
    }
    text
}
