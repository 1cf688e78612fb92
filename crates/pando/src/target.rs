//! The server that a command talks to, and the key it has for it: from flags, from the environment that the SDKs use,
//! or from the data directory of a server on this machine.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use client::api::ApiClient;
use proto::Secret;

use crate::config::{DEFAULT_DATA_DIR, DEFAULT_LISTEN};

/// Where the server is; the same for every command that needs one.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Target {
    /// Data directory of a server on this machine: gives its address and first key
    #[arg(long, global = true, env = "PANDO_DATA_DIR", value_name = "DIR", default_value = DEFAULT_DATA_DIR)]
    pub(crate) data_dir: PathBuf,
    /// Address of the server, as http://HOST:PORT
    #[arg(long, global = true, env = "E2B_API_URL", value_name = "URL")]
    pub(crate) api_url: Option<String>,
    /// API key; better in E2B_API_KEY than on the command line
    #[arg(long, global = true, env = "E2B_API_KEY", value_name = "KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// Print JSON, for scripts
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// File with the first key, readable by root alone.
pub(crate) fn key_file(data_dir: &Path) -> PathBuf {
    data_dir.join("secrets/api-key")
}

/// File with the address of the running server.
pub(crate) fn address_file(data_dir: &Path) -> PathBuf {
    data_dir.join("run/address")
}

impl Target {
    /// The server's address.
    pub(crate) fn url(&self) -> String {
        let running = || std::fs::read_to_string(address_file(&self.data_dir)).ok();
        let url = self.api_url.clone().or_else(running).unwrap_or_else(|| format!("http://{DEFAULT_LISTEN}"));
        url.trim().trim_end_matches('/').to_owned()
    }

    /// The key.
    pub(crate) fn key(&self) -> Result<Secret> {
        if let Some(key) = &self.api_key {
            return Ok(Secret::new(key.trim()));
        }
        let path = key_file(&self.data_dir);
        match std::fs::read_to_string(&path) {
            Ok(key) => Ok(Secret::new(key.trim())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => bail!(
                "there is no API key in {}; start `pando serve` once, or set E2B_API_KEY",
                self.data_dir.display()
            ),
            Err(error) => {
                Err(error).with_context(|| format!("cannot read the API key in {}", path.display()))
            }
        }
    }

    /// A client of the server.
    pub(crate) fn client(&self) -> Result<ApiClient> {
        let url = self.url();
        if !url.starts_with("http://") {
            bail!("{url}: the command line speaks http:// only");
        }
        Ok(ApiClient::new(&url, &self.key()?)?)
    }
}
