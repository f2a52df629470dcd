"""The faults, outcomes and edges that a run of many simulations must cover.

A fault that never occurs proves nothing, so its absence is a failure.
"""

from __future__ import annotations

from machines.states import IN_FLIGHT_PHASES, Trigger, edges
from tests.sim.fault_plan import EffectOutcome, RunFate
from tests.sim.random_streams import Coverage

FAULTS = (
    "clock-jumps",
    *("cluster-available", "cluster-endpoint", "cluster-joins", "cluster-paused", "cluster-up"),
    "crash",
    "database-locked",
    "deleted-in-soak",
    "evidence-breaks",
    "foreign-cordon",
    "forged-votes",
    "freeze-deleted",
    "held-during-attempt",
    "inventory-shrinks",
    "isolation-never-ends",
    "isolation-undone",
    "isolator-no-longer-applies",
    "label-changes",
    "listener-fails",
    "daemon-ended-itself",
    "inspect-busy",
    "machine-down",
    "node-down",
    "observer-fails",
    "killed-while-signing",
    "old-checkpoint",
    "old-boot-id",
    "read-fails",
    "settings-changed",
    "observation-lost",
    "source-fails",
    "name-shared",
    "node-disputed",
    "node-renamed",
    "pending-node-vanishes",
    "record-invalid",
    "ssh-refused",
    "ssh-slow",
    "ssh-timeout",
    "staged-file-damaged",
    "started-twice",
    "stopped",
    "traffic-before",
    "traffic-between",
    "traffic-busy",
    "traffic-unknown",
    "two-daemons",
)

USER_ACTIONS = (
    *("vote", "vote-of-old", "withdraw", "pause", "resume", "cancel", "retry", "rollback", "skip", "leave"),
    "roll_back_all",
    "pin",
    "withdraw_rollbacks",
    *("stop", "advance", "return", "hold", "release", "freeze", "unfreeze", "submit", "team", "supersede"),
    *("submit-again", "clean", "preview-impact"),
)


def missing_coverage(coverage: Coverage) -> list[str]:
    """Return what should have happened and did not."""
    # Only the audits of earlier versions have nodes that left in flight.
    possible = (e for e in edges() if e.trigger is not Trigger.LEFT or e.source not in IN_FLIGHT_PHASES)
    wanted = [f"edge:{edge.trigger}-{edge.source}-{edge.target}" for edge in possible]
    wanted += [f"fault:{name}" for name in FAULTS]
    wanted += [f"fault:{fate}" for fate in RunFate if fate is not RunFate.ENDS]
    wanted += [f"outcome:{way}" for way in EffectOutcome if way is not EffectOutcome.SUCCEEDS]
    wanted += [f"user:{name}" for name in USER_ACTIONS]
    wanted += ["guard:timer", "guard:confirmed", "guard:restored"]
    wanted += ["pilot:evidence", "check-mode:compliant", "check-mode:differs", "staged:differs"]
    wanted += ["commit:large", "values:shell-text", "values:templates"]
    return [name for name in wanted if not coverage.counts.get(name)]
