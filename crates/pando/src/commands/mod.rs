//! The command line: one file a command.

mod cp;
mod doctor;
mod env;
mod kill;
mod logs;
mod ls;
mod run;
mod serve;
mod setup;
mod terminal;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::target::Target;

/// Computers for AI agents: microVM sandboxes behind the E2B API.
#[derive(Debug, Parser)]
#[command(
    name = "pando",
    version,
    propagate_version = true,
    after_help = "\
First steps (as root, on Debian):
  pando doctor                       what this machine lacks, and how to mend it
  pando setup                        make the guest's kernel, disk and base template
  pando serve                        serve the E2B API on 127.0.0.1:3000
  eval \"$(pando env)\"                point the E2B SDKs at it
  pando run -- python3 -c 'print(6*7)'

Exit codes: 0 done; 1 failed; 2 wrong arguments. `run` and `exec` end with the command's own code, 125 if pando failed."
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) target: Target,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve the API and the sandboxes of this machine
    Serve(serve::Serve),
    /// Make the guest's kernel, initramfs, root disk and the template `base`; only what is missing
    Setup(setup::Setup),
    /// Check what this machine needs, and say how to mend each thing
    Doctor,
    /// Print `export` lines that point the E2B SDKs at this server
    Env,
    /// Run a command in a new sandbox, and remove the sandbox when it ends
    Run(run::Run),
    /// Create a sandbox and print its ID
    Create(run::Create),
    /// List the running sandboxes
    Ls,
    /// Run a command in a running sandbox
    Exec(run::Exec),
    /// Copy a file into or out of a sandbox
    Cp(cp::Cp),
    /// Print what a sandbox's machine and agent wrote
    Logs(logs::Logs),
    /// End sandboxes
    Kill(kill::Kill),
    /// Templates that sandboxes are made from
    #[command(subcommand)]
    Template(TemplateCommand),
}

/// What to do with templates.
#[derive(Debug, Subcommand)]
pub(crate) enum TemplateCommand {
    /// List the templates
    Ls,
}

impl Command {
    /// Whether the exit code is that of a command in a sandbox.
    pub(crate) fn runs_a_command(&self) -> bool {
        matches!(self, Self::Run(_) | Self::Exec(_))
    }
}

/// Runs the command; the exit code.
pub(crate) async fn execute(cli: Cli) -> Result<u8> {
    let target = &cli.target;
    match cli.command {
        Command::Serve(serve) => serve.execute(target).await,
        Command::Setup(setup) => setup.execute(target).await,
        Command::Doctor => doctor::execute(target).await,
        Command::Env => env::execute(target),
        Command::Run(run) => run.execute(target).await,
        Command::Create(create) => create.execute(target).await,
        Command::Ls => ls::sandboxes(target).await,
        Command::Exec(exec) => exec.execute(target).await,
        Command::Cp(cp) => cp.execute(target).await,
        Command::Logs(logs) => logs.execute(target).await,
        Command::Kill(kill) => kill.execute(target).await,
        Command::Template(TemplateCommand::Ls) => ls::templates(target).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
