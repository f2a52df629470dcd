"""The in-memory fakes of the Clock and the Alarm: time passes when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

START = 1_800_000_000.0
"""Some instant: 2027-01-15 08:00 UTC, a Friday."""


class FakeClock:
    """ports.Clock whose time is `advance`d; sleepers wake in the order of their instants."""

    def __init__(self, start: float = START) -> None:
        self._now = start
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Return the instant at which the test has put the clock."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock was advanced so far."""
        if seconds > 0:
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._sleepers.append((self._now + seconds, woken))
            await woken

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds
        due = sorted((s for s in self._sleepers if s[0] <= self._now), key=lambda s: s[0])
        self._sleepers = [s for s in self._sleepers if s[0] > self._now]
        for _, woken in due:
            if not woken.done():
                woken.set_result(None)

    @property
    def sleepers(self) -> int:
        """How many wait."""
        return sum(not woken.done() for _, woken in self._sleepers)


@dataclass(slots=True)
class _Job:
    instant: float
    callback: Callable[[], None]
    interval_s: float | None


class FakeTimers:
    """ports.Timers over a clock: `ring` pokes whatever is due by that clock."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._jobs: dict[str, _Job] = {}
        self._open = True

    def call_at(self, key: str, instant: float, callback: Callable[[], None]) -> None:
        """Remember to poke at the instant."""
        self._set(key, _Job(instant, callback, None))

    def call_every(self, key: str, seconds: float, callback: Callable[[], None]) -> None:
        """Remember to poke every so many seconds."""
        self._set(key, _Job(self._clock.now() + seconds, callback, seconds))

    def cancel(self, key: str) -> None:
        """Forget the key."""
        self._jobs.pop(key, None)

    def close(self) -> None:
        """Forget all keys and take no more."""
        self._open = False
        self._jobs.clear()

    def run_due(self) -> None:
        """Poke what is due; several missed turns of one key are one."""
        for key, due in list(self._jobs.items()):
            if due.instant <= self._clock.now():
                if due.interval_s is None:
                    del self._jobs[key]
                else:
                    due.instant = self._clock.now() + due.interval_s
                due.callback()

    def next_instant(self) -> float | None:
        """Return when the next poke is due."""
        return min((poke.instant for poke in self._jobs.values()), default=None)

    def _set(self, key: str, poke: _Job) -> None:
        if self._open:
            self._jobs[key] = poke
