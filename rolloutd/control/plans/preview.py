"""The preview of a plan: what it would do, without opening a rollout.

The plan becomes a rollout in a fork of the facts, among all live rollouts, and
the same rules judge it as would judge the real one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from machines.facts import votes
from machines.facts.index import Index
from machines.model.plan import GateName
from machines.model.preparation import PrepareKind, total_bytes
from machines.model.reasons import Reason
from machines.model.rollout import Actor, Rollout, Target
from machines.rules import pools, start_blockers
from machines.scheduler.train_savings import shareable_nodes
from rolloutd.commands import trains
from rolloutd.commands.execution import Principal
from rolloutd.commands.submit import ResolvedPlan
from rolloutd.control.daemons.runner_serializers import chosen_runner
from rolloutd.control.formats import fill
from rolloutd.control.plans import plan_serializers, wire_plans
from rolloutd.control.rollouts import coverage, serializers
from rolloutd.forecast.request import Draft
from rolloutd.settings import Settings
from rolloutd.texts.formats import pluralize

OFFERED_OVERLAP = 0.1
"""Share of nodes in common above which a train is offered: fewer outages are not worth the approval."""

DRAFT_ROLLOUT_ID = "(preview)"
"""The preview's rollout id; no plan's name can contain parentheses."""


def preview(settings: Settings, draft: ResolvedPlan, actor: Actor, now: float) -> wire_plans.Preview:
    index = _index_with_draft(draft, actor, now)
    rollout = index.rollout(DRAFT_ROLLOUT_ID)
    targets = list(index.targets(DRAFT_ROLLOUT_ID))
    blockers = {target.node: _first_blocker(index, rollout, target, now) for target in targets}
    digest, nodes = draft.digest, [index.nodes[target.node] for target in targets]
    return {
        "targets": [
            fill(
                wire_plans.PreviewTarget,
                target,
                runner=chosen_runner(index, index.nodes[target.node]),
                cannot_start=serializers.reason(blockers[target.node]),
            )
            for target in targets
        ],
        "waves": _waves(draft, targets),
        "pools": _pools(index, targets),
        "prepare": _prepare_stages(index, rollout, targets),
        "values": plan_serializers.target_values(draft.plan),
        "free_joiners": rollout.free_joiners,
        "gates": [_gate_preview(settings, rollout, gate, targets) for gate in _gates(rollout)],
        "traffic_probes": coverage.traffic_probes(draft.plan),
        "not_probed": coverage.not_probed(draft.plan, nodes),
        "not_isolated": coverage.not_isolated(draft.plan, nodes),
        "source": serializers.source(draft.pinned.to_record()),
        "digest": digest.whole,
        "hashes": plan_serializers.hashes(digest),
        "warnings": [*_warnings(settings, draft, targets), *_unopenable_gates(settings, rollout, targets)],
        "trains": _trains(draft, rollout),
        "forecast": None,
    }


def draft_rollout(draft: ResolvedPlan, actor: Actor, now: float) -> tuple[Rollout, tuple[Target, ...]]:
    rollout = Rollout(DRAFT_ROLLOUT_ID, draft.plan, draft.digest, actor, now, len(draft.targets))
    return rollout, tuple(replace(target, rollout=DRAFT_ROLLOUT_ID) for target in draft.targets)


def forecast_draft(draft: ResolvedPlan, who: Principal, content: Mapping[str, Any], now: float) -> Draft:
    """Return what the forecast's process asks of a plan, in the train that its submit would make."""
    rollout, targets = draft_rollout(draft, who.actor, now)
    nodes = (target.node for target in targets)
    return Draft(rollout, targets, content, tuple(trains.join(draft.facts, who, rollout, nodes, set())))


def _index_with_draft(draft: ResolvedPlan, actor: Actor, now: float) -> Index:
    index = draft.facts.fork()
    index.advance(now)
    # The rollout itself would be the first to need such a runner.
    problems = {name: each for name, each in index.runner_problems.items() if not each.is_unneeded}
    index.record_runner_problems(problems)
    index.load_rollout(*draft_rollout(draft, actor, now))
    return index


def _first_blocker(index: Index, rollout: Rollout, target: Target, now: float) -> Reason | None:
    """Return why the node cannot start, apart from gates, waves and missing observations."""
    for reason in (
        start_blockers.node_blocker(index, rollout, target, now),
        pools.slot_blocker(index, target, now),
    ):
        if reason is not None and reason.code not in start_blockers.NEEDS_OBSERVATION:
            return reason
    return None


def _waves(draft: ResolvedPlan, targets: list[Target]) -> list[wire_plans.PreviewWave]:
    return [
        fill(
            wire_plans.PreviewWave,
            spec,
            wave=spec.name,
            nodes=[target.node for target in targets if target.wave == spec.name],
        )
        for spec in draft.plan.waves
    ]


def _pools(index: Index, targets: list[Target]) -> list[wire_plans.PreviewPool]:
    counted = Counter(pool for target in targets for pool in target.pools)
    return [
        {
            "pool": pool,
            "targets": number,
            "members": len(index.pool(pool).members),
            "max_unavailable": index.budget(index.pool(pool)),
        }
        for pool, number in sorted(counted.items())
    ]


