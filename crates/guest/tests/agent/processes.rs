//! Commands and their streams.

use std::time::{Duration, Instant};

use futures::future::join_all;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::harness::{Agent, encoded, is_root, pause};

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn run_directly(agent: &Agent, cmd: &str) -> crate::harness::Done {
    agent.start_process(&[], json!({"process": {"cmd": cmd}, "stdin": false})).await.finish().await
}

#[tokio::test]
async fn b1_a_missing_binary_is_exit_127() {
    let agent = Agent::start();
    for cmd in ["no_such_tool", "/no/such/tool"] {
        let done = run_directly(&agent, cmd).await;
        assert_eq!(done.code(), 127);
        assert!(String::from_utf8_lossy(&done.stderr).contains("not found"));
    }
    assert_eq!(run_directly(&agent, "/etc/passwd").await.code(), 126);
    assert_eq!(agent.run("no_such_tool --x").await.code(), 127);
}

#[tokio::test]
async fn b2_output_is_exact() {
    let done = Agent::start().run("printf abc; exit 7").await;
    assert_eq!((done.stdout.as_slice(), done.stderr.as_slice(), done.code()), (&b"abc"[..], &b""[..], 7));
    assert_eq!(done.end["status"], "exit status 7");
    assert_eq!(done.end["error"], "exit status 7");
    assert_eq!(done.end["exited"], true);
}

#[tokio::test]
async fn b4_bytes_are_not_text() {
    let agent = Agent::start();
    assert_eq!(agent.run(r"printf '\377\376\000end'").await.stdout, b"\xff\xfe\0end");
    let done = agent.run("head -c 65536 /dev/urandom | tee /dev/stderr | sha256sum").await;
    assert_eq!(done.stderr.len(), 65536);
    assert!(done.text().starts_with(&hex(&done.stderr)));
}

#[tokio::test]
async fn b7_a_slow_reader_holds_up_the_command_and_costs_no_memory() {
    let agent = Agent::start();
    let (_, mut events) = agent.shell("yes 0123456789 | head -c 50000000", false).await;
    let before = agent.memory();
    pause(700).await;
    assert!(agent.memory() < before + (16 << 20), "{} -> {}", before, agent.memory());
    for _ in 0..20 {
        events.next().await.unwrap();
        pause(10).await;
    }
    let mut total = 0;
    let done = events.finish().await;
    total += done.stdout.len();
    assert!(total > 45_000_000 && done.code() == 0, "{total}");
    assert!(agent.memory() < before + (16 << 20));
}

#[tokio::test]
async fn b8_input_is_there_only_when_asked_for() {
    let agent = Agent::start();
    assert_eq!(agent.run("cat; echo done").await.text(), "done\n");
    let (pid, events) = agent.shell("cat; echo done", true).await;
    let selector = json!({"pid": pid});
    pause(200).await;
    assert_eq!(agent.call("process.Process/List", json!({})).await.json()["processes"][0]["pid"], pid);
    for _ in 0..2 {
        assert_eq!(agent.call("process.Process/CloseStdin", json!({"process": selector})).await.status, 200);
    }
    assert_eq!(events.finish().await.text(), "done\n");
    // Old clients do not know the field: there is input.
    let mut old = agent.start_process(&[], json!({"process": {"cmd": "cat"}})).await;
    let pid = old.next().await.unwrap()["event"]["start"]["pid"].clone();
    let input = json!({"process": {"pid": pid}, "input": {"stdin": encoded("x")}});
    assert_eq!(agent.call("process.Process/SendInput", input).await.status, 200);
    agent.call("process.Process/CloseStdin", json!({"process": {"pid": pid}})).await;
    assert_eq!(old.finish().await.text(), "x");
}

#[tokio::test]
async fn b10_input_larger_than_the_pipe_waits() {
    let agent = Agent::start();
    let (pid, events) = agent.shell("sleep 1; sha256sum", true).await;
    let piece = vec![b'x'; 1 << 20];
    for _ in 0..20 {
        let input = json!({"process": {"pid": pid}, "input": {"stdin": encoded(&piece)}});
        assert_eq!(agent.call("process.Process/SendInput", input).await.status, 200);
    }
    agent.call("process.Process/CloseStdin", json!({"process": {"pid": pid}})).await;
    assert!(events.finish().await.text().starts_with(&hex(&piece.repeat(20))));
}

