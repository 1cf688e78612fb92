"""The official Python SDK, unmodified, against a server that is already running.

The server is found through E2B_API_KEY, E2B_API_URL and E2B_SANDBOX_URL, as every user of the SDK finds it. Most tests share
one sandbox: each works in names of its own and leaves nothing running.
"""

import os
import threading
import time
import uuid
from typing import Callable

import httpx
import pytest
from e2b import AsyncSandbox, Sandbox

LIFETIME = 1800


def pytest_configure(config):
    for name in ("E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL"):
        if not os.environ.get(name):
            raise pytest.UsageError(f"{name} is not set: start a server and take its values from `pando env`")


@pytest.fixture(scope="session")
def sbx():
    """The sandbox that tests share."""
    sandbox = Sandbox.create(timeout=LIFETIME)
    yield sandbox
    sandbox.kill()


@pytest.fixture
async def asbx(sbx):
    """The shared sandbox, through the asynchronous SDK."""
    return await AsyncSandbox.connect(sbx.sandbox_id, timeout=LIFETIME)


@pytest.fixture
def create():
    """Makes sandboxes of the test's own, which end with it."""
    made = []

    def make(**options) -> Sandbox:
        options.setdefault("timeout", 300)
        made.append(Sandbox.create(**options))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.kill()


@pytest.fixture
def place(sbx) -> str:
    """A new directory in the shared sandbox."""
    path = f"/home/user/{uuid.uuid4().hex[:12]}"
    assert sbx.files.make_dir(path)
    return path


@pytest.fixture(scope="session")
def origin() -> str:
    """The server's origin, where every sandbox is reached."""
    return os.environ["E2B_SANDBOX_URL"].rstrip("/")


@pytest.fixture
def raw(sbx, origin):
    """Requests to the shared sandbox's agent that no SDK would send."""
    headers = {
        "E2b-Sandbox-Id": sbx.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": sbx._envd_access_token,
    }
    with httpx.Client(base_url=origin, headers=headers, timeout=60) as client:
        yield client


def eventually(check: Callable[[], object], limit: float = 10.0, pause: float = 0.05):
    """What `check` says as soon as it is true; fails after `limit` seconds."""
    deadline = time.monotonic() + limit
    while True:
        found = check()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {limit} s"
        time.sleep(pause)


class Silent:
    """A server left in the background and a command that says nothing, both for longer than anybody's default of 60 s.

    They run beside all other tests; the last one looks at them.
    """

    def __init__(self):
        self.sandbox = Sandbox.create(timeout=LIFETIME)
        self.server = self.sandbox.commands.run("exec python3 -m http.server 8000", background=True, timeout=0)
        self.server.disconnect()
        self.result = None
        self.started = time.monotonic()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.result = self.sandbox.commands.run("sleep 65; echo end", timeout=0)
        except Exception as error:
            self.result = error


@pytest.fixture(scope="session", autouse=True)
def silent():
    """Started first, whatever runs."""
    silent = Silent()
    yield silent
    silent.sandbox.kill()
