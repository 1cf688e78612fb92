// A state file of any content: with a right header around it, so that the body is reached.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vmm::snapshot::State;

fuzz_target!(|data: &[u8]| {
    let _ = State::from_bytes(data);
    if let Ok(state) = State::from_bytes(&State::frame(data)) {
        // What can be read can be written, and is the same then.
        let again = state.to_bytes().unwrap();
        assert_eq!(again, State::from_bytes(&again).unwrap().to_bytes().unwrap());
    }
});
