"""Versions of the status for streams: each is made once for all of them, with what it changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rolloutd.control.responses import SharedAnswers, encode_in_slices, encode_json
from rolloutd.control.status_changes import Object, difference


@dataclass(slots=True)
class StatusVersion:
    """A status; `change` is what differs from version `number - 1`, and `news` what it was made for.

    `begun_at`: when its facts were read, in the loop's time.
    `writes` are those of the streams with its change, by what each had: ten consoles share one.
    """

    number: int
    news: Hashable
    begun_at: float
    status: Object
    change: bytes | None
    writes: dict[Hashable, Any] = field(default_factory=dict)
    _encoded: bytes | None = None

    async def line(self, after: int) -> bytes:
        """Return the line for a stream that has version `after`: the change if it suffices, else all."""
        if self.change is not None and after == self.number - 1:
            return b'{"seq":null,"version":%d,"change":%s}\n' % (self.number, self.change)
        if self._encoded is None:
            self._encoded = await encode_in_slices(self.status)
        return b'{"seq":null,"version":%d,"status":%s}\n' % (self.number, self._encoded)


class StatusFeed:
    """The latest version of the status, kept while a stream follows it."""

    def __init__(self) -> None:
        self._latest: StatusVersion | None = None
        self._number = 0
        self.followers = 0

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Keep the latest version meanwhile: in a large fleet it takes megabytes."""
        self.followers += 1
        try:
            yield
        finally:
            self.followers -= 1
            if not self.followers:
                self._latest = None

    async def newer(
        self,
        after: int,
        answers: SharedAnswers,
        read_status: Callable[[], Awaitable[Object]],
        news: Callable[[], Hashable],
    ) -> StatusVersion:
        """Return a version that is newer than `after`; 0 is that of a stream that begins."""

        async def make() -> bytes:
            # Before the facts: what comes meanwhile is news for the next version.
            seen, begun_at = news(), asyncio.get_running_loop().time()
            status = await read_status()
            # After the facts: another version may have been made meanwhile.
            before, change = self._latest, None
            self._number += 1
            # A rollout that is new is long: a whole status is encoded in slices.
            if before is not None and _rollouts(before.status) == _rollouts(status):
                change = encode_json(difference(before.status, status))
            if self.followers:
                self._latest = StatusVersion(self._number, seen, begun_at, status, change)
            return b""

        latest = self._latest
        if latest is None or after == latest.number or (not after and latest.news != news()):
            # Streams have a share of the loop for themselves: requests for a whole status do not delay them.
            await answers.get("/v1/events?status", "", make)
        assert self._latest is not None  # while somebody follows
        return self._latest


def _rollouts(status: Object) -> list[str]:
    return [each["rollout"] for each in status["rollouts"]]
