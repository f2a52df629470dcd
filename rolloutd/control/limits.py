"""Limits per user: connections, requests, uploads, streams and audited denials.

A user of the socket's group without a team may read, but must not use up the
descriptors of members, admins or runs.  So each rank has a share that lower ranks
cannot take, and each user has a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from machines.model.events import RequestDenied
from machines.model.rollout import Actor
from rolloutd.control.identity import Identity, read_peer_uid
from rolloutd.errors import Refused
from rolloutd.texts.formats import pluralize

FIRST_REQUEST_TIMEOUT_S = 10.0
"""Time limit from a connection to the headers of its first request."""

RESERVED_DESCRIPTORS = 256
"""Descriptors for the store, logs, sources and the start of runs."""

MAX_CONNECTIONS = 4096
"""Maximum of all connections, even with more descriptors."""

MIN_CONNECTIONS = 32

MAX_KNOWN_USERS = 4096
"""Users whose rank is cached between their connections."""

MERGE_WINDOW_S = 60.0
"""Denials of one user within this time share one entry per request."""

MAX_LOGGED_PER_WINDOW = 10
"""Different requests of one user recorded within that time; a person tries no more by hand."""

MAX_TRACKED_USERS = 1024
"""Users tracked; beyond that, the oldest window is dropped."""


class Rank(IntEnum):
    """The class of users whose share a user takes."""

    STRANGER = 0
    MEMBER = 1
    ADMIN = 2

    @classmethod
    def of(cls, identity: Identity) -> Rank:
        return cls.ADMIN if identity.admin else cls.MEMBER if identity.teams else cls.STRANGER


_SHARES = {Rank.STRANGER: (1 / 16, 1 / 4), Rank.MEMBER: (1 / 4, 7 / 8), Rank.ADMIN: (1 / 2, 1)}
"""Shares of a quota that one user of a rank may hold, and all users up to this rank together."""


class TooMany(Refused):
    """A user has reached a limit."""

    def __init__(self, kind: str, limit: int) -> None:
        super().__init__(f"too-many-{kind}", f"too many {kind}: {limit} open; close some or try later")


class Quota:
    """Counts of one kind, by user."""

    def __init__(self, kind: str, total: int, ranks: dict[int, Rank]) -> None:
        self.kind = kind
        self.total = total
        self._ranks = ranks
        self._held: Counter[int] = Counter()

    @property
    def held(self) -> int:
        return self._held.total()

    def acquire(self, uid: int) -> None:
        """Count one more; raises TooMany."""
        rank = self._ranks.get(uid, Rank.STRANGER)
        per_user, together = (max(1, int(self.total * share)) for share in _SHARES[rank])
        if self._held[uid] >= per_user:
            raise TooMany(self.kind, per_user)
        # A share counts the lower ranks too, so that what is left of the total is for higher ones.
        held = sum(count for other, count in self._held.items() if self._ranks.get(other, 0) <= rank)
        if held >= together or self.held >= self.total:
            raise TooMany(self.kind, held)
        self._held[uid] += 1

    def release(self, uid: int) -> None:
        self._held[uid] -= 1
        if self._held[uid] <= 0:
            del self._held[uid]

    @contextlib.contextmanager
    def taking(self, uid: int) -> Iterator[None]:
        """Count one for the duration of the block; raises TooMany."""
        self.acquire(uid)
        try:
            yield
        finally:
            self.release(uid)


class Limits:
    """The quotas of one server, and each user's rank at their last request."""

    def __init__(self, *, streams: int, uploads: int, requests: int, heavy: int) -> None:
        self._ranks: dict[int, Rank] = {}
        self.connections = Quota("connections", max_connections(), self._ranks)
        self.requests = Quota("requests", requests, self._ranks)
        self.heavy = Quota("verifications", heavy, self._ranks)
        self.uploads = Quota("uploads", uploads, self._ranks)
        self.streams = Quota("streams", streams, self._ranks)

    def remember(self, identity: Identity) -> None:
        """Cache a user's rank for their next connections."""
        self._ranks.pop(identity.uid, None)
        while len(self._ranks) >= MAX_KNOWN_USERS:
            del self._ranks[next(iter(self._ranks))]
        self._ranks[identity.uid] = Rank.of(identity)


