"""Time as the daemon has it: a clock to read, and an alarm that pokes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """The wall clock and the patience of the daemon."""

    def now(self) -> float:
        """Return the wall clock, epoch seconds."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""
        ...


class Alarm(Protocol):
    """Calls the daemon back at an instant; it pokes, it decides nothing."""

    def at(self, key: str, instant: float, poke: Callable[[], None]) -> None:
        """Call `poke` at `instant`; a later call with the same key replaces it."""
        ...

    def every(self, key: str, seconds: float, poke: Callable[[], None]) -> None:
        """Call `poke` every so many seconds."""
        ...

    def cancel(self, key: str) -> None:
        """Forget the key; unknown keys are fine."""
        ...

    def close(self) -> None:
        """Stop; nothing is called any more."""
        ...
