"""Slots that at most so many hold at once; those who wait get theirs in order.

It does not know what a slot is, nor how those who wait learn of theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Waiter = TypeVar("Waiter")


@dataclass(slots=True)
class SlotQueue(Generic[Waiter]):
    """The number of slots in use, and who waits for one.

    `has_given_up` returns whether a waiter does not want its slot any more.  The limit may change, so each
    call gets it.
    """

    has_given_up: Callable[[Waiter], bool] = lambda _: False
    active: int = 0
    _waiting: deque[Waiter] = field(default_factory=deque)

    def enter(self, waiter: Waiter, limit: float) -> bool:
        """Give the waiter a free slot if no other is ahead of it; return whether it has one, or waits."""
        self._drop_first()
        if not self._waiting and self.active < limit:
            self.active += 1
            return True
        self._waiting.append(waiter)
        return False

    def admit(self, limit: float) -> Iterator[Waiter]:
        """Yield those who wait and have a slot now, in order."""
        self._drop_first()
        while self._waiting and self.active < limit:
            self.active += 1
            yield self._waiting.popleft()
            self._drop_first()

    def _drop_first(self) -> None:
        # Only the first ones: a search for all who gave up would cost all who wait.
        while self._waiting and self.has_given_up(self._waiting[0]):
            self._waiting.popleft()
