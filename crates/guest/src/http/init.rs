//! `POST /init`: the host says who this copy of the machine is.
//!
//! Owns: putting `proto::guest::Init` into effect. Contract: when it answers 204, all of it is: clock, host name, machine
//! ID, entropy, environment, token, defaults. Names that an earlier call set and this one does not mention stay. In test mode
//! only what the agent itself knows is changed.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use axum::extract::{ConnectInfo, State};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderValue, StatusCode};
use proto::guest::{ENVD_VERSION, Init};
use rustix::time::{ClockId, Timespec, clock_settime};
use sha2::{Digest, Sha256};

use super::{HttpError, VERSION_HEADER, from_gateway};
use crate::agent::{Agent, Place};
use crate::errors::chain;
use crate::sys::ioctl::add_entropy;

/// A step of `/init` that failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InitError {
    /// The entropy is not base64.
    #[error("entropy is not base64")]
    Entropy(#[from] base64::DecodeError),
    /// The guest could not be changed.
    #[error("cannot {step}")]
    Step {
        /// What was to be done.
        step: &'static str,
        /// Why it was not.
        #[source]
        source: io::Error,
    },
}

fn step<T, E: Into<io::Error>>(step: &'static str, result: Result<T, E>) -> Result<T, InitError> {
    result.map_err(|source| InitError::Step { step, source: source.into() })
}

/// The route.
pub(crate) async fn init(
    State(agent): State<Arc<Agent>>,
    peer: ConnectInfo<SocketAddr>,
    body: axum::body::Bytes,
) -> Result<Response, HttpError> {
    from_gateway(&agent, &peer)?;
    let body = if body.is_empty() { b"{}".as_slice() } else { &body };
    let init: Init = serde_json::from_slice(body)
        .map_err(|error| HttpError::bad_request(format!("cannot read the body: {error}")))?;
    // One at a time, so that two cannot leave a mixture.
    let _turn = agent.init.lock().await;
    if agent.place == Place::Guest {
        let (own, init) = (Arc::clone(&agent), init.clone());
        let applied = tokio::task::spawn_blocking(move || apply(&own, &init)).await;
        applied
            .map_err(|_| HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, "the operation was interrupted"))?
            .map_err(|error| HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, chain(&error)))?;
    }
    remember(&agent, init);
    let mut response = StatusCode::NO_CONTENT.into_response();
    response.headers_mut().insert(VERSION_HEADER, HeaderValue::from_static(ENVD_VERSION));
    Ok(response)
}

/// What the agent itself has to know.
fn remember(agent: &Agent, init: Init) {
    let mut settings = agent.settings.write();
    settings.env.extend(init.env_vars);
    if let Some(id) = &init.sandbox_id {
        settings.env.insert("E2B_SANDBOX_ID".into(), id.to_string());
    }
    if let Some(id) = &init.template_id {
        settings.env.insert("E2B_TEMPLATE_ID".into(), id.to_string());
    }
    if let Some(token) = init.access_token {
        settings.token = Some(token);
    }
    if let Some(user) = init.default_user.filter(|user| !user.is_empty()) {
        settings.default_user = user;
    }
    if let Some(dir) = init.default_workdir.filter(|dir| !dir.is_empty()) {
        settings.default_workdir = Some(dir);
    }
    if let Some(time) = init.timestamp {
        settings.clock = settings.clock.max(Some(time));
    }
}

/// What the guest has to show.
fn apply(agent: &Agent, init: &Init) -> Result<(), InitError> {
    // Entropy first: whatever is generated from here on differs from the other copies.
    if let Some(entropy) = &init.entropy {
        let random = step("open /dev/urandom", std::fs::File::options().write(true).open("/dev/urandom"))?;
        step("add entropy", add_entropy(&random, &STANDARD.decode(entropy.expose())?))?;
    }
    if let Some(time) = init.timestamp
        && agent.settings.read().clock.is_none_or(|last| time > last)
    {
        let at = Timespec { tv_sec: time.as_second(), tv_nsec: time.subsec_nanosecond().into() };
        step("set the clock", clock_settime(ClockId::Realtime, at))?;
    }
    if let Some(id) = &init.sandbox_id {
        identity(id.as_str())?;
    }
    let run = Path::new("/run/e2b");
    step("write /run/e2b", std::fs::create_dir_all(run))?;
    step("write /run/e2b", std::fs::write(run.join(".E2B_SANDBOX"), "true"))?;
    if let Some(id) = &init.sandbox_id {
        step("write /run/e2b", std::fs::write(run.join(".E2B_SANDBOX_ID"), id.as_str()))?;
    }
    if let Some(id) = &init.template_id {
        step("write /run/e2b", std::fs::write(run.join(".E2B_TEMPLATE_ID"), id.as_str()))?;
    }
    step("write /run/pando", std::fs::create_dir_all("/run/pando"))?;
    step("write /run/pando", std::fs::write("/run/pando/generation", format!("{}\n", init.generation)))
}

