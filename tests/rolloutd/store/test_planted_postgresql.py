"""Planted bugs of the store on PostgreSQL: each check passes without its bug, and fails with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from rolloutd.errors import LeadershipLost, StoreFailed
from rolloutd.store.postgresql.backend import PostgresqlBackend
from rolloutd.store.postgresql.commit_mark import FILE_NAME as MARK
from rolloutd.store.postgresql.commit_mark import CommitMark
from rolloutd.store.postgresql.lease import PostgresqlLease
from tests.contracts.store_backends import write
from tests.contracts.test_leadership import MachineClock
from tests.rolloutd.store.test_postgresql import all_entries, hold, name, opened, proxy, through
from tests.support import cutting_proxy
from tests.support.cutting_proxy import Cut, CuttingProxy
from tests.support.mutation import Mutant
from tests.support.postgresql import Postgresql

pytestmark = pytest.mark.servers("postgresql")

__all__ = ["name", "proxy"]  # fixtures

BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED; SELECT epoch FROM term"


class World:
    """What the checks share."""

    def __init__(self, server: Postgresql, database: str, proxy: CuttingProxy, directory: Path) -> None:
        self.server, self.database, self.proxy, self.directory = server, database, proxy, directory


async def answers_what_a_late_commit_wrote(world: World) -> bool:
    """The old session's COMMIT arrives when the new session is there."""
    # A lease so long that the server does not end the old session before.
    address = replace(through(world.proxy, world.database), lease_s=20.0)
    store = await opened(address, world.directory / "s")
    try:
        await write(store, hold(1))
        before = await all_entries(store)
        world.proxy.arm(1, Cut.LATE, b"COMMIT\0")
        try:
            answered = list(await asyncio.wait_for(write(store, hold(2)), 60))
        except StoreFailed:
            answered = []
        assert world.proxy.has_cut
        return (await all_entries(store))[len(before) :] == answered
    finally:
        world.proxy.end_ghosts()
        await store.close()


async def keeps_terms_apart(world: World) -> bool:
    """Another daemon begins a term while a commit is under way; it has to wait."""
    store = await opened(world.server.address(world.database), world.directory / "s")
    append, has_waited = PostgresqlBackend.append_entries, []

    def begin_term_first(backend: PostgresqlBackend, *arguments: Any) -> None:
        with world.server.connect(world.database) as other:
            other.execute("SET lock_timeout = '300ms'; SET search_path = rolloutd")
            try:
                other.execute("UPDATE term SET epoch = epoch + 1")
                has_waited.append(False)
            except psycopg.errors.LockNotAvailable:
                has_waited.append(True)
        append(backend, *arguments)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PostgresqlBackend, "append_entries", begin_term_first)
            try:
                await write(store, hold(1))
            except StoreFailed:
                return False
        return has_waited == [True]
    finally:
        await store.close()


async def acts_no_more_after_its_deadline(world: World) -> bool:
    clock = MachineClock()
    leader = PostgresqlLease(
        world.server.address(world.database, lease_s=60.0), world.directory / "s", clock=clock
    )
    await leader.acquire()
    try:
        clock.now += 60.0
        leader.require()
    except LeadershipLost:
        return True
    else:
        return False
    finally:
        await leader.release()


async def notices_a_forked_history(world: World) -> bool:
    """The promoted server lacks the tail, and has other entries of the same numbers since."""
    address = world.server.address(world.database)
    store = await opened(address, world.directory / "s")
    await write(store, hold(1))
    await store.close()
    (world.directory / "s" / MARK).write_text(f"{1:020d} {1:020d} {'f' * 64}\n")
    try:
        await (await opened(address, world.directory / "s")).close()
    except LeadershipLost:
        return True
    return False


Check = Callable[[World], Awaitable[bool]]

CHECKS: dict[str, tuple[Check, str | Mutant]] = {
    "lock FOR SHARE": (answers_what_a_late_commit_wrote, f"{BEGIN} FOR SHARE"),
    "no lock": (keeps_terms_apart, BEGIN),
    "no deadline": (
        acts_no_more_after_its_deadline,
        Mutant(
            "no-deadline",
            PostgresqlLease.require,
            "not self.lost.is_set() and self._clock() < self._deadline",
            "not self.lost.is_set()",
        ),
    ),
    "a mark without hash": (
        notices_a_forked_history,
        Mutant(
            "mark-without-hash",
            CommitMark.require_newest,
            "row is not None and row[0] == digest",
            "row is not None",
        ),
    ),
}


@pytest.mark.parametrize("planted", CHECKS)
@pytest.mark.parametrize("is_planted", [False, True], ids=["sound", "planted"])
async def test_planted_bug_is_caught(
    postgresql: Postgresql,
    name: str,
    proxy: CuttingProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    planted: str,
    is_planted: bool,
) -> None:
    check, bug = CHECKS[planted]
    # The new session must be there before the late message, however slow this machine is.
    monkeypatch.setattr(cutting_proxy, "LATE_S", 2.0)
    with ExitStack() as stack:
        if is_planted and isinstance(bug, Mutant):
            stack.enter_context(bug.applied())
        elif is_planted:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(PostgresqlBackend, "begin_write", bug)
        assert await check(World(postgresql, name, proxy, tmp_path)) is not is_planted
