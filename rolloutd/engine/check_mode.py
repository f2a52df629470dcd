"""Check mode: what a plan's stages would change on a node, without a change.

It needs no slot and no isolation.  A run that a crash interrupts ends by itself, and its result is not used.
What check mode cannot say is a problem of the report, never compliance.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from functools import partial

from machines.facts.node_work import WorkKind
from machines.model.configuration import ComplianceReport, TaskChange
from machines.model.limits import runner_of
from machines.model.plan import MaintainStage, Plan
from machines.rules.runners import unavailable_reason
from rolloutd import ports
from rolloutd.concurrency.slots import Slots
from rolloutd.configuration.shown_variables import hide_values
from rolloutd.configuration.target_values import params_for
from rolloutd.engine.state import State
from rolloutd.errors import Refused, RolloutdError, SourceFailed
from rolloutd.plugin import LOCAL_RUNNER
from rolloutd.ports.guards import adapter_errors
from rolloutd.texts.reason_text import describe

MAX_CHANGES = 50
"""Tasks of one report: enough to see what a node needs."""

MAX_DIFF_CHARS = 4000
"""Characters of one task's diff: the daemon keeps the reports of whole fleets."""

CANCEL_TRIES = 5
CANCEL_RETRY_S = 5.0
"""Tries to cancel a run that gives no answer, and the pause between two: most faults are over by then."""

PREVIEW = "impact"
"""Begins the names of the runs of a preview; a rollout's id ends in a hyphen and five characters."""

PROBLEMS = {
    "unchecked": "does not support check mode",
    "ignored": "failed in check mode",
    "failed": "failed in check mode",
    "unreachable": "could not reach the node",
}
"""Kinds of events after which the run's other events do not show compliance."""


class CheckMode:
    """Check-mode runs, at most half of each runner's runs at once: they must not delay a run of a rollout."""

    def __init__(self, state: State, runner: ports.Runners) -> None:
        self._state = state
        self._runner = runner
        self._slots = {name: Slots(partial(_half_of, status)) for name, status in runner.statuses.items()}
        self._numbers = itertools.count(1)

    async def check(
        self, node: str, source: ports.PinnedSource, plan: Plan, *, rollout: str = ""
    ) -> ComplianceReport:
        """Return what the plan's stages would change on the node; never raises an adapter's error.

        Diffs have no values of the plan's variables that people may not see.
        """
        allowed = (*self._state.settings.show_vars, *plan.shown_variables)
        changes: list[TaskChange] = []
        problem = ""
        async with self._slots_of(node):
            for stage in plan.stages:
                try:
                    with adapter_errors("runner"):
                        found, problem_here = await self._check_stage(node, source, plan, stage, rollout)
                except (RolloutdError, TimeoutError) as error:
                    found, problem_here = [], str(error) or "no answer in time"
                changes += (
                    replace(each, diff=hide_values(each.diff, stage.variables, allowed)) for each in found
                )
                problem = problem or problem_here
        return ComplianceReport(node, self._state.now(), tuple(changes[:MAX_CHANGES]), problem)

    def _slots_of(self, node: str) -> Slots:
        index = self._state.index
        rule = runner_of(index.limits.runners, index.nodes[node]) if node in index.nodes else None
        return self._slots.get("" if rule is None else rule.name, self._slots[LOCAL_RUNNER])

    async def _check_stage(
        self, node: str, source: ports.PinnedSource, plan: Plan, stage: MaintainStage, rollout: str
    ) -> tuple[list[TaskChange], str]:
        """Return the tasks of one stage that would change the node, and why there may be more."""
        async with self._state.begin_work(WorkKind.CHECK_MODE, node, rollout) as obstacle:
            if obstacle is not None:
                raise Refused("out-of-service", describe(obstacle))
            return await self._run_stage(node, source, plan, stage, rollout)

    async def _run_stage(
        self, node: str, source: ports.PinnedSource, plan: Plan, stage: MaintainStage, rollout: str
    ) -> tuple[list[TaskChange], str]:
        if self._state.awaited_sources(node):
            raise SourceFailed(f"{node}: its inventory source has not answered since the daemon started")
        # Never the name of an earlier run: its result would be of another time.
        name = f"{rollout or PREVIEW}.{node}.check-{self._state.epoch}-{next(self._numbers)}"
        host = self._state.host(node)
        request = ports.RunRequest(
            run_id=self._runner.run_id_for(name, node, stage.kind),
            host=host,
            source=source,
            playbook=stage.playbook,
            variables=dict(stage.variables),
            timeout_s=stage.timeout_s,
            check_only=True,
            rollout=rollout,
            step=stage.step,
            kind=stage.kind,
            params=params_for(plan, stage, host),
        )
        # A report is asked for now: it says that the runner is down, and does not wait for it.
        if (reason := unavailable_reason(self._state.index, node, self._state.now(), stage.kind)) is not None:
            raise Refused("runner-unavailable", describe(reason))
        handle = request.run_id
        try:
            handle = await self._runner.start(request)
            run = await ports.wait_for_end(self._runner, handle)
        except (RolloutdError, TimeoutError, OSError):
            # It may have begun: once this work has ended, nothing else keeps an attempt from the node.
            await self._cancel(handle)
            raise
        try:
            return await self._read_report(handle, run)
        finally:
            with contextlib.suppress(RolloutdError, OSError):
                await self._runner.discard(handle)

    async def _cancel(self, handle: str) -> None:
        """End a run of which the daemon has lost sight."""
        for _ in range(CANCEL_TRIES):
            with contextlib.suppress(RolloutdError, TimeoutError, OSError), adapter_errors("runner"):
                # A daemon that was replaced leaves the run to its successor, which may work on the node.
                await self._state.store.require_term()
                await self._runner.cancel(handle)
                return
            if self._state.leadership_lost.is_set():
                return
            await self._state.clock.sleep(CANCEL_RETRY_S)

    async def _read_report(self, handle: str, run: ports.RunState) -> tuple[list[TaskChange], str]:
        changes: list[TaskChange] = []
        problem = run.result.text if isinstance(run.result, ports.Failed | ports.Unknown) else ""
        async for event in self._runner.read_events(handle):
            task = str(event.fields.get("task") or event.text)
            if event.kind == "changed":
                changes.append(TaskChange(task, str(event.fields.get("diff") or "")[:MAX_DIFF_CHARS]))
            elif event.kind in PROBLEMS:
                problem = problem or f'task "{task}" {PROBLEMS[event.kind]}'
        return changes, problem


def _half_of(status: ports.RunnerStatus) -> int:
    return max(1, status.parallel // 2)
