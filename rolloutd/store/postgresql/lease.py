"""Leadership by a lease in the database: a counter that the leader raises while it lives.

None trusts another machine's clock, nor the database's: a standby counts the lease on its own clock since
it last saw the counter change, the leader since before it sent the last renewal that succeeded.  So the
leader's deadline comes first.  The lease says who may try; only the term refuses the writes of a daemon that
is late.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rolloutd.concurrency import threads
from rolloutd.errors import LeadershipLost, StoreFailed
from rolloutd.ports import AuditEntry, Peers, PostgresqlAddress, StandbyDaemon
from rolloutd.store.postgresql import tables
from rolloutd.store.postgresql.commit_mark import CommitMark
from rolloutd.store.postgresql.connection import ERRORS, PostgresqlConnection, boot_time_s
from rolloutd.store.sqlite.lock import StateLock, prepare_directory

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Interval in which a standby looks at the counter; a takeover is late by up to so much."""

RENEWALS = 3
"""Renewals in a lease: two may fail."""

MARGIN = 0.1
"""Part of the lease by which the leader's deadline is earlier than a standby's."""

STATEMENT_LIMIT_MS = 2_000
"""Longest wait for the row, which no daemon holds for longer than one statement."""

STANDBY_KEY = "standby "
"""Begin of the keys of rows of `meta` in which standbys say what they have followed, and when."""

SEEN_LEASES = 3
"""A standby that has said nothing for so many leases is no longer one."""

_SAY = (
    "INSERT INTO meta (key, value) VALUES (?1, ?2 || extract(epoch FROM clock_timestamp())::text)"
    " ON CONFLICT (key) DO UPDATE SET value = excluded.value"
)

_LOOK = """
SELECT epoch, holder, since, extract(epoch FROM clock_timestamp())::float8,
    current_setting('synchronous_standby_names') <> ''
    AND (SELECT reset_val NOT IN ('off', 'local') FROM pg_settings WHERE name = 'synchronous_commit')
FROM term"""
"""`reset_val`: the lease's own session commits locally."""

_FAILURES: tuple[type[Exception], ...] = (*ERRORS, StoreFailed)

_LOST = ("", "08", "57", "25", "55", "53")
"""Classes of SQLSTATE after which the database may answer again by itself; "" is a connection that failed."""


class _End:
    """What the renewing thread waits for; its limits need no clock, unlike those of threading.Event.

    An event's wait() ends at an instant of the monotonic clock.  Where libfaketime moves that clock, the
    kernel's comes there decades later, and the lease is lost.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            os.eventfd_write(self._descriptor, 1)

    def wait(self, limit_s: float) -> bool:
        """Wait for set(); return whether it was called."""
        return bool(self._poll.poll(limit_s * 1000))

    def close(self) -> None:
        """Release the descriptor, once; the process may have other files of its number afterwards."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def name_of(holder: str) -> str:
    """Return the name of a lease's holder, without its process."""
    return holder.partition(" (pid ")[0]


