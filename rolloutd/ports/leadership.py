"""Port of leadership: the right to be the one daemon that acts on a state."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Leadership(Protocol):
    """One daemon's candidacy: it waits, then it leads once, until it has lost or released.

    A daemon may lose before it can know.  So the store's term stops its writes also without this port.
    """

    @property
    def lost(self) -> asyncio.Event:
        """Set when another daemon may lead; never cleared."""

    async def acquire(self) -> None:
        """Return when this daemon leads; until then it is a standby and may be cancelled.

        Raises AlreadyRunning where it does not wait for the leader's end, and StoreFailed.
        """

    async def renew(self) -> None:
        """Prolong the leadership; sets `lost` when it is another daemon's."""

    async def release(self) -> None:
        """Let another daemon lead at once, also after a loss and without leadership."""
