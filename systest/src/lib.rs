//! Drives the real binaries with real clients, in real guests.
//!
//! Owns: starting a server of its own for a test, and looking at what is left on the host afterwards. A server here is
//! `target/release/pando serve` with a data directory of its own, whose kernel, disk and templates are hard links to
//! those that `make setup` made: nothing is built twice, nothing is shared that can be written.

pub mod host;
pub mod raw;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use client::api::ApiClient;
use client::envd::{CommandEvent, Envd, StartCommand};
use proto::api::{NewSandbox, Sandbox};
use proto::{SandboxId, Secret};

const START_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// The repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_owned()
}

/// The program under test.
pub fn program() -> PathBuf {
    root().join("target/release/pando")
}

/// A server with a data directory of its own; ended and removed when dropped.
pub struct Server {
    child: Child,
    dir: tempfile::TempDir,
    /// Its address, `http://127.0.0.1:PORT`.
    pub url: String,
    /// Its first API key.
    pub key: String,
}

/// What a command came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Exit code.
    pub code: i32,
}

impl Server {
    /// Starts a server with the default configuration.
    pub fn start() -> Result<Self> {
        Self::start_with("")
    }

    /// Starts a server with a configuration.
    pub fn start_with(config: &str) -> Result<Self> {
        let places = root().join(".cache/systest");
        std::fs::create_dir_all(&places)?;
        let dir = tempfile::Builder::new().prefix("server-").tempdir_in(&places)?;
        // Only root can go there, as in root's own home: machines must need no path.
        let data = dir.path().join("data");
        link_made_things(&golden()?, &data)?;
        std::fs::write(dir.path().join("pando.toml"), config)?;
        let (child, url, key) = launch(dir.path())?;
        Ok(Self { child, dir, url, key })
    }

    /// Its data directory.
    pub fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// What it has written to its log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Its process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it still runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Ends it as a user would, and waits until it has ended.
    pub fn stop(&mut self) -> Result<()> {
        signal(self.child.id(), rustix::process::Signal::TERM)?;
        let deadline = Instant::now() + STOP_LIMIT;
        while Instant::now() < deadline {
            if self.child.try_wait()?.is_some() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!("the server did not end within {STOP_LIMIT:?}")
    }

    /// Ends it as a crash would.
    pub fn crash(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Starts it again on the same data directory, after [`Server::stop`] or [`Server::crash`].
    pub fn restart(&mut self) -> Result<()> {
        (self.child, self.url, self.key) = launch(self.dir.path())?;
        Ok(())
    }

    /// A client with its key.
    pub fn api(&self) -> ApiClient {
        ApiClient::new(&self.url, &Secret::new(&self.key)).expect("a key is a header value")
    }

    /// Creates a sandbox from `base`.
    pub async fn create(&self) -> Result<Guest> {
        self.create_with(NewSandbox::default()).await
    }

    /// Creates a sandbox; the template is `base` unless it says otherwise.
    pub async fn create_with(&self, mut new: NewSandbox) -> Result<Guest> {
        if new.template_id.is_empty() {
            "base".clone_into(&mut new.template_id);
        }
        let sandbox = self.api().create(&new).await?;
        let agent = self.api().envd(&sandbox.sandbox_id, sandbox.envd_access_token.as_deref())?;
        Ok(Guest { sandbox, agent })
    }

    /// What a process of ours needs in its environment to reach the server.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("E2B_API_KEY", self.key.clone()),
            ("E2B_API_URL", self.url.clone()),
            ("E2B_SANDBOX_URL", self.url.clone()),
            ("PANDO_DATA_DIR", self.data().display().to_string()),
        ]
    }

    /// The program with arguments, aimed at this server.
    pub fn cli(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.args(arguments).envs(self.environment());
        command
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) && self.stop().is_err() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            eprintln!("--- log of the server ---\n{}", self.log());
        }
    }
}

/// A sandbox and its agent.
pub struct Guest {
    /// What create answered.
    pub sandbox: Sandbox,
    /// The agent.
    pub agent: Envd,
}

