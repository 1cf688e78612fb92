"""Terminals."""

import asyncio
import threading

import pytest
from conftest import eventually
from e2b import CommandExitException, NotFoundException, PtySize, SandboxException


class Terminal:
    """A terminal whose output is collected while it runs."""

    def __init__(self, sandbox, **options):
        self.sandbox = sandbox
        self.handle = sandbox.pty.create(PtySize(rows=24, cols=80), **options)
        self.pid = self.handle.pid
        self.seen = bytearray()
        self.failure = None
        self.thread = threading.Thread(target=self._follow)
        self.thread.start()

    def _follow(self):
        try:
            self.handle.wait(on_pty=self.seen.extend)
        except Exception as error:
            self.failure = error

    def type(self, text: str):
        self.sandbox.pty.send_stdin(self.pid, text.encode())

    def until(self, text: str):
        eventually(lambda: text.encode() in self.seen, 10)

    def end(self):
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.failure


def test_a_shell_with_size_and_environment(sbx, place):
    terminal = Terminal(sbx, cwd=place, envs={"FOO": "bar"})
    terminal.type("echo =$FOO=$TERM=$LANG= $(pwd) $(whoami)\n")
    terminal.until(f"=bar=xterm-256color=C.UTF-8= {place} user")
    terminal.type("echo cols:$(tput cols):\n")
    terminal.until("cols:80:")
    sbx.pty.resize(terminal.pid, PtySize(rows=40, cols=100))
    terminal.type("echo size:$(stty size): cols:$(tput cols):\n")
    terminal.until("size:40 100: cols:100:")
    assert terminal.pid in [p.pid for p in sbx.commands.list()]
    terminal.type("exit\n")
    assert terminal.end() is None


def test_b31_the_shells_exit_code_is_the_end(sbx):
    terminal = Terminal(sbx)
    terminal.type("exit 5\n")
    failure = terminal.end()
    assert isinstance(failure, CommandExitException) and failure.exit_code == 5


def test_ctrl_c_and_job_control(sbx):
    terminal = Terminal(sbx)
    terminal.type("sleep 100\n")
    terminal.until("sleep 100")
    eventually(lambda: sbx.commands.run("pgrep -fxc 'sleep 100' || true").stdout == "1\n")
    terminal.type("\x03")
    terminal.type("echo after:$?:\n")
    terminal.until("after:130:")
    terminal.type("\x04")
    terminal.end()


def test_kill_and_unknown(sbx):
    terminal = Terminal(sbx)
    assert sbx.pty.kill(terminal.pid) is True
    assert isinstance(terminal.end(), CommandExitException)
    assert sbx.pty.kill(terminal.pid) is False
    with pytest.raises(NotFoundException):
        sbx.pty.resize(999999, PtySize(rows=1, cols=1))
    with pytest.raises(NotFoundException):
        sbx.pty.send_stdin(999999, b"x")


def test_stream_input_connect_and_root(sbx):
    terminal = Terminal(sbx, user="root")
    sbx.pty.stream_input(terminal.pid, ["echo who", b":$(whoami):\n"])
    terminal.until("who:root:")
    other = sbx.pty.connect(terminal.pid)
    seen = bytearray()
    terminal.type("echo to-both; exit\n")
    other.wait(on_pty=seen.extend)
    terminal.end()
    assert b"to-both" in seen and b"to-both" in terminal.seen


def test_stdin_is_not_the_terminal(sbx):
    terminal = Terminal(sbx)
    with pytest.raises(SandboxException):
        sbx.commands.send_stdin(terminal.pid, "x")
    with pytest.raises(SandboxException, match="Ctrl"):
        sbx.commands.close_stdin(terminal.pid)
    sbx.pty.kill(terminal.pid)
    terminal.end()
    command = sbx.commands.run("sleep 5", background=True)
    with pytest.raises(SandboxException):
        sbx.pty.send_stdin(command.pid, b"x")
    command.kill()


async def test_async_terminal(asbx):
    seen = bytearray()
    terminal = await asbx.pty.create(PtySize(rows=24, cols=80), on_data=seen.extend)
    await asbx.pty.send_stdin(terminal.pid, b"echo $((6*7))\n")
    await asbx.pty.resize(terminal.pid, PtySize(rows=30, cols=120))
    await asbx.pty.send_stdin(terminal.pid, b"echo cols:$(tput cols):; exit\n")
    result = await asyncio.wait_for(terminal.wait(), 15)
    assert result.exit_code == 0
    assert b"42" in seen and b"cols:120:" in seen
