//! The one thread that does everything but run the guest: answers the control socket, works for the devices, and tells
//! how the guest ended.
//!
//! It waits with poll(2) on a list that is made anew each time: some twenty descriptors, and nothing to take apart when
//! the process is forked. While the machine is paused only the control socket and the console are looked at, so that
//! nothing changes under a snapshot.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use kvm_ioctls::Kvm;
use proto::vmm::{Answer, ChildSpec, Ending, Fd, Phase, Request, VERSION};

use crate::control::{Connection, MAX_CONNECTIONS, Received};
use crate::devices::card::{RECEIVE, TRANSMIT};
use crate::devices::transport::Backend;
use crate::devices::would_block;
use crate::fork::{self, Outcome};
use crate::machine::{Descriptors, Machine};
use crate::sys::{self, Waiting};
use crate::vcpu::lock;
use crate::{Error, phase};

/// How long a machine whose guest has ended waits for somebody to tell it to.
const FAREWELL: Duration = Duration::from_secs(60);

/// What a descriptor in the list is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Listener,
    Connection(RawFd),
    Ended,
    ConsoleOutput,
    Console,
    Doorbell(usize, usize),
    Link(usize),
}

/// The process.
pub struct Server {
    kvm: Kvm,
    listener: OwnedFd,
    zygote: bool,
    phase: Phase,
    connections: Vec<Connection>,
    machine: Option<Machine>,
    ending: Option<(Ending, Instant)>,
    stop: bool,
}

impl Server {
    /// A process without a machine yet.
    pub fn new(kvm: Kvm, listener: OwnedFd, zygote: bool) -> Self {
        Self {
            kvm,
            listener,
            zygote,
            phase: Phase::Empty,
            connections: Vec::new(),
            machine: None,
            ending: None,
            stop: false,
        }
    }

    /// Serves until the machine has ended and somebody was told, or it is asked to stop.
    ///
    /// # Errors
    /// When poll(2) fails.
    pub fn run(mut self) -> Result<(), Error> {
        while !self.stop {
            for (source, events) in self.wait()? {
                self.handle(source, events);
            }
            self.retry();
            if let Some((_, since)) = &self.ending
                && (!self.connections.is_empty() || since.elapsed() > FAREWELL)
            {
                // Whoever is connected was told when it ended, or when it connected.
                break;
            }
        }
        Ok(())
    }

    /// Waits for something to do.
    fn wait(&self) -> Result<Vec<(Source, i16)>, Error> {
        let (sources, mut list, timeout) = self.list();
        match sys::poll(&mut list, timeout) {
            Ok(()) => {
                let ready = sources.into_iter().zip(list.iter().map(|waiting| waiting.revents));
                Ok(ready.filter(|(_, events)| *events != 0).collect())
            }
            Err(error) if would_block(&error) => Ok(Vec::new()),
            Err(error) => Err(Error::io("wait for something to do")(error)),
        }
    }

    /// What to wait for, and how long.
    fn list(&self) -> (Vec<Source>, Vec<Waiting>, Option<Duration>) {
        let (mut sources, mut list) = (Vec::new(), Vec::new());
        let mut add = |source, fd: RawFd, events| {
            sources.push(source);
            list.push(Waiting { fd, events, revents: 0 });
        };
        if self.connections.len() < MAX_CONNECTIONS {
            add(Source::Listener, self.listener.as_raw_fd(), libc::POLLIN);
        }
        for connection in &self.connections {
            let fd = connection.fd().as_raw_fd();
            add(Source::Connection(fd), fd, libc::POLLIN);
        }
        let mut until = self.ending.as_ref().map(|(_, since)| *since + FAREWELL);
        if let Some(machine) = &self.machine {
            let devices = lock(&machine.shared.devices);
            add(Source::Ended, machine.shared.ended.as_raw_fd(), libc::POLLIN);
            add(Source::ConsoleOutput, devices.serial.wake().as_raw_fd(), libc::POLLIN);
            if let Some(console) = &machine.console
                && !devices.serial.output().0.is_empty()
            {
                add(Source::Console, console.as_raw_fd(), libc::POLLOUT);
            }
            if self.phase == Phase::Running {
                for (number, device) in devices.virtio.iter().enumerate() {
                    for (queue, doorbell) in device.doorbells().iter().enumerate() {
                        add(Source::Doorbell(number, queue), doorbell.as_raw_fd(), libc::POLLIN);
                    }
                    if let Backend::Card(card) = &device.backend
                        && let Some(link) = card.link()
                    {
                        let (read, write) = card.interest();
                        // A card that the guest does not use takes nothing: its link waits, and so does who sends.
                        let (read, write) =
                            (read && device.is_ready(RECEIVE), write && device.is_ready(TRANSMIT));
                        let events =
                            if read { libc::POLLIN } else { 0 } | if write { libc::POLLOUT } else { 0 };
                        if events != 0 {
                            add(Source::Link(number), link.as_raw_fd(), events);
                        }
                    }
                    until = until.into_iter().chain(device.retry_at()).min();
                }
            }
        }
        (sources, list, until.map(|at| at.saturating_duration_since(Instant::now())))
    }

