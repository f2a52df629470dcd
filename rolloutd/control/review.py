"""The review of a rollout: what a voter reads before approving, and what the approval means.

It decides nothing.  Everybody may read the plan; the text of its source is for members of a team and admins.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from machines.facts.votes import was_opened
from machines.model.plan import GateName
from machines.model.rollout import Rollout
from machines.scheduler.blast_radius import blast_radius
from machines.states import CARRIES_CHANGE
from rolloutd.commands import voting
from rolloutd.control import plan_text, serializers, source_text, wire_plans
from rolloutd.control.identity import Identity
from rolloutd.control.resolve import MAX_CLOSED, ResolvedRollout
from rolloutd.engine.state import State
from rolloutd.errors import NotFound, RolloutdError
from rolloutd.planfile import written_content
from rolloutd.ports import PinnedSource, SourceStore
from rolloutd.text import describe_source, pluralize

PLAYBOOK_KEYS = frozenset({"playbook", "repair"})
"""Plan keys whose values name a playbook."""

NOT_A_MEMBER = "not shown: only members of a team and admins may read playbooks"


async def review(
    state: State, sources: SourceStore, resolved: ResolvedRollout, who: Identity
) -> wire_plans.Review:
    rollout = resolved.rollout
    content, source = await state.store.load_plan(rollout.id)
    previous = await _previous_rollout(state, rollout)
    old_content, old_source = (content, source) if previous is None else await state.store.load_plan(previous)
    may_read = bool(who.teams) or who.admin
    trees = (_pinned(source), _pinned(old_source))
    return {
        "rollout": rollout.id,
        "previous": previous,
        "gates": [] if rollout.closed else list(_gate_reviews(state, resolved, who)),
        "playbooks": await _playbooks(sources, trees[0], list(_named_playbooks(content)), may_read=may_read),
        "file_differences": await _file_differences(sources, *trees) if may_read else [],
        "checks": list(_checks(resolved, content)),
        "plan": plan_text.plan_values(content),
        "plan_differences": [
            *_source_difference(old_source, source),
            *plan_text.plan_differences(old_content, content),
        ],
        "overrides": [
            serializers.verdict(each)
            for each in (await state.store.load_verdicts() if rollout.overrides else ())
            if each.id in rollout.overrides
        ],
    }


def _gate_reviews(state: State, resolved: ResolvedRollout, who: Identity) -> Iterator[wire_plans.GateReview]:
    rollout = resolved.rollout
    for gate, wave in (*rollout.plan.gates_in_order, (GateName.PROCEED, "")):
        if was_opened(rollout, gate, wave):
            continue
        radius = blast_radius(resolved.index, rollout, gate, wave)
        yield {
            "gate": gate.value,
            "wave": wave or None,
            "blast_radius": {
                "nodes": radius.nodes,
                "teams": list(radius.teams),
                "at_once": radius.at_once,
                "work": radius.work_s and {"low_s": radius.work_s[0], "high_s": radius.work_s[1]},
                "traffic_probed": bool(rollout.plan.traffic),
            },
            "your_approval": _approval_effect(state, rollout, gate, wave, who),
        }


def _approval_effect(
    state: State, rollout: Rollout, gate: GateName, wave: str, who: Identity
) -> wire_plans.ApprovalEffect:
    try:
        effect = voting.approval_effect(state, who, rollout, gate, wave)
    except RolloutdError as refused:
        return {"owner": False, "teams": [], "opens": False, "refused": str(refused)}
    return {"owner": effect.owner, "teams": list(effect.teams), "opens": effect.opens, "refused": None}


async def _previous_rollout(state: State, rollout: Rollout) -> str | None:
    """Return the latest earlier rollout of the same plan that changed nodes."""
    earlier = {
        each.id: each.submitted_at
        for each in await state.store.list_closed_rollouts(MAX_CLOSED)
        if each.name == rollout.plan.name and any(each.counts.get(outcome, 0) for outcome in CARRIES_CHANGE)
    }
    earlier |= {
        each.id: each.submitted_at
        for each in state.index.rollouts.values()
        if each.plan.name == rollout.plan.name and state.index.counters(each.id).done
    }
    before = {each: at for each, at in earlier.items() if each != rollout.id and at <= rollout.submitted_at}
    return max(before, key=before.__getitem__, default=None)


# -- the change ---------------------------------------------------------------


def _source_difference(
    before: Mapping[str, str], after: Mapping[str, str]
) -> Iterator[wire_plans.PlanDifference]:
    """Yield the source if it is pinned to something else, also under the same ref."""
    if before["pin"] != after["pin"]:
        yield {"path": "source", "before": describe_source(before), "after": describe_source(after)}


def _pinned(source: Mapping[str, str]) -> PinnedSource:
    return PinnedSource(source["kind"], source["pin"])


async def _playbooks(
    sources: SourceStore, pinned: PinnedSource, paths: list[str], *, may_read: bool
) -> list[wire_plans.PlaybookText]:
    note = NOT_A_MEMBER
    if may_read:
        try:
            return await asyncio.to_thread(source_text.playbook_texts, sources.tree_path(pinned), paths)
        except NotFound as pruned:
            note = str(pruned)
    return [{"path": path, "text": None, "note": note} for path in dict.fromkeys(paths)]


async def _file_differences(
    sources: SourceStore, after: PinnedSource, before: PinnedSource
) -> list[wire_plans.FileDifference]:
    try:
        old, new = sources.tree_path(before), sources.tree_path(after)
    except NotFound:  # _playbooks reports a source that is no longer stored
        return []
    return await asyncio.to_thread(source_text.file_differences, old, new)


def _named_playbooks(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in PLAYBOOK_KEYS and isinstance(inner, str) and inner:
                yield inner
            elif key != "vars":
                yield from _named_playbooks(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _named_playbooks(inner)


def _checks(resolved: ResolvedRollout, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the plan's checks, and the number of each team's own, whose parameters are the team's."""
    for step in written_content(content)["spec"]["verify"]:
        for kind, params in step.items():
            yield plan_text.format_step(kind, params)
    own = Counter(step.team for step in resolved.rollout.plan.verify if step.team is not None)
    for team in sorted(resolved.index.counters(resolved.rollout.id).teams):
        if own[team]:
            yield f"team {team}: {pluralize(own[team], 'check')} of its own"
