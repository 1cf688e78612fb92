"""Create, connect, list, time limits, end."""

import concurrent.futures
import time
import uuid
from datetime import datetime, timedelta, timezone

import pytest
from conftest import eventually
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    ConnectionConfig,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)

GONE = "inosuchsandbox0000000"


def listed(**query):
    """Every page."""
    paginator = Sandbox.list(**query)
    found = []
    while paginator.has_next:
        found += paginator.next_items()
    return found


def mine(mark, **query):
    return listed(query=SandboxQuery(metadata={"mark": mark}, **query))


def test_create_get_info_and_kill(create):
    before = datetime.now(timezone.utc)
    sandbox = create(timeout=120, metadata={"who": "me"}, envs={"FOO": "bar"})
    assert sandbox.sandbox_id.isalnum() and sandbox.sandbox_id.islower()
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.name == "base" and info.template_id
    assert info.metadata == {"who": "me"}
    assert info.state == SandboxState.RUNNING
    assert info.cpu_count >= 1 and info.memory_mb >= 128
    assert info.sandbox_domain is None or "e2b" not in info.sandbox_domain
    assert before - timedelta(seconds=5) < info.started_at < datetime.now(timezone.utc) + timedelta(seconds=5)
    assert 115 <= (info.end_at - info.started_at).total_seconds() <= 120.5
    assert sandbox.is_running()
    assert sandbox.kill() is True
    # At once, and for every caller.
    assert sandbox.is_running() is False
    assert sandbox.kill() is False
    assert Sandbox.kill(sandbox.sandbox_id) is False
    with pytest.raises(SandboxNotFoundException):
        sandbox.get_info()


def test_a_create_can_run_at_once_and_is_quick(create):
    started = time.monotonic()
    sandbox = create()
    assert sandbox.commands.run("echo ready").stdout == "ready\n"
    assert time.monotonic() - started < 5


def test_context_manager_kills():
    with Sandbox.create(timeout=60) as sandbox:
        assert sandbox.is_running()
    assert not sandbox.is_running()


def test_connect_by_id_and_instance(create):
    sandbox = create()
    sandbox.files.write("/tmp/mark", "here")
    other = Sandbox.connect(sandbox.sandbox_id)
    assert other.files.read("/tmp/mark") == "here"
    assert other._envd_access_token == sandbox._envd_access_token
    assert sandbox.connect().sandbox_id == sandbox.sandbox_id


def test_connect_never_shortens_and_extends(create):
    sandbox = create(timeout=300)
    before = sandbox.get_info().end_at
    Sandbox.connect(sandbox.sandbox_id, timeout=10)
    assert sandbox.get_info().end_at == before
    Sandbox.connect(sandbox.sandbox_id, timeout=900)
    assert sandbox.get_info().end_at > before + timedelta(seconds=500)


def test_set_timeout_both_ways(create):
    sandbox = create(timeout=300)
    before = sandbox.get_info().end_at
    sandbox.set_timeout(60)
    shorter = sandbox.get_info().end_at
    assert shorter < before - timedelta(seconds=200)
    Sandbox.set_timeout(sandbox.sandbox_id, 600)
    assert sandbox.get_info().end_at > before


def test_set_timeout_zero_ends_now(create):
    sandbox = create()
    sandbox.set_timeout(0)
    eventually(lambda: not sandbox.is_running(), 5)
    with pytest.raises(SandboxNotFoundException):
        sandbox.get_info()


def test_timeout_kills(create):
    sandbox = create(timeout=2)
    assert sandbox.is_running()
    time.sleep(1)
    assert sandbox.is_running()
    eventually(lambda: not sandbox.is_running(), 4)
    with pytest.raises(SandboxException) as caught:
        sandbox.commands.run("true")
    assert "was not found" in str(caught.value)
    assert isinstance(caught.value, SandboxNotRunningException)


