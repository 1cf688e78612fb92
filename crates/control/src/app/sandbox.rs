//! What requests about sandboxes do.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use proto::api::{ListedSandbox, NewSandbox, Sandbox, State};
use proto::guest::ENVD_VERSION;
use proto::node::{EndReason, SandboxSpec, TemplateView};
use proto::{SandboxId, TeamId};
use serde_json::Value;

use super::Control;
use crate::db::{Claim, RowState, SandboxRow};
use crate::error::ApiError;
use crate::keys;
use crate::listing::Listing;

/// What E2B calls the client: the node. There is one.
pub const CLIENT_ID: &str = "local";
const DEFAULT_KEEPALIVE: i64 = 15;
const MAX_REFRESH: i64 = 3600;
/// Limits of what is stored for a sandbox.
const MAX_PAIRS: usize = 256;
const MAX_TEXT: usize = 64 << 10;

/// Checks a request and returns its time to live; `default_timeout` is the version's, in seconds.
pub fn check(new: &NewSandbox, default_timeout: i64, max_timeout: i64) -> Result<SignedDuration, ApiError> {
    refuse_unsupported(new)?;
    if new.template_id.is_empty() {
        return Err(ApiError::invalid("templateID: must not be empty"));
    }
    let env = new.env_vars.iter().flatten();
    for (name, value) in env.clone() {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(ApiError::invalid(format!("envVars: \"{name}\" is not a variable's name")));
        }
        if value.contains('\0') {
            return Err(ApiError::invalid(format!("envVars: the value of \"{name}\" holds a NUL")));
        }
    }
    for (field, pairs) in [("metadata", &new.metadata), ("envVars", &new.env_vars)] {
        let pairs = pairs.iter().flatten();
        let bytes: usize = pairs.clone().map(|(key, value)| key.len() + value.len()).sum();
        if pairs.count() > MAX_PAIRS || bytes > MAX_TEXT {
            return Err(ApiError::invalid(format!(
                "{field}: at most {MAX_PAIRS} pairs and {MAX_TEXT} bytes"
            )));
        }
    }
    checked_timeout(new.timeout.unwrap_or(default_timeout), max_timeout)
}

/// Fields that E2B has and Pando does not have yet. A value that asks for nothing is let through.
fn refuse_unsupported(new: &NewSandbox) -> Result<(), ApiError> {
    if new.auto_pause == Some(true) {
        return Err(ApiError::unsupported("autoPause"));
    }
    let asks_nothing = |value: &Value| match value {
        Value::Null => true,
        Value::Object(map) => {
            map.is_empty() || (map.len() == 1 && map.get("enabled") == Some(&Value::Bool(false)))
        }
        Value::Array(items) => items.is_empty(),
        _ => false,
    };
    for (name, value) in [
        ("autoPauseMemory", &new.auto_pause_memory),
        ("autoResume", &new.auto_resume),
        ("network", &new.network),
        ("iam", &new.iam),
        ("volumeMounts", &new.volume_mounts),
    ] {
        if value.as_ref().is_some_and(|value| !asks_nothing(value)) {
            return Err(ApiError::unsupported(name));
        }
    }
    Ok(())
}

fn checked_timeout(seconds: i64, max: i64) -> Result<SignedDuration, ApiError> {
    if (1..=max).contains(&seconds) {
        return Ok(SignedDuration::from_secs(seconds));
    }
    Err(ApiError::invalid(format!("timeout: must be from 1 to {max} seconds, not {seconds}")))
}

/// Whether a client may use it. Its node ends it when its time is up; the row says so a moment later.
fn is_alive(row: &SandboxRow) -> bool {
    row.state == RowState::Running && row.end_at > Timestamp::now()
}

/// A time as the database keeps it, so that what a client is told is what it will be told again.
fn to_microseconds(time: Timestamp) -> Timestamp {
    Timestamp::from_microsecond(time.as_microsecond()).unwrap_or(time)
}