class PostgresqlLease:
    """The lease on one database (ports.Leadership); acquire() waits for the leader's end."""

    def __init__(
        self,
        address: PostgresqlAddress,
        state_dir: Path,
        *,
        name: str = "",
        clock: Callable[[], float] = boot_time_s,
    ) -> None:
        """`name` is that of this daemon for people; default: the machine's."""
        self.lost = asyncio.Event()
        self.peers: Peers | None = None
        self.renewal_s = address.lease_s / RENEWALS
        self._name = name or os.uname().nodename
        self._followed = self._marked = 0
        self._problem = f"lease: {self._name} has not renewed it in time, or another leads; this one ends"
        self._address = address
        self._state_dir = state_dir
        self._lock = StateLock(state_dir)
        self._mark = CommitMark(state_dir)
        self._clock = clock
        # Of this process alone: another one under the same name must not renew it.
        self._holder = f"{self._name} (pid {os.getpid()}, {uuid.uuid4().hex[:8]})"
        self._session: PostgresqlConnection | None = None
        self._session_lock = threading.Lock()
        self._seen: tuple[Any, ...] = ()
        self._seen_at = 0.0
        self._deadline = 0.0
        self._loop_seen_at = 0.0
        self._ending = _End()
        self._renewing: threading.Thread | None = None
        self._watch: asyncio.Task[None] | None = None

    async def acquire(self) -> None:
        prepare_directory(self._state_dir)
        # Two daemons of one directory would share their runs and marks.
        self._lock.take()
        try:
            await self._wait_for_lease()
        except BaseException:
            # A standby that was stopped must not have taken the lease in the end.
            await self.release()
            raise
        loop = asyncio.get_running_loop()
        self._loop_seen_at = self._clock()
        self._renewing = threading.Thread(
            target=self._renew_until_lost, args=(loop,), name="lease", daemon=True
        )
        self._renewing.start()
        self._watch = asyncio.create_task(self._lose_at_deadline(), name="lease")

    async def _wait_for_lease(self) -> None:
        reported = ""
        while not await threads.DATABASE.run(self._try_take):
            leader = self._seen[0] if self._seen else ""
            if leader != reported:
                log.info("standby: %s leads", leader)
                reported = leader
            await asyncio.sleep(POLL_S)

    def require(self) -> None:
        if not self.lost.is_set() and self._clock() < self._deadline:
            return
        self.lost.set()
        raise LeadershipLost(self._problem)

    def record_followed(self, seq: int) -> None:
        self._followed = seq

    async def hand_over(self) -> None:
        lease_s, ended_at = self._address.lease_s, self._clock() + self._address.lease_s
        await self.release()
        with suppress(*_FAILURES):
            while self._clock() < ended_at:  # another machine's daemon is no event
                if await threads.DATABASE.run(self._has_leader):
                    break
                await asyncio.sleep(min(POLL_S, lease_s))
        await threads.DATABASE.run(self._close)

    async def renew(self) -> None:
        """Renew in the loop's turn too: the renewing thread stops when the loop has not for a lease."""
        self._loop_seen_at = self._clock()
        if not await threads.DATABASE.run(self._renew):
            self.lost.set()

    async def release(self) -> None:
        self._ending.set()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait((self._watch,))
        if self._renewing is not None:
            await threads.DATABASE.run(self._renewing.join, self._address.lease_s)
            self._renewing = None
        self._ending.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(STATEMENT_LIMIT_MS / 1000):
                await threads.DATABASE.run(self._give_up)
        self._lock.close()

    # -- in threads

    def _has_leader(self) -> bool:
        with self._session_lock:
            return bool(self._open().execute("SELECT holder FROM lease WHERE holder <> ''").fetchall())

    def _look(self, session: PostgresqlConnection) -> None:
        """Read who leads and who waits; the database's clock says how old a standby's word is."""
        row = session.execute(_LOOK).fetchone() or (0, "", 0.0, 0.0, None)
        epoch, holder, since, now, is_synchronous = row
        standbys = []
        said = session.execute("SELECT key, value FROM meta WHERE key LIKE ?", (f"{STANDBY_KEY}%",))
        for key, value in said:
            seq, _, at = value.partition(" ")
            if now - float(at) < SEEN_LEASES * self._address.lease_s:
                standbys.append(StandbyDaemon(key.removeprefix(STANDBY_KEY), int(seq), float(at)))
        leader = name_of(holder)
        standbys.sort(key=lambda standby: standby.name)
        self.peers = Peers(leader, epoch, since, tuple(standbys), is_synchronous)

    def _try_take(self) -> bool:
        with self._session_lock:
            return not self._ending.is_set and self._take_if_free()

    def _take_if_free(self) -> bool:
        sent_at = self._clock()
        try:
            session = self._open()
            session.execute("BEGIN; SELECT 1 FROM lease FOR UPDATE")
            row = session.execute("SELECT holder, counter FROM lease").fetchone() or ("", 0)
            if row != self._seen:
                if self._seen and self._seen[0] == row[0] and name_of(row[0]) == self._name:
                    raise StoreFailed(f"name {self._name}: the leader has it too; give each daemon its own")
                self._seen, self._seen_at = row, self._clock()
            free = not row[0] or self._clock() - self._seen_at >= self._address.lease_s
            if free:
                self._seen_at = sent_at
                session.execute("UPDATE lease SET holder = ?, counter = counter + 1", (self._holder,))
            session.execute("COMMIT")
            if free:
                session.execute("DELETE FROM meta WHERE key = ?", (STANDBY_KEY + self._name,))
            else:
                session.execute(_SAY, (STANDBY_KEY + self._name, f"{self._followed} "))
                self._mark_head(session)
            self._look(session)
        except ERRORS as error:
            self._close()
            if (getattr(error, "sqlstate", None) or "")[:2] not in _LOST:
                raise StoreFailed(f"database: {str(error).strip()}; check `store.postgresql`") from error
            return False
        if free:
            self._deadline = sent_at + self._address.lease_s * (1 - MARGIN)
        return free

    def _mark_head(self, session: PostgresqlConnection) -> None:
        """Record the last entry, so that a promoted server without it is not led by a standby either."""
        row = session.execute(
            "SELECT epoch, seq, hash FROM term, audit WHERE seq > ? ORDER BY seq DESC LIMIT 1",
            (self._marked,),
        ).fetchone()
        if row is None:
            # An older copy may have been restored into this database, below this session.
            self._mark.require_newest(session, "database")
            return
        epoch, self._marked, digest = row
        self._mark.write(epoch, AuditEntry(self._marked, "", digest))

    def _renew_until_lost(self, loop: asyncio.AbstractEventLoop) -> None:
        lease_s = self._address.lease_s
        while not self._ending.wait(self.renewal_s if self._session else self.renewal_s / 10):
            # A daemon whose loop stands still must not lead for ever.
            if self._clock() - self._loop_seen_at >= lease_s or not self._renew():
                break
        if not self._ending.is_set:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.lost.set)

    def _renew(self) -> bool:
        """Raise the counter; return whether this daemon may lead on, also if the database does not answer."""
        with self._session_lock:
            sent_at = self._clock()
            if sent_at >= self._deadline or self._ending.is_set:
                return False
            try:
                session = self._open()
                changed = session.execute(
                    "UPDATE lease SET counter = counter + 1 WHERE holder = ?", (self._holder,)
                )
                self._mark.require_newest(session, "database")
            except LeadershipLost as error:
                self._problem = str(error)
                self._close()
                return False
            except _FAILURES:
                self._close()
                return True
            if changed.rowcount != 1:
                return False
            self._deadline = sent_at + self._address.lease_s * (1 - MARGIN)
            with suppress(*_FAILURES):
                self._look(self._open())
            return True

    def _give_up(self) -> None:
        with self._session_lock:
            if self._session is not None:
                with suppress(*_FAILURES):
                    self._session.execute("UPDATE lease SET holder = '' WHERE holder = ?", (self._holder,))
                    self._session.execute("DELETE FROM meta WHERE key = ?", (STANDBY_KEY + self._name,))
            self._close()

    def _open(self) -> PostgresqlConnection:
        if self._session is None or self._session.is_lost:
            session = PostgresqlConnection(
                self._address,
                {
                    "statement_timeout": STATEMENT_LIMIT_MS,
                    "idle_in_transaction_session_timeout": STATEMENT_LIMIT_MS,
                    # The lease is nothing that must survive: a standby that is away must not end it.
                    "synchronous_commit": "local",
                },
            )
            try:
                tables.require_current(session, "database")
                tables.require_original(session, "database")
                # A promoted standby server may lack what this daemon knows to be written.
                self._mark.require_newest(session, "database")
            except BaseException:
                session.close()
                raise
            self._session = session
        return self._session

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    # -- in the loop

    async def _lose_at_deadline(self) -> None:
        """Lose at the deadline, whatever the renewing thread waits for."""
        while (remaining := self._deadline - self._clock()) > 0:  # noqa: ASYNC110  # a clock is no event
            # Short: the loop's own clock stands still while the machine is suspended.
            await asyncio.sleep(min(remaining, 1.0))
        self.lost.set()
        if (session := self._session) is not None:
            session.interrupt()
