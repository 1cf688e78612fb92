//! What every sandbox does first, done once before the machine says that it is ready.
//!
//! Owns: nothing that lasts. A template's memory is kept right after the ready line, so what was read from disk until then
//! is in memory in every sandbox made from it: the shell, the interpreter, and the agent's own way from a request to a
//! command's end.
//!
//! Contract: bounded by [`LIMIT`] in all, and no failure matters: an image need have none of these programs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::agent::Agent;
use crate::process::{Config, Start, Streams};

/// How long all of it may take.
const LIMIT: Duration = Duration::from_secs(15);

/// What is run first, in this order.
const COMMANDS: [&[&str]; 4] = [
    &["/bin/bash", "-l", "-c", "true"],
    &["/bin/sh", "-c", "true"],
    &["/usr/bin/python3", "-c", "pass"],
    &["sudo", "-n", "true"],
];

/// Does it, for `address`, where the agent is served.
pub(crate) async fn warm(agent: &Arc<Agent>, address: SocketAddr) {
    let all = async {
        for words in COMMANDS {
            run(agent, words).await;
        }
        exercise(address).await
    };
    // A machine that was not warmed is only slower at first.
    let _ = tokio::time::timeout(LIMIT, all).await;
}

/// Runs a program as the default user, or as root where there is no such user. It runs in the agent's own cgroup: memory
/// that holds files counts as the one's who read them first, and the agent's is the last to be given up. So when user code
/// fills its memory, a shell still starts without the disk.
async fn run(agent: &Arc<Agent>, words: &[&str]) {
    let Ok(user) = agent.user(None).or_else(|_| agent.user(Some("root"))) else { return };
    let mut env = user.environment().to_vec();
    env.push(("PATH".into(), crate::process::rpc::PATH.into()));
    let config = Config {
        cmd: words[0].to_owned(),
        args: words[1..].iter().map(|word| (*word).to_owned()).collect(),
        ..Config::default()
    };
    let start = Start {
        config,
        tag: None,
        env,
        cwd: "/".into(),
        credentials: Some(user.credentials),
        streams: Streams::Pipes { stdin: false },
        reset_limits: true,
    };
    let _ = agent.processes.start_beside(start).await;
}

/// Sends the agent the requests that a client sends first.
async fn exercise(address: SocketAddr) -> std::io::Result<()> {
    let start = br#"{"process":{"cmd":"/bin/bash","args":["-l","-c","true"]},"stdin":false}"#;
    let length = u32::try_from(start.len()).unwrap_or_default();
    let framed = [&[0][..], &length.to_be_bytes(), start].concat();
    let requests: [(&str, &str, &[u8]); 4] = [
        ("GET /health", "text/plain", b""),
        ("GET /files?path=/etc/passwd", "text/plain", b""),
        ("POST /filesystem.Filesystem/ListDir", "application/json", br#"{"path":"/etc"}"#),
        ("POST /process.Process/Start", "application/connect+json", &framed),
    ];
    for (what, kind, body) in requests {
        let mut stream = TcpStream::connect(address).await?;
        let head = format!(
            "{what} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nConnect-Protocol-Version: 1\r\n\
             Content-Type: {kind}\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(&[head.as_bytes(), body].concat()).await?;
        stream.read_to_end(&mut Vec::new()).await?;
    }
    Ok(())
}
