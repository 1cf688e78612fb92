//! Lives of sandboxes, and what the host has left when they are over.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use proto::api::NewSandbox;
use rustix::process::Signal;
use systest::host::{Holdings, machines, private_kib};
use systest::raw::request;
use systest::{Server, eventually};

/// Descriptors of pooled connections and threads of a runtime come and go; machines, directories and files must not.
async fn settles_to(server: &Server, before: &Holdings) {
    let near = |now: usize, then: usize| now <= then + 8;
    eventually(Duration::from_secs(20), &format!("the host is as it was: {before:?}"), async || {
        let now = Holdings::of(server);
        println!("{now:?}");
        (now.machines, now.directories, now.half_made)
            == (before.machines, before.directories, before.half_made)
            && near(now.descriptors, before.descriptors)
            && near(now.threads, before.threads)
    })
    .await;
}

#[tokio::test]
async fn twenty_at_once_are_apart_and_leave_nothing() {
    let server = Server::start().unwrap();
    // What the first burst makes for good (pools, threads) is not a leak; what the second adds to it is.
    let burst = futures::future::join_all((0..20).map(|_| server.create())).await;
    for guest in burst {
        server.api().kill(guest.unwrap().id()).await.unwrap();
    }
    let before = Holdings::of(&server);
    let guests = futures::future::join_all((0..20).map(|_| server.create())).await;
    let guests: Vec<_> = guests.into_iter().map(Result::unwrap).collect();
    assert_eq!(machines(&server.data()).len(), 20);
    let said = futures::future::join_all(guests.iter().map(|guest| {
        guest.sh("hostname; cat /etc/machine-id /proc/sys/kernel/random/uuid; head -c 8 /dev/urandom | od -An -tx1; date +%s%N")
    }))
    .await;
    let now = jiff::Timestamp::now().as_nanosecond();
    let mut seen = BTreeSet::new();
    for (guest, said) in guests.iter().zip(said) {
        let said = said.unwrap().stdout;
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines[0], guest.id().as_str());
        for line in &lines[..4] {
            assert!(
                seen.insert((*line).to_owned()),
                "each copy has its own name, machine-id and random bytes: {line}"
            );
        }
        let skew = now - lines[4].parse::<i128>().unwrap();
        assert!(
            skew.abs() < 120_000_000_000,
            "the clock is the host's, give or take the time of the test: {skew}"
        );
    }
    // Each machine runs as a user of its own, without privileges.
    let mut users = BTreeSet::new();
    for pid in machines(&server.data()) {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
        assert!(users.insert(field("Uid:")));
        assert_eq!(field("CapEff:"), "0000000000000000");
        assert_eq!((field("Seccomp:"), field("NoNewPrivs:")), ("2".to_owned(), "1".to_owned()));
    }
    futures::future::join_all(
        guests.iter().map(|guest| async { server.api().kill(guest.id()).await.unwrap() }),
    )
    .await;
    assert!(server.api().list().await.unwrap().is_empty());
    // Each holds a connection to the server of its own.
    drop(guests);
    settles_to(&server, &before).await;
}

#[tokio::test]
async fn a_hundred_cycles_leave_nothing() {
    let server = Server::start().unwrap();
    let cycle = async || {
        let guest = server.create().await.unwrap();
        assert_eq!(guest.run(&["/bin/echo", "hi"], None).await.unwrap().stdout, "hi\n");
        server.api().kill(guest.id()).await.unwrap();
    };
    futures::future::join(cycle(), cycle()).await;
    let (before, memory) = (Holdings::of(&server), private_kib(server.pid()));
    for _ in 0..50 {
        futures::future::join(cycle(), cycle()).await;
    }
    settles_to(&server, &before).await;
    let grown = private_kib(server.pid()).saturating_sub(memory);
    assert!(grown < 16 << 10, "the server grew by {grown} KiB");
}

