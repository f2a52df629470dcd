"""How far an attempt is in an outage that others share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from machines.model.rollout import Target


@dataclass(frozen=True, slots=True)
class OutageProgress:
    """How far an attempt is in an outage that others may share.

    `has_passed`: its own checks have passed while the node was isolated.  `has_served`: its checks in service
    too.  `waits`: it does nothing on the node until another attempt has moved.  `judged`: what its checks
    said after the changes of others, by Peer.key: "" when they passed.
    """

    attempt: int
    has_passed: bool = False
    has_served: bool = False
    waits: bool = False
    judged: Mapping[str, str] = field(default_factory=dict)


def change_key(target: Target) -> str:
    """Return what names the change of an attempt, for the checks of others after it."""
    return f"{target.rollout}.{target.attempt}"
