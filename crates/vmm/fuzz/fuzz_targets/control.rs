// A packet of any content on the control socket, against every phase.
#![no_main]

use libfuzzer_sys::fuzz_target;
use proto::vmm::{Phase, Request};
use vmm::machine::{Descriptors, make_devices};

fuzz_target!(|data: &[u8]| {
    let Ok(request) = serde_json::from_slice::<Request>(data) else { return };
    for phase in [Phase::Empty, Phase::Paused, Phase::Running, Phase::Ended] {
        for zygote in [false, true] {
            let _ = vmm::phase::next(phase, &request, zygote);
        }
    }
    // Whatever is named did not come.
    let mut none = Descriptors::new(Vec::new());
    let devices = match &request {
        Request::Boot(spec) => &spec.devices,
        Request::Restore(spec) => &spec.devices,
        _ => return,
    };
    assert!(make_devices(devices, &mut none).is_err() || devices.disks.is_empty() && devices.card.is_none());
});
