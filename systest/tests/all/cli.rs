//! The command line as people use it.

use std::io::Write;
use std::process::{Output, Stdio};

use systest::Server;

fn output(server: &Server, arguments: &[&str], input: &[u8]) -> Output {
    let mut command = server.cli(arguments);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_owned();
    // A command that does not read its input closes it: no fault of the test's.
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().unwrap();
    let _ = writer.join();
    output
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn run_passes_everything_through() {
    let server = Server::start().unwrap();
    let large: Vec<u8> = (0..3_000_000u32).map(|n| (n.wrapping_mul(7919) >> 8) as u8).collect();
    let echoed = output(&server, &["run", "--", "cat"], &large);
    assert!(
        echoed.stdout == large,
        "{} of {} bytes; {}",
        echoed.stdout.len(),
        large.len(),
        text(&echoed.stderr)
    );
    assert_eq!(echoed.status.code(), Some(0));

    let failed =
        output(&server, &["run", "-e", "X=y z", "--", "sh", "-c", "echo \"$X\"; echo e >&2; exit 7"], b"");
    assert_eq!((text(&failed.stdout).as_str(), text(&failed.stderr).as_str()), ("y z\n", "e\n"));
    assert_eq!(failed.status.code(), Some(7));
    let killed = output(&server, &["run", "--", "sh", "-c", "kill -9 $$"], b"");
    assert_eq!(killed.status.code(), Some(137));
    let missing = output(&server, &["run", "--", "no-such-program"], b"");
    assert_eq!(missing.status.code(), Some(127));
    let unknown = output(&server, &["run", "-t", "nope", "--", "true"], b"");
    assert_eq!(unknown.status.code(), Some(125));
    assert!(text(&unknown.stderr).contains("template \"nope\" was not found"), "{}", text(&unknown.stderr));
    assert_eq!(
        text(&output(&server, &["ls", "--json"], b"").stdout).trim(),
        "[]",
        "run leaves nothing behind"
    );
}

#[test]
fn ctrl_c_ends_the_command_and_the_sandbox() {
    let server = Server::start().unwrap();
    let mut command = server.cli(&["run", "--", "sh", "-c", "echo started; sleep 600"]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut begun = [0u8; 8];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut begun).unwrap();
    systest::signal(child.id(), rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(text(&output(&server, &["ls", "--json"], b"").stdout).trim(), "[]");
}

#[test]
fn sandboxes_are_made_used_and_ended() {
    let server = Server::start().unwrap();
    let id =
        text(&output(&server, &["create", "--timeout", "600", "-m", "who=me"], b"").stdout).trim().to_owned();
    let listed = text(&output(&server, &["ls"], b"").stdout);
    assert!(listed.contains(&id) && listed.contains("who=me") && listed.contains("base"), "{listed}");

    let dir = tempfile::tempdir().unwrap();
    let (there, back) = (dir.path().join("there.bin"), dir.path().join("back.bin"));
    let content: Vec<u8> = (0..20_000_000u32).map(|n| (n.wrapping_mul(31) >> 3) as u8).collect();
    std::fs::write(&there, &content).unwrap();
    let (there, back) = (there.display().to_string(), back.display().to_string());
    for arguments in
        [["cp", there.as_str(), &format!("{id}:data/x y.bin")], ["cp", &format!("{id}:data/x y.bin"), &back]]
    {
        let copied = output(&server, &arguments, b"");
        assert!(copied.status.success(), "{}", text(&copied.stderr));
    }
    assert!(std::fs::read(&back).unwrap() == content);
    let listed =
        output(&server, &["exec", "-u", "root", "-w", "/tmp", &id, "--", "sh", "-c", "id -un; pwd"], b"");
    assert_eq!(text(&listed.stdout), "root\n/tmp\n");
    let missing = output(&server, &["cp", &format!("{id}:/nope"), &back], b"");
    assert!(
        !missing.status.success() && text(&missing.stderr).contains("/nope"),
        "{}",
        text(&missing.stderr)
    );
    assert!(output(&server, &["logs", &id], b"").status.success());

    assert_eq!(text(&output(&server, &["kill", &id], b"").stdout).trim(), id);
    let again = output(&server, &["kill", &id], b"");
    assert_eq!(again.status.code(), Some(1));
    assert!(text(&again.stderr).contains("it was killed"), "{}", text(&again.stderr));
}

/// A terminal of ours, by `script`, which gives its command one.
#[test]
fn exec_gives_a_terminal() {
    let server = Server::start().unwrap();
    let id = text(&output(&server, &["create"], b"").stdout).trim().to_owned();
    let inner = format!("{} exec -it {id} -- bash -c 'tty; stty size; exit 3'", systest::program().display());
    let mut script = std::process::Command::new("script");
    script.args(["-qec", &format!("stty rows 33 cols 101; {inner}"), "/dev/null"]).envs(server.environment());
    let shown = script.stdin(Stdio::null()).output().unwrap();
    let shown_text = text(&shown.stdout);
    assert!(shown_text.contains("/dev/pts/") && shown_text.contains("33 101"), "{shown_text}");
    assert_eq!(shown.status.code(), Some(3));
}

#[test]
fn help_env_and_doctor_say_what_is_there() {
    let server = Server::start().unwrap();
    let environment = text(&output(&server, &["env"], b"").stdout);
    for line in
        ["export E2B_API_KEY=e2b_", "export E2B_API_URL=http://127.0.0.1:", "export E2B_SANDBOX_URL=http"]
    {
        assert!(environment.contains(line), "{environment}");
    }
    let doctor = output(&server, &["doctor", "--json"], b"");
    assert_eq!(doctor.status.code(), Some(0), "{}", text(&doctor.stdout));
    let checks: serde_json::Value = serde_json::from_slice(&doctor.stdout).unwrap();
    assert!(
        checks.as_array().unwrap().iter().any(|check| check["name"] == "qemu" && check["verdict"] == "good")
    );
    let templates = text(&output(&server, &["template", "ls"], b"").stdout);
    assert!(templates.contains("base"), "{templates}");
    assert_eq!(output(&server, &["nonsense"], b"").status.code(), Some(2));
    for command in ["serve", "setup", "run", "create", "exec", "cp", "kill"] {
        let help = text(&output(&server, &[command, "--help"], b"").stdout);
        assert!(help.contains("Example"), "{command}: {help}");
    }
    let second = output(&server, &["serve"], b"");
    assert_eq!(second.status.code(), Some(1));
    let said = text(&second.stderr);
    assert!(said.contains("in use by another pando"), "{said}");
    let open = output(&server, &["serve", "--listen", "0.0.0.0:0"], b"");
    assert!(text(&open.stderr).contains("--allow-plaintext"));
}

/// A server that cannot serve says so and leaves nothing behind.
#[test]
fn a_server_that_cannot_start_makes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = other.local_addr().unwrap().to_string();
    for (arguments, says) in [
        (&["--listen", taken.as_str()][..], "cannot listen"),
        (&["--listen", "127.0.0.1:0"], "pando setup"),
        (&["--listen", "127.0.0.1:0", "--machine", "kvm"], "pando setup"),
        (&["--listen", "0.0.0.0:0"], "--allow-plaintext"),
    ] {
        let mut command = std::process::Command::new(systest::program());
        let output = command.arg("serve").args(arguments).env("PANDO_DATA_DIR", &data).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(text(&output.stderr).contains(says), "{arguments:?}: {}", text(&output.stderr));
        assert!(!data.exists(), "{arguments:?}");
    }
}
