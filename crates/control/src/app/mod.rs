//! What a request does, apart from HTTP.
//!
//! A create crosses: quota and row, node, row. Everything that changes something runs in a task of its own
//! ([`detached`]): a client that goes away in the middle does not cut it off.

pub mod sandbox;

use std::future::Future;
use std::sync::Arc;

use client::node::NodeClient;
use edge::ingress::Ingress;
use parking_lot::RwLock;
use proto::node::TemplateView;
use proto::{SandboxId, Secret, TeamId};

use crate::db::Db;
use crate::error::ApiError;
use crate::keys::{self, Seed};

/// How the control plane is set up.
pub struct ControlConfig {
    /// Its database.
    pub db: Db,
    /// The seed of tokens.
    pub seed: Seed,
    /// The node.
    pub node: NodeClient,
    /// Carries requests for sandboxes' ports.
    pub ingress: Ingress,
    /// The domain of `<port>-<sandboxID>.<domain>`, if one leads here.
    pub domain: Option<String>,
    /// The longest time to live, in seconds.
    pub max_timeout: i64,
    /// Sandboxes that a team may have at once.
    pub sandboxes_per_team: u64,
}

/// The control plane. Clones are the same.
#[derive(Clone)]
pub struct Control {
    pub(crate) config: Arc<ControlConfig>,
    /// As last read from the node. A template does not change; a name that is not here may be new there.
    templates: Arc<RwLock<Vec<TemplateView>>>,
}

/// Who asks.
#[derive(Debug, Clone)]
pub struct Caller {
    /// The team its key opens.
    pub team: TeamId,
    /// The team's name.
    pub name: String,
}

impl Control {
    /// Settles what an earlier server left in the database.
    pub async fn start(config: ControlConfig) -> Result<Self, sqlx::Error> {
        config.db.begin().await?;
        Ok(Self { config: Arc::new(config), templates: Arc::default() })
    }

    /// Makes the first team and key, if there is none; the key is returned to be shown, and is not kept.
    pub async fn first_key(db: &Db) -> Result<Option<Secret>, ApiError> {
        if db.first_team().await?.is_some() {
            return Ok(None);
        }
        let random = |error: std::io::Error| ApiError::internal(&error);
        let key = keys::new_key().map_err(random)?;
        let team = TeamId::from_random(keys::random().map_err(random)?);
        db.add_team(&team, "default", &keys::hash(key.expose())).await?;
        Ok(Some(key))
    }

    /// Who has this key.
    pub async fn authenticate(&self, key: &str) -> Result<Caller, ApiError> {
        match self.config.db.team_of_key(&keys::hash(key)).await? {
            Some((team, name)) => Ok(Caller { team, name }),
            None => Err(ApiError::unauthenticated(
                "this API key is not known to this server; `pando env` prints the one that is",
            )),
        }
    }

    /// All templates, read again from the node.
    pub async fn templates(&self) -> Result<Vec<TemplateView>, ApiError> {
        let templates = self.config.node.templates().await?;
        self.templates.write().clone_from(&templates);
        Ok(templates)
    }

    /// The template of an ID or a name, `name:default` and `namespace/name` included.
    pub async fn template(&self, name: &str) -> Result<TemplateView, ApiError> {
        if let Some(found) = find_template(&self.templates.read(), name) {
            return Ok(found);
        }
        find_template(&self.templates().await?, name).ok_or_else(|| ApiError::template_not_found(name))
    }

    /// Whose signature it is, for a signed file URL that names no sandbox (`e2b-protocol` 1.1). One that is nobody's is
    /// refused in the agent's words.
    pub async fn sandbox_of_signature(&self, url: &SignedUrl<'_>) -> Result<SandboxId, ApiError> {
        let running = self.config.db.all_running().await?;
        let signed = |id: &SandboxId| {
            let token = self.config.seed.envd_token(id);
            let ours = keys::file_signature(&token, url.path, url.operation, url.user, url.expiration);
            Secret::new(ours).matches(url.signature)
        };
        running.into_iter().find(signed).ok_or_else(|| ApiError::unauthenticated("invalid signature"))
    }
}

/// The parts of a signed file URL.
pub struct SignedUrl<'a> {
    /// `signature`.
    pub signature: &'a str,
    /// `path`, unescaped.
    pub path: &'a str,
    /// `read` or `write`.
    pub operation: &'a str,
    /// `username`, or nothing.
    pub user: &'a str,
    /// `signature_expiration`.
    pub expiration: Option<&'a str>,
}

fn find_template(templates: &[TemplateView], name: &str) -> Option<TemplateView> {
    let bare = name.strip_suffix(":default").unwrap_or(name);
    let bare = bare.strip_prefix("default/").unwrap_or(bare);
    let is = |template: &&TemplateView| {
        template.manifest.template_id.as_str() == name
            || template.manifest.aliases.iter().any(|alias| alias == bare)
    };
    // The newest of a name is the one meant.
    templates.iter().filter(is).max_by_key(|template| template.manifest.created_at).cloned()
}

/// Runs `work` to its end even if the caller goes away.
pub async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::spawn(work).await.map_err(|error| ApiError::internal(&error))?
}