impl Control {
    /// Creates a sandbox from a checked request; returns when its guest is ready.
    pub async fn create(
        &self,
        team: TeamId,
        new: NewSandbox,
        timeout: SignedDuration,
    ) -> Result<Sandbox, ApiError> {
        let template = self.template(&new.template_id).await?;
        let random = keys::random().map_err(|error| ApiError::internal(&error))?;
        let id = SandboxId::from_random(random);
        let now = to_microseconds(Timestamp::now());
        let internet = new.allow_internet_access.unwrap_or(true);
        let row = SandboxRow {
            metadata: new.metadata.unwrap_or_default(),
            internet,
            end_at: now + timeout,
            ..row_of(&id, &team, &template, now)
        };
        let limit = self.config.sandboxes_per_team;
        if !self.config.db.insert_sandbox(&row, limit).await? {
            return Err(ApiError::too_many_sandboxes(limit));
        }
        let spec = SandboxSpec {
            id: id.clone(),
            template: template.manifest.template_id.clone(),
            env: new.env_vars.unwrap_or_default(),
            access_token: self.config.seed.envd_token(&id),
            end_at: row.end_at,
            internet,
        };
        let view = match self.config.node.ensure(&spec).await {
            Ok(view) => view,
            Err(error) => {
                let error = ApiError::from(error);
                // What ended it meanwhile is no failure of the create. Before a sandbox runs only a kill ends it; another
                // reason has come as an event already, and the first one stands.
                match error.code {
                    "sandbox_ended" => self.config.db.set_ended(&id, EndReason::Killed).await?,
                    "node_stopping" => self.config.db.set_ended(&id, EndReason::NodeStopped).await?,
                    _ => self.config.db.set_ended(&id, EndReason::CreateFailed).await?,
                }
                return Err(error);
            }
        };
        if !self.config.db.set_running(&id, to_microseconds(view.started_at)).await? {
            // A kill that came before the node had heard of the sandbox found nothing there to end.
            let _ = self.config.node.kill(&id).await;
            let reason = match self.config.db.sandbox(&row.team, &id).await? {
                Some(SandboxRow { state: RowState::Ended(reason), .. }) => reason,
                _ => EndReason::MachineDied,
            };
            return Err(ApiError::ended_in_create(reason));
        }
        Ok(self.sandbox(&row))
    }

    /// Creates a sandbox once for an idempotency key, however often it is asked.
    pub async fn create_once(
        &self,
        team: TeamId,
        key: String,
        body_hash: String,
        new: NewSandbox,
        timeout: SignedDuration,
    ) -> Result<Sandbox, ApiError> {
        if key.is_empty() || key.len() > 255 || !key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
            return Err(ApiError::invalid("Idempotency-Key: must be 1 to 255 letters, digits and dashes"));
        }
        match self.config.db.claim(&team, &key, &body_hash).await? {
            Claim::New => {}
            Claim::InProgress => {
                let message = "a create with this Idempotency-Key is under way; ask again in a moment";
                return Err(ApiError::idempotency("idempotency_request_in_progress", message));
            }
            Claim::Mismatch => {
                let message = "this Idempotency-Key was used with another request; use a new key";
                return Err(ApiError::idempotency("idempotency_request_mismatch", message));
            }
            Claim::Done(id) => return Ok(self.sandbox(&self.running(&team, &id).await?)),
        }
        let outcome = self.create(team.clone(), new, timeout).await;
        let made = outcome.as_ref().ok().map(|sandbox| &sandbox.sandbox_id);
        self.config.db.settle(&team, &key, made).await?;
        outcome
    }

    /// The row of a team's sandbox that runs; otherwise an error that says what became of it.
    pub async fn running(&self, team: &TeamId, id: &SandboxId) -> Result<SandboxRow, ApiError> {
        let found = self.config.db.sandbox(team, id).await?;
        match found {
            Some(row) if is_alive(&row) => Ok(row),
            Some(row) => {
                let why = match row.state {
                    RowState::Ended(reason) => reason.describe(),
                    RowState::Running => EndReason::TimedOut.describe(),
                    RowState::Creating => "it is still being created",
                };
                Err(ApiError::sandbox_not_found(id.as_str(), Some(why)))
            }
            None => Err(ApiError::sandbox_not_found(id.as_str(), None)),
        }
    }

    /// The page of a team's sandboxes that was asked for.
    pub async fn list(
        &self,
        team: &TeamId,
        listing: &Listing,
    ) -> Result<(Vec<ListedSandbox>, Option<String>), ApiError> {
        let rows = self.config.db.running(team).await?;
        Ok(listing.page(rows.iter().filter(|row| is_alive(row)).map(listed).collect()))
    }

    /// Ends a sandbox; returns when nothing of it is left.
    pub async fn kill(&self, team: TeamId, id: SandboxId) -> Result<(), ApiError> {
        match self.config.db.sandbox(&team, &id).await? {
            // A sandbox that is being created can be killed as well.
            Some(row) if !matches!(row.state, RowState::Ended(_)) => {}
            _ => return self.running(&team, &id).await.map(|_| ()),
        }
        let outcome = self.config.node.kill(&id).await.map_err(ApiError::from);
        match outcome {
            Ok(()) => {}
            // It ended by itself in the meantime; the row says so or will.
            Err(error) if error.code == "sandbox_not_found" => {}
            Err(error) => return Err(error),
        }
        self.config.db.set_ended(&id, EndReason::Killed).await?;
        Ok(())
    }

    /// Sets the time to live from now; zero or less ends the sandbox now.
    pub async fn set_timeout(&self, team: TeamId, id: SandboxId, seconds: i64) -> Result<(), ApiError> {
        self.running(&team, &id).await?;
        if seconds > self.config.max_timeout {
            checked_timeout(seconds, self.config.max_timeout)?;
        }
        let end_at = Timestamp::now() + SignedDuration::from_secs(seconds.max(0));
        self.move_end(&id, end_at, false).await.map(|_| ())
    }

    /// Makes the time to live at least `seconds` from now (E2B's refresh).
    pub async fn refresh(&self, team: TeamId, id: SandboxId, seconds: Option<i64>) -> Result<(), ApiError> {
        let seconds = seconds.unwrap_or(0);
        if !(0..=MAX_REFRESH).contains(&seconds) {
            return Err(ApiError::invalid(format!("duration: must be from 0 to {MAX_REFRESH} seconds")));
        }
        self.running(&team, &id).await?;
        let end_at = Timestamp::now() + SignedDuration::from_secs(seconds.max(DEFAULT_KEEPALIVE));
        self.move_end(&id, end_at, true).await.map(|_| ())
    }

    /// Gives a handle to a running sandbox, with at least `seconds` to live.
    pub async fn connect(&self, team: TeamId, id: SandboxId, seconds: i64) -> Result<Sandbox, ApiError> {
        let timeout = checked_timeout(seconds, self.config.max_timeout)?;
        let row = self.running(&team, &id).await?;
        self.move_end(&id, Timestamp::now() + timeout, true).await?;
        Ok(self.sandbox(&row))
    }

    async fn move_end(&self, id: &SandboxId, end_at: Timestamp, only_later: bool) -> Result<(), ApiError> {
        let end_at = to_microseconds(end_at);
        if !self.config.db.set_end(id, end_at, only_later).await? {
            return Err(ApiError::sandbox_not_found(id.as_str(), Some("it has just ended")));
        }
        // The row decides: two requests at once must leave node and database with the same time.
        let running = self.config.db.end_of(id).await?;
        if let Some(end_at) = running {
            self.config.node.set_deadline(id, end_at).await?;
        }
        Ok(())
    }

    /// The answer to create and connect.
    pub fn sandbox(&self, row: &SandboxRow) -> Sandbox {
        Sandbox {
            template_id: row.template.to_string(),
            sandbox_id: row.id.clone(),
            client_id: CLIENT_ID.to_owned(),
            envd_version: ENVD_VERSION.to_owned(),
            alias: row.alias.clone(),
            envd_access_token: Some(self.config.seed.envd_token(&row.id).expose().to_owned()),
            traffic_access_token: None,
            domain: self.config.domain.clone(),
        }
    }
}

