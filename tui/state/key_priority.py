"""Time reserved for the answer to a key: other work waits for it.

A held key delays other work for a limited time only.
"""

from __future__ import annotations

import time
from collections.abc import Callable

ANSWER_S = 0.08
"""Reserved after a key: enough to draw a page of the largest fleet."""

MAX_DELAY_S = 0.25
"""The longest delay of other work while a key is held down."""


class KeyPriority:
    """Delays the work that no user waits for until a key has been answered."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = self._last = float("-inf")

    def key_pressed(self) -> None:
        now = self._now()
        if now - self._last > ANSWER_S:
            self._began = now
        self._last = now

    def delay(self) -> float:
        """Return the seconds for which other work should wait."""
        return max(0.0, min(self._last + ANSWER_S, self._began + MAX_DELAY_S) - self._now())

    def since_key(self) -> float:
        """Return the seconds since the last key."""
        return self._now() - self._last