@dataclass(slots=True)
class _DenialWindow:
    actor: Actor
    started_at: float
    logged_calls: set[str] = field(default_factory=set)
    suppressed: int = 0


class DenialLog:
    """Rate limit for audit entries of denied requests, by uid.

    The audit records that a user tried something forbidden; a thousand tries in a
    minute become one number, so that they cannot fill the disk.  The number is written
    when the minute ends.
    """

    def __init__(self) -> None:
        self._windows: dict[int, _DenialWindow] = {}

    def record(self, actor: Actor, call: str, reason: str, now: float) -> list[RequestDenied]:
        """Return the events to write: none for a call that only counts, and the numbers of ended windows."""
        uid = -1 if actor.uid is None else actor.uid
        events = self.end_windows(now)
        if uid not in self._windows:
            if len(self._windows) >= MAX_TRACKED_USERS:
                events += self._end_window(next(iter(self._windows)), now)
            self._windows[uid] = _DenialWindow(actor, now)
        window = self._windows[uid]
        if call in window.logged_calls or len(window.logged_calls) >= MAX_LOGGED_PER_WINDOW:
            window.suppressed += 1
            return events
        window.logged_calls.add(call)
        return [*events, RequestDenied(actor, call, reason, now)]

    def end_windows(self, now: float, *, is_last: bool = False) -> list[RequestDenied]:
        """Return the numbers of the windows that have ended, or with `is_last` of all."""
        # A clock that was set back ends a window too.
        ended = [
            uid
            for uid, window in self._windows.items()
            if is_last or not 0 <= now - window.started_at < MERGE_WINDOW_S
        ]
        return [event for uid in ended for event in self._end_window(uid, now)]

    def _end_window(self, uid: int, now: float) -> list[RequestDenied]:
        window = self._windows.pop(uid)
        if not window.suppressed:
            return []
        calls = pluralize(window.suppressed, "more request")
        why = "repeated, or too many for an entry each, within a minute"
        return [RequestDenied(window.actor, calls, why, now)]


def max_connections() -> int:
    """Return how many connections the daemon's descriptors allow, after the reserve."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, (descriptors - RESERVED_DESCRIPTORS) // 2))


class LimitedProtocol(asyncio.Protocol):
    """Refuses connections over the quota and ends those without a request, before HTTP sees them."""

    def __init__(self, protocol: asyncio.Protocol, connections: Quota) -> None:
        self._protocol = protocol
        self._connections = connections
        self._last_bytes: bytes | None = b""
        self._uid: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, or answer 429 and close it."""
        assert isinstance(transport, asyncio.Transport)
        # Before HTTP: a user over the quota must not cost a parser and a task.
        peer = read_peer_uid(transport.get_extra_info("socket"))
        uid = -1 if peer is None else peer
        try:
            self._connections.acquire(uid)
        except TooMany as exc:
            transport.write(_refusal(exc))
            transport.close()
            return
        self._uid = uid
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(FIRST_REQUEST_TIMEOUT_S, self._close_if_silent, transport)
        self._protocol.connection_made(transport)

    def _close_if_silent(self, transport: asyncio.Transport) -> None:
        if self._last_bytes is not None:
            # Not close(), which waits until the silent client has read what is buffered.
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._uid is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._connections.release(self._uid)
        self._uid = None
        self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Forward the bytes; an empty line ends the headers of the first request."""
        if self._uid is None:
            return
        if self._last_bytes is not None:
            # The empty line may be split between two packets.
            seen = self._last_bytes + data
            self._last_bytes = None if b"\r\n\r\n" in seen else seen[-3:]
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._uid is None else self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


def _refusal(exc: TooMany) -> bytes:
    body = json.dumps({"error": str(exc), "code": exc.code, "errors": []}).encode()
    head = "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
