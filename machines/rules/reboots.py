"""The rule by which a machine that reboots itself gets a slot: that of a start, without a rollout.

It asks what each start asks of the node, its team and its pools.  Gates, waves and traffic are a rollout's.
"""

from __future__ import annotations

from machines.facts.index import Index
from machines.facts.node_work import WorkKind
from machines.model.reasons import Reason, ReasonCode
from machines.model.rollout import Target
from machines.rules import node_claims, pools, start_blockers


def reboot_blocker(index: Index, node: str, now: float) -> Reason | None:
    """Return why a node of the inventory may not reboot now, None if a slot of each of its pools is free."""
    team = index.nodes[node].team
    candidate = Target("", node, team, (), "", 0)
    return (
        start_blockers.observe_only_blocker(index)
        or start_blockers.mismatch_blocker(index, "all", f"node/{node}", f"team/{team}")
        or node_claims.quarantine_blocker(index, candidate)
        or start_blockers.stale_blocker(index, candidate, now)
        or start_blockers.target_freeze_blocker(index, candidate, now)
        or start_blockers.closed_window(
            start_blockers.team_window_groups(index, team), node, team, now, needed_s=0.0
        )
        or node_claims.work_blocker(index, WorkKind.HOLD, node, now)
        or pools.slot_blocker(index, candidate, now)
    )


def return_blocker(index: Index, node: str) -> Reason | None:
    """Return why a node is not back after its reboot, None if it was freshly seen up.

    A cordon or lock of others keeps nothing: it takes a slot by itself.
    """
    reason = start_blockers.observation_blocker(index, Target("", node, None, (), "", 0))
    is_taken = reason is not None and reason.code in (ReasonCode.FOREIGN_CORDON, ReasonCode.FOREIGN_LOCK)
    return None if is_taken else reason
