"""Watched directories."""

import asyncio

import pytest
from conftest import eventually
from e2b import (
    FileNotFoundException,
    FilesystemEventType as Type,
    NotFoundException,
    SandboxException,
)


def seen(events):
    return [(event.name, event.type) for event in events]


def test_a_write_is_three_events_at_once(sbx, place):
    watcher = sbx.files.watch_dir(place)
    sbx.files.write(f"{place}/f", "1")
    assert seen(watcher.get_new_events()) == [("f", Type.CREATE), ("f", Type.CHMOD), ("f", Type.WRITE)]
    assert watcher.get_new_events() == []
    sbx.files.write(f"{place}/f", "2")
    assert ("f", Type.WRITE) in seen(watcher.get_new_events())
    sbx.files.rename(f"{place}/f", f"{place}/g")
    assert seen(watcher.get_new_events()) == [("f", Type.RENAME), ("g", Type.CREATE)]
    sbx.files.remove(f"{place}/g")
    assert seen(watcher.get_new_events()) == [("g", Type.REMOVE)]
    sbx.commands.run(f"touch {place}/h; chmod 600 {place}/h")
    assert ("h", Type.CHMOD) in seen(watcher.get_new_events())
    watcher.stop()
    with pytest.raises(SandboxException):
        watcher.get_new_events()


def test_not_recursive_unless_asked(sbx, place):
    sbx.files.make_dir(f"{place}/d")
    watcher = sbx.files.watch_dir(place)
    sbx.files.write(f"{place}/d/f", "1")
    assert all(not name.startswith("d/") for name, _ in seen(watcher.get_new_events()))
    watcher.stop()


def test_recursive_with_what_is_new(sbx, place):
    watcher = sbx.files.watch_dir(place, recursive=True)
    sbx.files.make_dir(f"{place}/n/m")
    sbx.files.write(f"{place}/n/m/f", "1")
    events = seen(watcher.get_new_events())
    assert ("n", Type.CREATE) in events and ("n/m", Type.CREATE) in events
    assert ("n/m/f", Type.CREATE) in events and ("n/m/f", Type.WRITE) in events
    assert len([e for e in events if e == ("n/m/f", Type.CREATE)]) == 1
    watcher.stop()


def test_entries(sbx, place):
    watcher = sbx.files.watch_dir(place, include_entry=True)
    sbx.files.write(f"{place}/f", "123")
    sbx.files.remove(f"{place}/f")
    events = watcher.get_new_events()
    assert events[-1].type == Type.REMOVE and events[-1].entry is None
    sbx.files.write(f"{place}/g", "123")
    entry = watcher.get_new_events()[-1].entry
    assert (entry.path, entry.size, entry.owner) == (f"{place}/g", 3, "user")
    watcher.stop()


def test_what_cannot_be_watched(sbx, place):
    sbx.files.write(f"{place}/f", "1")
    with pytest.raises(SandboxException):
        sbx.files.watch_dir(f"{place}/f")
    with pytest.raises(FileNotFoundException):
        sbx.files.watch_dir(f"{place}/none")
    watcher = sbx.files.watch_dir(place)
    watcher._watcher_id = "none-such"
    with pytest.raises(NotFoundException):
        watcher.get_new_events()


def test_b49_paths_after_a_directory_was_renamed(sbx, place):
    watcher = sbx.files.watch_dir(place, recursive=True)
    sbx.commands.run("mkdir d1; echo 1 > d1/f; mv d1 d2; echo 2 > d2/f; rm -r d2", cwd=place)
    events = seen(watcher.get_new_events())
    for wanted in (
        ("d1", Type.CREATE),
        ("d1/f", Type.CREATE),
        ("d1", Type.RENAME),
        ("d2", Type.CREATE),
        ("d2/f", Type.WRITE),
        ("d2/f", Type.REMOVE),
        ("d2", Type.REMOVE),
    ):
        assert wanted in events, (wanted, events)
    assert ("d1/f", Type.REMOVE) not in events
    watcher.stop()


def test_b50_too_many_events_are_an_error_not_a_loss(sbx, place):
    watcher = sbx.files.watch_dir(place)
    sbx.commands.run(
        "python3 -c \"import os\nfor i in range(10000):\n f=os.open('x', os.O_CREAT|os.O_WRONLY); os.close(f); os.unlink('x')\"",
        cwd=place,
        timeout=60,
    )
    with pytest.raises(SandboxException, match="overflow|lost"):
        watcher.get_new_events()
    resident = int(sbx.commands.run("awk '/VmRSS/ {print $2}' /proc/1/status", user="root").stdout)
    assert resident < 96 << 10
    # Usable again.
    eventually(lambda: watcher.get_new_events() == [], 5)
    sbx.files.write(f"{place}/after", "1")
    assert ("after", Type.CREATE) in seen(watcher.get_new_events())
    watcher.stop()


async def test_async_stream(asbx, place):
    events = []
    done = asyncio.Event()

    def take(event):
        events.append((event.name, event.type))
        if event.name == "sub/last":
            done.set()

    ended = []
    handle = await asbx.files.watch_dir(place, on_event=take, on_exit=lambda e: ended.append(e), recursive=True)
    await asbx.files.write(f"{place}/f", "1")
    await asbx.files.write(f"{place}/sub/last", "1")
    await asyncio.wait_for(done.wait(), 5)
    assert events[:3] == [("f", Type.CREATE), ("f", Type.CHMOD), ("f", Type.WRITE)]
    assert ("sub", Type.CREATE) in events
    await handle.stop()
    await asyncio.sleep(0.1)
    count = len(events)
    await asbx.files.write(f"{place}/g", "1")
    await asyncio.sleep(0.3)
    assert len(events) == count
    with pytest.raises(FileNotFoundException):
        await asbx.files.watch_dir(f"{place}/none", on_event=take)


async def test_a_stopped_stream_frees_its_watches(asbx, sbx, place):
    count = "find /proc/1/fd -lname 'anon_inode:*inotify*' | wc -l"
    before = int(sbx.commands.run(count, user="root").stdout)
    handles = [await asbx.files.watch_dir(place, on_event=lambda e: None) for _ in range(5)]
    assert int(sbx.commands.run(count, user="root").stdout) >= before + 5
    for handle in handles:
        await handle.stop()
    for _ in range(50):
        now = int((await asbx.commands.run(count, user="root")).stdout)
        if now <= before:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{now} watchers, {before} before")
