//! Which request is allowed when, as a pure function; the diagram is in `proto::vmm`.

use proto::vmm::{Phase, Request};

use crate::Error;

/// The name of a request, for messages.
pub fn name(request: &Request) -> &'static str {
    match request {
        Request::Boot(_) => "boot",
        Request::Restore(_) => "be restored",
        Request::Pause => "be paused",
        Request::Resume => "resume",
        Request::Save(_) => "be saved",
        Request::Fork { .. } => "be forked",
        Request::Stats => "report",
        Request::Balloon { .. } => "change its balloon",
        Request::Stop => "stop",
        _ => "do that",
    }
}

/// The phase after `request` has succeeded. A repeated pause or resume is no error: the one who asks may not know that
/// an earlier request got through. A zygote never runs.
///
/// # Errors
/// When the request is not allowed in `phase`.
pub fn next(phase: Phase, request: &Request, zygote: bool) -> Result<Phase, Error> {
    let after = match (phase, request) {
        (Phase::Empty, Request::Boot(_)) if !zygote => Phase::Running,
        (Phase::Empty, Request::Restore(_)) => Phase::Paused,
        (Phase::Paused, Request::Resume) if !zygote => Phase::Running,
        (Phase::Running, Request::Resume) => Phase::Running,
        (Phase::Paused | Phase::Running, Request::Pause) => Phase::Paused,
        (Phase::Paused, Request::Save(_)) => Phase::Paused,
        (Phase::Paused | Phase::Running, Request::Fork { .. } | Request::Balloon { .. }) => phase,
        (_, Request::Stats) => phase,
        (_, Request::Stop) => Phase::Ended,
        _ => return Err(Error::WrongPhase { phase, request: name(request) }),
    };
    Ok(after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn requests() -> impl Strategy<Value = Request> {
        let fd = proto::vmm::Fd(0);
        let devices = proto::vmm::DevicesSpec { disks: Vec::new(), card: None, console: None };
        let boot = proto::vmm::BootSpec {
            vcpus: 1,
            memory_mib: 1,
            huge_pages: false,
            kernel: fd,
            initramfs: None,
            command_line: String::new(),
            devices: devices.clone(),
        };
        let restore = proto::vmm::RestoreSpec { state: fd, memory: Vec::new(), devices };
        let save = proto::vmm::SaveSpec { state: fd, memory: fd, pagemap: None };
        prop_oneof![
            Just(Request::Boot(boot)),
            Just(Request::Restore(restore)),
            Just(Request::Pause),
            Just(Request::Resume),
            Just(Request::Save(save)),
            Just(Request::Fork { children: Vec::new(), deltas: Vec::new() }),
            Just(Request::Stats),
            Just(Request::Balloon { mib: 1 }),
            Just(Request::Stop),
        ]
    }

    proptest! {
        #[test]
        fn whatever_is_asked(sequence in prop::collection::vec(requests(), 0..40), zygote: bool) {
            let mut phase = Phase::Empty;
            let mut made = 0;
            for request in &sequence {
                match next(phase, request, zygote) {
                    Ok(after) => {
                        made += u32::from(matches!(request, Request::Boot(_) | Request::Restore(_)));
                        prop_assert!(!(zygote && after == Phase::Running), "a zygote never runs");
                        prop_assert!(phase != Phase::Ended || after == Phase::Ended, "nothing runs after its end");
                        if matches!(request, Request::Save(_)) {
                            prop_assert_eq!(phase, Phase::Paused);
                        }
                        phase = after;
                    }
                    Err(error) => prop_assert_eq!(error.code(), proto::vmm::FailureCode::WrongPhase),
                }
            }
            prop_assert!(made <= 1, "a process makes one machine");
        }
    }
}