def test_b22_kill_during_a_command_is_a_typed_error(create):
    """A cut stream is an error that says the sandbox is gone, soon, and never success."""
    sandbox = create()
    handle = sandbox.commands.run("sleep 30; exit 3", background=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(handle.wait)
        time.sleep(0.2)
        started = time.monotonic()
        sandbox.kill()
        with pytest.raises(TimeoutException) as caught:
            waiting.result(timeout=5)
    assert time.monotonic() - started < 5
    assert "killed or reached its end of life" in str(caught.value)


def test_list_filters_order_and_pages(create):
    mark = uuid.uuid4().hex
    metadata = {"mark": mark, "with space": "a b=c&d é/%"}
    made = [create(metadata={**metadata, "n": str(n)}) for n in range(3)]
    ids = [sandbox.sandbox_id for sandbox in made]

    assert [s.sandbox_id for s in mine(mark)] == ids[::-1], "newest first"
    assert [s.sandbox_id for s in listed(query=SandboxQuery(metadata={"mark": mark}), order="asc")] == ids
    assert [s.sandbox_id for s in listed(query=SandboxQuery(metadata=metadata))] == ids[::-1]
    assert [s.sandbox_id for s in listed(query=SandboxQuery(metadata={"mark": mark, "n": "1"}))] == [ids[1]]
    assert listed(query=SandboxQuery(metadata={"mark": mark, "n": "7"})) == []
    assert mine(mark, state=[SandboxState.PAUSED]) == []
    assert len(mine(mark, state=[SandboxState.RUNNING])) == 3
    assert len(mine(mark, state=[SandboxState.RUNNING, SandboxState.PAUSED])) == 3

    for order, wanted in (("desc", ids[::-1]), ("asc", ids)):
        paginator = Sandbox.list(query=SandboxQuery(metadata={"mark": mark}), limit=1, order=order)
        pages = []
        while paginator.has_next:
            page = paginator.next_items()
            assert len(page) == 1
            pages.append(page[0].sandbox_id)
        assert pages == wanted
        assert paginator.next_token is None

    second = mine(mark)[1]
    assert {s.sandbox_id for s in mine(mark, started_after=second.started_at)} == set(ids[1:])
    later = mine(mark)[0].started_at + timedelta(seconds=1)
    assert mine(mark, started_after=later) == []
    template = made[0].get_info().template_id
    assert len(mine(mark, template=template)) == 3
    assert len(mine(mark, template="base")) == 3
    assert mine(mark, template="no-such-template") == []

    # Read your writes.
    made[1].kill()
    assert [s.sandbox_id for s in mine(mark)] == [ids[2], ids[0]]


def test_b80_filters_that_match_nothing_give_nothing(create, origin):
    mark = uuid.uuid4().hex
    one = create(metadata={"mark": mark, "odd": "a=b&c=d"})
    create(metadata={"mark": mark, "odd": "a"})
    assert len(mine(mark)) == 2
    odd = listed(query=SandboxQuery(metadata={"odd": "a=b&c=d", "mark": mark}))
    assert [s.sandbox_id for s in odd] == [one.sandbox_id]
    assert listed(query=SandboxQuery(metadata={"nobody": mark})) == []
    assert mine(mark, state=[SandboxState.PAUSED]) == []


def test_wrong_key():
    wrong = "e2b_" + "0" * 40
    for call in (
        lambda: Sandbox.create(api_key=wrong),
        lambda: Sandbox.connect(GONE, api_key=wrong),
        lambda: Sandbox.kill(GONE, api_key=wrong),
        lambda: Sandbox.list(api_key=wrong).next_items(),
    ):
        with pytest.raises(AuthenticationException):
            call()


def test_what_is_not_there(create):
    for call in (
        lambda: Sandbox.connect(GONE),
        lambda: Sandbox.get_info(GONE),
        lambda: Sandbox.set_timeout(GONE, 10),
        lambda: Sandbox.get_metrics(GONE),
    ):
        with pytest.raises(SandboxNotFoundException):
            call()
    assert Sandbox.kill(GONE) is False
    with pytest.raises(SandboxException, match="404: .*no-such-template"):
        Sandbox.create(template="no-such-template")


def test_wrong_agent_token(sbx):
    other = Sandbox(
        sandbox_id=sbx.sandbox_id,
        sandbox_domain=None,
        envd_version=sbx._envd_version,
        envd_access_token="0" * 64,
        connection_config=ConnectionConfig(
            extra_sandbox_headers={
                "E2b-Sandbox-Id": sbx.sandbox_id,
                "E2b-Sandbox-Port": "49983",
                "X-Access-Token": "0" * 64,
            }
        ),
    )
    with pytest.raises(AuthenticationException):
        other.commands.run("true")
    with pytest.raises(AuthenticationException):
        other.files.read("/etc/hostname")
    assert other.is_running()


def test_metrics(create):
    sandbox = create()
    started = datetime.now(timezone.utc)
    found = eventually(lambda: sandbox.get_metrics(), 30, 0.5)
    for sample in found:
        assert sample.cpu_count == sandbox.get_info().cpu_count
        assert 0 <= sample.cpu_used_pct <= 100 * sample.cpu_count + 5
        assert 0 < sample.mem_used < sample.mem_total
        assert 0 < sample.disk_used < sample.disk_total
        assert abs((sample.timestamp - started).total_seconds()) < 40
    hour_ago = started - timedelta(hours=1)
    assert sandbox.get_metrics(start=hour_ago, end=hour_ago + timedelta(minutes=5)) == []
    window = sandbox.get_metrics(start=started - timedelta(seconds=10), end=datetime.now(timezone.utc))
    assert len(window) >= 1


def test_idempotency_key_makes_one_sandbox():
    key = uuid.uuid4().hex
    one = Sandbox.create(timeout=60, idempotency_key=key)
    try:
        again = Sandbox.create(timeout=60, idempotency_key=key)
        assert again.sandbox_id == one.sandbox_id
    finally:
        one.kill()


async def test_async_life():
    sandbox = await AsyncSandbox.create(timeout=120, metadata={"who": "async"})
    try:
        assert await sandbox.is_running()
        info = await sandbox.get_info()
        assert info.metadata == {"who": "async"}
        await sandbox.set_timeout(600)
        assert (await sandbox.get_info()).end_at > info.end_at
        other = await AsyncSandbox.connect(sandbox.sandbox_id)
        assert (await other.commands.run("echo hi")).stdout == "hi\n"
        paginator = AsyncSandbox.list(query=SandboxQuery(metadata={"who": "async"}))
        assert sandbox.sandbox_id in [s.sandbox_id for s in await paginator.next_items()]
    finally:
        assert await sandbox.kill()
    assert not await sandbox.is_running()
