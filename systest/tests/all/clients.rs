//! The official SDKs against the real server: `systest/python` and `systest/js`, in the environments that
//! `scripts/test` makes.

use std::path::PathBuf;
use std::process::Command;

use systest::{Server, root};

/// Where `scripts/test` puts a Python environment.
fn python(name: &str) -> PathBuf {
    root().join(".cache").join(name).join("bin/python")
}

fn run(mut command: Command, server: &mut Server) {
    let output = command.envs(server.environment()).current_dir(root()).output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    println!("{text}");
    assert!(output.status.success(), "{command:?} failed:\n{text}");
    assert!(server.is_alive(), "the server survived it");
}

fn pytest(environment: &str) {
    let mut server = Server::start().unwrap();
    let mut command = Command::new(python(environment));
    command.args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "systest/python"]);
    run(command, &mut server);
}

#[test]
fn python_sdk_pinned() {
    pytest("venv-pinned");
}

#[test]
fn python_sdk_newest() {
    // Where the newest version is the pinned one, the same suite need not run twice.
    let version = |name: &str| {
        let show = "import importlib.metadata as m; print(m.version('e2b'))";
        Command::new(python(name)).args(["-c", show]).output().unwrap().stdout
    };
    if version("venv-newest") != version("venv-pinned") {
        pytest("venv-newest");
    }
}

#[test]
fn javascript_sdk() {
    let mut server = Server::start().unwrap();
    let mut command = Command::new("npm");
    command.args(["test", "--silent", "--prefix", "systest/js"]);
    run(command, &mut server);
}

/// The README's demonstration, on a server of its own.
#[test]
fn demo_runs() {
    let mut server = Server::start().unwrap();
    let mut command = Command::new(python("venv-pinned"));
    command.arg("examples/demo.py");
    run(command, &mut server);
}
