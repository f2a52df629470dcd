"""Keeps the audit of refused calls from becoming a way to fill the disk.

That somebody tried what they may not do is remembered; that they tried it a
thousand times in a minute is remembered as a number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from machines.events import CallRefused
from machines.rollout import Actor

MERGED_WITHIN_S = 60.0
"""Refusals of one person within this time are told together."""

MOST_TOLD = 10
"""Different refusals of one person told one by one within that time; nobody tries more by hand."""

MOST_PEOPLE = 1024
"""People remembered; the one who was quiet the longest is forgotten first."""


@dataclass(slots=True)
class _Recent:
    since: float
    told: set[str] = field(default_factory=set)
    merged: int = 0


class Refusals:
    """Which refusals were told lately, by uid."""

    def __init__(self) -> None:
        self._recent: dict[int, _Recent] = {}

    def note(self, actor: Actor, call: str, why: str, now: float) -> CallRefused | None:
        """Return the event to be written, None when it is merged with one that was."""
        uid = -1 if actor.uid is None else actor.uid
        recent = self._recent.get(uid)
        before = 0
        if recent is None or not 0 <= now - recent.since < MERGED_WITHIN_S:
            before = recent.merged if recent is not None else 0
            self._recent.pop(uid, None)
            while len(self._recent) >= MOST_PEOPLE:
                del self._recent[next(iter(self._recent))]
            recent = self._recent[uid] = _Recent(now)
        if call in recent.told or len(recent.told) >= MOST_TOLD:
            recent.merged += 1
            return None
        recent.told.add(call)
        more = f" ({before} more refused in the minute before)" if before else ""
        return CallRefused(actor, call, why + more, now)
