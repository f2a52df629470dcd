"""Tells whoever listens that something was committed or that a run has moved on.

Listeners are only woken: what happened they read from the store, by sequence
number, so that a slow or returning listener loses nothing.  Progress of runs is
kept as the latest value per node and is never stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rolloutd.ports import Entry


class Feed:
    """The latest sequence number, and the bells of those who wait for the next one."""

    def __init__(self, latest: int = 0) -> None:
        self.latest = latest
        self.moved = 0
        self._bells: set[asyncio.Event] = set()

    @contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """Yield a bell that is set at each change; the listener clears it."""
        bell = asyncio.Event()
        self._bells.add(bell)
        try:
            yield bell
        finally:
            self._bells.discard(bell)

    def committed(self, entries: Sequence[Entry]) -> None:
        """Ring for new audit entries."""
        if entries:
            self.latest = max(self.latest, entries[-1].seq)
            self._ring()

    def progressed(self) -> None:
        """Ring because a node in flight has moved on within its step."""
        self.moved += 1
        self._ring()

    def _ring(self) -> None:
        for bell in self._bells:
            bell.set()
