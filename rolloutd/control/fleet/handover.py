"""The handover between two people on duty."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from machines.model.node import natural_sort_key
from machines.scheduler.progress import rollout_progress
from machines.states import CARRIES_CHANGE, Phase
from rolloutd.commands.resolve import ResolvedRollout, resolve_rollout
from rolloutd.control.audit import wire_audit
from rolloutd.control.fleet import wire_fleet
from rolloutd.control.formats import format_timestamp
from rolloutd.control.requests import HandoverQuery
from rolloutd.control.rollouts import gate_serializers, serializers
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.engine.state import State
from rolloutd.texts.event_text import ROLLOUT_DECISIONS
from rolloutd.texts.vote_text import describe_missing_votes

routes = RouteTable()

DECISIONS = (
    "RolloutOpened",
    *ROLLOUT_DECISIONS,
    "RolloutDeleted",
    "NodeOrdered",
    "NodeAdvanced",
    "HoldTaken",
    "HoldReleased",
    "FreezeStarted",
    "FreezeLifted",
    "TeamRulesChanged",
    "MismatchSettled",
    "SettingsChanged",
    "DaemonStarted",
)
"""Events that are a person's decision, or a change of the daemon itself."""

MAX_PER_KIND = 50
"""Latest decisions of one kind; `rolloutctl audit` has all."""

MAX_FAILED_NAMED = 20

MAX_CLOSED_SHOWN = 20
"""Latest closed rollouts that are considered; `rolloutctl rollouts` lists all."""

LATEST = 2**62
"""A sequence number after all entries."""


@routes.add("GET", "/v1/handover")
async def hand_over(services: Services, request: Request[HandoverQuery]) -> wire_fleet.Handover:
    """Show what changed since an instant, who decided, and what waits."""
    state, since = services.state, request.input.since.timestamp()
    decisions, omitted = await _decisions(state, since)
    return {
        "since": format_timestamp(since),
        "until": format_timestamp(state.now()),
        "rollouts": [_rollout(state, each, since) async for each in _changed_rollouts(state, since)],
        "decisions": decisions,
        "omitted": omitted,
    }


async def _changed_rollouts(state: State, since: float) -> AsyncIterator[ResolvedRollout]:
    """Yield the live rollouts, and those that were closed since the instant."""
    for rollout in state.index.rollouts.values():
        if not rollout.closed or (serializers.ended_at(rollout) or 0.0) >= since:
            yield ResolvedRollout(state.index, rollout, live=True)
    closed = await state.store.list_closed_rollouts(MAX_CLOSED_SHOWN)
    for each in closed:
        if each.id not in state.index.rollouts and (serializers.ended_at(each) or 0.0) >= since:
            yield await resolve_rollout(state, each.id)


def _rollout(state: State, resolved: ResolvedRollout, since: float) -> wire_fleet.HandoverRollout:
    rollout, now = resolved.rollout, state.now()
    progress = rollout_progress(resolved.index, rollout.id, now)
    targets = [each for each in resolved.index.targets(rollout.id) if each.since >= since]
    failed = [each.node for each in targets if each.phase is Phase.FAILED]
    places = () if rollout.closed else gate_serializers.gate_places(rollout)
    views = [gate_serializers.gate_view(resolved.index, rollout, *place, now) for place in places]
    return {
        "rollout": rollout.id,
        "plan": rollout.plan.name,
        "state": progress.state.value,
        "percent": round(progress.percent, 2),
        "opened": rollout.submitted_at >= since,
        "ended": (serializers.ended_at(rollout) or 0.0) >= since,
        "changed": sum(each.outcome in CARRIES_CHANGE for each in targets),
        "failed": sorted(failed, key=natural_sort_key)[:MAX_FAILED_NAMED],
        "reason": serializers.reason(progress.reason),
        "gates": [
            {
                "gate": view.gate.value,
                "wave": view.wave or None,
                "missing": describe_missing_votes(view.missing),
            }
            for view in views
            if view.state == "waiting"
        ],
    }


async def _decisions(state: State, since: float) -> tuple[list[wire_audit.AuditEntry], bool]:
    """Return the decisions since the instant, oldest first, and whether some were left out."""
    found: list[wire_audit.AuditEntry] = []
    omitted = False
    for kind in DECISIONS:
        page = await state.store.read_audit(event=kind, before=LATEST, limit=MAX_PER_KIND)
        entries = [(each, json.loads(each.text)) for each in page]
        recent = [(each, entry) for each, entry in entries if entry["at"] >= since]
        omitted = omitted or len(recent) == MAX_PER_KIND
        found += [
            {"seq": each.seq, "at": format_timestamp(entry["at"]), "hash": each.hash, "entry": entry}
            for each, entry in recent
        ]
    return sorted(found, key=lambda each: each["seq"]), omitted
