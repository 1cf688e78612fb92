//! `pando run`, `pando create`, `pando exec`.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use client::api::ApiClient;
use client::envd::{CommandEvent, CommandStream, Envd, StartCommand};
use proto::SandboxId;
use proto::api::{NewSandbox, Sandbox};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::signal::unix::{SignalKind, signal};

use super::terminal::Terminal;
use crate::output;
use crate::target::Target;

const STDIN_CHUNK: usize = 64 << 10;
const INTERRUPTED: u8 = 130;

/// What a new sandbox is to be.
#[derive(Debug, clap::Args)]
pub(crate) struct New {
    /// Template to make it from
    #[arg(short, long, default_value = "base")]
    template: String,
    /// Seconds to live
    #[arg(long, default_value_t = 300)]
    timeout: i64,
    /// A variable of every command in it
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = pair)]
    env: Vec<(String, String)>,
    /// A pair to find it by
    #[arg(short, long = "metadata", value_name = "KEY=VALUE", value_parser = pair)]
    metadata: Vec<(String, String)>,
    /// Without a way to the internet
    #[arg(long)]
    no_internet: bool,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("must be NAME=VALUE")?;
    if name.is_empty() {
        return Err("the name is empty".to_owned());
    }
    Ok((name.to_owned(), value.to_owned()))
}

impl New {
    async fn create(self, client: &ApiClient) -> Result<Sandbox> {
        let map = |pairs: Vec<(String, String)>| Some(pairs.into_iter().collect::<BTreeMap<_, _>>());
        let new = NewSandbox {
            template_id: self.template,
            timeout: Some(self.timeout),
            metadata: map(self.metadata),
            env_vars: map(self.env),
            allow_internet_access: Some(!self.no_internet),
            ..NewSandbox::default()
        };
        Ok(client.create(&new).await?)
    }
}

/// Runs a command in a new sandbox.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  pando run -- python3 -c 'print(6*7)'\n  \
    echo hello | pando run -- tr a-z A-Z\n  pando run --no-internet -e TOKEN=x -- ./script.sh\n\n\
    Standard input, output and error are the command's; so is the exit code. Ctrl-C ends the command, twice at once.")]
pub(crate) struct Run {
    #[command(flatten)]
    new: New,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl Run {
    pub(crate) async fn execute(self, target: &Target) -> Result<u8> {
        let client = target.client()?;
        let sandbox = self.new.create(&client).await?;
        let agent = client.envd(&sandbox.sandbox_id, sandbox.envd_access_token.as_deref())?;
        let outcome = follow(agent, start(self.command, StartCommand::default())?).await;
        if let Err(error) = client.kill(&sandbox.sandbox_id).await {
            output::note(&format!("warning: sandbox {} could not be removed: {error}", sandbox.sandbox_id));
        }
        outcome
    }
}

/// Creates a sandbox.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  id=$(pando create --timeout 3600); pando exec $id -- uname -a; pando kill $id"
)]
pub(crate) struct Create {
    #[command(flatten)]
    new: New,
}

impl Create {
    pub(crate) async fn execute(self, target: &Target) -> Result<u8> {
        let sandbox = self.new.create(&target.client()?).await?;
        if target.json {
            output::json(&sandbox)?;
        } else {
            output::line(sandbox.sandbox_id.as_str())?;
        }
        Ok(0)
    }
}

/// Runs a command in a running sandbox.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  pando exec SANDBOX -- ls -la\n  pando exec -it SANDBOX -- bash")]
pub(crate) struct Exec {
    /// Pass standard input (always done; for those used to docker)
    #[arg(short)]
    interactive: bool,
    /// Give the command a terminal
    #[arg(short)]
    terminal: bool,
    /// User to run as
    #[arg(short, long)]
    user: Option<String>,
    /// Directory to run in
    #[arg(short = 'w', long)]
    workdir: Option<String>,
    /// A variable of the command
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = pair)]
    env: Vec<(String, String)>,
    /// The sandbox
    sandbox: SandboxId,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl Exec {
    pub(crate) async fn execute(self, target: &Target) -> Result<u8> {
        let client = target.client()?;
        let token = client.get(&self.sandbox).await?.envd_access_token;
        let agent = client.envd(&self.sandbox, token.as_deref())?;
        let mut base =
            StartCommand { env: self.env, cwd: self.workdir, user: self.user, ..StartCommand::default() };
        if self.terminal {
            let size = Terminal::size().context("-t needs a terminal on standard input")?;
            base.terminal = Some(size);
            if let Ok(kind) = std::env::var("TERM") {
                base.env.push(("TERM".to_owned(), kind));
            }
            let terminal = Terminal::raw()?;
            let outcome = follow_terminal(agent, start(self.command, base)?).await;
            drop(terminal);
            return outcome;
        }
        follow(agent, start(self.command, base)?).await
    }
}