#[tokio::test]
async fn closing_input_does_not_wait_for_a_blocked_write() {
    let agent = Agent::start();
    let (pid, events) = agent.shell("sleep 100", true).await;
    let input = json!({"process": {"pid": pid}, "input": {"stdin": encoded(vec![0; 1 << 20])}});
    let blocked = agent.call("process.Process/SendInput", input);
    let close = async {
        pause(200).await;
        let start = Instant::now();
        let answer = agent.call("process.Process/CloseStdin", json!({"process": {"pid": pid}})).await;
        assert_eq!(answer.status, 200);
        assert!(start.elapsed() < Duration::from_secs(1));
    };
    let (blocked, ()) = futures::join!(blocked, close);
    assert_eq!(blocked.json()["code"], "internal");
    agent
        .call("process.Process/SendSignal", json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}))
        .await;
    assert_eq!(events.finish().await.code(), -1);
}

#[tokio::test]
async fn b11_input_to_an_ended_command_is_an_error() {
    let agent = Agent::start();
    let (pid, events) = agent.shell("true", true).await;
    events.finish().await;
    for (method, body) in [
        ("SendInput", json!({"process": {"pid": pid}, "input": {"stdin": encoded("0123456789")}})),
        ("SendSignal", json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})),
        ("SendInput", json!({"process": {"pid": 999_999}, "input": {"stdin": ""}})),
    ] {
        let answer = agent.call(&format!("process.Process/{method}"), body).await;
        assert_eq!((answer.status, &answer.json()["code"]), (404, &json!("not_found")));
    }
    let answer = agent.call("process.Process/CloseStdin", json!({"process": {"pid": 999_999}})).await;
    assert_eq!(answer.json()["message"], "process with pid 999999 not found");
}

#[tokio::test]
async fn b14_deadlines_kill_and_say_so() {
    let agent = Agent::start();
    let runs = (0..20).map(|_| async {
        let start = Instant::now();
        let body = json!({"process": {"cmd": "sh", "args": ["-c", "sleep 98 & sleep 98"]}, "stdin": false});
        let events = agent.start_process(&[("connect-timeout-ms", "1000")], body).await;
        let done = events.finish().await;
        assert_eq!(done.error["code"], "deadline_exceeded", "{done:?}");
        let took = start.elapsed();
        assert!(took > Duration::from_millis(950) && took < Duration::from_millis(1600), "{took:?}");
    });
    join_all(runs).await;
    pause(300).await;
    let left = agent.call("process.Process/List", json!({})).await.json();
    assert_eq!(left, json!({}));
    assert_eq!(agent.run("ps -eo ppid,args | grep '[s]leep 98' | wc -l").await.text().trim(), "0");
}

#[tokio::test]
async fn endless_output_does_not_starve_the_deadline() {
    let agent = Agent::start();
    let body = json!({"process": {"cmd": "yes"}, "stdin": false});
    let start = Instant::now();
    let done = agent.start_process(&[("connect-timeout-ms", "700")], body).await.finish().await;
    assert_eq!(done.error["code"], "deadline_exceeded");
    assert!(start.elapsed() < Duration::from_secs(2));
}

#[tokio::test]
async fn b16_orphans_are_reaped() {
    let agent = Agent::start();
    assert_eq!(agent.run("for i in $(seq 300); do (true &) ; done").await.code(), 0);
    pause(1000).await;
    let zombies = std::process::Command::new("ps")
        .args(["-o", "stat=", "--ppid", &agent.pid().to_string()])
        .output()
        .unwrap();
    assert!(!String::from_utf8_lossy(&zombies.stdout).contains('Z'));
}

