//! Watched directories.

use serde_json::{Value, json};

use crate::harness::{Agent, pause};

async fn create(agent: &Agent, path: &std::path::Path, recursive: bool) -> String {
    let body = json!({"path": path, "recursive": recursive});
    let answer = agent.call("filesystem.Filesystem/CreateWatcher", body).await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    answer.json()["watcherId"].as_str().unwrap().to_owned()
}

async fn poll(agent: &Agent, id: &str) -> Vec<(String, String)> {
    let answer = agent.call("filesystem.Filesystem/GetWatcherEvents", json!({"watcherId": id})).await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    let events = answer.json()["events"].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap().replace("EVENT_TYPE_", "");
    events.iter().map(|event| (text(&event["name"]), text(&event["type"]))).collect()
}

fn pairs(events: &[(&str, &str)]) -> Vec<(String, String)> {
    events.iter().map(|(name, kind)| ((*name).to_owned(), (*kind).to_owned())).collect()
}

#[tokio::test]
async fn a_written_file_is_three_events_at_once() {
    let agent = Agent::start();
    let dir = tempfile::tempdir().unwrap();
    let id = create(&agent, dir.path(), false).await;
    agent.put(&dir.path().join("f").display().to_string(), "x").await;
    assert_eq!(poll(&agent, &id).await, pairs(&[("f", "CREATE"), ("f", "CHMOD"), ("f", "WRITE")]));
    assert_eq!(poll(&agent, &id).await, []);
    let remove = json!({"watcherId": id});
    assert_eq!(agent.call("filesystem.Filesystem/RemoveWatcher", remove.clone()).await.status, 200);
    assert_eq!(agent.call("filesystem.Filesystem/RemoveWatcher", remove).await.status, 404);
}

#[tokio::test]
async fn what_is_written_into_a_new_directory_is_seen() {
    let agent = Agent::start();
    let dir = tempfile::tempdir().unwrap();
    let id = create(&agent, dir.path(), true).await;
    let nested = dir.path().join("nested");
    assert_eq!(agent.call("filesystem.Filesystem/MakeDir", json!({"path": nested})).await.status, 200);
    agent.put(&nested.join("file").display().to_string(), "x").await;
    let events = poll(&agent, &id).await;
    for expected in pairs(&[("nested", "CREATE"), ("nested/file", "CREATE"), ("nested/file", "WRITE")]) {
        assert_eq!(events.iter().filter(|event| **event == expected).count(), 1, "{events:?}");
    }
}

#[tokio::test]
async fn b49_renamed_directories_keep_being_watched_under_their_new_name() {
    let agent = Agent::start();
    let dir = tempfile::tempdir().unwrap();
    let id = create(&agent, dir.path(), true).await;
    std::fs::create_dir(dir.path().join("d1")).unwrap();
    std::fs::write(dir.path().join("d1/early"), "x").unwrap();
    pause(100).await;
    let events = poll(&agent, &id).await;
    assert!(events.contains(&("d1/early".into(), "CREATE".into())), "{events:?}");
    std::fs::rename(dir.path().join("d1"), dir.path().join("d2")).unwrap();
    std::fs::write(dir.path().join("d2/f"), "").unwrap();
    std::fs::remove_file(dir.path().join("d2/f")).unwrap();
    pause(100).await;
    assert_eq!(
        poll(&agent, &id).await,
        pairs(&[("d1", "RENAME"), ("d2", "CREATE"), ("d2/f", "CREATE"), ("d2/f", "REMOVE")])
    );
    // Out of the tree, and back in.
    let outside = tempfile::tempdir().unwrap();
    std::fs::rename(dir.path().join("d2"), outside.path().join("d2")).unwrap();
    pause(100).await;
    assert_eq!(poll(&agent, &id).await, pairs(&[("d2", "RENAME")]));
    std::fs::write(outside.path().join("d2/unseen"), "").unwrap();
    std::fs::create_dir(dir.path().join("other")).unwrap();
    pause(100).await;
    assert_eq!(poll(&agent, &id).await, pairs(&[("other", "CREATE")]));
    std::fs::rename(outside.path().join("d2"), dir.path().join("d3")).unwrap();
    std::fs::write(dir.path().join("d3/seen"), "").unwrap();
    pause(100).await;
    let events = poll(&agent, &id).await;
    assert!(events.contains(&("d3/seen".into(), "CREATE".into())), "{events:?}");
}

#[tokio::test]
async fn b50_an_unread_watcher_is_bounded_and_says_what_it_lost() {
    let agent = Agent::start();
    let dir = tempfile::tempdir().unwrap();
    let id = create(&agent, dir.path(), true).await;
    let before = agent.memory();
    for n in 0..60_000 {
        std::fs::write(dir.path().join(format!("f{}", n % 100)), "x").unwrap();
    }
    pause(200).await;
    assert!(agent.memory() < before + (24 << 20));
    let answer = agent.call("filesystem.Filesystem/GetWatcherEvents", json!({"watcherId": id})).await;
    assert_eq!(answer.json()["code"], "data_loss");
    std::fs::write(dir.path().join("after"), "").unwrap();
    assert!(poll(&agent, &id).await.contains(&("after".into(), "CREATE".into())));
}

#[tokio::test]
async fn streams_start_report_and_end_with_the_client() {
    let agent = Agent::start();
    let dir = tempfile::tempdir().unwrap();
    let before = agent.descriptors();
    let body = json!({"path": dir.path(), "recursive": true, "includeEntry": true});
    let mut events = agent.stream("filesystem.Filesystem/WatchDir", &[], body).await;
    assert!(events.next().await.unwrap().get("start").is_some());
    std::fs::write(dir.path().join("f"), "x").unwrap();
    let first = events.next().await.unwrap();
    assert_eq!(first["filesystem"]["type"], "EVENT_TYPE_CREATE");
    assert_eq!(first["filesystem"]["entry"]["path"].as_str(), dir.path().join("f").to_str());
    drop(events);
    pause(300).await;
    assert!(agent.descriptors() <= before + 1, "{before} -> {}", agent.descriptors());
}

#[tokio::test]
async fn only_directories_are_watched() {
    let agent = Agent::start();
    let file = tempfile::NamedTempFile::new().unwrap();
    for (path, code) in [(file.path(), "invalid_argument"), (std::path::Path::new("/no/such"), "not_found")] {
        let answer = agent.call("filesystem.Filesystem/CreateWatcher", json!({"path": path})).await;
        assert_eq!(answer.json()["code"], code);
    }
}