    fn handle(&mut self, source: Source, events: i16) {
        match source {
            Source::Listener => self.accept(),
            Source::Connection(fd) => self.receive(fd),
            Source::Ended => self.guest_ended(),
            Source::ConsoleOutput => {
                self.with_machine(|machine| {
                    // Empties the counter; what waits is in the ring.
                    let _ = lock(&machine.shared.devices).serial.wake().read();
                });
                self.write_console();
            }
            Source::Console => self.write_console(),
            Source::Doorbell(device, queue) => self.with_machine(|machine| {
                if let Some(device) = lock(&machine.shared.devices).virtio.get_mut(device) {
                    if let Some(doorbell) = device.doorbells().get(queue) {
                        let _ = doorbell.read();
                    }
                    device.process(queue, &machine.memory.map);
                }
            }),
            Source::Link(device) => self.with_machine(|machine| {
                if let Some(device) = lock(&machine.shared.devices).virtio.get_mut(device) {
                    if events & libc::POLLOUT != 0 {
                        device.process(TRANSMIT, &machine.memory.map);
                    }
                    if events & !libc::POLLOUT != 0 {
                        device.process(RECEIVE, &machine.memory.map);
                    }
                }
            }),
        }
    }

    fn with_machine(&self, work: impl FnOnce(&Machine)) {
        if let Some(machine) = &self.machine {
            work(machine);
        }
    }

    /// Goes on with what a rate had held back.
    fn retry(&mut self) {
        if self.phase != Phase::Running {
            return;
        }
        self.with_machine(|machine| {
            let now = Instant::now();
            for device in &mut lock(&machine.shared.devices).virtio {
                if device.retry_at().is_some_and(|at| at <= now) {
                    let queue = if matches!(device.backend, Backend::Card(_)) { TRANSMIT } else { 0 };
                    device.process(queue, &machine.memory.map);
                }
            }
        });
    }

    fn write_console(&mut self) {
        let Some(machine) = &mut self.machine else { return };
        let mut devices = lock(&machine.shared.devices);
        while let Some(console) = &machine.console {
            let bytes = devices.serial.output().0;
            if bytes.is_empty() {
                break;
            }
            let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
            match rustix::net::send(console, bytes, flags) {
                Ok(count) => devices.serial.taken(count),
                Err(error) if would_block(&error.into()) => break,
                // Nobody reads any more; the ring goes on.
                Err(_) => machine.console = None,
            }
        }
    }

    fn accept(&mut self) {
        let Some(connection) = Connection::accept(self.listener.as_fd()) else { return };
        let hello = Answer::Hello { version: VERSION, pid: std::process::id(), phase: self.phase };
        let ending = self.ending.as_ref().map(|(ending, _)| Answer::Event(ending.clone()));
        if connection.send(&hello) && ending.is_none_or(|ending| connection.send(&ending)) {
            self.connections.push(connection);
        }
    }

    fn receive(&mut self, fd: RawFd) {
        let at = |connections: &[Connection]| {
            connections.iter().position(|connection| connection.fd().as_raw_fd() == fd)
        };
        let Some(place) = at(&self.connections) else { return };
        let answer = match self.connections[place].receive() {
            Received::Nothing => return,
            Received::Closed => {
                self.connections.swap_remove(place);
                return;
            }
            Received::Malformed(error) => Some(failed(&error)),
            Received::Request(request, fds) => self.answer(*request, fds),
        };
        // A child of a fork has no connection to answer on.
        let (Some(answer), Some(place)) = (answer, at(&self.connections)) else { return };
        if !self.connections[place].send(&answer) {
            self.connections.swap_remove(place);
        }
    }