#[tokio::test]
async fn time_is_kept() {
    let server = Server::start().unwrap();
    let timed = NewSandbox { timeout: Some(3), ..NewSandbox::default() };
    let guest = server.create_with(timed).await.unwrap();
    let ended = Instant::now();
    eventually(Duration::from_secs(6), "the timeout ends it", async || {
        server.api().get(guest.id()).await.is_err()
    })
    .await;
    assert!(ended.elapsed() > Duration::from_secs(1));
    let error = server.api().get(guest.id()).await.unwrap_err().to_string();
    assert!(error.contains("its timeout was reached"), "{error}");
    let guest = server.create().await.unwrap();
    server.api().set_timeout(guest.id(), 0).await.unwrap();
    eventually(Duration::from_secs(5), "zero ends it now", async || {
        server.api().list().await.unwrap().is_empty()
    })
    .await;
    eventually(Duration::from_secs(2), "its machine goes with it", async || {
        machines(&server.data()).is_empty()
    })
    .await;
}

#[tokio::test]
async fn a_machine_that_dies_is_noticed() {
    let server = Server::start().unwrap();
    let guest = server.create().await.unwrap();
    let pid = machines(&server.data())[0];
    systest::signal(pid, Signal::KILL).unwrap();
    eventually(Duration::from_secs(5), "the API says so", async || {
        server.api().get(guest.id()).await.is_err()
    })
    .await;
    let error = server.api().get(guest.id()).await.unwrap_err().to_string();
    assert!(error.contains("its virtual machine ended unexpectedly"), "{error}");
    let headers = [("e2b-sandbox-id", guest.id().as_str()), ("e2b-sandbox-port", "49983")];
    let answer = request(&server.url, "GET", "/health", &headers, "").await.unwrap();
    assert_eq!(answer.status, 502);
    // The guest can end its own machine as well.
    let guest = server.create().await.unwrap();
    let _ = guest.root_sh("echo o > /proc/sysrq-trigger; sleep 5").await;
    eventually(Duration::from_secs(10), "a power-off is noticed", async || {
        machines(&server.data()).is_empty()
    })
    .await;
    eventually(Duration::from_secs(2), "its directory goes too", async || {
        Holdings::of(&server).directories == 0
    })
    .await;
}

#[tokio::test]
async fn shutdown_leaves_nothing_and_a_crash_is_swept_up() {
    let mut server = Server::start().unwrap();
    let (one, two) = tokio::join!(server.create(), server.create());
    let (one, _two) = (one.unwrap(), two.unwrap());
    assert_eq!(machines(&server.data()).len(), 2);
    server.stop().unwrap();
    assert!(machines(&server.data()).is_empty());
    assert_eq!(std::fs::read_dir(server.data().join("sandboxes")).unwrap().count(), 0);
    server.restart().unwrap();
    let error = server.api().get(one.id()).await.unwrap_err().to_string();
    assert!(error.contains("the node was shut down"), "{error}");

    let three = server.create().await.unwrap();
    server.crash().unwrap();
    server.restart().unwrap();
    assert!(machines(&server.data()).is_empty(), "machines of the crashed server are gone");
    assert_eq!(std::fs::read_dir(server.data().join("sandboxes")).unwrap().count(), 0);
    assert!(server.api().get(three.id()).await.is_err());
    assert!(server.api().list().await.unwrap().is_empty());
    let four = server.create().await.unwrap();
    assert_eq!(four.sh("echo ok").await.unwrap().stdout, "ok\n");
}

