//! Child programs of the build: run to the end, their output kept to explain a failure.

use std::process::{Command, Stdio};

/// A child program could not be run, or said no.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// It could not be started.
    #[error("cannot run {program}; install the Debian package {package}")]
    Start {
        /// The program.
        program: String,
        /// The package that has it.
        package: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// It ended with an error.
    #[error("{program} failed ({status}):\n{tail}")]
    Failed {
        /// The program.
        program: String,
        /// How it ended.
        status: std::process::ExitStatus,
        /// The last lines it printed.
        tail: String,
    },
}

/// Runs `command` to its end and returns its standard output. `package` names the Debian package that has the program.
pub fn run(command: &mut Command, package: &'static str) -> Result<Vec<u8>, CommandError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|source| CommandError::Start {
        program: program.clone(),
        package,
        source,
    })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let text =
        String::from_utf8_lossy(if output.stderr.is_empty() { &output.stdout } else { &output.stderr });
    let lines: Vec<&str> = text.lines().collect();
    let tail = lines[lines.len().saturating_sub(15)..].join("\n");
    Err(CommandError::Failed { program, status: output.status, tail })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_shows_the_last_lines() {
        let error = run(Command::new("sh").args(["-c", "seq 1 100 >&2; exit 3"]), "dash").unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("exit status: 3") && text.contains("100") && !text.contains("\n50\n"),
            "{text}"
        );
    }

    #[test]
    fn missing_program_names_its_package() {
        let error = run(&mut Command::new("/no/such/program"), "some-package").unwrap_err();
        assert!(error.to_string().contains("some-package"));
    }
}
