//! How long a machine takes to be copied or restored, and what an idle copy costs. `cargo bench -p vmm`; docs/performance.md
//! explains the figures.
//!
//! The guest sleeps; a copy or a restored machine is interrupted once, wakes, and says a word that is in its memory. The
//! clock runs from the request to the first byte of that. Guest memory is touched from outside first (`Vmm::touch`).
#![allow(unsafe_code, clippy::unwrap_used, clippy::print_stdout, unreachable_pub)]

#[path = "../tests/all/harness.rs"]
#[allow(dead_code, reason = "tests and benchmarks use parts of it")]
mod harness;

use std::time::{Duration, Instant};

use harness::{Copied, Fds, Vmm, fork, guest};
use proto::vmm::{Answer, Request};

const MIB: u64 = 1 << 20;

fn main() {
    // cargo passes --bench.
    let quick = std::env::args().any(|argument| argument == "--quick");
    let rounds = if quick { 5 } else { 50 };
    println!("{:<44} {:>9} {:>9} {:>9}", "", "p50", "p95", "paused");
    for mib in [256, 2048, 8192] {
        for huge in [false, true] {
            live_fork(mib, huge, rounds);
        }
    }
    for mib in [256, 2048] {
        restore(mib, rounds);
    }
    children(if quick { 10 } else { 100 });
}

fn sleeping(mib: u64, huge_pages: bool) -> Vmm {
    let (mut vmm, mut console) =
        Vmm::boot_with(&guest("idle"), mib, 1, |spec, _| spec.huge_pages = huge_pages);
    assert_eq!(console.line(), "asleep");
    vmm.touch(mib * MIB);
    // Nobody reads the parent's console any more.
    drop(console);
    vmm.client.stats();
    vmm
}

fn show(what: &str, times: &mut [Duration], paused: Option<Duration>) {
    times.sort();
    let ms = |time: Duration| format!("{:.1} ms", time.as_secs_f64() * 1000.0);
    let at = |part: f64| ms(times[((times.len() - 1) as f64 * part).round() as usize]);
    println!("{what:<44} {:>9} {:>9} {:>9}", at(0.5), at(0.95), paused.map(ms).unwrap_or_default());
}

fn live_fork(mib: u64, huge_pages: bool, rounds: usize) {
    let mut vmm = sleeping(mib, huge_pages);
    let (mut times, mut paused) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let begun = Instant::now();
        let (mut copies, paused_us) = fork(&mut vmm, 1, &[], &mut Fds::default(), |_, _| ());
        let line = copies[0].console.line();
        times.push(begun.elapsed());
        assert_eq!(line, "1 0x55555555");
        paused.push(Duration::from_micros(paused_us));
        drop(copies);
        settle();
    }
    paused.sort();
    let pages = if huge_pages {
        format!("huge pages ({} MiB are)", huge_mib(vmm.client.pid))
    } else {
        "4 KiB pages".into()
    };
    show(&format!("fork, {mib} MiB, {pages}"), &mut times, Some(paused[paused.len() / 2]));
}

/// A killed copy gives its memory back after its end.
fn settle() {
    std::thread::sleep(Duration::from_millis(30));
}

fn smaps(pid: u32, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let lines = text.lines().filter(|line| line.starts_with(name));
    lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum()
}

fn huge_mib(pid: u32) -> u64 {
    smaps(pid, "AnonHugePages:") / 1024
}

fn restore(mib: u64, rounds: usize) {
    let mut vmm = sleeping(mib, false);
    vmm.client.done(&Request::Pause, &[]);
    let begun = Instant::now();
    let snapshot = vmm.save();
    println!(
        "{:<44} {:>9}",
        format!("save, {mib} MiB"),
        format!("{:.0} ms", begun.elapsed().as_secs_f64() * 1000.0)
    );
    drop(vmm);
    let mut times = Vec::new();
    for _ in 0..rounds {
        let begun = Instant::now();
        let (mut restored, mut console, answer) = Vmm::restore(&[], &snapshot);
        assert_eq!(answer, Answer::Done);
        restored.client.done(&Request::Resume, &[]);
        let line = console.line();
        times.push(begun.elapsed());
        assert_eq!(line, "1 0x55555555");
    }
    show(&format!("restore with a new process, {mib} MiB"), &mut times, None);
}

fn children(count: usize) {
    let mut vmm = sleeping(2048, true);
    let begun = Instant::now();
    let mut copies: Vec<Copied> = Vec::new();
    while copies.len() < count {
        let batch = (count - copies.len()).min(proto::vmm::MAX_CHILDREN);
        copies.extend(fork(&mut vmm, batch, &[], &mut Fds::default(), |_, _| ()).0);
    }
    for copy in &mut copies {
        assert_eq!(copy.console.line(), "1 0x55555555");
    }
    let took = begun.elapsed();
    println!(
        "{:<44} {:>9}",
        format!("{count} children of 2048 MiB, all spoke"),
        format!("{:.0} ms", took.as_secs_f64() * 1000.0)
    );
    let private: u64 = copies.iter().map(|copy| smaps(copy.pid, "Private_")).sum();
    println!("{:<44} {:>9}", "private memory of an idle child", format!("{} KiB", private / count as u64));
}
