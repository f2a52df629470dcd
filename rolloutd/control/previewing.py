"""What a plan would do, from a draft of it, without opening a rollout.

The draft is put in an index of its own, beside everything else that is going
on, and the same rules are asked that would be asked for real.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from machines import ballots, pools, rules
from machines.index import Index
from machines.plan import GateName
from machines.projection import Projection
from machines.rollout import Actor, Reason, Rollout, Target
from rolloutd.control import looking, views, wire
from rolloutd.orders.submit import Draft
from rolloutd.state import State

DRAFT = "(preview)"
"""The id of a rollout that is none; no plan's name can make it."""


def preview(state: State, draft: Draft, who: Actor) -> wire.Preview:
    """Return what `plan preview` shows."""
    index = _index(state, draft, who)
    rollout = index.rollout(DRAFT)
    targets = list(index.targets(DRAFT))
    blocks = {target.node: _block(index, rollout, target, state.now()) for target in targets}
    digest = draft.digest
    return {
        "targets": [
            {
                "node": target.node,
                "team": target.team,
                "pools": list(target.pools),
                "wave": target.wave,
                "position": target.position,
                "cannot_start": views.reason(blocks[target.node]),
            }
            for target in targets
        ],
        "waves": _waves(draft, targets),
        "pools": _pools(index, targets),
        "gates": [_gate(state, rollout, gate, targets) for gate in GateName],
        "looked_at": looking.looked_at(draft.plan),
        "not_looked_at": looking.not_looked_at(draft.plan),
        "digest": digest.whole,
        "hashes": views.hashes(digest),
        "warnings": [*_warnings(state, draft, targets), *_unanswerable(state, rollout, targets)],
    }


def _index(state: State, draft: Draft, who: Actor) -> Index:
    facts = state.index.snapshot()
    rollout = Rollout(DRAFT, draft.plan, draft.digest, who, state.now(), len(draft.targets))
    targets = tuple(replace(target, rollout=DRAFT) for target in draft.targets)
    index = Projection.build(
        replace(facts, rollouts=(*facts.rollouts, rollout), targets=(*facts.targets, *targets)),
        state.index.limits,
    )
    index.observed(state.index.observations, state.now())
    return index


def _block(index: Index, rollout: Rollout, target: Target, now: float) -> Reason | None:
    """Return what stands in the node's way besides gates, waves and what only a look would tell."""
    for reason in (rules.own_block(index, rollout, target, now), pools.may_start(index, target, now)):
        if reason is not None and reason.code not in rules.UNSEEN:
            return reason
    return None


def _waves(draft: Draft, targets: list[Target]) -> list[wire.PreviewWave]:
    return [
        {
            "wave": spec.name,
            "nodes": [target.node for target in targets if target.wave == spec.name],
            "max_parallel": spec.max_parallel,
            "soak_s": spec.soak_s,
            "gate": None if spec.gate is None else GateName.CONTINUE.value,
        }
        for spec in draft.plan.waves
    ]


def _pools(index: Index, targets: list[Target]) -> list[wire.PreviewPool]:
    counted = Counter(pool for target in targets for pool in target.pools)
    return [
        {
            "pool": pool,
            "targets": number,
            "members": len(index.pool(pool).members),
            "max_unavailable": pools.budget(index, pool),
        }
        for pool, number in sorted(counted.items())
    ]


def _gate(state: State, rollout: Rollout, gate: GateName, targets: list[Target]) -> wire.PreviewGate:
    need = ballots.need_of(rollout, gate)
    teams = sorted({target.team for target in targets if target.team is not None}) if need.each_team else []
    return {
        "gate": gate.value,
        "needs": {"owner": need.owner, "each_team": need.each_team, "four_eyes": need.four_eyes},
        "answerable_by": {
            "owner": _members(state, rollout.plan.owner) if need.owner else [],
            "teams": {team: _members(state, team) for team in teams},
        },
    }


def _members(state: State, team: str) -> list[str]:
    known = state.settings.teams.get(team)
    return [] if known is None else list(known.members)


def _warnings(state: State, draft: Draft, targets: list[Target]) -> list[str]:
    found = []
    unowned = sorted(target.node for target in targets if target.team is None)
    if unowned:
        found.append(
            f"{unowned[0]} has no team: nobody votes for it"
            if len(unowned) == 1
            else f"{len(unowned)} targets have no team, {unowned[0]} for one: nobody votes for them"
        )
    strange = sorted(
        {target.team for target in targets if target.team and target.team not in state.settings.teams}
    )
    found += [
        f"team {team} owns targets and is not in the settings: nobody can vote for it" for team in strange
    ]
    worked = {target.wave for target in targets}
    found += [
        f"wave {spec.name} has no node: its selector matches none of the targets that are left"
        for spec in draft.plan.waves[:-1]
        if spec.name not in worked
    ]
    return found


def _unanswerable(state: State, rollout: Rollout, targets: list[Target]) -> list[str]:
    """Tell gates that nobody can open: better before the start than at the end of the canaries."""
    found = []
    for gate in GateName:
        need = ballots.need_of(rollout, gate)
        wanted = {target.team: need.each_team for target in targets if target.team in state.settings.teams}
        wanted[rollout.plan.owner] = max(need.owner, wanted.get(rollout.plan.owner, 0))
        for team, votes in sorted(wanted.items(), key=str):
            able = set(_members(state, str(team)))
            if any(member.startswith("@") for member in able):
                continue  # how many are in a group is the name service's word, and changes
            if need.four_eyes:
                able.discard(rollout.submitted_by.name)
            if len(able) < votes:
                besides = f" besides {rollout.submitted_by.name}, who asks" if need.four_eyes else ""
                asked = f"gate {gate.value} cannot open: it asks for {votes} of team {team}"
                found.append(f"{asked}, which has {len(able)}{besides}")
    return found