impl Guest {
    /// Its ID.
    pub fn id(&self) -> &SandboxId {
        &self.sandbox.sandbox_id
    }

    /// The agent's token.
    pub fn token(&self) -> &str {
        self.sandbox.envd_access_token.as_deref().unwrap_or_default()
    }

    /// Runs a shell command to its end.
    pub async fn sh(&self, script: &str) -> Result<Output> {
        self.run(&["/bin/bash", "-c", script], None).await
    }

    /// Runs a shell command as root.
    pub async fn root_sh(&self, script: &str) -> Result<Output> {
        self.run(&["/bin/bash", "-c", script], Some("root")).await
    }

    /// Runs a command to its end.
    pub async fn run(&self, words: &[&str], user: Option<&str>) -> Result<Output> {
        let command = StartCommand {
            program: words[0].to_owned(),
            arguments: words[1..].iter().map(|word| (*word).to_owned()).collect(),
            user: user.map(str::to_owned),
            ..StartCommand::default()
        };
        let mut stream = self.agent.start(&command).await?;
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        while let Some(event) = stream.next().await? {
            match event {
                CommandEvent::Stdout(bytes) => stdout.extend(bytes),
                CommandEvent::Stderr(bytes) => stderr.extend(bytes),
                CommandEvent::Started(_) => {}
                CommandEvent::Ended { code, .. } => {
                    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
                    return Ok(Output { stdout: text(stdout), stderr: text(stderr), code });
                }
            }
        }
        bail!("the stream ended before the command")
    }
}

/// What `make setup` made.
fn golden() -> Result<PathBuf> {
    let dir = std::env::var_os("PANDO_DATA_DIR").map_or_else(|| root().join(".cache/data"), PathBuf::from);
    if !dir.join("templates").exists() {
        bail!("{} holds no template: run `make setup` first (or all tests with `make test`)", dir.display());
    }
    Ok(dir)
}

fn link_made_things(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to.join("run"))?;
    for name in ["guest", "templates"] {
        let status = Command::new("cp").arg("-al").arg(from.join(name)).arg(to.join(name)).status()?;
        if !status.success() {
            bail!("cannot link {}", from.join(name).display());
        }
    }
    // What the probe for KVM found holds for the host; without it each server would wait for another.
    std::fs::copy(from.join("run/probe.json"), to.join("run/probe.json"))
        .context("run `make setup` first")?;
    Ok(())
}

fn launch(dir: &Path) -> Result<(Child, String, String)> {
    let log = std::fs::File::options().create(true).append(true).open(dir.join("log"))?;
    let data = dir.join("data");
    // Left by a crash: it would be taken for the new server's.
    let _ = std::fs::remove_file(data.join("run/address"));
    let mut child = Command::new(program())
        .args(["serve", "--listen", "127.0.0.1:0", "--machine", "qemu", "--config"])
        .arg(dir.join("pando.toml"))
        .env("PANDO_DATA_DIR", &data)
        .env("PANDO_LOG", "info,pando=debug,node=debug")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .context("cannot start the server; run `make build` first")?;
    let deadline = Instant::now() + START_LIMIT;
    loop {
        if let (Ok(url), Ok(key)) = (
            std::fs::read_to_string(data.join("run/address")),
            std::fs::read_to_string(data.join("secrets/api-key")),
        ) && url.ends_with('\n')
        {
            return Ok((child, url.trim().to_owned(), key));
        }
        if child.try_wait()?.is_some() || Instant::now() > deadline {
            let _ = child.kill();
            let log = std::fs::read_to_string(dir.join("log")).unwrap_or_default();
            bail!("the server did not start:\n{log}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sends a signal to a process.
pub fn signal(pid: u32, signal: rustix::process::Signal) -> Result<()> {
    let pid = rustix::process::Pid::from_raw(pid.try_into()?).context("no such process")?;
    rustix::process::kill_process(pid, signal)?;
    Ok(())
}

/// Tries again until `check` says yes; fails after `limit`.
pub async fn eventually(limit: Duration, what: &str, mut check: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !check().await {
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
