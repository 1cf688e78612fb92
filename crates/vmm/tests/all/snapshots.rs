//! Save and restore with tiny guests.

use std::io::{Read, Seek, SeekFrom, Write};

use proto::vmm::{Answer, FailureCode, Request};

use crate::harness::{Fds, Snapshot, Vmm};

fn snapshot_of_count() -> (Snapshot, u64) {
    let (mut vmm, mut console) = Vmm::boot("count", 64);
    let mut last = console.number();
    vmm.client.done(&Request::Pause, &[]);
    let snapshot = vmm.save();
    vmm.client.done(&Request::Stop, &[]);
    for line in console.rest() {
        last = line.parse().unwrap();
    }
    (snapshot, last)
}

#[test]
fn a_restored_machine_goes_on_where_it_was() {
    let (snapshot, last) = snapshot_of_count();
    for _ in 0..2 {
        let (mut vmm, mut console, answer) = Vmm::restore(&[], &snapshot);
        assert_eq!(answer, Answer::Done);
        vmm.client.done(&Request::Resume, &[]);
        // The end of the line it was saying when it was paused may come first.
        let first = console.line();
        let first = if first.parse::<u64>().is_ok_and(|number| number == last + 1000) {
            last + 1000
        } else {
            console.number()
        };
        assert!(first == last + 1000 || first == last + 2000, "{last} then {first}");
        assert_eq!(console.number(), first + 1000);
    }
}

#[test]
fn a_damaged_state_is_refused() {
    let (mut snapshot, _) = snapshot_of_count();
    let mut bytes = Vec::new();
    snapshot.state.seek(SeekFrom::Start(0)).unwrap();
    snapshot.state.read_to_end(&mut bytes).unwrap();
    let mut cases = vec![bytes[..10].to_vec(), bytes[..bytes.len() - 1].to_vec(), b"PANDOVM".to_vec()];
    for at in [0, 8, 12, 16, 20, bytes.len() / 2] {
        let mut case = bytes.clone();
        case[at] ^= 0x10;
        cases.push(case);
    }
    for case in cases {
        let mut state = tempfile::tempfile().unwrap();
        state.write_all(&case).unwrap();
        let damaged = Snapshot { state, memory: snapshot.memory.try_clone().unwrap() };
        match Vmm::restore(&[], &damaged).2 {
            Answer::Failed { code: FailureCode::BadSnapshot, .. } => {}
            other => panic!("{other:?}"),
        }
    }
    let short = tempfile::tempfile().unwrap();
    short.set_len(4096).unwrap();
    assert!(matches!(
        Vmm::restore(&[], &Snapshot { state: snapshot.state, memory: short }).2,
        Answer::Failed { code: FailureCode::BadSnapshot, .. }
    ));
}

#[test]
fn a_zygote_never_runs_and_its_copies_have_users_of_their_own() {
    let (snapshot, last) = snapshot_of_count();
    let (mut zygote, _console, answer) = Vmm::restore(&["--zygote", "--uid", "71000"], &snapshot);
    assert_eq!(answer, Answer::Done);
    assert!(matches!(
        zygote.client.ask(&Request::Resume, &[]),
        Answer::Failed { code: FailureCode::WrongPhase, .. }
    ));
    let next = std::sync::atomic::AtomicU32::new(71001);
    let (mut copies, _) = crate::harness::fork(&mut zygote, 3, &[], &mut Fds::default(), |child, _| {
        child.uid = Some(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    });
    for (number, copy) in copies.iter_mut().enumerate() {
        let status = std::fs::read_to_string(format!("/proc/{}/status", copy.pid)).unwrap();
        let uid = 71001 + number;
        assert!(status.contains(&format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n")), "{status}");
        assert!(status.contains("CapEff:\t0000000000000000\n"), "{status}");
        assert!(status.contains("CapPrm:\t0000000000000000\n"), "{status}");
        let first = copy.console.line();
        let first: u64 =
            first.parse().ok().filter(|number| *number > last).unwrap_or_else(|| copy.console.number());
        assert!(first > last);
    }
}
