"""Port of leadership: the right to be the one daemon that acts on a state."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StandbyDaemon:
    """A daemon that waits for leadership, the last audit entry that it has followed, and when it said so."""

    name: str
    seq: int
    seen_at: float


@dataclass(frozen=True, slots=True)
class Peers:
    """The daemons of one store: who leads since when, who waits, and how the store is replicated.

    `is_synchronous`: an acknowledged commit is on a second server too; None for a store that has none.
    """

    leader: str
    epoch: int
    since: float
    standbys: tuple[StandbyDaemon, ...] = ()
    is_synchronous: bool | None = None


class Leadership(Protocol):
    """One daemon's candidacy: it waits, then it leads once, until it has lost or released.

    A daemon may lose before it can know.  So the store's term stops its writes also without this port.
    """

    @property
    def lost(self) -> asyncio.Event:
        """Set when another daemon may lead; never cleared."""

    @property
    def renewal_s(self) -> float:
        """Longest interval between two calls of renew()."""

    @property
    def peers(self) -> Peers | None:
        """The daemons of the store as last seen; None for a store with one daemon."""

    async def acquire(self) -> None:
        """Return when this daemon leads; until then it is a standby and may be cancelled.

        Raises AlreadyRunning where it does not wait for the leader's end, and StoreFailed.
        """

    def require(self) -> None:
        """Raise LeadershipLost, and set `lost`, if another daemon may lead at this instant."""

    def record_followed(self, seq: int) -> None:
        """Note the last audit entry that a standby has followed, for the other daemons."""

    async def renew(self) -> None:
        """Prolong the leadership; sets `lost` when it is another daemon's."""

    async def release(self) -> None:
        """Let another daemon lead at once, also after a loss and without leadership."""

    async def hand_over(self) -> None:
        """Release, and return once another daemon leads, or after a lease."""
