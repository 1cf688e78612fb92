//! The database: SQLite on one node. Times are microseconds since 1970.
//!
//! One connection writes, a few read. WAL with `synchronous = NORMAL`: a crash of the process loses nothing; a loss of
//! power may lose the last few commits, of sandboxes that it ends as well.

use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;

use jiff::Timestamp;
use proto::node::EndReason;
use proto::{SandboxId, TeamId, TemplateId};
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{FromRow, Row};

const READERS: u32 = 4;
/// How long what has ended is remembered, to be able to say what became of it: a day.
const REMEMBER_MICROSECONDS: i64 = 24 * 3600 * 1_000_000;

/// The database. Clones are the same.
#[derive(Clone)]
pub struct Db {
    write: SqlitePool,
    read: SqlitePool,
}

/// A sandbox's row.
#[derive(Debug, Clone)]
pub struct SandboxRow {
    /// The sandbox.
    pub id: SandboxId,
    /// Its owner.
    pub team: TeamId,
    /// The template it is a copy of.
    pub template: TemplateId,
    /// The name it was created by.
    pub alias: Option<String>,
    /// As given at create.
    pub metadata: BTreeMap<String, String>,
    /// Whether the internet can be reached.
    pub internet: bool,
    /// Where it is in its life.
    pub state: RowState,
    /// When it started.
    pub started_at: Timestamp,
    /// When it will end, or has ended.
    pub end_at: Timestamp,
    /// vCPUs.
    pub cpu_count: u32,
    /// Memory in MiB.
    pub memory_mb: u64,
    /// Root disk in MiB.
    pub disk_mb: u64,
}

/// Where a sandbox is in its life, as the database knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowState {
    /// Asked of a node, which has not answered.
    Creating,
    /// A node has it.
    Running,
    /// It is no more.
    Ended(EndReason),
}

/// What a use of an idempotency key meets.
#[derive(Debug, PartialEq, Eq)]
pub enum Claim {
    /// The key is new; the create may go on.
    New,
    /// The same request is under way.
    InProgress,
    /// The same request made this sandbox.
    Done(SandboxId),
    /// The key was used with another request.
    Mismatch,
}

fn reason_word(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Killed => "killed",
        EndReason::TimedOut => "timed_out",
        EndReason::MachineDied => "machine_died",
        EndReason::CreateFailed => "create_failed",
        EndReason::NodeStopped => "node_stopped",
    }
}

fn reason_of(word: &str) -> EndReason {
    match word {
        "killed" => EndReason::Killed,
        "timed_out" => EndReason::TimedOut,
        "create_failed" => EndReason::CreateFailed,
        "node_stopped" => EndReason::NodeStopped,
        _ => EndReason::MachineDied,
    }
}

fn decode<E: std::error::Error + Send + Sync + 'static>(error: E) -> sqlx::Error {
    sqlx::Error::Decode(Box::new(error))
}

impl<'r> FromRow<'r, sqlx::sqlite::SqliteRow> for SandboxRow {
    fn from_row(row: &'r sqlx::sqlite::SqliteRow) -> Result<Self, sqlx::Error> {
        let text = |name: &str| row.try_get::<String, _>(name);
        let number = |name: &str| row.try_get::<i64, _>(name);
        let time = |name: &str| Timestamp::from_microsecond(number(name)?).map_err(decode);
        let state = match text("state")?.as_str() {
            "creating" => RowState::Creating,
            "running" => RowState::Running,
            _ => RowState::Ended(reason_of(&row.try_get::<Option<String>, _>("reason")?.unwrap_or_default())),
        };
        Ok(Self {
            id: text("id")?.parse().map_err(decode)?,
            team: text("team")?.parse().map_err(decode)?,
            template: text("template")?.parse().map_err(decode)?,
            alias: row.try_get("alias")?,
            metadata: serde_json::from_str(&text("metadata")?).map_err(decode)?,
            internet: number("internet")? != 0,
            state,
            started_at: time("started_at")?,
            end_at: time("end_at")?,
            cpu_count: number("cpu_count")?.try_into().map_err(decode)?,
            memory_mb: number("memory_mb")?.try_into().map_err(decode)?,
            disk_mb: number("disk_mb")?.try_into().map_err(decode)?,
        })
    }
}

