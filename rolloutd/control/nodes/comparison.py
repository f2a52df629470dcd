"""The comparison of the nodes of now with their canaries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from machines.model.plan import PILOT_WAVE
from machines.model.rollout import Target
from machines.model.step_record import StepAction, StepState
from machines.states import IN_FLIGHT_PHASES, Outcome, Phase
from rolloutd.commands.resolve import resolve_for_reading
from rolloutd.control.nodes import wire_nodes
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.engine.state import State
from rolloutd.errors import RolloutdError
from rolloutd.ports import Runs

routes = RouteTable()

MAX_NODES = 50
"""Canaries, and nodes of now: each one's log is read."""

FACTOR = 1.5
"""A node is slower than its canaries from half as long again, and faster below two thirds."""

MIN_DIFFERENCE_S = 5.0
"""Smaller differences are noise."""


@routes.add("GET", "/v1/rollouts/{r}/comparison")
async def compare(services: Services, request: Request) -> wire_nodes.Comparison:
    """Compare the nodes of now with the canaries: durations and changed tasks."""
    resolved = await resolve_for_reading(services.state, request.path_params["r"])
    state, runner, rollout = services.state, services.runners, resolved.rollout
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


@dataclass(frozen=True, slots=True)
class _Measured:
    """A node's seconds so far, and its changed tasks; None without a log."""

    target: Target
    seconds: float
    tasks: tuple[str, ...] | None

    @property
    def is_over(self) -> bool:
        return self.target.phase is Phase.DONE


async def _measure(state: State, runner: Runs, target: Target, now: float) -> _Measured:
    end = target.since if target.phase is Phase.DONE else now
    return _Measured(target, max(0.0, end - target.admitted_at), await _changed_tasks(state, runner, target))


async def _changed_tasks(state: State, runner: Runs, target: Target) -> tuple[str, ...] | None:
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


def _compare(node: _Measured, canaries: Sequence[_Measured]) -> wire_nodes.ComparedNode:
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