fn start(command: Vec<String>, base: StartCommand) -> Result<StartCommand> {
    let mut words = command.into_iter();
    let program = words.next().context("there is no command")?;
    Ok(StartCommand { program, arguments: words.collect(), stdin: base.terminal.is_none(), ..base })
}

/// Starts a command and waits until it says its process ID.
async fn started(agent: &Envd, command: &StartCommand) -> Result<(CommandStream, u32)> {
    let mut stream = agent.start(command).await?;
    match stream.next().await? {
        Some(CommandEvent::Started(pid)) => Ok((stream, pid)),
        _ => bail!("the sandbox did not say that the command started"),
    }
}

/// Runs a command with our standard input, output and error.
async fn follow(agent: Envd, command: StartCommand) -> Result<u8> {
    let (mut stream, pid) = started(&agent, &command).await?;
    let agent = Arc::new(agent);
    let input = tokio::spawn(send_stdin(agent.clone(), pid));
    let mut interrupts = signal(SignalKind::interrupt())?;
    let (mut stdout, mut stderr) = (tokio::io::stdout(), tokio::io::stderr());
    let mut interrupted = 0;
    let code = loop {
        tokio::select! {
            event = stream.next() => match event? {
                Some(CommandEvent::Stdout(bytes)) => {
                    stdout.write_all(&bytes).await?;
                    stdout.flush().await?;
                }
                Some(CommandEvent::Stderr(bytes)) => {
                    stderr.write_all(&bytes).await?;
                    stderr.flush().await?;
                }
                Some(CommandEvent::Ended { code, status }) => break exit_code(code, &status),
                Some(CommandEvent::Started(_)) => {}
                None => bail!("the sandbox ended before the command did"),
            },
            _ = interrupts.recv() => {
                interrupted += 1;
                agent.signal(pid, interrupted > 1).await?;
            }
        }
    };
    input.abort();
    Ok(if interrupted > 0 { INTERRUPTED } else { code })
}

/// Passes our input on until it ends, or the command does.
async fn send_stdin(agent: Arc<Envd>, pid: u32) {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0u8; STDIN_CHUNK];
    loop {
        match stdin.read(&mut buffer).await {
            Ok(count @ 1..) => {
                // The command has closed its input or ended; its end is told by its own stream.
                if agent.send_input(pid, false, &buffer[..count]).await.is_err() {
                    return;
                }
            }
            _ => {
                let _ = agent.close_stdin(pid).await;
                return;
            }
        }
    }
}

/// Runs a command in a terminal that is ours.
async fn follow_terminal(agent: Envd, command: StartCommand) -> Result<u8> {
    let (mut stream, pid) = started(&agent, &command).await?;
    let agent = Arc::new(agent);
    let typed = agent.clone();
    let input = tokio::spawn(async move {
        let mut stdin = tokio::io::stdin();
        let mut buffer = vec![0u8; 4096];
        while let Ok(count @ 1..) = stdin.read(&mut buffer).await {
            if typed.send_input(pid, true, &buffer[..count]).await.is_err() {
                return;
            }
        }
    });
    let mut resized = signal(SignalKind::window_change())?;
    let mut stdout = tokio::io::stdout();
    let code = loop {
        tokio::select! {
            event = stream.next() => match event? {
                Some(CommandEvent::Stdout(bytes) | CommandEvent::Stderr(bytes)) => {
                    stdout.write_all(&bytes).await?;
                    stdout.flush().await?;
                }
                Some(CommandEvent::Ended { code, status }) => break exit_code(code, &status),
                Some(CommandEvent::Started(_)) => {}
                None => bail!("the sandbox ended before the command did"),
            },
            _ = resized.recv() => {
                if let Some((columns, rows)) = Terminal::size() {
                    agent.resize(pid, columns, rows).await?;
                }
            }
        }
    };
    input.abort();
    Ok(code)
}

/// The exit code as a shell would tell it: 128 and the signal's number for a command that a signal ended.
fn exit_code(code: i32, status: &str) -> u8 {
    if let Ok(code) = u8::try_from(code) {
        return code;
    }
    128 + match status.strip_prefix("signal: ").unwrap_or_default() {
        "hangup" => 1,
        "interrupt" => 2,
        "quit" => 3,
        "aborted" => 6,
        "killed" => 9,
        "segmentation fault" => 11,
        "broken pipe" => 13,
        "terminated" => 15,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_a_shells() {
        assert_eq!(exit_code(3, "exit status 3"), 3);
        assert_eq!(exit_code(-1, "signal: killed"), 137);
        assert_eq!(exit_code(-1, "signal: terminated"), 143);
    }

    #[test]
    fn pairs_are_split_at_the_first_sign() {
        assert_eq!(pair("A=b=c").unwrap(), ("A".to_owned(), "b=c".to_owned()));
        assert!(pair("A").is_err() && pair("=b").is_err());
    }
}
