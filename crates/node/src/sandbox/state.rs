//! The states of a sandbox and what moves it from one to the next: a pure function, so that it can be tested whole.
//!
//! ```text
//!            GuestReady             Kill, MachineEnded
//!  creating ────────────► running ─────────────────────► killing ──Released──► gone
//!      │                                                    ▲
//!      └───────── StartFailed, Kill, MachineEnded ──────────┘
//! ```

use proto::node::SandboxState;

/// What can happen to a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// The guest said that it is who it should be.
    GuestReady,
    /// A step of the start failed.
    StartFailed,
    /// It is to end: its owner asked, its time is up, the node stops.
    Kill,
    /// The machine's process ended by itself.
    MachineEnded,
    /// Everything it had on the host is gone.
    Released,
}

/// The state after `input`, or None where it changes nothing.
pub fn next(state: SandboxState, input: Input) -> Option<SandboxState> {
    use SandboxState::{Creating, Gone, Killing, Running};
    match (state, input) {
        (Creating, Input::GuestReady) => Some(Running),
        (Creating, Input::StartFailed | Input::Kill | Input::MachineEnded) => Some(Killing),
        (Running, Input::Kill | Input::MachineEnded) => Some(Killing),
        (Killing, Input::Released) => Some(Gone),
        (Creating, Input::Released)
        | (Running, Input::GuestReady | Input::StartFailed | Input::Released)
        | (Killing, Input::GuestReady | Input::StartFailed | Input::Kill | Input::MachineEnded)
        | (Gone, _) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn inputs() -> impl Strategy<Value = Vec<Input>> {
        proptest::collection::vec(
            prop_oneof![
                Just(Input::GuestReady),
                Just(Input::StartFailed),
                Just(Input::Kill),
                Just(Input::MachineEnded),
                Just(Input::Released)
            ],
            0..20,
        )
    }

    proptest! {
        #[test]
        fn life_only_goes_forward_and_always_ends(inputs in inputs()) {
            let rank = |state| match state {
                SandboxState::Creating => 0,
                SandboxState::Running => 1,
                SandboxState::Killing => 2,
                SandboxState::Gone => 3,
            };
            let mut state = SandboxState::Creating;
            for input in inputs {
                if let Some(after) = next(state, input) {
                    prop_assert!(rank(after) > rank(state));
                    // Nothing is gone while it may still have something on the host.
                    prop_assert!(after != SandboxState::Gone || input == Input::Released);
                    state = after;
                }
            }
            // From any state, being killed and released ends it.
            let state = next(state, Input::Kill).unwrap_or(state);
            let state = next(state, Input::Released).unwrap_or(state);
            prop_assert_eq!(state, SandboxState::Gone);
        }
    }
}
