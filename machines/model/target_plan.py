"""The plan as it applies to one node: the only place that decides which items are for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from machines.model.node import Node
from machines.model.plan import Capability, Plan, StepDef
from machines.model.rollout import Target


def plan_for_target(plan: Plan, target: Target, node: Node, *, in_effect: Collection[str] = ()) -> Plan:
    """Return the plan with the items that apply to this node; its `verify` has the checks that judge it now.

    The node's own team's checks follow the infra team's.  `in_effect` names isolators of the node that are
    not reverted: they stay, because a label that changed meanwhile must not leave the node isolated for ever.
    """
    infra = applicable(plan.rollback_verify if target.rolling_back else _team_checks(plan, None), node)
    if target.rolling_back and not infra:
        infra = plan.fallback_verify
    team = () if target.team is None else applicable(_team_checks(plan, target.team), node)
    isolate = isolators_for(plan, node, in_effect=in_effect)
    # The isolators share one deadline, so the slowest of those that apply to this node sets it.
    drains = (spec.drain_timeout_s for spec in isolate if spec.drain_timeout_s is not None)
    guard = plan.guard
    if guard is not None and (confirm := applicable(guard.confirm, node)) != guard.confirm:
        guard = replace(guard, confirm=confirm)
    own: dict[str, Any] = {
        "traffic": applicable(plan.traffic, node),
        "isolate": isolate,
        "guard": guard,
        "isolate_timeout_s": max(drains, default=plan.isolate_timeout_s),
        "verify": infra + team,
    }
    # On most nodes nothing differs, and a copy costs more than the rest.
    is_same = all(getattr(plan, key) == value for key, value in own.items())
    return plan if is_same else replace(plan, **own)


def plan_with_values(plan: Plan, node: str) -> Plan:
    """Return the plan whose changes have the values that this target had at the submission."""
    values = plan.values.get(node)
    if values is None:
        return plan
    stages = (
        replace(each, params={**each.params, "values": values[each.step]}) if each.step in values else each
        for each in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def isolators_for(plan: Plan, node: Node, *, in_effect: Collection[str] = ()) -> tuple[StepDef, ...]:
    """Return the isolators that take the node out of service, in order."""
    return tuple(
        spec
        for spec in plan.isolate
        if spec.name in in_effect
        or (Capability.STAYS_IN_SERVICE not in spec.capabilities and applies(spec, node))
    )


def applicable(specs: Iterable[StepDef], node: Node) -> tuple[StepDef, ...]:
    return tuple(spec for spec in specs if applies(spec, node))


def applies(spec: StepDef, node: Node) -> bool:
    """Return whether an item is for this node, by its adapter's kinds of nodes and by its `where`.

    The key `kind` of a selector is the node's kind, also if the node has a label of that name.
    """
    if spec.node_kinds and node.kind not in spec.node_kinds:
        return False
    return spec.where is None or spec.where.matches({**node.labels, "kind": node.kind.value})


def lacks_isolator(plan: Plan, node: Node) -> bool:
    """Return whether the plan isolates other nodes and has no word for this one."""
    return bool(plan.isolate) and not any(applies(spec, node) for spec in plan.isolate)


def lacks_change(plan: Plan, node: Node) -> bool:
    """Return whether a stage of the plan cannot change nodes of this kind."""
    return any(stage.node_kinds and node.kind not in stage.node_kinds for stage in plan.stages)


def lacks_check(plan: Plan, node: Node) -> bool:
    return not any(spec.team is None and applies(spec, node) for spec in plan.verify)


def _team_checks(plan: Plan, team: str | None) -> tuple[StepDef, ...]:
    return tuple(spec for spec in plan.verify if spec.team == team)