impl Db {
    /// Opens the database at `path`, making and migrating it as needed.
    pub async fn open(path: &Path) -> Result<Self, sqlx::Error> {
        let options = SqliteConnectOptions::from_str("sqlite:")?
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Normal)
            .foreign_keys(true)
            .busy_timeout(std::time::Duration::from_secs(10));
        let write = SqlitePoolOptions::new().max_connections(1).connect_with(options.clone()).await?;
        sqlx::migrate!().run(&write).await.map_err(|error| sqlx::Error::Migrate(Box::new(error)))?;
        let read =
            SqlitePoolOptions::new().max_connections(READERS).connect_with(options.read_only(true)).await?;
        Ok(Self { write, read })
    }

    /// The first team, if there is one.
    pub async fn first_team(&self) -> Result<Option<TeamId>, sqlx::Error> {
        let row = sqlx::query("SELECT id FROM teams ORDER BY created_at LIMIT 1")
            .fetch_optional(&self.read)
            .await?;
        row.map(|row| row.try_get::<String, _>(0)?.parse().map_err(decode)).transpose()
    }

    /// Adds a team and its first key in one transaction.
    pub async fn add_team(&self, team: &TeamId, name: &str, key_hash: &str) -> Result<(), sqlx::Error> {
        let now = Timestamp::now().as_microsecond();
        let mut transaction = self.write.begin().await?;
        sqlx::query("INSERT INTO teams (id, name, created_at) VALUES ($1, $2, $3)")
            .bind(team.as_str())
            .bind(name)
            .bind(now)
            .execute(&mut *transaction)
            .await?;
        sqlx::query("INSERT INTO api_keys (hash, team, name, created_at) VALUES ($1, $2, 'first', $3)")
            .bind(key_hash)
            .bind(team.as_str())
            .bind(now)
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await
    }

    /// The team that a key opens, with its name.
    pub async fn team_of_key(&self, key_hash: &str) -> Result<Option<(TeamId, String)>, sqlx::Error> {
        let sql = "SELECT teams.id, teams.name FROM api_keys JOIN teams ON teams.id = api_keys.team WHERE hash = $1";
        let row = sqlx::query(sql).bind(key_hash).fetch_optional(&self.read).await?;
        row.map(|row| Ok((row.try_get::<String, _>(0)?.parse().map_err(decode)?, row.try_get(1)?)))
            .transpose()
    }

    /// Adds a sandbox unless the team has `limit` of them; false if it has.
    pub async fn insert_sandbox(&self, row: &SandboxRow, limit: u64) -> Result<bool, sqlx::Error> {
        let metadata = serde_json::to_string(&row.metadata).map_err(decode)?;
        let sql = "INSERT INTO sandboxes (id, team, template, alias, metadata, internet, state, started_at, end_at, \
                   cpu_count, memory_mb, disk_mb) \
                   SELECT $1, $2, $3, $4, $5, $6, 'creating', $7, $8, $9, $10, $11 \
                   WHERE (SELECT COUNT(*) FROM sandboxes WHERE team = $2 AND state <> 'ended') < $12";
        let done = sqlx::query(sql)
            .bind(row.id.as_str())
            .bind(row.team.as_str())
            .bind(row.template.as_str())
            .bind(&row.alias)
            .bind(metadata)
            .bind(i64::from(row.internet))
            .bind(row.started_at.as_microsecond())
            .bind(row.end_at.as_microsecond())
            .bind(i64::from(row.cpu_count))
            .bind(row.memory_mb as i64)
            .bind(row.disk_mb as i64)
            .bind(limit as i64)
            .execute(&self.write)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Creating becomes running; false if it has ended meanwhile.
    pub async fn set_running(&self, id: &SandboxId, at: Timestamp) -> Result<bool, sqlx::Error> {
        let sql =
            "UPDATE sandboxes SET state = 'running', started_at = $2 WHERE id = $1 AND state = 'creating'";
        let done = sqlx::query(sql).bind(id.as_str()).bind(at.as_microsecond()).execute(&self.write).await?;
        Ok(done.rows_affected() == 1)
    }

    /// A sandbox is no more. The first reason stands.
    pub async fn set_ended(&self, id: &SandboxId, reason: EndReason) -> Result<(), sqlx::Error> {
        let sql = "UPDATE sandboxes SET state = 'ended', reason = $2, end_at = $3 WHERE id = $1 AND state <> 'ended'";
        let now = Timestamp::now().as_microsecond();
        sqlx::query(sql).bind(id.as_str()).bind(reason_word(reason)).bind(now).execute(&self.write).await?;
        Ok(())
    }

    /// Sandboxes that the database believes in and `alive` does not hold have ended.
    pub async fn reconcile(&self, alive: &[SandboxId], reason: EndReason) -> Result<u64, sqlx::Error> {
        // Not those being created: the node may not have heard of them yet; their create settles them.
        let known =
            sqlx::query("SELECT id FROM sandboxes WHERE state = 'running'").fetch_all(&self.read).await?;
        let mut ended = 0;
        for row in known {
            let id: SandboxId = row.try_get::<String, _>(0)?.parse().map_err(decode)?;
            if !alive.contains(&id) {
                self.set_ended(&id, reason).await?;
                ended += 1;
            }
        }
        Ok(ended)
    }

    /// At start: nothing that was is any more; creates under way are forgotten, and what ended long ago too.
    pub async fn begin(&self) -> Result<(), sqlx::Error> {
        let now = Timestamp::now().as_microsecond();
        sqlx::query("UPDATE sandboxes SET state = 'ended', reason = $1, end_at = $2 WHERE state <> 'ended'")
            .bind(reason_word(EndReason::NodeStopped))
            .bind(now)
            .execute(&self.write)
            .await?;
        sqlx::query("DELETE FROM idempotency WHERE sandbox IS NULL").execute(&self.write).await?;
        self.forget_old().await
    }

    /// Removes what ended longer ago than it is remembered.
    pub async fn forget_old(&self) -> Result<(), sqlx::Error> {
        let before = Timestamp::now().as_microsecond() - REMEMBER_MICROSECONDS;
        sqlx::query("DELETE FROM sandboxes WHERE state = 'ended' AND end_at < $1")
            .bind(before)
            .execute(&self.write)
            .await?;
        sqlx::query("DELETE FROM idempotency WHERE created_at < $1")
            .bind(before)
            .execute(&self.write)
            .await?;
        Ok(())
    }

    /// Sets when a running sandbox ends; with `only_later`, only if that is later. False if it does not run.
    pub async fn set_end(
        &self,
        id: &SandboxId,
        end_at: Timestamp,
        only_later: bool,
    ) -> Result<bool, sqlx::Error> {
        let sql = "UPDATE sandboxes SET end_at = CASE WHEN $3 = 1 AND end_at > $2 THEN end_at ELSE $2 END \
                   WHERE id = $1 AND state = 'running'";
        let done = sqlx::query(sql)
            .bind(id.as_str())
            .bind(end_at.as_microsecond())
            .bind(i64::from(only_later))
            .execute(&self.write)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    /// When a running sandbox will end.
    pub async fn end_of(&self, id: &SandboxId) -> Result<Option<Timestamp>, sqlx::Error> {
        let sql = "SELECT end_at FROM sandboxes WHERE id = $1 AND state = 'running'";
        let row = sqlx::query(sql).bind(id.as_str()).fetch_optional(&self.write).await?;
        row.map(|row| Timestamp::from_microsecond(row.try_get(0)?).map_err(decode)).transpose()
    }

    /// One sandbox of a team, ended ones included.
    pub async fn sandbox(&self, team: &TeamId, id: &SandboxId) -> Result<Option<SandboxRow>, sqlx::Error> {
        sqlx::query_as("SELECT * FROM sandboxes WHERE id = $1 AND team = $2")
            .bind(id.as_str())
            .bind(team.as_str())
            .fetch_optional(&self.read)
            .await
    }

    /// A team's running sandboxes.
    pub async fn running(&self, team: &TeamId) -> Result<Vec<SandboxRow>, sqlx::Error> {
        sqlx::query_as("SELECT * FROM sandboxes WHERE team = $1 AND state = 'running'")
            .bind(team.as_str())
            .fetch_all(&self.read)
            .await
    }

    /// All running sandboxes' IDs, of every team.
    pub async fn all_running(&self) -> Result<Vec<SandboxId>, sqlx::Error> {
        let rows =
            sqlx::query("SELECT id FROM sandboxes WHERE state = 'running'").fetch_all(&self.read).await?;
        rows.iter().map(|row| row.try_get::<String, _>(0)?.parse().map_err(decode)).collect()
    }

    /// Claims an idempotency key for a request.
    pub async fn claim(&self, team: &TeamId, key: &str, body_hash: &str) -> Result<Claim, sqlx::Error> {
        let sql = "INSERT INTO idempotency (team, key, body_hash, created_at) VALUES ($1, $2, $3, $4) \
                   ON CONFLICT DO NOTHING";
        let done = sqlx::query(sql)
            .bind(team.as_str())
            .bind(key)
            .bind(body_hash)
            .bind(Timestamp::now().as_microsecond())
            .execute(&self.write)
            .await?;
        if done.rows_affected() == 1 {
            return Ok(Claim::New);
        }
        let row = sqlx::query("SELECT body_hash, sandbox FROM idempotency WHERE team = $1 AND key = $2")
            .bind(team.as_str())
            .bind(key)
            .fetch_optional(&self.write)
            .await?;
        // Given up between the two statements: the other request failed, so this one may be tried again.
        let Some(row) = row else { return Ok(Claim::InProgress) };
        if row.try_get::<String, _>(0)? != body_hash {
            return Ok(Claim::Mismatch);
        }
        match row.try_get::<Option<String>, _>(1)? {
            Some(id) => Ok(Claim::Done(id.parse().map_err(decode)?)),
            None => Ok(Claim::InProgress),
        }
    }

    /// A claimed key made this sandbox; None gives the key up, as the create failed.
    pub async fn settle(
        &self,
        team: &TeamId,
        key: &str,
        made: Option<&SandboxId>,
    ) -> Result<(), sqlx::Error> {
        let query = match made {
            Some(id) => sqlx::query("UPDATE idempotency SET sandbox = $3 WHERE team = $1 AND key = $2")
                .bind(team.as_str())
                .bind(key)
                .bind(id.as_str()),
            None => sqlx::query("DELETE FROM idempotency WHERE team = $1 AND key = $2")
                .bind(team.as_str())
                .bind(key),
        };
        query.execute(&self.write).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(team: &TeamId, id: &str) -> SandboxRow {
        let now = Timestamp::from_microsecond(Timestamp::now().as_microsecond()).unwrap();
        SandboxRow {
            id: id.parse().unwrap(),
            team: team.clone(),
            template: "tpl".parse().unwrap(),
            alias: None,
            metadata: BTreeMap::from([("k".to_owned(), "v'\"é".to_owned())]),
            internet: true,
            state: RowState::Creating,
            started_at: now,
            end_at: now,
            cpu_count: 1,
            memory_mb: 512,
            disk_mb: 1024,
        }
    }

    async fn open(dir: &Path) -> (Db, TeamId) {
        let db = Db::open(&dir.join("db")).await.unwrap();
        let team: TeamId = "team".parse().unwrap();
        db.add_team(&team, "default", "hash").await.unwrap();
        (db, team)
    }

    #[tokio::test]
    async fn a_sandboxs_life_is_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let (db, team) = open(dir.path()).await;
        assert_eq!(db.team_of_key("hash").await.unwrap().unwrap().0, team);
        assert!(db.team_of_key("other").await.unwrap().is_none());
        let first = row(&team, "ia");
        assert!(db.insert_sandbox(&first, 1).await.unwrap());
        assert!(!db.insert_sandbox(&row(&team, "ib"), 1).await.unwrap(), "the team's limit");
        assert!(db.running(&team).await.unwrap().is_empty());
        assert!(db.set_running(&first.id, first.started_at).await.unwrap());
        let later = first.end_at + jiff::SignedDuration::from_secs(60);
        assert!(db.set_end(&first.id, later, true).await.unwrap());
        assert!(db.set_end(&first.id, first.end_at, true).await.unwrap());
        let read = db.sandbox(&team, &first.id).await.unwrap().unwrap();
        assert_eq!((read.end_at, read.metadata), (later, first.metadata));
        assert!(db.sandbox(&"other".parse().unwrap(), &first.id).await.unwrap().is_none());
        assert_eq!(db.reconcile(&[], EndReason::MachineDied).await.unwrap(), 1);
        db.set_ended(&first.id, EndReason::Killed).await.unwrap();
        let read = db.sandbox(&team, &first.id).await.unwrap().unwrap();
        assert_eq!(read.state, RowState::Ended(EndReason::MachineDied), "the first reason stands");
        assert!(!db.set_running(&first.id, later).await.unwrap());
        assert!(!db.set_end(&first.id, later, false).await.unwrap());
    }

    #[tokio::test]
    async fn idempotency_keys_are_claimed_once() {
        let dir = tempfile::tempdir().unwrap();
        let (db, team) = open(dir.path()).await;
        let id: SandboxId = "ia".parse().unwrap();
        assert_eq!(db.claim(&team, "k", "h").await.unwrap(), Claim::New);
        assert_eq!(db.claim(&team, "k", "h").await.unwrap(), Claim::InProgress);
        assert_eq!(db.claim(&team, "k", "other").await.unwrap(), Claim::Mismatch);
        db.settle(&team, "k", Some(&id)).await.unwrap();
        assert_eq!(db.claim(&team, "k", "h").await.unwrap(), Claim::Done(id));
        assert_eq!(db.claim(&team, "k2", "h").await.unwrap(), Claim::New);
        db.settle(&team, "k2", None).await.unwrap();
        assert_eq!(db.claim(&team, "k2", "h").await.unwrap(), Claim::New);
        db.begin().await.unwrap();
        assert_eq!(
            db.claim(&team, "k2", "h").await.unwrap(),
            Claim::New,
            "a create cut off by a crash gives its key up"
        );
    }
}
