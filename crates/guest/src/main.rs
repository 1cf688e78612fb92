//! The agent: PID 1 in every sandbox, and envd's protocol on port 49983.
//!
//! Owns: the process's two modes. As PID 1 it makes a machine first ([`boot`]); `guest serve --listen ADDRESS` serves the same
//! protocol on a host for tests, and changes nothing there.
//!
//! * [`boot`]: from the kernel to a running machine.
//! * [`http`]: routes; [`process`] and [`files`] are what they act on, [`watch`] directories that are watched.
//! * [`agent`]: what `/init` sets. [`relay`]: ports on the guest's loopback. [`warm`]: what is done ahead.
//! * [`sys`]: everything that is `unsafe`.

mod agent;
mod boot;
mod errors;
mod files;
mod http;
mod paths;
mod process;
mod relay;
mod sys;
mod users;
mod warm;
mod watch;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use axum::serve::ListenerExt as _;
use proto::guest::{ENVD_PORT, READY_LINE, RELAY_PORT};
use tokio::net::TcpListener;

use agent::{Agent, Place};
use process::Table;
use process::cgroup::Cgroups;
use sys::wait::Children;

/// Threads that serve: few, so that user code has the CPUs.
const WORKERS: usize = 2;
/// Threads for operations that block.
const BLOCKING: usize = 64;
/// A peer that does not acknowledge for so long is gone (milliseconds).
const PEER_TIMEOUT: u32 = 60_000;

const USAGE: &str = "usage: guest serve --listen ADDRESS:PORT [--relay ADDRESS:PORT] [--user NAME]";

struct Serve {
    listen: SocketAddr,
    relay: Option<SocketAddr>,
    user: String,
}

impl Serve {
    fn parse(mut args: impl Iterator<Item = String>) -> Option<Self> {
        let (mut listen, mut relay, mut user) = (None, None, "user".to_owned());
        if args.next()? != "serve" {
            return None;
        }
        while let Some(name) = args.next() {
            let value = args.next()?;
            match name.as_str() {
                "--listen" => listen = Some(value.parse().ok()?),
                "--relay" => relay = Some(value.parse().ok()?),
                "--user" => user = value,
                _ => return None,
            }
        }
        Some(Self { listen: listen?, relay, user })
    }
}

fn main() -> ExitCode {
    if std::process::id() == 1 {
        let result = boot::boot().map_err(|error| errors::chain(&error)).and_then(|()| {
            let any = |port| SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
            let serve = Serve { listen: any(ENVD_PORT), relay: Some(any(RELAY_PORT)), user: "user".into() };
            run(Place::Guest, serve).map_err(|error| errors::chain(&error))
        });
        // PID 1 must not return: the kernel would panic instead of switching off.
        if let Err(error) = result {
            boot::say(&format!("pando-guest: {error}"));
        }
        boot::power_off();
        return ExitCode::FAILURE;
    }
    let Some(serve) = Serve::parse(std::env::args().skip(1)) else {
        boot::say(USAGE);
        return ExitCode::from(2);
    };
    match run(Place::Host, serve) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            boot::say(&format!("guest: {}", errors::chain(&error)));
            ExitCode::FAILURE
        }
    }
}

fn run(place: Place, serve: Serve) -> io::Result<()> {
    let children = Children::start()?;
    let cgroups = match place {
        Place::Guest if std::path::Path::new(boot::COMMANDS).exists() => {
            Cgroups::under(PathBuf::from(boot::COMMANDS))
        }
        Place::Guest => Cgroups::default(),
        Place::Host => {
            // As PID 1 would be, so that orphans are reaped here too.
            rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
            Cgroups::default()
        }
    };
    let agent = Agent::new(place, serve.user, Table::new(children, cgroups));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(BLOCKING)
        .thread_name("agent")
        .enable_all()
        .build()?;
    runtime.block_on(async move {
        let listener = TcpListener::bind(serve.listen).await?;
        if let Some(relay) = serve.relay {
            let listener = TcpListener::bind(relay).await?;
            tokio::spawn(relay::serve(Arc::clone(&agent), listener));
        }
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        let address = listener.local_addr()?;
        match place {
            Place::Guest => {
                let agent = Arc::clone(&agent);
                let address = SocketAddr::from((Ipv4Addr::LOCALHOST, address.port()));
                tokio::spawn(async move {
                    warm::warm(&agent, address).await;
                    boot::say(READY_LINE);
                });
            }
            // The port is often one that the kernel chose.
            Place::Host => boot::say(&format!("guest: listening on {address}")),
        }
        let listener = listener.tap_io(|stream| {
            // Without these a connection still works.
            let _ = stream.set_nodelay(true);
            let _ = rustix::net::sockopt::set_tcp_user_timeout(&*stream, PEER_TIMEOUT);
        });
        let app = http::router(&agent).into_make_service_with_connect_info::<SocketAddr>();
        tokio::select! {
            served = axum::serve(listener, app) => served,
            _ = terminate.recv() => Ok(()),
        }
    })
}
