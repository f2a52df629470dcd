"""Ports of time: a clock and a scheduler of callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """The wall clock, and sleep."""

    def now(self) -> float:
        """Return the wall clock, epoch seconds."""

    async def sleep(self, seconds: float) -> None: ...


class Scheduler(Protocol):
    """Calls the daemon back at an instant."""

    def call_at(self, key: str, instant: float, callback: Callable[[], None]) -> None:
        """Schedule the callback; a later call with the same key replaces it."""

    def call_every(self, key: str, seconds: float, callback: Callable[[], None]) -> None:
        """Call the callback every `seconds`."""

    def cancel(self, key: str) -> None:
        """Cancel the callback of a key; an unknown key is ignored."""

    def close(self) -> None:
        """Cancel all callbacks."""
