//! What the whole agent knows.
//!
//! Owns: the settings that `/init` changes, and who a request acts as. Does not own: the parts themselves (`process`,
//! `watch`, `http`).

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use parking_lot::RwLock;
use proto::Secret;

use crate::process::Table;
use crate::users::{User, UserError, lookup};
use crate::watch::Watchers;

/// What the agent runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// It is PID 1 of a virtual machine, which is its own to change.
    Guest,
    /// It is a process among others on a host, in a test: `/init` changes only what the agent itself knows.
    Host,
}

/// What `/init` sets. Names set earlier and not set again stay.
#[derive(Default)]
pub(crate) struct Settings {
    /// Every request but the open routes must carry it.
    pub(crate) token: Option<Secret>,
    /// Environment of every command.
    pub(crate) env: BTreeMap<String, String>,
    /// User of requests that name none.
    pub(crate) default_user: String,
    /// Directory of requests that name none.
    pub(crate) default_workdir: Option<String>,
    /// The last wall clock that was accepted.
    pub(crate) clock: Option<jiff::Timestamp>,
}

/// The agent.
pub(crate) struct Agent {
    /// Where it runs.
    pub(crate) place: Place,
    /// The only peer that may call `/init`, `/shutdown` and the relay.
    pub(crate) gateway: IpAddr,
    /// What `/init` sets.
    pub(crate) settings: RwLock<Settings>,
    /// One `/init` at a time.
    pub(crate) init: tokio::sync::Mutex<()>,
    /// Commands.
    pub(crate) processes: Arc<Table>,
    /// Watched directories.
    pub(crate) watchers: Watchers,
}

/// Who a request acts as could not be found out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallerError {
    /// The header is not `Basic base64(user:…)`.
    #[error("invalid Authorization header")]
    Header,
    /// No such user.
    #[error(transparent)]
    User(#[from] UserError),
}

impl Agent {
    /// An agent with nothing set.
    pub(crate) fn new(place: Place, default_user: String, processes: Arc<Table>) -> Arc<Self> {
        let gateway = match place {
            Place::Guest => proto::guest::GATEWAY,
            Place::Host => Ipv4Addr::LOCALHOST,
        };
        let env = BTreeMap::from([("E2B_SANDBOX".to_owned(), "true".to_owned())]);
        Arc::new(Self {
            place,
            gateway: gateway.into(),
            settings: RwLock::new(Settings { env, default_user, ..Settings::default() }),
            init: tokio::sync::Mutex::default(),
            processes,
            watchers: Watchers::default(),
        })
    }

    /// The user named in `Authorization: Basic`, or the default one.
    ///
    /// # Errors
    /// When the header cannot be read or the user does not exist.
    pub(crate) fn caller(&self, headers: &HeaderMap) -> Result<User, CallerError> {
        Ok(self.user(basic_user(headers)?.as_deref())?)
    }

    /// The user of that name, or the default one.
    ///
    /// # Errors
    /// When there is no such user.
    pub(crate) fn user(&self, name: Option<&str>) -> Result<User, UserError> {
        match name {
            Some(name) if !name.is_empty() => lookup(name),
            _ => lookup(&self.settings.read().default_user.clone()),
        }
    }

    /// The default working directory.
    pub(crate) fn default_workdir(&self) -> Option<String> {
        self.settings.read().default_workdir.clone()
    }

    /// Whether a request with these headers may pass: no token is set, or it carries the token.
    pub(crate) fn authorised(&self, headers: &HeaderMap) -> bool {
        match &self.settings.read().token {
            None => true,
            Some(token) => headers
                .get("x-access-token")
                .and_then(|value| value.to_str().ok())
                .is_some_and(|given| token.matches(given)),
        }
    }
}

/// The user name of a Basic header, if there is such a header. Other schemes are not for the agent.
fn basic_user(headers: &HeaderMap) -> Result<Option<String>, CallerError> {
    let Some(value) = headers.get(http::header::AUTHORIZATION) else { return Ok(None) };
    let text = value.to_str().map_err(|_| CallerError::Header)?;
    let Some((scheme, encoded)) = text.split_once(' ') else { return Ok(None) };
    if !scheme.eq_ignore_ascii_case("basic") {
        return Ok(None);
    }
    let decoded = STANDARD.decode(encoded.trim()).map_err(|_| CallerError::Header)?;
    let decoded = String::from_utf8(decoded).map_err(|_| CallerError::Header)?;
    let user = decoded.split_once(':').map_or(decoded.as_str(), |(user, _)| user);
    Ok(Some(user.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(authorization: &str) -> HeaderMap {
        HeaderMap::from_iter([(http::header::AUTHORIZATION, authorization.parse().unwrap())])
    }

    #[test]
    fn basic_header_names_the_user() {
        assert_eq!(basic_user(&HeaderMap::new()).unwrap(), None);
        assert_eq!(basic_user(&headers("Basic cm9vdDo=")).unwrap().as_deref(), Some("root"));
        assert_eq!(basic_user(&headers("basic dXNlcjpwOnc=")).unwrap().as_deref(), Some("user"));
        assert_eq!(basic_user(&headers("Bearer x")).unwrap(), None);
        assert!(basic_user(&headers("Basic !")).is_err());
    }
}
