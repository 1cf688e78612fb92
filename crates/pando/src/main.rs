//! The pando program: command line and server.
//!
//! `main` reads arguments and configuration, and nothing else in the program does. One file in [`commands`] is one
//! command. Data goes to standard output, everything else to standard error.
//!
//! Exit codes (`docs/cli.md`): 0 done; 1 it failed; 2 the arguments are wrong; `run` and `exec` end with the command's
//! own code, and with 125 when Pando itself failed.

mod commands;
mod config;
mod listener;
mod output;
mod target;

use std::process::ExitCode;

use clap::Parser;

use commands::Cli;

/// `run` and `exec` must not be mistaken for the command they run.
pub(crate) const FAILED_BEFORE_COMMAND: u8 = 125;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let failure = if cli.command.runs_a_command() { FAILED_BEFORE_COMMAND } else { 1 };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            output::error(&anyhow::Error::new(error).context("cannot start the runtime"));
            return ExitCode::from(failure);
        }
    };
    let outcome = runtime.block_on(commands::execute(cli));
    // A read of standard input may still be under way in a thread, and only its user could end it.
    runtime.shutdown_background();
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::error(&error);
            ExitCode::from(failure)
        }
    }
}
