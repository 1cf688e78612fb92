"""What takes longer than a minute; the name puts it after everything it runs beside."""

import httpx
import pytest


@pytest.mark.timeout(150)
def test_b29_a_silent_command_ends_as_it_should(silent):
    silent.thread.join(120)
    assert not silent.thread.is_alive()
    assert silent.result.stdout == "end\n" and silent.result.exit_code == 0


def test_b13_a_server_in_the_background_lives_on(silent, origin):
    assert silent.server.pid in [p.pid for p in silent.sandbox.commands.list()]
    headers = {"E2b-Sandbox-Id": silent.sandbox.sandbox_id, "E2b-Sandbox-Port": "8000"}
    assert httpx.get(origin, headers=headers).status_code == 200
