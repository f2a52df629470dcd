"""JSON of the daemons of one store."""

from __future__ import annotations

from typing_extensions import TypedDict


class Leader(TypedDict):
    """The daemon that acts, and the term that it has begun."""

    name: str
    epoch: int
    since: str


class Standby(TypedDict):
    """A daemon that waits; `behind_entries`: audit entries that it had not followed at `seen_at`."""

    name: str
    behind_entries: int
    seen_at: str


class Daemons(TypedDict):
    """The daemons of one store.

    `role` is that of the daemon that answers: leader or standby.  `synchronous`: an acknowledged commit is on
    a second database server too, null for a store that is a file.
    """

    role: str
    leader: Leader
    standbys: list[Standby]
    synchronous: bool | None


class StepDownResponse(TypedDict):
    """The daemon ends, and these may lead next."""

    standbys: list[str]
