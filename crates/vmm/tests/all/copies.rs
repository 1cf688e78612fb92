//! Live fork.

use std::fs::File;

use proto::vmm::{Answer, Request};

use crate::harness::{Control, Fds, Vmm, bare_child, fork};

#[test]
fn copies_go_on_from_the_same_number_and_then_apart() {
    let (mut vmm, mut console) = Vmm::boot("count", 64);
    assert_eq!(console.number(), 1000);
    let (mut copies, _) = fork(&mut vmm, 5, &[], &mut Fds::default(), |_, _| ());
    let mut firsts = Vec::new();
    for copy in &mut copies {
        let first = copy.console.fresh_number();
        assert!(first >= 2000, "{first}");
        assert_eq!(copy.console.number(), first + 1000);
        firsts.push(first);
    }
    firsts.dedup();
    assert_eq!(firsts.len(), 1, "{firsts:?}");
    let own = console.number();
    assert_eq!(console.number(), own + 1000);
}

#[test]
fn copies_of_copies_and_their_ends() {
    let (mut vmm, mut console) = Vmm::boot("count", 64);
    console.number();
    let (mut copies, _) = fork(&mut vmm, 1, &[], &mut Fds::default(), |_, _| ());
    let first = copies[0].console.fresh_number();
    // The parent's death is nothing to its copy.
    drop(vmm);
    assert_eq!(copies[0].console.number(), first + 1000);
    copies[0].client.done(&Request::Stop, &[]);
    let pid = copies[0].pid;
    let limit = std::time::Instant::now() + crate::harness::LIMIT;
    while std::path::Path::new(&format!("/proc/{pid}")).exists() {
        assert!(std::time::Instant::now() < limit, "the copy is still there");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

fn delta() -> File {
    let file = tempfile::tempfile().unwrap();
    disk::create_delta(&file, 1 << 20).unwrap();
    file
}

/// A request is on its way at almost any moment: the guest does nothing else.
#[test]
fn a_busy_disk_is_copied_whole() {
    let image = tempfile::tempfile().unwrap();
    image.set_len(1 << 20).unwrap();
    let (mut vmm, mut console) = Vmm::boot_with(&crate::harness::guest("writer"), 64, 1, |spec, fds| {
        spec.devices.disks.push(proto::vmm::DiskSpec {
            base: fds.add(image),
            base_written: false,
            frozen: Vec::new(),
            delta: Some(fds.add(delta())),
            durable: false,
            rate: proto::vmm::Rate::default(),
        });
    });
    let pair = |line: String| {
        let (number, read) = line.split_once(' ').unwrap();
        (number.parse::<u64>().unwrap(), read.parse::<u64>().unwrap())
    };
    for _ in 0..5 {
        let (before, _) = pair(console.line());
        let mut fds = Fds::default();
        let own = fds.add(delta());
        let (mut copies, _) =
            fork(&mut vmm, 2, &[own], &mut fds, |child, fds| child.deltas.push(fds.add(delta())));
        // A copy begins within the line that the guest was saying.
        copies.iter_mut().for_each(|copy| drop(copy.console.line()));
        for console in copies.iter_mut().map(|copy| &mut copy.console).chain([&mut console]) {
            let mut last = None;
            for _ in 0..5 {
                let (number, read) = pair(console.line());
                assert_eq!(number, read, "what was written is read");
                assert!(number > before && last.is_none_or(|last| number == last + 1));
                last = Some(number);
            }
        }
    }
    assert_eq!(vmm.client.stats().refused_chains, 0);
}

#[test]
fn a_fork_that_does_not_fit_is_refused_and_the_machine_runs_on() {
    let (mut vmm, mut console) = Vmm::boot("count", 64);
    console.number();
    let mut fds = Fds::default();
    let control = Control::new(vmm.dir.path(), "child");
    let child = bare_child(&control, &mut fds);
    let wrong: [&dyn Fn(&mut proto::vmm::ChildSpec); 4] = [
        &|child| child.uid = Some(1000),
        &|child| child.deltas.push(proto::vmm::Fd(0)),
        &|child| child.link = Some(proto::vmm::Fd(9)),
        &|child| child.control = proto::vmm::Fd(250),
    ];
    for change in wrong {
        let mut child = child.clone();
        change(&mut child);
        let request = Request::Fork { children: vec![child], deltas: Vec::new() };
        assert!(matches!(vmm.client.ask(&request, &fds.borrow()), Answer::Failed { .. }));
    }
    let before = console.number();
    assert_eq!(console.number(), before + 1000);
    assert_eq!(vmm.client.stats().refused_chains, 0);
}

/// Whatever the machine is doing when it is killed, nothing of it stays, and its copies do not notice.
#[test]
fn kill_at_any_moment() {
    for delay in [0u64, 1, 3, 7, 15] {
        let (mut vmm, mut console) = Vmm::boot("count", 64);
        console.number();
        let (mut copies, _) = fork(&mut vmm, 2, &[], &mut Fds::default(), |_, _| ());
        std::thread::sleep(std::time::Duration::from_millis(delay));
        vmm.process.kill().unwrap();
        vmm.process.wait().unwrap();
        assert_eq!(vmm.client.receive(), None, "the socket is closed");
        for copy in &mut copies {
            let first = copy.console.fresh_number();
            assert_eq!(copy.console.number(), first + 1000);
        }
    }
}

#[test]
fn a_sleeping_guest_is_woken_in_each_copy_once() {
    let (mut vmm, mut console) = Vmm::boot("idle", 128);
    assert_eq!(console.line(), "asleep");
    vmm.touch(128 << 20);
    for _ in 0..3 {
        let (mut copies, _) = fork(&mut vmm, 4, &[], &mut Fds::default(), |_, _| ());
        for copy in &mut copies {
            assert_eq!(copy.console.line(), "1 0x55555555", "the parent has slept all the time");
        }
    }
}

#[test]
fn a_timer_goes_on_in_copies() {
    let (mut vmm, mut console) = Vmm::boot("timer", 64);
    assert_eq!(console.number(), 100);
    let (mut copies, _) = fork(&mut vmm, 2, &[], &mut Fds::default(), |_, _| ());
    for console in copies.iter_mut().map(|copy| &mut copy.console).chain([&mut console]) {
        let first = console.number();
        assert!(first >= 200);
        assert_eq!(console.number(), first + 100);
    }
}

/// The host has room for some of the children: those exist and work, and the answer says why there are no more.
#[test]
fn a_fork_that_goes_half_way_says_so() {
    let (mut vmm, mut console) = Vmm::boot("count", 64);
    console.number();
    let mut fds = Fds::default();
    let good = Control::new(vmm.dir.path(), "good");
    let mut children = Vec::new();
    for control in [&good, &Control::new(vmm.dir.path(), "other")] {
        children.push(bare_child(control, &mut fds));
    }
    // RLIMIT_NPROC does not bind root, so the bound is a cgroup's where there is one.
    let group = std::path::PathBuf::from(format!("/sys/fs/cgroup/pids/vmm-test-{}", std::process::id()));
    if std::fs::create_dir(&group).is_err() {
        eprintln!("not tested: no cgroup with pids");
        return;
    }
    std::fs::write(group.join("cgroup.procs"), vmm.client.pid.to_string()).unwrap();
    // As many as there are now (KVM has a thread of its own for each machine), and one child.
    let now: u64 = std::fs::read_to_string(group.join("pids.current")).unwrap().trim().parse().unwrap();
    std::fs::write(group.join("pids.max"), (now + 1).to_string()).unwrap();
    let answer = vmm.client.ask(&Request::Fork { children, deltas: Vec::new() }, &fds.borrow());
    std::fs::write(group.join("pids.max"), "max").unwrap();
    match answer {
        Answer::Forked { pids, failure: Some(failure), .. } => assert_eq!(pids.len(), 1, "{failure}"),
        other => panic!("{other:?}"),
    }
    let before = console.number();
    assert_eq!(console.number(), before + 1000, "the machine runs on");
    drop(good.connect());
    vmm.process.kill().unwrap();
    vmm.process.wait().unwrap();
    for pid in std::fs::read_to_string(group.join("cgroup.procs")).unwrap().lines() {
        let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
    while std::fs::remove_dir(&group).is_err() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}
