"""The daemon's life under the Leadership port: standby, leader, and its end after a loss."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rolloutd import app
from rolloutd.control import standby as standby_module
from rolloutd.control.client import Client
from rolloutd.errors import AlreadyRunning, LeadershipLost
from rolloutd.settings import Settings, load
from rolloutd.store import FILE_NAME, StateLock, open_store
from tests.contracts.fakes.leadership import FakeLeadership, Seat
from tests.support.waiting import wait_in_loop_until


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.model_validate({"state_dir": str(tmp_path / "state"), "socket": str(tmp_path / "s")})


async def test_standby_leads_after_leader_and_ends_when_lost(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "RENEW_S", 0.02)
    seat = Seat()
    leader, standby = FakeLeadership(seat), FakeLeadership(seat)
    await leader.acquire()
    serving = asyncio.create_task(app.serve(settings, standby))
    await asyncio.sleep(0.1)
    assert not settings.socket.exists()
    assert not (settings.state_dir / FILE_NAME).exists(), "a standby begins no term"
    await leader.release()
    await wait_in_loop_until(settings.socket.exists)
    assert seat.leader is standby
    leader.usurp()
    with pytest.raises(ExceptionGroup) as ended:
        await asyncio.wait_for(serving, 30)
    assert ended.group_contains(LeadershipLost)
    assert seat.leader is leader, "the end of the old daemon leaves the new one alone"


async def test_stopped_standby_ends_without_leading(settings: Settings) -> None:
    seat = Seat()
    leader = FakeLeadership(seat)
    await leader.acquire()
    serving = asyncio.create_task(app.serve(settings, FakeLeadership(seat)))
    # Before it has a handler the signal would end the tests.
    await wait_in_loop_until(lambda: signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, 30)
    assert not (settings.state_dir / FILE_NAME).exists()


async def test_standby_outlives_reload_and_leads_by_present_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_module, "STANDBY_AFTER_S", 0.0)
    file = tmp_path / "config.yaml"
    text = f"state_dir: {tmp_path / 'state'}\nsocket: {tmp_path / 's'}\nmax_parallel: %d\nssh: {{user: %s}}\n"
    file.write_text(text % (3, "one"))
    settings, seat = load(file), Seat()
    leader = FakeLeadership(seat)
    await leader.acquire()
    serving = asyncio.create_task(app.serve(settings, FakeLeadership(seat)))
    # Before it has a handler the signal would end the tests.
    await wait_in_loop_until(lambda: signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGHUP)
    file.write_text(text % (5, "other"))
    await leader.release()
    await wait_in_loop_until(settings.socket.exists)
    client = Client(settings.socket)
    assert (await asyncio.to_thread(client.get, "/v1/settings"))["max_parallel"] == 5
    async with asyncio.timeout(30):
        while (await asyncio.to_thread(client.get, "/v1/status"))["trouble"] is None:
            await asyncio.sleep(0.05)
    assert "restart required to apply: ssh" in (await asyncio.to_thread(client.get, "/v1/status"))["trouble"]
    serving.cancel()
    await asyncio.wait((serving,))


async def test_second_daemon_is_refused_before_its_term(settings: Settings) -> None:
    lock = StateLock(settings.state_dir, now=lambda: 1_700_000_000.0)
    await lock.acquire()
    store = await open_store(settings.state_dir, compile_plan=lambda content: content)
    with pytest.raises(AlreadyRunning, match=rf"pid {os.getpid()}, started 2023-11-14T22:13:20Z"):
        await app.serve(settings)
    assert (await store.load_snapshot()).epoch == 1
    await store.close()
    await lock.release()
