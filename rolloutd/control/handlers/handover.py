"""The handover between two people on duty, and the comparison of nodes with their canaries."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from machines.model.events import StepAction, StepState
from machines.model.node import natural_sort_key
from machines.model.plan import PILOT_WAVE
from machines.model.rollout import Target
from machines.scheduler.progress import rollout_progress
from machines.states import CARRIES_CHANGE, IN_FLIGHT_PHASES, Outcome, Phase
from rolloutd.commands.resolve import ResolvedRollout, resolve_for_reading, resolve_rollout
from rolloutd.control import gate_serializers, serializers, wire, wire_audit, wire_fleet
from rolloutd.control.requests import HandoverQuery
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.control.serializers import format_timestamp
from rolloutd.engine.state import State
from rolloutd.errors import RolloutdError
from rolloutd.ports import Runner
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

MAX_NODES = 50
"""Canaries, and nodes of now: each one's log is read."""

FACTOR = 1.5
"""A node is slower than its canaries from half as long again, and faster below two thirds."""

MIN_DIFFERENCE_S = 5.0
"""Smaller differences are noise."""


@routes.add("GET", "/v1/rollouts/{r}/comparison")
async def compare(services: Services, request: Request) -> wire.Comparison:
    """Compare the nodes of now with the canaries: durations and changed tasks."""
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    state, runner, rollout = services.state, services.runner, resolved.rollout
    now = state.now()
    wave = next(wave.name for wave in rollout.plan.waves if wave.name != PILOT_WAVE)
    targets = [each for each in resolved.index.targets(rollout.id) if each.admitted_at]
    canaries = [each for each in targets if each.wave == wave and each.outcome is Outcome.CHANGED]
    others = [
        each
        for each in targets
        if each.wave not in (wave, PILOT_WAVE)
        and (each.phase in IN_FLIGHT_PHASES or each.outcome is Outcome.CHANGED)
    ]
    # Nodes in flight first, then those that were done last.
    others.sort(key=lambda each: (each.phase not in IN_FLIGHT_PHASES, -each.since))
    measured_canaries = [await _measure(state, runner, each, now) for each in canaries[:MAX_NODES]]
    measured = [await _measure(state, runner, each, now) for each in others[:MAX_NODES]]
    seconds = [each.seconds for each in measured_canaries]
    compared = [_compare(each, measured_canaries) for each in measured]
    return {
        "rollout": rollout.id,
        "canary_wave": wave,
        "canaries": [_compare(each, ()) for each in measured_canaries],
        "low_s": min(seconds, default=None),
        "high_s": max(seconds, default=None),
        "nodes": sorted(
            compared,
            key=lambda each: (
                each["time"] == "usual" and not each["extra_tasks"] and not each["missing_tasks"]
            ),
        ),
        "omitted": max(0, len(canaries) - MAX_NODES) + max(0, len(others) - MAX_NODES),
    }


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


# -- the handover ---------------------------------------------------------------


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
    views = () if rollout.closed else gate_serializers.gate_views(resolved.index, rollout, now)
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


# -- the comparison -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Measured:
    """A node's seconds so far, and its changed tasks; None without a log."""

    target: Target
    seconds: float
    tasks: tuple[str, ...] | None

    @property
    def is_over(self) -> bool:
        return self.target.phase is Phase.DONE


def _is_outlier(node: wire.ComparedNode) -> bool:
    return node["time"] != "usual" or bool(node["extra_tasks"] or node["missing_tasks"])


async def _measure(state: State, runner: Runner, target: Target, now: float) -> _Measured:
    end = target.since if target.phase is Phase.DONE else now
    return _Measured(target, max(0.0, end - target.admitted_at), await _changed_tasks(state, runner, target))


async def _changed_tasks(state: State, runner: Runner, target: Target) -> tuple[str, ...] | None:
    """Return the tasks that changed something in the latest attempt; None if a run's log cannot be read."""
    found: dict[str, None] = {}
    records = await state.store.load_steps(target.rollout, target.node, target.attempt)
    for record in records:
        # The log of a team's own run is not compared, because other teams may not read it.
        is_run = record.action is StepAction.RUN and record.handle and record.visible_to is None
        if not is_run or record.state is StepState.INTENDED:
            continue
        try:
            async for event in runner.read_events(record.handle):
                if event.kind == "changed":
                    found[str(event.fields.get("task") or event.text)] = None
        except RolloutdError:
            return None
    return tuple(found)


def _compare(node: _Measured, canaries: Sequence[_Measured]) -> wire.ComparedNode:
    extra: Collection[str] = ()
    missing: Collection[str] = ()
    known = [each.tasks for each in canaries if each.tasks is not None]
    if known and node.tasks is not None:
        on_any = {task for tasks in known for task in tasks}
        on_all = set(known[0]).intersection(*known)
        extra = [task for task in node.tasks if task not in on_any]
        missing = sorted(on_all - set(node.tasks)) if node.is_over else ()
    return {
        "node": node.target.node,
        "wave": node.target.wave,
        "phase": node.target.phase.value,
        "seconds": round(node.seconds, 1),
        "time": _compare_time(node, [each.seconds for each in canaries]),
        "changed_tasks": None if node.tasks is None else list(node.tasks),
        "extra_tasks": list(extra),
        "missing_tasks": list(missing),
    }


def _compare_time(node: _Measured, canaries: Sequence[float]) -> Literal["usual", "slower", "faster"]:
    if not canaries:
        return "usual"
    if node.seconds > max(max(canaries) * FACTOR, max(canaries) + MIN_DIFFERENCE_S):
        return "slower"
    if node.is_over and node.seconds < min(min(canaries) / FACTOR, min(canaries) - MIN_DIFFERENCE_S):
        return "faster"
    return "usual"
