//! `filesystem.Filesystem`: requests as Connect messages.
//!
//! Owns: the mapping between messages, [`super`] and [`crate::watch`]. Does not own: what the operations do.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use connectrpc::{ConnectError, RequestContext, Response, ServiceRequest, ServiceResult, ServiceStream};
use proto::rpc::filesystem as pb;

use super::FileError;
use crate::agent::Agent;
use crate::errors::{chain, joined};
use crate::paths;
use crate::process::rpc::keepalive;
use crate::users::User;
use crate::watch::{WatchError, Watcher};
use pb::__buffa::oneof::watch_dir_response::Event as PbEvent;

/// The service.
pub(crate) struct FilesystemService(pub(crate) Arc<Agent>);

impl From<WatchError> for ConnectError {
    fn from(error: WatchError) -> Self {
        let text = chain(&error);
        match error {
            WatchError::File(error) => error.into(),
            WatchError::NotDirectory(_) | WatchError::Network(_) => Self::invalid_argument(text),
            // Not resource_exhausted: clients try that again by themselves, and would miss the loss.
            WatchError::Overflow => Self::new(connectrpc::ErrorCode::DataLoss, text),
            WatchError::TooMany | WatchError::Io(_) => Self::resource_exhausted(text),
            WatchError::Unknown(_) => Self::not_found(text),
        }
    }
}

impl FilesystemService {
    async fn user(&self, ctx: &RequestContext) -> Result<User, ConnectError> {
        let (agent, headers) = (Arc::clone(&self.0), ctx.headers().clone());
        Ok(tokio::task::spawn_blocking(move || agent.caller(&headers)).await.map_err(joined)??)
    }

    fn path(&self, path: &str, user: &User) -> Result<PathBuf, FileError> {
        Ok(paths::resolve(path, user, self.0.default_workdir().as_deref())?)
    }

    async fn watch(
        &self,
        ctx: &RequestContext,
        request: pb::CreateWatcherRequest,
    ) -> Result<Arc<Watcher>, ConnectError> {
        let user = self.user(ctx).await?;
        let path = self.path(&request.path, &user)?;
        let watcher = crate::watch::Options {
            path,
            recursive: request.recursive,
            include_entry: request.include_entry,
            allow_network_mounts: request.allow_network_mounts,
        };
        Ok(self.0.watchers.watch(watcher, user).await?)
    }
}

struct Watching {
    watcher: Arc<Watcher>,
    ready: std::collections::VecDeque<pb::FilesystemEvent>,
    started: bool,
    failed: bool,
    keepalive: Duration,
}

impl Watching {
    async fn next(&mut self) -> Option<Result<pb::WatchDirResponse, ConnectError>> {
        if self.failed {
            return None;
        }
        let event: PbEvent = if !std::mem::replace(&mut self.started, true) {
            pb::watch_dir_response::StartEvent::default().into()
        } else if let Some(event) = self.ready.pop_front() {
            event.into()
        } else {
            tokio::select! {
                events = self.watcher.next() => match events {
                    Ok(events) => self.ready = events.into(),
                    Err(error) => {
                        self.failed = true;
                        return Some(Err(error.into()));
                    }
                },
                () = tokio::time::sleep(self.keepalive) => {}
            }
            match self.ready.pop_front() {
                Some(event) => event.into(),
                None => pb::watch_dir_response::KeepAlive::default().into(),
            }
        };
        Some(Ok(pb::WatchDirResponse { event: Some(event), ..Default::default() }))
    }
}

#[allow(
    refining_impl_trait,
    reason = "async fn with concrete types reads better than the generated signatures"
)]
impl pb::Filesystem for FilesystemService {
    async fn stat(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, pb::StatRequest>,
    ) -> ServiceResult<pb::StatResponse> {
        let request = request.to_owned_message();
        let user = self.user(&ctx).await?;
        let path = self.path(&request.path, &user)?;
        let entry = super::run(&user, move || super::stat(&path)).await?;
        Response::ok(pb::StatResponse { entry: entry.into(), ..Default::default() })
    }

    async fn make_dir(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, pb::MakeDirRequest>,
    ) -> ServiceResult<pb::MakeDirResponse> {
        let request = request.to_owned_message();
        let user = self.user(&ctx).await?;
        let path = self.path(&request.path, &user)?;
        let entry = super::run(&user, move || super::make_dir(&path)).await?;
        // What the client writes into it next must be seen by those who watch.
        self.0.watchers.settle().await;
        Response::ok(pb::MakeDirResponse { entry: entry.into(), ..Default::default() })
    }

    async fn r#move(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, pb::MoveRequest>,
    ) -> ServiceResult<pb::MoveResponse> {
        let request = request.to_owned_message();
        let user = self.user(&ctx).await?;
        let (from, to) = (self.path(&request.source, &user)?, self.path(&request.destination, &user)?);
        let entry = super::run(&user, move || super::rename(&from, &to)).await?;
        self.0.watchers.settle().await;
        Response::ok(pb::MoveResponse { entry: entry.into(), ..Default::default() })
    }

    async fn list_dir(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, pb::ListDirRequest>,
    ) -> ServiceResult<pb::ListDirResponse> {
        let request = request.to_owned_message();
        let user = self.user(&ctx).await?;
        let path = self.path(&request.path, &user)?;
        let entries = super::run(&user, move || super::list(&path, request.depth)).await?;
        Response::ok(pb::ListDirResponse { entries, ..Default::default() })
    }

    async fn remove(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, pb::RemoveRequest>,
    ) -> ServiceResult<pb::RemoveResponse> {
        let request = request.to_owned_message();
        let user = self.user(&ctx).await?;
        let path = self.path(&request.path, &user)?;
        super::run(&user, move || super::remove(&path)).await?;
        Response::ok(pb::RemoveResponse::default())
    }

    async fn watch_dir(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, pb::WatchDirRequest>,
    ) -> ServiceResult<ServiceStream<pb::WatchDirResponse>> {
        let request = request.to_owned_message();
        let watcher = self
            .watch(
                &ctx,
                pb::CreateWatcherRequest {
                    path: request.path,
                    recursive: request.recursive,
                    include_entry: request.include_entry,
                    allow_network_mounts: request.allow_network_mounts,
                    ..Default::default()
                },
            )
            .await?;
        let state = Watching {
            watcher,
            ready: Default::default(),
            started: false,
            failed: false,
            keepalive: keepalive(&ctx),
        };
        Response::stream_ok(futures::stream::unfold(state, |mut state| async move {
            state.next().await.map(|item| (item, state))
        }))
    }

    async fn create_watcher(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, pb::CreateWatcherRequest>,
    ) -> ServiceResult<pb::CreateWatcherResponse> {
        let watcher = self.watch(&ctx, request.to_owned_message()).await?;
        let watcher_id = self.0.watchers.keep(watcher)?;
        Response::ok(pb::CreateWatcherResponse { watcher_id, ..Default::default() })
    }

    async fn get_watcher_events(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::GetWatcherEventsRequest>,
    ) -> ServiceResult<pb::GetWatcherEventsResponse> {
        let request = request.to_owned_message();
        let watcher = self.0.watchers.kept(&request.watcher_id)?;
        let events = watcher.drain().await?;
        Response::ok(pb::GetWatcherEventsResponse { events, ..Default::default() })
    }

    async fn remove_watcher(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::RemoveWatcherRequest>,
    ) -> ServiceResult<pb::RemoveWatcherResponse> {
        let request = request.to_owned_message();
        self.0.watchers.release(&request.watcher_id)?;
        Response::ok(pb::RemoveWatcherResponse::default())
    }
}
