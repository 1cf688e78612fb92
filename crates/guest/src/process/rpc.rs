//! `process.Process`: requests and events as Connect messages.
//!
//! Owns: the mapping between messages and [`super::Table`], deadlines and keep-alives of streams, and which error is
//! which code (`e2b-protocol` 3.2). Does not own: what a command is.

use std::ffi::OsString;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use connectrpc::{
    ConnectError, InboundStream, RequestContext, Response, ServiceRequest, ServiceResult, ServiceStream,
};
use futures::{Stream, StreamExt};
use proto::rpc::process as pb;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::fanout::Event;
use super::input::InputError;
use super::{Config, Process, Start, StartError, Streams};
use crate::agent::{Agent, CallerError, Place};
use crate::errors::{chain, joined};
use crate::paths;
use crate::sys::rights::{as_user, own_uid};
use crate::users::User;
use pb::__buffa::oneof::process_event::Event as PbEvent;
use pb::__buffa::oneof::process_event::data_event::Output as PbOutput;
use pb::__buffa::oneof::process_input::Input as PbInput;
use pb::__buffa::oneof::process_selector::Selector;
use pb::__buffa::oneof::stream_input_request::Event as PbStreamEvent;

/// Keep-alive interval of clients that name none.
const KEEPALIVE: Duration = Duration::from_secs(90);
/// How long a kill waits for the end, so that the process is gone when it answers.
const KILL_WAIT: Duration = Duration::from_secs(2);
/// What a command without a `PATH` of its own gets.
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The service.
pub(crate) struct ProcessService(pub(crate) Arc<Agent>);

impl From<CallerError> for ConnectError {
    fn from(error: CallerError) -> Self {
        Self::unauthenticated(chain(&error))
    }
}

impl From<InputError> for ConnectError {
    fn from(error: InputError) -> Self {
        match error {
            InputError::CloseTerminal => Self::unknown(chain(&error)),
            _ => Self::internal(chain(&error)),
        }
    }
}

impl From<StartError> for ConnectError {
    fn from(error: StartError) -> Self {
        match error {
            StartError::Nul(_) => Self::invalid_argument(chain(&error)),
            StartError::Io(_) => Self::resource_exhausted(chain(&error)),
        }
    }
}

/// `Keepalive-Ping-Interval`, in seconds.
pub(crate) fn keepalive(ctx: &RequestContext) -> Duration {
    ctx.header("keepalive-ping-interval")
        .and_then(|value| value.to_str().ok()?.trim().parse().ok())
        .filter(|seconds| *seconds > 0)
        .map_or(KEEPALIVE, Duration::from_secs)
}

fn deadline(ctx: &RequestContext) -> Option<Instant> {
    ctx.time_remaining().map(|left| Instant::now() + left)
}

impl ProcessService {
    /// The command that a selector names; with `running`, not one that has ended.
    fn select(
        &self,
        selector: Option<&pb::ProcessSelector>,
        running: bool,
    ) -> Result<Arc<Process>, ConnectError> {
        let (found, what) = match selector.and_then(|selector| selector.selector.as_ref()) {
            Some(Selector::Pid(pid)) => (self.0.processes.by_pid(*pid), format!("pid {pid}")),
            Some(Selector::Tag(tag)) => (self.0.processes.by_tag(tag), format!("tag {tag}")),
            None => return Err(ConnectError::invalid_argument("no process selected")),
        };
        found
            .filter(|process| !(running && process.has_ended()))
            .ok_or_else(|| ConnectError::not_found(format!("process with {what} not found")))
    }

    async fn input(process: &Process, input: Option<&pb::ProcessInput>) -> Result<(), ConnectError> {
        let written = match input.and_then(|input| input.input.as_ref()) {
            Some(PbInput::Stdin(data)) => process.input.write_stdin(data).await,
            Some(PbInput::Pty(data)) => process.input.write_pty(data).await,
            None => return Err(ConnectError::invalid_argument("no input given")),
        };
        written.map_err(|error| match error {
            // The pipe broke because the command is gone, or is about to be.
            _ if process.has_ended() => {
                ConnectError::not_found(format!("process with pid {} not found", process.pid))
            }
            error => error.into(),
        })
    }
}

/// The working directory of a command: the one asked for, which must exist, or the first default that does.
fn working_directory(
    asked: Option<&str>,
    user: &User,
    default: Option<&str>,
) -> Result<PathBuf, ConnectError> {
    let asked = asked.unwrap_or("");
    let path = paths::resolve(asked, user, default)
        .map_err(|error| ConnectError::invalid_argument(chain(&error)))?;
    let found = as_user(&user.credentials, || std::fs::metadata(&path));
    let found = found.and_then(|found| found);
    match found {
        Ok(found) if found.is_dir() => Ok(path),
        Ok(_) => Err(ConnectError::invalid_argument(format!("cwd '{}' is not a directory", path.display()))),
        // Nobody asked for it; an image need not have every user's home.
        Err(_) if asked.is_empty() => Ok("/".into()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(ConnectError::invalid_argument(format!("cwd '{}' does not exist", path.display())))
        }
        Err(error) => Err(ConnectError::invalid_argument(format!("cwd '{}': {error}", path.display()))),
    }
}