/// The row of a sandbox that is about to be created, with nothing asked of it.
fn row_of(id: &SandboxId, team: &TeamId, template: &TemplateView, now: Timestamp) -> SandboxRow {
    let manifest = &template.manifest;
    SandboxRow {
        id: id.clone(),
        team: team.clone(),
        template: manifest.template_id.clone(),
        alias: manifest.aliases.first().cloned(),
        metadata: BTreeMap::new(),
        internet: true,
        state: RowState::Creating,
        started_at: now,
        end_at: now,
        cpu_count: manifest.machine.vcpus,
        memory_mb: manifest.machine.memory_mib,
        disk_mb: manifest.machine.disk_mib,
    }
}

/// What a list shows of a running sandbox.
pub fn listed(row: &SandboxRow) -> ListedSandbox {
    ListedSandbox {
        template_id: row.template.to_string(),
        alias: row.alias.clone(),
        sandbox_id: row.id.clone(),
        client_id: CLIENT_ID.to_owned(),
        started_at: row.started_at,
        end_at: row.end_at,
        cpu_count: row.cpu_count,
        memory_mb: row.memory_mb,
        disk_size_mb: row.disk_mb,
        metadata: Some(row.metadata.clone()),
        state: State::Running,
        envd_version: ENVD_VERSION.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_text(text: &str) -> Result<SignedDuration, ApiError> {
        check(&serde_json::from_str(text).unwrap(), 300, 3600)
    }

    #[test]
    fn fields_are_honoured_or_refused_by_name() {
        assert!(check_text(r#"{"templateID":"base","secure":true,"autoPause":false,"network":{}}"#).is_ok());
        for (body, field) in [
            (r#"{"templateID":""}"#, "templateID"),
            (r#"{"templateID":"b","timeout":0}"#, "timeout"),
            (r#"{"templateID":"b","timeout":3601}"#, "timeout"),
            (r#"{"templateID":"b","autoPause":true}"#, "autoPause"),
            (r#"{"templateID":"b","autoPauseMemory":false}"#, "autoPauseMemory"),
            (r#"{"templateID":"b","autoResume":{"enabled":true}}"#, "autoResume"),
            (r#"{"templateID":"b","network":{"denyOut":["1.1.1.1"]}}"#, "network"),
            (r#"{"templateID":"b","iam":{"tokens":{}}}"#, "iam"),
            (r#"{"templateID":"b","volumeMounts":[{"name":"v","path":"/x"}]}"#, "volumeMounts"),
            (r#"{"templateID":"b","envVars":{"A=B":"1"}}"#, "envVars"),
            (r#"{"templateID":"b","envVars":{"A":"\u0000"}}"#, "envVars"),
        ] {
            let error = check_text(body).unwrap_err();
            assert_eq!(error.status, 400, "{body}");
            assert!(error.message.contains(field), "{body}: {}", error.message);
        }
    }
}
