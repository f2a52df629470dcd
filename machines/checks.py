"""Which checks judge a node: the plan's, then its team's; and which say only that it is alive."""

from __future__ import annotations

from collections.abc import Iterable

from machines.plan import Plan, StepSpec
from machines.rollout import Target

ALIVE_KINDS = frozenset({"reachable", "kubernetes"})
"""Checks that say a node is alive whatever change it carries."""


def checks_of(plan: Plan, target: Target) -> tuple[StepSpec, ...]:
    """Return the checks that judge this node, in order; those of other teams left out."""
    infra = plan.rollback_verify if target.rolling_back else tuple(s for s in plan.verify if s.team is None)
    team = tuple(s for s in plan.verify if s.team is not None and s.team == target.team)
    return infra + team


def alive(specs: Iterable[StepSpec]) -> tuple[StepSpec, ...]:
    """Return the infra checks that hold whatever change the node carries."""
    return tuple(spec for spec in specs if spec.kind in ALIVE_KINDS and spec.team is None)
