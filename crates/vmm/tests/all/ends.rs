//! How machines end, and that nobody has to guess.

use proto::vmm::{Answer, DevicesSpec, Ending, Fd, Phase, Request, RestoreSpec};

use crate::harness::{Vmm, guest};

#[test]
fn a_guest_speaks_and_switches_itself_off() {
    let (mut vmm, mut console) = Vmm::boot("hello", 64);
    assert_eq!(console.line(), "hello 42");
    assert_eq!(vmm.client.ending(), Ending::PowerOff);
    assert!(vmm.process.wait().unwrap().success());
}

#[test]
fn a_reset_and_a_triple_fault_are_told_apart() {
    let (mut vmm, _console) = Vmm::boot("reset", 64);
    assert_eq!(vmm.client.ending(), Ending::Reset);
    let (mut vmm, mut console) = Vmm::boot("fault", 64);
    assert_eq!(console.line(), "about to fault");
    // A KVM that interprets the guest may give up before the third fault.
    let ending = vmm.client.ending();
    assert!(matches!(ending, Ending::TripleFault | Ending::Fault { .. }), "{ending:?}");
}

#[test]
fn whoever_connects_later_is_told_the_end() {
    let (mut vmm, mut console) = Vmm::boot("count", 64);
    console.line();
    let mut other = vmm.control.connect();
    vmm.client = vmm.control.connect();
    // The node went away and came back: the machine has run on.
    let before = console.number();
    assert_eq!(console.number(), before + 1000);
    let phase = vmm.control.connect().phase;
    assert_eq!(phase, Phase::Running);
    other.done(&Request::Stop, &[]);
}

#[test]
fn a_guest_that_only_spins_can_be_paused_and_stopped() {
    let (mut vmm, mut console) = Vmm::boot("spin", 64);
    assert_eq!(console.line(), "spinning");
    vmm.client.done(&Request::Pause, &[]);
    vmm.client.done(&Request::Pause, &[]);
    vmm.client.done(&Request::Resume, &[]);
    vmm.client.done(&Request::Resume, &[]);
    vmm.client.done(&Request::Stop, &[]);
    assert!(vmm.process.wait().unwrap().success());
}

#[test]
fn a_flood_on_the_console_neither_stops_the_guest_nor_grows() {
    let (mut vmm, console) = Vmm::boot("flood", 64);
    // Nobody reads.
    let resident = |vmm: &Vmm| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", vmm.client.pid)).unwrap();
        let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    while vmm.client.stats().console_dropped < 100_000 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let before = resident(&vmm);
    while vmm.client.stats().console_dropped < 300_000 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let grown = resident(&vmm).saturating_sub(before);
    assert!(grown < 256, "{grown} KiB more");
    drop(console);
    vmm.client.done(&Request::Stop, &[]);
}

#[test]
fn nonsense_on_the_control_socket_gets_an_answer() {
    let (mut vmm, mut console) = Vmm::boot("count", 64);
    console.line();
    for bytes in [
        b"{".as_slice(),
        b"[]",
        b"null",
        b"{\"request\":\"fly\"}",
        b"{\"request\":\"balloon\"}",
        b"{\"request\":\"balloon\",\"mib\":-1}",
        b"\xff\xfe",
        &[b'['; 60_000],
    ] {
        vmm.client.send_raw(bytes, &[]);
        match vmm.client.receive() {
            Some(Answer::Failed { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    let nothing = DevicesSpec { disks: Vec::new(), card: None, console: None };
    let again = Request::Restore(RestoreSpec { state: Fd(0), memory: Vec::new(), devices: nothing });
    for request in [again, Request::Fork { children: Vec::new(), deltas: Vec::new() }] {
        assert!(matches!(vmm.client.ask(&request, &[]), Answer::Failed { .. }));
    }
    let before = console.number();
    assert_eq!(console.number(), before + 1000, "the machine has not noticed");
}

#[test]
fn what_cannot_be_booted_is_refused_and_can_be_tried_again() {
    let mut vmm = Vmm::start(&[]);
    let text = vmm.dir.path().join("text");
    std::fs::write(&text, "no kernel").unwrap();
    let kernel = guest("hello");
    for (path, memory, vcpus) in
        [(&text, 64, 1), (&kernel, 64, 0), (&kernel, 64, 99), (&kernel, u64::MAX, 1), (&kernel, 1, 1)]
    {
        assert!(
            matches!(vmm.try_boot(path, memory, vcpus), Answer::Failed { .. }),
            "{path:?} {memory} {vcpus}"
        );
    }
    assert_eq!(vmm.try_boot(&kernel, 64, 1), Answer::Done);
    assert_eq!(vmm.client.ending(), Ending::PowerOff);
}
