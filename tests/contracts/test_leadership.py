"""The contract of the Leadership port; the fake and the lock of the state directory pass it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

import pytest

from rolloutd.errors import AlreadyRunning
from rolloutd.ports import Leadership
from rolloutd.store import StateLock
from rolloutd.store.sqlite import lock
from tests.contracts.fakes.leadership import FakeLeadership, Seat


class Backend(Protocol):
    def candidate(self) -> Leadership: ...

    async def usurp(self) -> Leadership:
        """Return a candidate that leads, though another one has not released."""
        ...


class FakeBackend:
    def __init__(self, _: Path) -> None:
        self._seat = Seat()

    def candidate(self) -> Leadership:
        return FakeLeadership(self._seat)

    async def usurp(self) -> Leadership:
        usurper = FakeLeadership(self._seat)
        usurper.usurp()
        return usurper


class LockBackend:
    wait = True

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir

    def candidate(self) -> Leadership:
        return StateLock(self._state_dir, wait=self.wait)

    async def usurp(self) -> Leadership:
        (self._state_dir / lock.FILE_NAME).unlink()
        usurper = self.candidate()
        await usurper.acquire()
        return usurper


class RefusingLockBackend(LockBackend):
    """As the daemon has it today."""

    wait = False


@pytest.fixture(params=[FakeBackend, LockBackend, RefusingLockBackend])
def backend(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setattr(lock, "POLL_S", 0.001)
    made: Backend = request.param(tmp_path / "state")
    return made


async def test_second_candidate_waits_or_is_refused(backend: Backend) -> None:
    first, second = backend.candidate(), backend.candidate()
    await first.acquire()
    acquiring = asyncio.create_task(second.acquire())
    await asyncio.wait((acquiring,), timeout=0.01)
    if acquiring.done():
        assert isinstance(acquiring.exception(), AlreadyRunning)
    await first.release()
    await (second.acquire() if acquiring.done() else acquiring)
    await second.renew()
    assert not second.lost.is_set()
    await second.release()


async def test_cancelled_standby_leads_never(backend: Backend) -> None:
    first, second, third = (backend.candidate() for _ in range(3))
    await first.acquire()
    acquiring = asyncio.create_task(second.acquire())
    await asyncio.sleep(0)
    acquiring.cancel()
    await asyncio.wait((acquiring,))
    await first.release()
    await third.acquire()
    await third.release()


async def test_renewed_leader_keeps_leadership(backend: Backend) -> None:
    leader = backend.candidate()
    await leader.acquire()
    for _ in range(3):
        await leader.renew()
    assert not leader.lost.is_set()
    await leader.release()


async def test_leader_with_successor_has_lost(backend: Backend) -> None:
    leader = backend.candidate()
    await leader.acquire()
    successor = await backend.usurp()
    await leader.renew()
    assert leader.lost.is_set()
    await leader.release()
    await successor.renew()
    assert not successor.lost.is_set(), "a release after a loss does not affect the successor"
    await successor.release()


async def test_release_without_leadership_does_nothing(backend: Backend) -> None:
    await backend.candidate().release()


async def test_lock_file_removed_by_user_keeps_leadership(tmp_path: Path) -> None:
    leader = StateLock(tmp_path)
    await leader.acquire()
    (tmp_path / lock.FILE_NAME).unlink()
    await leader.renew()
    assert not leader.lost.is_set()
    await leader.release()
