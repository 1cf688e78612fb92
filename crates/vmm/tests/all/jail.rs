//! The jail as /proc shows it, and that it bites.

use crate::harness::Vmm;

fn status(pid: &str) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap()
}

#[test]
fn a_running_machine_has_nothing_but_what_it_needs() {
    let (vmm, mut console) = Vmm::boot("count", 64);
    console.line();
    let pid = vmm.client.pid;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let thread = thread.unwrap().file_name().into_string().unwrap();
        let status = status(&format!("{pid}/task/{thread}"));
        for line in
            ["Seccomp:\t2", "NoNewPrivs:\t1", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000"]
        {
            assert!(status.contains(line), "thread {thread}: no {line:?} in {status}");
        }
    }
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().nth(4), Some("0"));
    let names: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .map(|entry| std::fs::read_link(entry.unwrap().path()).unwrap().display().to_string())
        .collect();
    for name in &names {
        let known = ["socket:", "anon_inode:", "pipe:", "/dev/null", "/dev/kvm", "/dev/pts", "/tmp"];
        assert!(known.iter().any(|known| name.starts_with(known)), "{name} is open: {names:?}");
    }
}
