"""What must have happened in a run of many simulations: every fault, every way, every edge.

A simulator that is silent proves nothing, so what it never did is a failure.
"""

from __future__ import annotations

from machines.states import TABLE, Phase, Trigger
from tests.sim.faults import Fate, Way
from tests.sim.seeds import Marks

UNTAKEN = frozenset({(Trigger.DRIFTED, Phase.DONE), (Trigger.ROLLED_BACK, Phase.FAILED)})
"""Edges of the table that no part of the daemon takes yet."""

FAULTS = (
    "clock-jumps",
    "crash",
    "database-locked",
    "foreign-cordon",
    "held-during-its-attempt",
    "inventory-shrinks",
    "isolation-never-ends",
    "isolation-undone",
    "label-changes",
    "life-ended-itself",
    "look-busy",
    "machine-down",
    "node-down",
    "observer-fails",
    "old-boot-id",
    "read-fails",
    "settings-changed",
    "sight-lost",
    "source-fails",
    "ssh-refused",
    "ssh-slow",
    "ssh-timeout",
    "started-twice",
    "stopped",
    "traffic-before",
    "traffic-between",
    "traffic-busy",
    "traffic-unknown",
    "two-daemons",
)

DEEDS = (
    *("vote", "vote-of-old", "withdraw", "pause", "resume", "cancel", "retry", "rollback", "skip", "leave"),
    *("stop", "advance", "return", "hold", "release", "freeze", "unfreeze", "submit", "team", "supersede"),
)


def missing(marks: Marks) -> list[str]:
    """Return what should have happened and did not."""
    wanted = [f"edge:{way.trigger}-{way.source}" for way in TABLE if (way.trigger, way.source) not in UNTAKEN]
    wanted += [f"fault:{name}" for name in FAULTS]
    wanted += [f"fault:{fate}" for fate in Fate if fate is not Fate.ENDS]
    wanted += [f"way:{way}" for way in Way if way is not Way.WELL]
    wanted += [f"person:{name}" for name in DEEDS]
    return [name for name in wanted if not marks.counts.get(name)]