/// 32 hexadecimal digits that belong to one sandbox.
fn machine_id(sandbox: &str) -> String {
    let digest = Sha256::digest(format!("pando machine-id {sandbox}"));
    digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

fn identity(sandbox: &str) -> Result<(), InitError> {
    step("set the host name", rustix::system::sethostname(sandbox.as_bytes()))?;
    step("write /etc/hostname", std::fs::write("/etc/hostname", format!("{sandbox}\n")))?;
    step(
        "write /etc/hosts",
        std::fs::write(
            "/etc/hosts",
            hosts(&std::fs::read_to_string("/etc/hosts").unwrap_or_default(), sandbox),
        ),
    )?;
    step("write /etc/machine-id", std::fs::write("/etc/machine-id", format!("{}\n", machine_id(sandbox))))
}

/// The mark of the line in `/etc/hosts` that is the agent's; the others are the image's or the user's.
const HOSTS_MARK: &str = "# sandbox";

/// `/etc/hosts` with the sandbox's own name in it.
pub(crate) fn hosts(current: &str, name: &str) -> String {
    let mut text: String =
        current.lines().filter(|line| !line.ends_with(HOSTS_MARK)).flat_map(|line| [line, "\n"]).collect();
    text.push_str(&format!("127.0.1.1\t{name} {HOSTS_MARK}\n"));
    text
}

/// The route: writes everything to disk and switches the machine off.
pub(crate) async fn shutdown(
    State(agent): State<Arc<Agent>>,
    peer: ConnectInfo<SocketAddr>,
) -> Result<StatusCode, HttpError> {
    from_gateway(&agent, &peer)?;
    if agent.place == Place::Guest {
        tokio::task::spawn_blocking(crate::boot::power_off);
    }
    Ok(StatusCode::ACCEPTED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{Table, cgroup::Cgroups};
    use crate::sys::wait::Children;

    #[tokio::test]
    async fn later_calls_do_not_wipe_what_earlier_ones_set() {
        let processes = Table::new(Children::start().unwrap(), Cgroups::default());
        let agent = Agent::new(Place::Host, "root".into(), processes);
        let read = |text| serde_json::from_str::<Init>(text).unwrap();
        remember(
            &agent,
            read(r#"{"envVars":{"A":"1","B":"1"},"accessToken":"t","defaultUser":"u","sandboxID":"iabc"}"#),
        );
        remember(&agent, read(r#"{"envVars":{"B":"2"},"unknown":1}"#));
        let settings = agent.settings.read();
        assert_eq!(settings.env.get("A").map(String::as_str), Some("1"));
        assert_eq!(settings.env.get("B").map(String::as_str), Some("2"));
        assert_eq!(settings.env.get("E2B_SANDBOX_ID").map(String::as_str), Some("iabc"));
        assert!(settings.token.as_ref().unwrap().matches("t"));
        assert_eq!(settings.default_user, "u");
    }

    #[test]
    fn the_hosts_line_is_replaced_and_others_stay() {
        let once = hosts("127.0.0.1 localhost\n", "ia");
        assert_eq!(once, "127.0.0.1 localhost\n127.0.1.1\tia # sandbox\n");
        assert_eq!(hosts(&once, "ib"), "127.0.0.1 localhost\n127.0.1.1\tib # sandbox\n");
    }

    #[test]
    fn machine_ids_are_hexadecimal_and_differ() {
        let id = machine_id("ia");
        assert!(id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit()));
        assert_ne!(id, machine_id("ib"));
    }
}
