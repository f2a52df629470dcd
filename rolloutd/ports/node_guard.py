"""Port of the guard on a node: it restores the node unless the daemon disarms it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rolloutd.ports.steps import StepContext


class GuardState(StrEnum):
    """What the node says of its guard; `restoring` becomes `restored`, and the last two are final."""

    NONE = "none"
    ARMED = "armed"
    RESTORING = "restoring"
    CONFIRMED = "confirmed"
    RESTORED = "restored"


@dataclass(frozen=True, slots=True)
class GuardReport:
    """The node's own record of its guard.

    `by` is what began the restore: `timer`, `boot` or `daemon`.  `restored` are the paths that differed from
    their backup.  `problems` are sentences: a path that could not be restored, a command that failed.
    """

    state: GuardState
    by: str = ""
    restored: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


class NodeGuard(Protocol):
    """Guards of nodes, one for each attempt of a node in a rollout.

    The parameters are `paths`, `commands`, `after` (seconds) and `across_reboot`.  All methods are idempotent
    and raise NodeUnreachable and TimeoutError, after which the node's state is unknown.  The node decides by
    one atomic step whether it is confirmed or restored: it is never both, and it stays what it is.
    """

    async def arm(self, ctx: StepContext, *, order: str) -> GuardReport:
        """Back up the paths, and restore them after a silence of `after`; a second arm finds the first.

        `order` is a fencing token (`epoch.number database-id start`): a guard older than the newest one of
        the node is refused.  Raises AdapterFailed if the node cannot arm; then nothing is armed.
        """

    async def renew(self, ctx: StepContext) -> GuardReport:
        """Let the silence begin again, over a new connection; only an armed guard changes."""

    async def disarm(self, ctx: StepContext) -> GuardReport:
        """Confirm the change, over a new connection, unless the node restores or has restored itself."""

    async def restore(self, ctx: StepContext) -> GuardReport:
        """Restore the node now, unless the change is confirmed.

        A node that has restored itself, and was changed after that, is restored again.
        """

    async def inspect(self, ctx: StepContext) -> GuardReport: ...