#[tokio::test]
async fn b17_each_command_gets_its_own_status() {
    let agent = Agent::start();
    let runs = (0..300).map(|i| {
        let agent = &agent;
        async move {
            let body = json!({"process": {"cmd": "sh", "args": ["-c", format!("exit {}", i % 250)]}, "stdin": false});
            let done = agent.start_process(&[], body).await.finish().await;
            assert_eq!(done.code(), i % 250);
        }
    });
    join_all(runs).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn b19_subscribers_come_and_go_without_gaps() {
    let agent = std::sync::Arc::new(Agent::start());
    let (pid, events) = agent.shell("sleep 0.5; seq 0 200000", false).await;
    let readers = (0..8).map(|n: u64| {
        let agent = agent.clone();
        tokio::spawn(async move {
            for round in 0..20 {
                let mut events =
                    agent.stream("process.Process/Connect", &[], json!({"process": {"pid": pid}})).await;
                let (mut text, mut left) = (Vec::new(), 3 + (n * 7 + round) % 11);
                while let Some(message) = events.next().await {
                    if !message["event"]["end"].is_null() {
                        break;
                    }
                    if let Some(data) = message["event"]["data"]["stdout"].as_str() {
                        use base64::Engine as _;
                        text.extend(base64::engine::general_purpose::STANDARD.decode(data).unwrap());
                        left -= 1;
                    }
                    if left == 0 {
                        break;
                    }
                }
                let text = String::from_utf8(text).unwrap();
                let numbers: Vec<u64> = text.lines().skip(1).filter_map(|line| line.parse().ok()).collect();
                // The last line may be cut.
                let whole = numbers.len().saturating_sub(1);
                assert!(numbers[..whole].windows(2).all(|pair| pair[1] == pair[0] + 1));
            }
        })
    });
    let readers: Vec<_> = readers.collect();
    let done = events.finish().await;
    assert_eq!(done.text().lines().count(), 200_001);
    for reader in readers {
        reader.await.unwrap();
    }
}

#[tokio::test]
async fn b20_a_client_that_leaves_leaves_nothing_behind() {
    let agent = Agent::start();
    agent.run("true").await;
    let before = agent.descriptors();
    for _ in 0..200 {
        let (pid, mut events) = agent.shell("yes", false).await;
        for _ in 0..3 {
            events.next().await.unwrap();
        }
        drop(events);
        let kill = json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"});
        assert_eq!(agent.call("process.Process/SendSignal", kill).await.status, 200);
    }
    assert_eq!(agent.get("/health").await.status, 204);
    pause(500).await;
    assert!(agent.descriptors() <= before + 12, "{before} -> {}", agent.descriptors());
}

#[tokio::test]
async fn a_command_outlives_its_stream_and_can_be_found_again() {
    let agent = Agent::start();
    let (pid, events) = agent.shell("sleep 0.5; echo late; exit 3", false).await;
    drop(events);
    let select = json!({"process": {"pid": pid}});
    let mut again = agent.stream("process.Process/Connect", &[], select.clone()).await;
    assert_eq!(again.next().await.unwrap()["event"]["start"]["pid"], pid);
    let done = again.finish().await;
    assert_eq!((done.text().as_str(), done.code()), ("late\n", 3));
    // Late: start and end.
    let mut late = agent.stream("process.Process/Connect", &[], select).await;
    assert_eq!(late.next().await.unwrap()["event"]["start"]["pid"], pid);
    assert_eq!(late.finish().await.code(), 3);
}

#[tokio::test]
async fn b23_here_documents_are_exact() {
    let done = Agent::start().run("cat <<'EOF'\na $b\n`c`\n\"d\"\nEOF\necho ok").await;
    assert_eq!(done.text(), "a $b\n`c`\n\"d\"\nok\n");
}

#[tokio::test]
async fn a_kill_is_final_when_it_answers() {
    let agent = Agent::start();
    let (pid, events) = agent.shell("sleep 97 & echo up; wait", false).await;
    pause(300).await;
    let kill = json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"});
    assert_eq!(agent.call("process.Process/SendSignal", kill).await.status, 200);
    assert_ne!(agent.run(&format!("kill -0 {pid}")).await.code(), 0);
    let done = events.finish().await;
    assert_eq!((done.code(), done.end["status"].as_str()), (-1, Some("signal: killed")));
    assert!(done.end["exited"].is_null());
    let (pid, events) = agent.shell("sleep 97", false).await;
    pause(200).await;
    let term = json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGTERM"});
    assert_eq!(agent.call("process.Process/SendSignal", term).await.status, 200);
    assert_eq!(events.finish().await.end["status"], "signal: terminated");
    let other = json!({"process": {"pid": pid}, "signal": "SIGNAL_UNSPECIFIED"});
    assert_eq!(agent.call("process.Process/SendSignal", other).await.status, 404);
}

#[tokio::test]
async fn b31_a_closed_terminal_is_an_end() {
    let agent = Agent::start();
    let body = json!({
        "process": {"cmd": "sh", "args": ["-i"], "envs": {"TERM": "dumb"}},
        "pty": {"size": {"cols": 80, "rows": 24}},
    });
    let mut events = agent.start_process(&[], body).await;
    let pid = events.next().await.unwrap()["event"]["start"]["pid"].clone();
    let send = async |text: &str| {
        let input = json!({"process": {"pid": pid}, "input": {"pty": encoded(text)}});
        assert_eq!(agent.call("process.Process/SendInput", input).await.status, 200);
    };
    send("stty size\n").await;
    pause(300).await;
    let size = json!({"process": {"pid": pid}, "pty": {"size": {"cols": 100, "rows": 30}}});
    assert_eq!(agent.call("process.Process/Update", size).await.status, 200);
    send("stty size\n").await;
    let stdin = json!({"process": {"pid": pid}, "input": {"stdin": encoded("x")}});
    assert_eq!(agent.call("process.Process/SendInput", stdin).await.json()["code"], "internal");
    let close = agent.call("process.Process/CloseStdin", json!({"process": {"pid": pid}})).await;
    assert_eq!(close.json()["code"], "unknown");
    pause(300).await;
    send("exit 5\n").await;
    let done = events.finish().await;
    let text = String::from_utf8_lossy(&done.pty).into_owned();
    assert!(text.contains("24 80") && text.contains("30 100"), "{text}");
    assert_eq!((done.code(), done.error), (5, Value::Null));
}

#[tokio::test]
async fn b34_long_command_lines() {
    let agent = Agent::start();
    let echo = |length: usize| json!({"process": {"cmd": "sh", "args": ["-c", "echo ${#1}", "sh", "x".repeat(length)]}});
    let done = agent.start_process(&[], echo(100 << 10)).await.finish().await;
    assert_eq!(done.text(), "102400\n");
    let done = agent.start_process(&[], echo(3 << 20)).await.finish().await;
    assert_eq!(done.code(), 126);
    assert!(String::from_utf8_lossy(&done.stderr).contains("argument list too long"));
    assert_eq!(agent.get("/health").await.status, 204);
}

#[tokio::test]
async fn keepalives_come_when_nothing_else_does() {
    let agent = Agent::start();
    let body = json!({"process": {"cmd": "sleep", "args": ["2.5"]}, "stdin": false});
    let mut events = agent.start_process(&[("keepalive-ping-interval", "1")], body).await;
    let mut count = 0;
    while let Some(message) = events.next().await {
        count += usize::from(message["event"].get("keepalive").is_some());
    }
    assert_eq!(count, 2);
}

#[tokio::test]
async fn environment_directory_and_user_are_checked() {
    let agent = Agent::start();
    let body = json!({"process": {"cmd": "sh", "args": ["-c", "echo $FOO $E2B_SANDBOX; pwd"], "envs": {"FOO": "bar"}, "cwd": "/tmp"}});
    assert_eq!(agent.start_process(&[], body).await.finish().await.text(), "bar true\n/tmp\n");
    let body = json!({"process": {"cmd": "true", "cwd": "/no/such"}});
    let error = agent.start_process(&[], body).await.finish().await.error;
    assert_eq!(error, json!({"code": "invalid_argument", "message": "cwd '/no/such' does not exist"}));
    let ghost = format!("Basic {}", encoded("ghost:"));
    let body = json!({"process": {"cmd": "true"}});
    let error = agent.start_process(&[("authorization", &ghost)], body).await.finish().await.error;
    assert_eq!(error, json!({"code": "unauthenticated", "message": "invalid username: 'ghost'"}));
}

#[tokio::test]
async fn b25_commands_run_as_the_user_named() {
    if !is_root() {
        eprintln!("left out: needs root");
        return;
    }
    let agent = Agent::start();
    let nobody = format!("Basic {}", encoded("nobody:"));
    let body = json!({"process": {"cmd": "sh", "args": ["-c", "id -un; echo $USER $LOGNAME; cat /proc/self/oom_score_adj"], "cwd": "/"}, "stdin": false});
    let done = agent.start_process(&[("authorization", &nobody)], body).await.finish().await;
    assert_eq!(done.text(), "nobody\nnobody nobody\n100\n");
}

#[tokio::test]
async fn binary_codec_is_answered() {
    let agent = Agent::start();
    let answer =
        agent.request("POST", "/process.Process/List", &[("content-type", "application/proto")], "").await;
    assert_eq!((answer.status, answer.body.len()), (200, 0));
    assert_eq!(answer.headers["content-type"], "application/proto");
}
