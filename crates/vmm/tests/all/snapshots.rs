//! Save and restore with tiny guests.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};

use proto::vmm::{Answer, DevicesSpec, FailureCode, Request, RestoreSpec, SaveSpec};

use crate::harness::{Console, Fds, Vmm};

struct Snapshot {
    state: File,
    memory: File,
}

fn save(vmm: &mut Vmm) -> Snapshot {
    let (state, memory) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let mut fds = Fds::default();
    let spec = SaveSpec {
        state: fds.add(state.try_clone().unwrap()),
        memory: fds.add(memory.try_clone().unwrap()),
        pagemap: Some(fds.add(vmm.pagemap())),
    };
    vmm.client.done(&Request::Save(spec), &fds.borrow());
    Snapshot { state, memory }
}

fn restore(arguments: &[&str], state: &File, memory: &File) -> (Vmm, Console, Answer) {
    let mut vmm = Vmm::start(arguments);
    let (console, theirs) = Console::new();
    let mut fds = Fds::default();
    let spec = RestoreSpec {
        state: fds.add(state.try_clone().unwrap()),
        memory: vec![fds.add(memory.try_clone().unwrap())],
        devices: DevicesSpec { disks: Vec::new(), card: None, console: Some(fds.add(theirs)) },
    };
    let answer = vmm.client.ask(&Request::Restore(spec), &fds.borrow());
    (vmm, console, answer)
}

fn snapshot_of_count() -> (Snapshot, u64) {
    let (mut vmm, mut console) = Vmm::boot("count", 64);
    let mut last = console.number();
    vmm.client.done(&Request::Pause, &[]);
    let snapshot = save(&mut vmm);
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
        let (mut vmm, mut console, answer) = restore(&[], &snapshot.state, &snapshot.memory);
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
        match restore(&[], &state, &snapshot.memory).2 {
            Answer::Failed { code: FailureCode::BadSnapshot, .. } => {}
            other => panic!("{other:?}"),
        }
    }
    let short = tempfile::tempfile().unwrap();
    short.set_len(4096).unwrap();
    assert!(matches!(
        restore(&[], &snapshot.state, &short).2,
        Answer::Failed { code: FailureCode::BadSnapshot, .. }
    ));
}

#[test]
fn a_zygote_never_runs_and_its_copies_have_users_of_their_own() {
    let (snapshot, last) = snapshot_of_count();
    let (mut zygote, _console, answer) =
        restore(&["--zygote", "--uid", "71000"], &snapshot.state, &snapshot.memory);
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
