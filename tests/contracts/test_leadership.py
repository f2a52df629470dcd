"""The contract of the Leadership port; the fake, the lock of the state directory and the lease pass it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from rolloutd.errors import AlreadyRunning, LeadershipLost, StoreFailed
from rolloutd.ports import Leadership
from rolloutd.store import StateLock
from rolloutd.store.postgresql import lease
from rolloutd.store.postgresql.lease import PostgresqlLease
from rolloutd.store.sqlite import lock
from tests.contracts.fakes.leadership import FakeLeadership, Seat
from tests.support.postgresql import Postgresql


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


class LeaseBackend:
    """A lease in a real PostgreSQL; each candidate is of another machine."""

    def __init__(self, state_root: Path, server: Postgresql) -> None:
        self._state_root = state_root
        self._server = server
        self._database = server.emptied_database()
        self._numbers = itertools.count()

    def candidate(self) -> Leadership:
        address = self._server.address(self._database, lease_s=60.0)
        name = str(next(self._numbers))
        return PostgresqlLease(address, self._state_root / name, name=name)

    async def usurp(self) -> Leadership:
        with self._server.connect(self._database) as admin:
            admin.execute("UPDATE rolloutd.lease SET holder = ''")
        usurper = self.candidate()
        await usurper.acquire()
        return usurper


@pytest.fixture(
    params=[
        FakeBackend,
        LockBackend,
        RefusingLockBackend,
        pytest.param(LeaseBackend, marks=pytest.mark.servers("postgresql")),
    ]
)
def backend(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setattr(lock, "POLL_S", 0.001)
    monkeypatch.setattr(lease, "POLL_S", 0.001)
    more = (request.getfixturevalue("postgresql"),) if request.param is LeaseBackend else ()
    made: Backend = request.param(tmp_path / "state", *more)
    return made


async def test_second_candidate_waits_or_is_refused(backend: Backend) -> None:
    first, second = backend.candidate(), backend.candidate()
    await first.acquire()
    acquiring = asyncio.create_task(second.acquire())
    await asyncio.wait((acquiring,), timeout=0.01)
    assert not acquiring.done() or isinstance(acquiring.exception(), AlreadyRunning)
    await first.release()
    try:
        await acquiring
    except AlreadyRunning:  # at once, or just before the release
        await second.acquire()
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


# -- the lease ------------------------------------------------------------------


@dataclass
class MachineClock:
    """A machine's clock since its boot, which a test moves."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def leases(
    postgresql: Postgresql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., PostgresqlLease]:
    monkeypatch.setattr(lease, "POLL_S", 0.001)
    database = postgresql.emptied_database()

    def make(name: str, clock: Callable[[], float], daemon: str = "") -> PostgresqlLease:
        address = postgresql.address(database, lease_s=60.0)
        return PostgresqlLease(address, tmp_path / name, name=daemon or name, clock=clock)

    return make


@pytest.mark.servers("postgresql")
async def test_silent_leader_is_followed_after_its_lease(leases: Callable[..., PostgresqlLease]) -> None:
    there, here = MachineClock(5.0), MachineClock(70_000.0)
    leader, standby = leases("a", there), leases("b", here)
    await leader.acquire()
    acquiring = asyncio.create_task(standby.acquire())
    await asyncio.wait((acquiring,), timeout=0.2)
    for _ in range(3):
        here.now += 59
        there.now += 50
        await leader.renew()
        await asyncio.wait((acquiring,), timeout=0.2)
        assert not acquiring.done(), "the counter has changed"
    # In two steps: a request that was sent before the step counts the lease from then.
    for _ in range(2):
        here.now += 30
        await asyncio.wait((acquiring,), timeout=0.2)
    await acquiring
    await leader.renew()
    assert leader.lost.is_set()
    await leader.release()
    await standby.renew()
    assert not standby.lost.is_set()
    await standby.release()


@pytest.mark.servers("postgresql")
async def test_leader_past_its_deadline_has_lost_without_a_database(
    leases: Callable[..., PostgresqlLease],
) -> None:
    """It must stop before the first instant at which a standby may have taken over."""
    clock = MachineClock()
    leader = leases("a", clock)
    await leader.acquire()
    clock.now += 60 * (1 - lease.MARGIN)
    async with asyncio.timeout(30):
        await leader.lost.wait()
    await leader.release()


@pytest.mark.servers("postgresql")
@pytest.mark.servers("postgresql")
async def test_name_of_a_living_leader_is_refused(
    postgresql: Postgresql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "POLL_S", 0.001)
    address = postgresql.address(postgresql.emptied_database(), lease_s=60.0)
    first, second = (PostgresqlLease(address, tmp_path / each, name="db") for each in "ab")
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(0)
    while not waiting.done():  # a leader that was killed says nothing, and its successor has its name
        await first.renew()
    with pytest.raises(StoreFailed, match="name db: the leader has it too; give each daemon its own"):
        await waiting
    assert not first.lost.is_set()
    await first.release()


async def test_leader_past_its_deadline_acts_no_more(leases: Callable[..., PostgresqlLease]) -> None:
    """After a suspension its next action comes before the loop has noticed."""
    clock = MachineClock()
    leader = leases("a", clock)
    await leader.acquire()
    leader.require()
    clock.now += 60 * (1 - lease.MARGIN)
    with pytest.raises(LeadershipLost, match="has not renewed it in time"):
        leader.require()
    assert leader.lost.is_set()
    await leader.release()


@pytest.mark.servers("postgresql")
async def test_standby_says_what_it_has_followed(leases: Callable[..., PostgresqlLease]) -> None:
    leader, follower = leases("a", MachineClock()), leases("b", MachineClock(), daemon="second")
    await leader.acquire()
    acquiring = asyncio.create_task(follower.acquire())
    follower.record_followed(17)
    async with asyncio.timeout(30):
        while not (leader.peers and leader.peers.standbys and leader.peers.standbys[0].seq == 17):
            await leader.renew()
    assert [each.name for each in leader.peers.standbys] == ["second"]
    acquiring.cancel()
    await asyncio.wait((acquiring,))
    await leader.renew()
    assert leader.peers.standbys == ()
    await leader.release()


@pytest.mark.servers("postgresql")
async def test_second_daemon_of_one_directory_is_refused(leases: Callable[..., PostgresqlLease]) -> None:
    first = leases("a", MachineClock())
    await first.acquire()
    with pytest.raises(AlreadyRunning):
        await leases("a", MachineClock()).acquire()
    await first.release()
