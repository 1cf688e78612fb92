//! Sandboxes are apart: from each other, from the host, from what is private, and from who has no right to them.

use proto::api::NewSandbox;
use systest::host::OtherHost;
use systest::raw::request;
use systest::{Guest, Server};

/// Whether the guest gets anywhere at all with a TCP connection; refusals must be quick.
async fn connects(guest: &Guest, address: &str, port: u16) -> bool {
    let script = format!(
        "import socket,time\nt=time.time()\ntry:\n socket.create_connection(({address:?},{port}),3); print('in')\n\
         except OSError as e: print('out',e)\nassert time.time()-t<2.5"
    );
    let output = guest.run(&["/usr/bin/python3", "-c", &script], None).await.unwrap();
    assert_eq!(output.code, 0, "a refusal is quick: {} {}", output.stdout, output.stderr);
    output.stdout.starts_with("in")
}

#[tokio::test]
async fn private_places_are_out_of_reach() {
    let server = Server::start().unwrap();
    let host = OtherHost::new().unwrap();
    let (one, two) = tokio::join!(server.create(), server.create());
    let (one, two) = (one.unwrap(), two.unwrap());
    let port: u16 = server.url.rsplit(':').next().unwrap().parse().unwrap();
    two.agent.write_file("/tmp/up", client::http::whole("x")).await.unwrap();

    // Something listens on every address of the host, the one towards the other host included.
    let everywhere = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let open = everywhere.local_addr().unwrap().port();
    let mut ours: Vec<String> =
        vec!["127.0.0.1".into(), "127.1.2.3".into(), "0.0.0.0".into(), "10.0.2.2".into()];
    let addresses = std::process::Command::new("hostname").arg("-I").output().unwrap();
    ours.extend(
        String::from_utf8_lossy(&addresses.stdout)
            .split_whitespace()
            .filter(|a| !a.contains(':'))
            .map(str::to_owned),
    );
    assert!(
        ours.iter().any(|address| address.starts_with("203.0.113.")),
        "the host's own public address is among them"
    );
    for address in &ours {
        for port in [port, open] {
            // In the guest, loopback is the guest's own: nothing listens there.
            assert!(!connects(&one, address, port).await, "{address}:{port}");
        }
    }
    for address in [
        "169.254.169.254",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "198.18.0.1",
    ] {
        assert!(!connects(&one, address, 80).await, "{address}");
    }
    // Guests have the same address; an agent that answers is one's own.
    assert!(connects(&one, "10.0.2.15", 49983).await);
    let sixth = one
        .sh("ip -6 addr show dev eth0; ip -6 route show default; curl -sg -m 2 'http://[fe80::1]/'; true")
        .await;
    assert_eq!(sixth.unwrap().stdout, "", "there is no IPv6 on the link");
    // The other host can be reached, so all this is policy and not a broken network.
    let _listener = host.serve_http(8080).unwrap();
    systest::eventually(std::time::Duration::from_secs(10), "the other host answers", async || {
        connects(&one, &host.address, 8080).await
    })
    .await;
}

#[tokio::test]
async fn without_internet_nothing_is_reached() {
    let server = Server::start().unwrap();
    let host = OtherHost::new().unwrap();
    let _listener = host.serve_http(8080).unwrap();
    let new = NewSandbox { allow_internet_access: Some(false), ..NewSandbox::default() };
    let guest = server.create_with(new).await.unwrap();
    assert!(!connects(&guest, &host.address, 8080).await);
    let lookup = guest.sh("getent ahostsv4 example.test; echo $?").await.unwrap();
    assert_eq!(lookup.stdout, "2\n", "names are refused at once");
}

