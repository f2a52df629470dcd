"""A standby's facts, which follow the audit of the daemon that leads.

They are what the store knows: no observation, no progress of a step, no reason of a decision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rolloutd.engine.state import State
from rolloutd.errors import StoreFailed

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Interval in which the audit's last entry is read."""

MAX_SHARE = 0.1
"""Share of the time in which the facts are read: those of 10,000 nodes take seconds."""

CONDITION = "standby"


class StandbyFollower:
    """Reads the facts again when the audit has grown; `on_followed` gets the last entry's number."""

    def __init__(self, state: State, on_followed: Callable[[int], None]) -> None:
        self._state = state
        self._on_followed = on_followed

    async def run(self) -> None:
        """Follow until cancelled; a database that does not answer leaves the facts as they are."""
        clock = self._state.clock
        while True:
            began = clock.now()
            try:
                await self.follow()
            except StoreFailed as error:
                log.warning("standby: the store is not read: %s", error)
                self._state.conditions[CONDITION] = f"store: not read since; {error}"
            else:
                self._state.conditions.pop(CONDITION, None)
            took_s = max(0.0, clock.now() - began)
            await clock.sleep(max(POLL_S, took_s * (1 / MAX_SHARE - 1)))

    async def follow(self) -> None:
        """Read the facts if the audit has grown; raises StoreFailed."""
        state = self._state
        entry = await state.store.latest_audit_entry()
        seq = 0 if entry is None else entry.seq
        if entry is not None and seq > state.changes.latest_seq:
            snapshot = await state.store.load_snapshot()
            state.index, state.epoch = state.index.rebuilt(snapshot), snapshot.epoch
            state.changes.notify_committed((entry,))
        self._on_followed(seq)
