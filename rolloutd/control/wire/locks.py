"""Slots and who takes them: pools, holds, freezes."""

from __future__ import annotations

from typing import TypedDict


class Holder(TypedDict):
    """A node that takes a pool's slot; `rollout` or (`source`, `id`) say on whose behalf.

    `unseen`: nobody has looked at it lately, so it counts as down until somebody does, before a mate starts.
    """

    node: str
    why: str
    rollout: str | None
    source: str | None
    id: str | None
    since: str | None
    unseen: bool


class Lock(TypedDict):
    """One pool's slots and who takes them; `down` counts all its nodes, also the `unseen`."""

    pool: str
    max_unavailable: int
    members: int
    down: int
    unseen: int
    holders: list[Holder]


class Hold(TypedDict):
    """Somebody outside the plans takes a node's slot."""

    node: str
    source: str
    id: str
    by: str
    reason: str
    at: str
    until: str | None


class Freeze(TypedDict):
    """Nothing starts in this scope: `all`, `team/NAME` or a pool."""

    id: str
    scope: str
    by: str
    reason: str
    at: str
    until: str | None


class Locks(TypedDict):
    """Every pool that somebody takes a slot of or whose members are known, the holds and the freezes.

    All as they are after audit entry `seq`.
    """

    pools: list[Lock]
    holds: list[Hold]
    freezes: list[Freeze]
    seq: int


class Released(TypedDict):
    """How many holds or freezes were lifted; 0 is an answer too."""

    lifted: int
