"""Signals of commits and progress to subscribers, with the latest audit entries."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from rolloutd.ports import AuditEntry

MAX_RECENT_ENTRIES = 2_048
"""Latest audit entries kept in memory: two seconds of a busy fleet."""

MAX_RECENT_CHARS = 4_096
"""Characters of an entry that is kept: longer ones, of many nodes, could take hundreds of MiB."""


class ChangeNotifier:
    """Signals to subscribers that something was committed, or that a step has progressed.

    Subscribers read the audit entries by sequence number, from memory or from the store, so a subscriber that
    is slow or reconnects loses nothing.
    """

    def __init__(self, latest_seq: int = 0) -> None:
        self.latest_seq = latest_seq
        self.progress_count = 0
        self._recent: deque[AuditEntry] = deque(maxlen=MAX_RECENT_ENTRIES)
        self._subscribers: set[asyncio.Event] = set()

    @contextmanager
    def subscribe(self) -> Iterator[asyncio.Event]:
        """Yield an event that is set at each change; the subscriber clears it."""
        event = asyncio.Event()
        self._subscribers.add(event)
        try:
            yield event
        finally:
            self._subscribers.discard(event)

    def notify_committed(self, entries: Sequence[AuditEntry]) -> None:
        if entries:
            is_next = entries[0].seq == self.latest_seq + 1
            # A standby reads only the latest entry: those in between are in the store alone.
            if not is_next or any(len(each.text) > MAX_RECENT_CHARS for each in entries):
                self._recent.clear()
            else:
                self._recent.extend(entries)
            self.latest_seq = max(self.latest_seq, entries[-1].seq)
            self._notify()

    def recent_after(self, seq: int, limit: int) -> Sequence[AuditEntry] | None:
        """Return the first entries after a sequence number; None if only the store has them."""
        if seq >= self.latest_seq:
            return ()
        if not self._recent or self._recent[0].seq > seq + 1:
            return None
        begin = seq + 1 - self._recent[0].seq
        return tuple(islice(self._recent, begin, begin + limit))

    def notify_progress(self) -> None:
        """Signal that a node in flight has progressed within its step."""
        self.progress_count += 1
        self._notify()

    def _notify(self) -> None:
        for event in self._subscribers:
            event.set()