/// Environment, each stage over the one before: `PATH`, the user's, `/init`'s, the request's.
fn environment(agent: &Agent, user: &User, request: &[(String, String)]) -> Vec<(OsString, OsString)> {
    let mut all = std::collections::BTreeMap::<OsString, OsString>::new();
    all.insert("PATH".into(), PATH.into());
    all.extend(user.environment());
    all.extend(agent.settings.read().env.iter().map(|(key, value)| (key.into(), value.into())));
    all.extend(request.iter().map(|(key, value)| (key.into(), value.into())));
    all.into_iter().collect()
}

fn terminal_size(pty: &pb::PTY) -> (u16, u16) {
    let size = pty.size.as_option().cloned().unwrap_or_default();
    let clamp = |value: u32| u16::try_from(value).unwrap_or(u16::MAX);
    (clamp(size.cols), clamp(size.rows))
}

/// Prepares and forks. Blocks; runs on a thread for that.
fn start(
    agent: &Arc<Agent>,
    user: &User,
    request: pb::StartRequest,
) -> Result<(Arc<Process>, mpsc::Receiver<Event>), ConnectError> {
    let process = request
        .process
        .into_option()
        .filter(|process| !process.cmd.is_empty())
        .ok_or_else(|| ConnectError::invalid_argument("no command given"))?;
    let streams = match request.pty.as_option() {
        Some(pty) => {
            let (cols, rows) = terminal_size(pty);
            Streams::Terminal { cols, rows }
        }
        None => Streams::Pipes { stdin: request.stdin.unwrap_or(true) },
    };
    let envs: Vec<_> = process.envs.into_iter().collect();
    let credentials = user.credentials.clone();
    let start = Start {
        env: environment(agent, user, &envs),
        cwd: working_directory(process.cwd.as_deref(), user, agent.default_workdir().as_deref())?,
        config: Config { cmd: process.cmd, args: process.args, envs, cwd: process.cwd },
        tag: request.tag,
        credentials: (own_uid().is_root() || credentials.uid != own_uid().as_raw()).then_some(credentials),
        streams,
        reset_limits: agent.place == Place::Guest,
    };
    Ok(agent.processes.start(start)?)
}

type Events = Pin<Box<dyn Stream<Item = Result<pb::ProcessEvent, ConnectError>> + Send>>;

fn event(event: impl Into<PbEvent>) -> pb::ProcessEvent {
    pb::ProcessEvent { event: Some(event.into()), ..Default::default() }
}

fn encode(what: Event) -> pb::ProcessEvent {
    let data = |output| event(pb::process_event::DataEvent { output: Some(output), ..Default::default() });
    match what {
        Event::Stdout(bytes) => data(PbOutput::Stdout(bytes.into())),
        Event::Stderr(bytes) => data(PbOutput::Stderr(bytes.into())),
        Event::Pty(bytes) => data(PbOutput::Pty(bytes.into())),
        Event::End(end) => event(pb::process_event::EndEvent {
            exit_code: end.exit_code,
            exited: end.exited,
            error: (end.exit_code != 0).then(|| end.status.clone()),
            status: end.status,
            ..Default::default()
        }),
    }
}

struct Following {
    events: mpsc::Receiver<Event>,
    start: Option<u32>,
    keepalive: Duration,
    deadline: Option<Instant>,
    done: bool,
}

async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// The stream of one subscriber: start, what happens, end.
fn follow(process: &Process, events: mpsc::Receiver<Event>, ctx: &RequestContext) -> Events {
    let state = Following {
        events,
        start: Some(process.pid),
        keepalive: keepalive(ctx),
        deadline: deadline(ctx),
        done: false,
    };
    Box::pin(futures::stream::unfold(state, |mut state| async move {
        if state.done {
            return None;
        }
        if let Some(pid) = state.start.take() {
            return Some((Ok(event(pb::process_event::StartEvent { pid, ..Default::default() })), state));
        }
        let item = tokio::select! {
            // First, or endless output would starve it.
            biased;
            () = at(state.deadline) => {
                state.done = true;
                Err(ConnectError::deadline_exceeded("the command's time limit has passed"))
            }
            next = state.events.recv() => match next {
                Some(next) => {
                    state.done = matches!(next, Event::End(_));
                    Ok(encode(next))
                }
                None => {
                    state.done = true;
                    Err(ConnectError::aborted("this stream was read too slowly and has been cut; connect again"))
                }
            },
            () = tokio::time::sleep(state.keepalive) => {
                Ok(event(pb::process_event::KeepAlive::default()))
            }
        };
        Some((item, state))
    }))
}

