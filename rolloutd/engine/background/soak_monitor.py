"""Checks of finished canaries while they soak.

A check that fails during the soak moves the node from done to failed, which pauses the rollout; nothing
else happens to the node.
"""

from __future__ import annotations

import asyncio
from functools import partial

from machines.facts.node_work import WorkKind
from machines.model.events import StepState
from machines.model.plan import StepDef
from machines.model.rollout import FailureCode, Target
from machines.scheduler.membership import target_changes
from machines.scheduler.progress import can_fail_soak, soaking_targets
from machines.states import Outcome, Trigger
from machines.workflow.phase_transitions import transition
from machines.workflow.steps import is_excused
from rolloutd.engine.background.extra_checks import run_check
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.outcomes import verdict_events
from rolloutd.engine.redaction import redact_for_team
from rolloutd.engine.state import State
from rolloutd.engine.tasks import BackgroundJobs
from rolloutd.errors import StoreFailed
from rolloutd.ports import Failed, Ok, Unknown

CHECK_INTERVAL_S = 60.0
"""Interval between the checks of a soaking canary: a failure is known within a minute."""

AT_ONCE = 64
"""Canaries that are checked at once; of a larger wave the others wait, without a connection."""

MIN_FAILED_CHECKS = 2
"""Failed checks in a row that count: one lost packet is not a regression."""

MAX_RECHECK_S = 60.0
"""A check with a `within` must fail for that long, at most this: a short overload is not a failure."""

RECHECK_S = 5.0
"""Pause between two tries of such a check: more requests do not help an overloaded node."""


class SoakMonitor:
    """The soak checks under way."""

    def __init__(self, state: State, adapters: AdapterSet, interval_s: float = CHECK_INTERVAL_S) -> None:
        self.interval_s = interval_s
        self._state = state
        self._adapters = adapters
        # No `on_done`: a check that changes something commits it, and each commit wakes the loop.
        self._jobs: BackgroundJobs[tuple[str, str]] = BackgroundJobs("soak", state, concurrency=AT_ONCE)

    def start_checks(self, tasks: asyncio.TaskGroup) -> None:
        """Start to check every soaking canary that is not being checked."""
        for target in soaking_targets(self._state.index, self._state.now()):
            # Without its password, a check of the node would fail.
            if target.outcome is Outcome.CHANGED and not self._state.awaited_sources(target.node):
                key = (target.rollout, target.node)
                job = partial(self._check_node, target)
                self._jobs.start(tasks, job, key, name=f"soak {key[0]}/{key[1]}")

    async def _check_node(self, target: Target, key: tuple[str, str]) -> None:
        if key[0] not in self._state.index.rollouts or key[1] not in self._state.index.nodes:
            return  # the rollout was deleted, or the node left, before the task began
        async with self._state.begin_work(WorkKind.CHECKS, key[1], key[0]) as obstacle:
            if obstacle is None:
                await self._check_in_service(target, key)

    async def _check_in_service(self, target: Target, key: tuple[str, str]) -> None:
        try:
            for spec in self._state.index.plan_for(target).verify:
                result = await self._repeat_check(key, spec)
                if not isinstance(result, Ok) and not await self._is_excused(key, spec, result):
                    await self._fail_node(target, spec, result)
                    return
        except StoreFailed as failure:
            self._state.last_write_error = str(failure)

    async def _is_excused(self, key: tuple[str, str], spec: StepDef, result: Failed | Unknown) -> bool:
        """Return whether the check failed before the change too, or may stay unknown."""
        if not spec.baseline and not spec.accepts_unknown:
            return False
        state = StepState.FAILED if isinstance(result, Failed) else StepState.UNKNOWN
        return is_excused(spec, state, await self._state.store.load_steps(*key))

    async def _repeat_check(self, key: tuple[str, str], spec: StepDef) -> Ok | Failed | Unknown:
        """Repeat a check until it passes, or has failed often and long enough to count."""
        recheck_s = min(float(spec.params.get("within", 0) or 0), MAX_RECHECK_S)
        until, checks_made = self._state.now() + recheck_s, 0
        while True:
            result = await run_check(NodeSession(self._state, self._adapters, *key), spec)
            checks_made += 1
            if isinstance(result, Ok) or (checks_made >= MIN_FAILED_CHECKS and self._state.now() >= until):
                return result
            if recheck_s:
                await self._state.clock.sleep(RECHECK_S)

    async def _fail_node(self, target: Target, spec: StepDef, result: Failed | Unknown) -> None:
        text = redact_for_team(result, spec.team).text
        code = result.code if isinstance(result, Failed) else FailureCode.UNKNOWN
        async with self._state.exclusive_commit() as commit:
            if not can_fail_soak(self._state.index, target):
                return
            step, now = f"soak.{spec.name}", self._state.now()
            moved = transition(target, Trigger.SOAK_CHECK_FAILED, now, step=step, text=text, code=code)
            current = self._state.index.target(target.rollout, target.node)
            # A done target does not follow its node: a retry must not start it by the votes of its old team.
            changed = target_changes(self._state.index, current, now)
            verdict = verdict_events(self._state, current, moved)
            await commit([moved, *changed, *verdict], f"{spec.name} failed during the soak: {text}")