def _prepare_stages(index: Index, rollout: Rollout, targets: list[Target]) -> list[wire_plans.PreviewStage]:
    """Return the stages; nodes that have an artifact already need less than `bytes`."""
    nodes = [index.nodes[target.node] for target in targets if target.node in index.nodes]
    found: list[wire_plans.PreviewStage] = []
    for stage in rollout.prepare_stages:
        is_build = stage.kind is PrepareKind.BUILD
        chosen = [] if is_build else [node for node in nodes if stage.applies_to(node)]
        if stage.kind is PrepareKind.COPY and not stage.built_by:
            chosen = [node for node in chosen if stage.artifacts_for(node)]
        size = None if stage.built_by else sum(total_bytes(stage.artifacts_for(node)) for node in chosen)
        # A limit for each value of a label: the values transfer side by side.
        sizes = Counter[str]()
        for node in chosen:
            sizes[node.labels.get(stage.rate_by, "")] += total_bytes(stage.artifacts_for(node))
        found.append(
            {
                "stage": stage.name,
                "kind": stage.kind.value,
                "nodes": 1 if is_build else len(chosen),
                "bytes": size,
                "seconds": max(sizes.values(), default=0) / stage.rate_bps
                if stage.rate_bps and size is not None
                else None,
            }
        )
    return found


def _trains(draft: ResolvedPlan, rollout: Rollout) -> list[wire_plans.PreviewTrain]:
    """Return the open rollouts with which a train is worth while, or made by the submit."""
    facts, found = draft.facts, list[wire_plans.PreviewTrain]()
    for other_id, shared in shareable_nodes(facts, (target.node for target in draft.targets)).items():
        other = facts.rollout(other_id)
        joins = draft.plan.joins_train and other.plan.joins_train
        # Of the smaller one: a small rollout inside a large one saves all its outages.
        smaller = min(len(draft.targets), facts.counters(other_id).phases.total())
        if joins or shared > smaller * OFFERED_OVERLAP:
            problem = trains.isolator_conflict(other, rollout)
            found.append(
                {
                    "rollout": other_id,
                    "nodes_shared": shared,
                    "joins": joins and problem is None,
                    "problem": problem,
                }
            )
    return found


def _gates(rollout: Rollout) -> list[GateName]:
    return [gate for gate in GateName if gate is not GateName.PILOT or rollout.plan.pilot_node is not None]


def _asked_teams(rollout: Rollout, gate: GateName, targets: list[Target]) -> set[str]:
    """Return the teams that the gate asks: all that own a target, at `pilot` the one that owns the pilot."""
    asked = (each for each in targets if gate is not GateName.PILOT or each.node == rollout.plan.pilot_node)
    return {target.team for target in asked if target.team is not None}


def _gate_preview(
    settings: Settings, rollout: Rollout, gate: GateName, targets: list[Target]
) -> wire_plans.PreviewGate:
    need = votes.requirement(rollout, gate)
    teams = sorted(_asked_teams(rollout, gate, targets)) if need.each_team else []
    return {
        "gate": gate.value,
        "needs": fill(wire_plans.PreviewRequirement, need),
        "answerable_by": {
            "owner": _team_members(settings, rollout.plan.owner) if need.owner else [],
            "teams": {team: _team_members(settings, team) for team in teams},
        },
    }


def _team_members(settings: Settings, team: str) -> list[str]:
    known = settings.teams.get(team)
    return [] if known is None else list(known.members)


def _warnings(settings: Settings, draft: ResolvedPlan, targets: list[Target]) -> list[str]:
    warnings = []
    unowned = sorted(target.node for target in targets if target.team is None)
    if unowned:
        warnings.append(
            f"{pluralize(len(unowned), 'target')} without a team, such as {unowned[0]}: no votes are asked"
        )
    unknown_teams = sorted(
        {target.team for target in targets if target.team and target.team not in settings.teams}
    )
    warnings += [
        f"team {team} owns targets but is not in the settings: it has no voters; add it"
        for team in unknown_teams
    ]
    used_waves = {target.wave for target in targets}
    warnings += [
        f"wave {spec.name} is empty: its selector matches none of the remaining targets"
        # The last wave takes the rest, so it may be empty.
        for spec in draft.plan.waves[:-1]
        if spec.name not in used_waves
    ]
    return warnings


def _unopenable_gates(settings: Settings, rollout: Rollout, targets: list[Target]) -> list[str]:
    """Return a warning for each gate that cannot open, before the rollout is stuck there."""
    warnings = []
    for gate in _gates(rollout):
        need = votes.requirement(rollout, gate)
        required_votes = {
            team: need.each_team for team in _asked_teams(rollout, gate, targets) if team in settings.teams
        }
        required_votes[rollout.plan.owner] = max(need.owner, required_votes.get(rollout.plan.owner, 0))
        for team, wanted in sorted(required_votes.items(), key=str):
            voters = set(_team_members(settings, str(team)))
            if any(member.startswith("@") for member in voters):
                continue  # the number of members of a group is unknown here, and changes
            if need.four_eyes:
                voters.discard(rollout.submitted_by.name)
            if len(voters) < wanted:
                besides = f" besides the submitter {rollout.submitted_by.name}" if need.four_eyes else ""
                problem = (
                    f"gate {gate.value} cannot open: it needs {pluralize(wanted, 'vote')} of team {team}"
                )
                warnings.append(f"{problem}, which has {pluralize(len(voters), 'voter')}{besides}")
    return warnings