#[allow(
    refining_impl_trait,
    reason = "async fn with concrete types reads better than the generated signatures"
)]
impl pb::Process for ProcessService {
    async fn list(
        &self,
        _ctx: RequestContext,
        _request: ServiceRequest<'_, pb::ListRequest>,
    ) -> ServiceResult<pb::ListResponse> {
        let processes = self.0.processes.running().into_iter().map(|process| pb::ProcessInfo {
            config: pb::ProcessConfig {
                cmd: process.config.cmd.clone(),
                args: process.config.args.clone(),
                envs: process.config.envs.iter().cloned().collect(),
                cwd: process.config.cwd.clone(),
                ..Default::default()
            }
            .into(),
            pid: process.pid,
            tag: process.tag.clone(),
            ..Default::default()
        });
        Response::ok(pb::ListResponse { processes: processes.collect(), ..Default::default() })
    }

    async fn connect(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, pb::ConnectRequest>,
    ) -> ServiceResult<ServiceStream<pb::ConnectResponse>> {
        let request = request.to_owned_message();
        let process = self.select(request.process.as_option(), false)?;
        let events = follow(&process, process.subscribe(), &ctx);
        Response::stream_ok(events.map(|event| {
            event.map(|event| pb::ConnectResponse { event: event.into(), ..Default::default() })
        }))
    }

    async fn start(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, pb::StartRequest>,
    ) -> ServiceResult<ServiceStream<pb::StartResponse>> {
        let request = request.to_owned_message();
        let agent = Arc::clone(&self.0);
        let headers = ctx.headers().clone();
        let started = tokio::task::spawn_blocking(move || {
            let user = agent.caller(&headers)?;
            start(&agent, &user, request)
        });
        let (process, events) = started.await.map_err(joined)??;
        if let Some(deadline) = deadline(&ctx) {
            // By itself, not by the stream: the client may leave first, or not read.
            let process = Arc::clone(&process);
            tokio::spawn(async move {
                tokio::select! {
                    () = tokio::time::sleep_until(deadline) => process.kill(),
                    () = process.wait() => {}
                }
            });
        }
        Response::stream_ok(
            follow(&process, events, &ctx).map(|event| {
                event.map(|event| pb::StartResponse { event: event.into(), ..Default::default() })
            }),
        )
    }

    async fn update(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::UpdateRequest>,
    ) -> ServiceResult<pb::UpdateResponse> {
        let request = request.to_owned_message();
        let process = self.select(request.process.as_option(), true)?;
        if let Some(pty) = request.pty.as_option() {
            let (cols, rows) = terminal_size(pty);
            process.input.resize(cols, rows)?;
        }
        Response::ok(pb::UpdateResponse::default())
    }

    async fn stream_input(
        &self,
        _ctx: RequestContext,
        mut requests: InboundStream<pb::StreamInputRequest>,
    ) -> ServiceResult<pb::StreamInputResponse> {
        let mut process = None;
        while let Some(request) = requests.next().await {
            match request?.to_owned_message().event {
                Some(PbStreamEvent::Start(start)) => {
                    process = Some(self.select(start.process.as_option(), true)?);
                }
                Some(PbStreamEvent::Data(data)) => {
                    let process = process.as_ref().ok_or_else(|| {
                        ConnectError::invalid_argument("the first message must be the start")
                    })?;
                    Self::input(process, data.input.as_option()).await?;
                }
                Some(PbStreamEvent::Keepalive(_)) | None => {}
            }
        }
        Response::ok(pb::StreamInputResponse::default())
    }

    async fn send_input(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::SendInputRequest>,
    ) -> ServiceResult<pb::SendInputResponse> {
        let request = request.to_owned_message();
        let process = self.select(request.process.as_option(), true)?;
        Self::input(&process, request.input.as_option()).await?;
        Response::ok(pb::SendInputResponse::default())
    }

    async fn send_signal(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::SendSignalRequest>,
    ) -> ServiceResult<pb::SendSignalResponse> {
        let request = request.to_owned_message();
        let process = self.select(request.process.as_option(), true)?;
        match request.signal.as_known() {
            Some(pb::Signal::SIGNAL_SIGKILL) => {
                process.kill();
                let _ = tokio::time::timeout(KILL_WAIT, process.wait()).await;
            }
            Some(pb::Signal::SIGNAL_SIGTERM) => process.terminate(),
            _ => return Err(ConnectError::unimplemented("only SIGTERM and SIGKILL can be sent")),
        }
        Response::ok(pb::SendSignalResponse::default())
    }

    async fn close_stdin(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::CloseStdinRequest>,
    ) -> ServiceResult<pb::CloseStdinResponse> {
        let request = request.to_owned_message();
        // Of a command that has just ended, the input is closed already: no error, as for a second close.
        let process = self.select(request.process.as_option(), false)?;
        process.input.close().await?;
        Response::ok(pb::CloseStdinResponse::default())
    }
}