    /// Does what was asked; None in a child.
    fn answer(&mut self, request: Request, mut fds: Descriptors) -> Option<Answer> {
        let after = match phase::next(self.phase, &request, self.zygote) {
            Ok(after) => after,
            Err(error) => return Some(failed(&error)),
        };
        let outcome = match request {
            Request::Fork { children, deltas } => return self.fork(&children, &deltas, fds),
            Request::Stats => {
                return Some(Answer::Stats(self.machine.as_ref().map(Machine::stats).unwrap_or_default()));
            }
            request => self.perform(request, &mut fds),
        };
        match outcome {
            Ok(()) => {
                self.phase = after;
                Some(Answer::Done)
            }
            Err(error) => Some(failed(&error)),
        }
    }

    fn perform(&mut self, request: Request, fds: &mut Descriptors) -> Result<(), Error> {
        match (request, &self.machine) {
            (Request::Boot(spec), _) => {
                let machine = Machine::boot(&self.kvm, &spec, fds)?;
                machine.resume();
                self.machine = Some(machine);
            }
            (Request::Restore(spec), _) => {
                let machine = Machine::restore(&self.kvm, &spec, fds)?;
                if self.zygote {
                    machine.memory.populate();
                }
                self.machine = Some(machine);
            }
            (Request::Pause, Some(machine)) => machine.pause()?,
            (Request::Resume, Some(machine)) => machine.resume(),
            (Request::Save(spec), Some(machine)) => machine.save(&spec, fds)?,
            (Request::Balloon { mib }, Some(machine)) => machine.balloon(mib),
            (Request::Stop, _) => {
                self.stop = true;
                self.tell(&Answer::Event(Ending::Stopped));
            }
            _ => return Err(Error::BadRequest("there is no machine yet".to_owned())),
        }
        Ok(())
    }

    fn fork(&mut self, children: &[ChildSpec], deltas: &[Fd], mut fds: Descriptors) -> Option<Answer> {
        let running = self.phase == Phase::Running;
        let Some(machine) = &mut self.machine else {
            return Some(failed(&Error::BadRequest("there is no machine yet".to_owned())));
        };
        match fork::copies(&self.kvm, machine, running, children, deltas, &mut fds, self.zygote) {
            Ok(Outcome::Parent { pids, failure, paused_us }) => {
                let failure = failure.map(|error| proto::chain(&error));
                Some(Answer::Forked { pids, paused_us, failure })
            }
            Ok(Outcome::Child(copied)) => {
                // Their descriptors are closed already.
                std::mem::forget(fds);
                self.become_child(copied);
                None
            }
            Err(error) => Some(failed(&error)),
        }
    }

    /// Goes on as the copy. What the parent had is forgotten, not dropped: its descriptors and threads are not here.
    fn become_child(&mut self, copied: Result<Box<fork::Copied>, fork::Stillborn>) {
        std::mem::forget(self.machine.take());
        std::mem::forget(std::mem::take(&mut self.connections));
        self.zygote = false;
        let (control, run) = match copied {
            Ok(copied) => {
                self.machine = Some(copied.machine);
                self.phase = Phase::Paused;
                (copied.control, copied.run)
            }
            Err(stillborn) => {
                self.phase = Phase::Ended;
                let detail = proto::chain(&stillborn.error);
                self.ending = Some((Ending::Fault { detail }, Instant::now()));
                (stillborn.control, false)
            }
        };
        std::mem::forget(std::mem::replace(&mut self.listener, control));
        if run && let Some(machine) = &self.machine {
            machine.resume();
            self.phase = Phase::Running;
        }
    }

    fn guest_ended(&mut self) {
        let Some(machine) = &self.machine else { return };
        let _ = machine.shared.ended.read();
        let Some(ending) = lock(&machine.shared.ending).clone() else {
            return;
        };
        if self.ending.is_some() {
            return;
        }
        self.write_console();
        self.phase = Phase::Ended;
        self.tell(&Answer::Event(ending.clone()));
        self.ending = Some((ending, Instant::now()));
    }

    fn tell(&mut self, answer: &Answer) {
        self.connections.retain(|connection| connection.send(answer));
    }
}

fn failed(error: &Error) -> Answer {
    Answer::Failed { code: error.code(), message: proto::chain(error) }
}