#[tokio::test]
async fn tokens_open_one_sandbox_only() {
    let server = Server::start().unwrap();
    let (one, two) = tokio::join!(server.create(), server.create());
    let (one, two) = (one.unwrap(), two.unwrap());
    let ask = async |guest: &Guest, token: Option<&str>, method: &str, path: &str, body: &'static str| {
        let mut headers = vec![
            ("e2b-sandbox-id", guest.id().as_str()),
            ("e2b-sandbox-port", "49983"),
            ("content-type", "application/json"),
        ];
        headers.extend(token.map(|token| ("x-access-token", token)));
        request(&server.url, method, path, &headers, body).await.unwrap()
    };
    for (method, path, body) in [
        ("POST", "/process.Process/List", "{}"),
        ("POST", "/filesystem.Filesystem/ListDir", r#"{"path":"/"}"#),
        ("GET", "/files?path=/etc/passwd", ""),
        ("POST", "/files?path=/tmp/x", ""),
        ("GET", "/metrics", ""),
        ("GET", "/envs", ""),
    ] {
        for token in [None, Some("wrong"), Some(two.token())] {
            assert_eq!(ask(&one, token, method, path, body).await.status, 401, "{method} {path} {token:?}");
        }
    }
    assert_eq!(ask(&one, Some(one.token()), "POST", "/process.Process/List", "{}").await.status, 200);
    // What only the host may say is hidden from outside, and refused to the guest itself, root or not.
    for path in
        ["/init", "/shutdown", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade"]
    {
        assert_eq!(ask(&one, Some(one.token()), "POST", path, "{}").await.status, 404, "{path}");
    }
    let replay = "curl -s -o /dev/null -w '%{http_code}' -X POST -H 'content-type: application/json' \
                  -d '{\"accessToken\":\"mine\"}' http://127.0.0.1:49983/init";
    let code = one.sh(replay).await.unwrap().stdout;
    assert!(code == "401" || code == "403" || code == "404", "{code}");
    assert_eq!(ask(&one, Some(one.token()), "POST", "/process.Process/List", "{}").await.status, 200);
    // A relayed port is not a way around: neither the agent's nor the relay's own.
    for port in ["49982"] {
        let headers = [("e2b-sandbox-id", one.id().as_str()), ("e2b-sandbox-port", port)];
        assert_eq!(request(&server.url, "GET", "/", &headers, "").await.unwrap().status, 502);
    }
}

#[tokio::test]
async fn file_paths_stay_in_the_guest_and_its_rights() {
    let server = Server::start().unwrap();
    let guest = server.create().await.unwrap();
    let canary = systest::root().join(".cache/systest/canary");
    std::fs::write(&canary, "host").unwrap();
    guest
        .sh("ln -s / root; ln -s /etc/shadow shadow; mkfifo pipe; ln -s loop loop; ln -s /etc/passwd pw")
        .await
        .unwrap();
    let read = async |path: &str| -> Result<String, String> {
        let response = guest.agent.read_file(path).await.map_err(|error| error.to_string())?;
        let body = http_body_util::BodyExt::collect(response.into_body())
            .await
            .map_err(|error| error.to_string())?;
        Ok(String::from_utf8_lossy(&body.to_bytes()).into_owned())
    };
    for path in [
        canary.display().to_string(),
        format!("../../../../../../{}", canary.display()),
        format!("root/{}", canary.display()),
        "/proc/1/root/../../work".to_owned(),
        "shadow".to_owned(),
        "/etc/shadow".to_owned(),
        "loop".to_owned(),
        "pipe".to_owned(),
        "/dev/vda".to_owned(),
        "a\0b".to_owned(),
    ] {
        let outcome = tokio::time::timeout(std::time::Duration::from_secs(5), read(&path)).await;
        let outcome = outcome.unwrap_or_else(|_| panic!("{path:?} hangs"));
        assert!(outcome.is_err(), "{path:?}: {outcome:?}");
    }
    assert!(read("pw").await.unwrap().contains("user:x:1000"));
    assert!(guest.agent.write_file("/etc/passwd", client::http::whole("x")).await.is_err());
    assert!(guest.agent.write_file("pw", client::http::whole("x")).await.is_err(), "a link gives no rights");
    assert!(read("/etc/passwd").await.unwrap().contains("root:x:0"));
    let _ = std::fs::remove_file(canary);
}

fn users_of(server: &Server) -> Vec<String> {
    let uid = |pid: u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap().trim().to_owned()
    };
    systest::host::machines(&server.data()).into_iter().map(uid).collect()
}

/// A user ID is the host's, not the server's: neither a second server nor one after a crash gives out another's.
#[tokio::test]
async fn no_two_servers_share_a_user_id() {
    let (mut one, two) = (Server::start().unwrap(), Server::start().unwrap());
    let (a, b) = tokio::join!(one.create(), two.create());
    let (_a, _b) = (a.unwrap(), b.unwrap());
    one.crash().unwrap();
    let orphan = users_of(&one);
    assert_eq!(orphan.len(), 1, "its machine is there until it is swept");
    let three = Server::start().unwrap();
    let _c = three.create().await.unwrap();
    let mut all = [orphan, users_of(&two), users_of(&three)].concat();
    assert_eq!(all.len(), 3);
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 3, "{all:?}");
    // The crashed server gets a range of its own again, and sweeps up.
    one.restart().unwrap();
    assert!(users_of(&one).is_empty());
    let _d = one.create().await.unwrap();
    let again = users_of(&one);
    assert!(![users_of(&two), users_of(&three)].concat().contains(&again[0]), "{again:?}");
}
