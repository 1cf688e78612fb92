//! What the command line asks of the public API.

use http::{HeaderMap, HeaderName, HeaderValue, Method};
use proto::api::{ListedSandbox, NewSandbox, Sandbox, SandboxDetail, SandboxLogs, SetTimeout, Template};
use proto::{SandboxId, Secret};

use crate::envd::Envd;
use crate::http::{ClientError, Endpoint, Http};

const NO_BODY: Option<&()> = None;
const NEXT_TOKEN: &str = "x-next-token";

/// The public API with one key.
#[derive(Clone)]
pub struct ApiClient {
    http: Http,
    endpoint: Endpoint,
}

impl ApiClient {
    /// The API at `origin` (`http://host:port`).
    pub fn new(origin: &str, key: &Secret) -> Result<Self, ClientError> {
        let origin = origin.trim_end_matches('/');
        let endpoint = Endpoint::Tcp(origin.to_owned());
        let mut headers = HeaderMap::new();
        let value = HeaderValue::from_str(key.expose())
            .map_err(|error| ClientError::Request { endpoint: origin.to_owned(), source: error.into() })?;
        headers.insert(HeaderName::from_static("x-api-key"), value);
        Ok(Self { http: Http::new(endpoint.clone(), headers), endpoint })
    }

    /// Creates a sandbox.
    pub async fn create(&self, new: &NewSandbox) -> Result<Sandbox, ClientError> {
        self.http.call(Method::POST, "/v2/sandboxes", Some(new)).await
    }

    /// One sandbox.
    pub async fn get(&self, id: &SandboxId) -> Result<SandboxDetail, ClientError> {
        self.http.call(Method::GET, &format!("/sandboxes/{id}"), NO_BODY).await
    }

    /// All sandboxes, newest first.
    pub async fn list(&self) -> Result<Vec<ListedSandbox>, ClientError> {
        let mut all = Vec::new();
        let mut path = "/v2/sandboxes?limit=100".to_owned();
        loop {
            let (headers, bytes) = self.http.json(Method::GET, &path, NO_BODY).await?;
            let page: Vec<ListedSandbox> =
                serde_json::from_slice(&bytes).map_err(|error| self.http.malformed(&error))?;
            all.extend(page);
            match headers
                .get(NEXT_TOKEN)
                .and_then(|token| token.to_str().ok())
                .filter(|token| !token.is_empty())
            {
                Some(token) => path = format!("/v2/sandboxes?limit=100&nextToken={token}"),
                None => return Ok(all),
            }
        }
    }

    /// Ends a sandbox.
    pub async fn kill(&self, id: &SandboxId) -> Result<(), ClientError> {
        self.http.json(Method::DELETE, &format!("/sandboxes/{id}"), NO_BODY).await.map(|_| ())
    }

    /// Sets a sandbox's time to live, in seconds from now.
    pub async fn set_timeout(&self, id: &SandboxId, timeout: i64) -> Result<(), ClientError> {
        let body = SetTimeout { timeout };
        self.http.json(Method::POST, &format!("/sandboxes/{id}/timeout"), Some(&body)).await.map(|_| ())
    }

    /// What a sandbox's machine said.
    pub async fn logs(&self, id: &SandboxId) -> Result<SandboxLogs, ClientError> {
        self.http.call(Method::GET, &format!("/sandboxes/{id}/logs"), NO_BODY).await
    }

    /// The templates.
    pub async fn templates(&self) -> Result<Vec<Template>, ClientError> {
        self.http.call(Method::GET, "/templates", NO_BODY).await
    }

    /// The agent of a sandbox, by way of the same address.
    pub fn envd(&self, id: &SandboxId, token: Option<&str>) -> Result<Envd, ClientError> {
        Envd::new(self.endpoint.clone(), id, token)
    }
}
