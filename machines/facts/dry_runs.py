"""Dry-run results of pending nodes: nodes that could be isolated now go first.

A result is a hint for the order: if no node could be isolated, the first one starts anyway, because its
blocker may go away during the eviction.  A permanent blocker is a rule: the node waits, takes no slot and
gets the next dry run when the blocker has changed.  Only nodes that would start otherwise get a dry run, a
few of each pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from machines.facts.node_work import WorkFacts, is_isolated
from machines.model.plan import Capability, Plan
from machines.model.reasons import Params, Reason, ReasonCode
from machines.model.rollout import Target

RESULT_MAX_AGE_S = 30.0
"""How long a dry run counts: disruption budgets change with every pod that becomes ready."""

DRY_RUN_AHEAD = 4
"""Dry runs for one start, and in one pool: each costs the outside system some requests."""

RESULT_RETENTION_S = 3600.0
"""How long the reason of a deferred node mentions the dry run, and a permanent blocker counts at most."""


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """Whether a node could be isolated at an instant (epoch seconds); None when unknown.

    `is_permanent`: what blocks the isolation of `step` stays until a person changes it.
    """

    rollout: str
    node: str
    succeeds: bool | None
    at: float
    why: str = ""
    is_permanent: bool = False
    step: str = ""


@dataclass(slots=True)
class DryRunResults:
    """The last dry-run result of each node of each rollout."""

    _latest: dict[tuple[str, str], DryRunResult] = field(default_factory=dict)

    def copy(self) -> DryRunResults:
        return DryRunResults(self._latest.copy())

    def record(self, result: DryRunResult) -> None:
        """Store a result, and drop those past their retention."""
        self._latest = {
            key: each for key, each in self._latest.items() if result.at < each.at + RESULT_RETENTION_S
        }
        self._latest[result.rollout, result.node] = result

    def fresh(self, target: Target, now: float) -> DryRunResult | None:
        """Return the node's result that still counts, None when it needs a dry run."""
        result = self._latest.get((target.rollout, target.node))
        return result if result is not None and result.at <= now < result.at + RESULT_MAX_AGE_S else None

    def forget(self, rollout: str, node: str) -> None:
        """Drop a node's result: what it was about has changed."""
        self._latest.pop((rollout, node), None)

    def permanent(self) -> list[DryRunResult]:
        return [each for each in self._latest.values() if each.is_permanent]

    def permanent_blocker(self, target: Target, now: float) -> DryRunResult | None:
        """Return the result that keeps the node from starting until its blocker has changed."""
        result = self._latest.get((target.rollout, target.node))
        if result is None or not result.is_permanent:
            return None
        return result if result.at <= now < result.at + RESULT_RETENTION_S else None

    def annotate(self, target: Target, reason: Reason) -> Reason:
        """Add to the reason of a deferred node when and why its dry run failed."""
        result = self._latest.get((target.rollout, target.node))
        # Only where another node was preferred is the failed dry run the cause of the wait.
        is_passed_over = reason.code in (ReasonCode.POOL_FULL, ReasonCode.QUEUED)
        if result is None or result.succeeds is not False or not is_passed_over:
            return reason
        note: Params = {"dry_run_at": result.at, "dry_run_problem": result.why}
        return replace(reason, params={**reason.params, **note})


def needs_dry_run(facts: WorkFacts, plan: Plan, target: Target) -> bool:
    """Return whether the node's order depends on a dry run, if another node could go first.

    `plan` is the plan as it applies to the node.
    """
    # Its isolation is joined; an isolator that cannot see the owner of one would call it another client's.
    if is_isolated(facts, target.node):
        return False
    return any(Capability.DRY_RUN in spec.capabilities for spec in plan.isolate)
