"""The time of one life of the daemon: the world's wall clock, and timers on the virtual loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from tests.sim.world import SimWorld

CLOCK_STEP_S = 0.0002
"""How far the wall clock goes on between two readings."""


class SimClock:
    """ports.Clock on the world's wall clock."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world

    def now(self) -> float:
        """Return the wall clock, epoch seconds; no two readings of it are the same."""
        self._world.skew_s += CLOCK_STEP_S
        return self._world.now()

    async def sleep(self, seconds: float) -> None:
        """Wait so long, by the monotonic clock."""
        await asyncio.sleep(seconds)


class SimTimers:
    """ports.Timers: instants become delays when they are set, as a timer's do."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def call_at(self, key: str, instant: float, callback: Callable[[], None]) -> None:
        """Poke at the instant."""
        self.cancel(key)
        delay_s = max(0.0, instant - self._world.now())
        self._timers[key] = asyncio.get_running_loop().call_later(delay_s, callback)

    def call_every(self, key: str, seconds: float, callback: Callable[[], None]) -> None:
        """Poke every so many seconds."""

        def again() -> None:
            if self._world.is_finished:
                return
            self._timers[key] = loop.call_later(seconds, again)
            with contextlib.suppress(
                RuntimeError
            ):  # a daemon that is ending takes no more work; timers log it
                callback()

        self.cancel(key)
        loop = asyncio.get_running_loop()
        self._timers[key] = loop.call_later(seconds, again)

    def cancel(self, key: str) -> None:
        """Forget the key."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Forget all keys."""
        for key in list(self._timers):
            self.cancel(key)
