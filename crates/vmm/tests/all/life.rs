//! A machine from its first instruction to its end.

use proto::vmm::{Answer, Ending, Phase, Request};

use crate::harness::{Fds, Vmm, fork};

#[test]
fn a_guest_boots_speaks_and_switches_itself_off() {
    let (mut vmm, mut console) = Vmm::boot("hello", 64);
    assert_eq!(console.line(), "hello 42");
    assert_eq!(vmm.client.ending(), Ending::PowerOff);
    assert!(vmm.process.wait().unwrap().success());
}

#[test]
fn copies_go_on_from_the_same_number_and_then_apart() {
    let (mut vmm, mut console) = Vmm::boot("count", 64);
    assert_eq!(console.number(), 1000);
    let (mut copies, paused_us) = fork(&mut vmm, 3, &[], &mut Fds::default(), |_, _| ());
    eprintln!("paused for {paused_us} us");
    for copy in &mut copies {
        let first = copy.console.number();
        assert!(first >= 2000, "{first}");
        assert_eq!(copy.console.number(), first + 1000);
    }
    let own = console.number();
    assert_eq!(console.number(), own + 1000);
}