/// B83: each create whose client went away is usable and listed, or gone.
#[tokio::test]
async fn a_client_that_goes_away_leaves_no_orphan() {
    let server = Server::start().unwrap();
    let headers = [("x-api-key", server.key.as_str())];
    for wait in [0, 1, 5, 20, 60, 120, 200, 250, 300, 400] {
        let create = request(&server.url, "POST", "/v2/sandboxes", &headers, r#"{"templateID":"base"}"#);
        let _ = tokio::time::timeout(Duration::from_millis(wait), create).await;
    }
    eventually(Duration::from_secs(15), "machines and list agree", async || {
        let listed = server.api().list().await.unwrap().len();
        let holdings = Holdings::of(&server);
        listed == holdings.machines && listed == holdings.directories
    })
    .await;
    for sandbox in server.api().list().await.unwrap() {
        server.api().kill(&sandbox.sandbox_id).await.unwrap();
    }
    assert_eq!(Holdings::of(&server).machines, 0);
}

/// What the API answered when it said no.
fn refusal(error: &anyhow::Error) -> (u16, proto::api::ErrorBody) {
    match error.downcast_ref::<client::ClientError>() {
        Some(client::ClientError::Refused { status, body }) => (status.as_u16(), body.clone()),
        _ => panic!("not an answer: {error:#}"),
    }
}

#[tokio::test]
async fn a_shutdown_tells_the_creates_it_cuts_short() {
    let mut server = Server::start().unwrap();
    let headers = [("x-api-key", server.key.as_str())];
    let url = server.url.clone();
    let creates =
        (0..6).map(|_| request(&url, "POST", "/v2/sandboxes", &headers, r#"{"templateID":"base"}"#));
    let pid = server.pid();
    let stop = async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        systest::signal(pid, Signal::TERM).unwrap();
    };
    let (answers, ()) = tokio::join!(futures::future::join_all(creates), stop);
    let mut cut_short = 0;
    for answer in answers.into_iter().map(Result::unwrap) {
        if answer.status != 201 {
            let body = answer.json();
            assert_eq!(
                (answer.status.as_u16(), &body["error_code"]),
                (503, &"node_stopping".into()),
                "{body}"
            );
            assert_eq!(answer.headers["retry-after"], "5");
            cut_short += 1;
        }
    }
    assert!(cut_short > 0, "the shutdown came too late to be tested");
    server.stop().unwrap();
}

/// B71 for what there is yet: a kill while a sandbox is being created.
#[tokio::test]
async fn killed_from_every_state() {
    let server = Server::start().unwrap();
    let before = Holdings::of(&server);
    let mut cut_short = 0;
    for wait in [0u64, 10, 30, 60, 100, 150, 200, 250] {
        let create = server.create();
        let kill = async {
            tokio::time::sleep(Duration::from_millis(wait)).await;
            let mut killed = Vec::new();
            // It is not listed before it runs; its directory has its name.
            for entry in std::fs::read_dir(server.data().join("sandboxes")).unwrap().flatten() {
                let id = entry.file_name().to_string_lossy().parse().unwrap();
                let _ = server.api().kill(&id).await;
                let _ = server.api().kill(&id).await;
                killed.push(id);
            }
            killed
        };
        let (created, killed) = tokio::join!(create, kill);
        match created {
            Ok(guest) => drop(server.api().kill(guest.id()).await),
            Err(error) => {
                let (status, body) = refusal(&error);
                assert_eq!((status, body.error_code.as_str()), (409, "sandbox_ended"), "{body:?}");
                assert!(body.message.ends_with("it was killed"), "{body:?}");
                cut_short += 1;
            }
        }
        for id in killed {
            let error = server.api().get(&id).await.unwrap_err().to_string();
            assert!(error.contains("it was killed"), "{error}");
        }
    }
    assert!(cut_short > 0, "no kill came in time to be tested");
    assert!(server.api().list().await.unwrap().is_empty());
    settles_to(&server, &before).await;
}

#[tokio::test]
async fn full_disks_are_told() {
    let server = Server::start().unwrap();
    let guest = server.create().await.unwrap();
    guest.root_sh("fallocate -l $(df --output=avail -B1 / | tail -1) /fill; dd if=/dev/zero of=/fill2 bs=1M 2>/dev/null; true").await.unwrap();
    let headers = [
        ("e2b-sandbox-id", guest.id().as_str()),
        ("e2b-sandbox-port", "49983"),
        ("x-access-token", guest.token()),
        ("content-type", "application/octet-stream"),
    ];
    let answer =
        request(&server.url, "POST", "/files?path=/home/user/x", &headers, vec![7u8; 4 << 20]).await.unwrap();
    assert_eq!(answer.status, 507, "{}", answer.text());
    assert_eq!(guest.sh("echo ok").await.unwrap().stdout, "ok\n", "the agent is well");
}

#[tokio::test]
async fn a_host_without_space_or_room_refuses() {
    for (limit, status, word) in [
        ("min_free_mib = 1000000000000", 503, "node_disk_full"),
        ("max_sandboxes = 1", 503, "sandbox_capacity_unavailable"),
    ] {
        let server = Server::start_with(&format!("[limits]\n{limit}\n")).unwrap();
        let headers = [("x-api-key", server.key.as_str())];
        let create = async || {
            request(&server.url, "POST", "/v2/sandboxes", &headers, r#"{"templateID":"base"}"#).await.unwrap()
        };
        create().await;
        let answer = create().await;
        assert_eq!(
            (answer.status.as_u16(), answer.json()["error_code"].as_str()),
            (status, Some(word)),
            "{}",
            answer.text()
        );
        assert!(answer.json()["message"].as_str().unwrap().len() > 20);
        let holdings = Holdings::of(&server);
        assert_eq!(
            (holdings.machines, holdings.directories),
            (usize::from(word != "node_disk_full"), holdings.machines)
        );
    }
}

/// Half-sent requests need no key: they must cost sandboxes nothing, nor the end of the server time.
#[tokio::test]
async fn strangers_cannot_use_up_descriptors() {
    let mut server = Server::start_with("[limits]\nconnections = 20\n").unwrap();
    let before = Holdings::of(&server);
    let address = server.url.strip_prefix("http://").unwrap().to_owned();
    let mut halves = Vec::new();
    for _ in 0..100 {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        std::io::Write::write_all(&mut stream, b"GET /health HTTP/1.1\r\nhost: a\r\n").unwrap();
        halves.push(stream);
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let grown = Holdings::of(&server).descriptors - before.descriptors;
    assert!(grown <= 24, "{grown} descriptors for 20 connections");
    // Whoever comes after them is served once they have had their time; they reconnect no more.
    halves.truncate(30);
    let guest = server.create().await.unwrap();
    assert_eq!(guest.sh("echo ok").await.unwrap().stdout, "ok\n");
    server.api().kill(guest.id()).await.unwrap();
    let _more: Vec<_> = (0..10).map(|_| std::net::TcpStream::connect(&address).unwrap()).collect();
    let begun = Instant::now();
    server.stop().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
}

/// What `min_free_mib` does not catch: the disk fills up while a sandbox is being made.
#[tokio::test]
async fn a_disk_that_fills_up_during_a_create_is_told() {
    let server = Server::start_with("[limits]\nmin_free_mib = 0\n").unwrap();
    let places = server.data().join("sandboxes");
    let headers = [("x-api-key", server.key.as_str())];
    // Room for nothing, for a directory, and for a directory and part of a disk.
    for options in ["size=4k,nr_inodes=1", "size=4k,nr_inodes=2", "size=4k,nr_inodes=9"] {
        let mount = |arguments: &[&str]| {
            let status = std::process::Command::new(arguments[0]).args(&arguments[1..]).arg(&places).status();
            assert!(status.unwrap().success(), "{arguments:?}");
        };
        mount(&["mount", "-t", "tmpfs", "-o", options, "tmpfs"]);
        let answer = request(&server.url, "POST", "/v2/sandboxes", &headers, r#"{"templateID":"base"}"#)
            .await
            .unwrap();
        mount(&["umount"]);
        let body = answer.json();
        assert_eq!((answer.status.as_u16(), &body["error_code"]), (503, &"node_disk_full".into()), "{body}");
        assert!(!answer.text().contains(".cache"), "a path of the host: {body}");
    }
    server.create().await.unwrap();
}
