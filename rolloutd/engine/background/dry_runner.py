"""Dry runs of the isolation of waiting nodes, and the watch of what blocks them.

A dry run that exceeds its time limit is unknown and stops no node.  A node with a permanent blocker gets the
next dry run when the blocker has changed.  It knows isolators as ports.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from machines.facts.dry_runs import RESULT_RETENTION_S, DryRunResult
from machines.model.decision import DryRun
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.state import State
from rolloutd.engine.tasks import BackgroundJobs
from rolloutd.errors import RolloutdError
from rolloutd.ports import Busy, Ok, SupportsBlockerWatch, SupportsDryRun
from rolloutd.ports.guards import adapter_errors, validate_result

log = logging.getLogger("rolloutd.engine.background.dry_runner")

MAX_CONCURRENT = 8
"""Nodes at a time, because drains need the outside system too."""

DRY_RUN_TIMEOUT_S = 10.0
"""Time limit of one dry run, because it delays the start of its node."""


BLOCKER_RECHECK_S = 60.0
"""Pause before the next dry run of a blocked node, if its isolator cannot watch the blocker."""


class DryRunner:
    """The dry runs and the watches of blockers under way."""

    def __init__(self, state: State, adapters: AdapterSet) -> None:
        self._state = state
        self._adapters = adapters
        self._jobs: BackgroundJobs[DryRun] = BackgroundJobs(
            "dry-run", state, lambda: state.wake_up(), MAX_CONCURRENT
        )
        self._watches: BackgroundJobs[DryRun] = BackgroundJobs("blocker", state, lambda: state.wake_up())

    def request_dry_runs(self, tasks: asyncio.TaskGroup, wanted: Sequence[DryRun]) -> None:
        """Start the dry runs that are not under way yet."""
        for each in wanted:
            self._jobs.start(tasks, self._dry_run, each, name=f"dry run {each.rollout}/{each.node}")

    def watch_blockers(self, tasks: asyncio.TaskGroup) -> None:
        """Start to watch the permanent blockers that are not watched yet."""
        for result in self._state.index.dry_run_results.permanent():
            job = partial(self._forget_when_unblocked, result)
            request = DryRun(result.rollout, result.node)
            self._watches.start(tasks, job, request, name=f"blocker {result.rollout}/{result.node}")

    async def _dry_run(self, request: DryRun) -> None:
        result = await self._dry_run_isolators(request)
        # After the wait, which a commit may end with other facts.
        self._state.index.record_dry_run(result)

    async def _dry_run_isolators(self, request: DryRun) -> DryRunResult:
        def unknown(why: str) -> DryRunResult:
            return DryRunResult(request.rollout, request.node, None, self._state.now(), why)

        if request.rollout not in self._state.index.rollouts:
            return unknown("its rollout is over")
        session = NodeSession(self._state, self._adapters, request.rollout, request.node)
        try:
            async with asyncio.timeout(DRY_RUN_TIMEOUT_S):
                for spec in session.node_plan().isolate:
                    isolator = self._adapters.isolators[spec.kind]
                    if not isinstance(isolator, SupportsDryRun):
                        continue
                    ctx = await session.step_context(spec)
                    with adapter_errors(f"isolator {spec.kind}"):
                        response = await isolator.dry_run(ctx)
                    answer = validate_result(f"isolator {spec.kind}", response, Ok, Busy)
                    if isinstance(answer, Busy):
                        return replace(
                            unknown(answer.text),
                            succeeds=False,
                            is_permanent=answer.is_permanent,
                            step=spec.name,
                        )
        except (RolloutdError, TimeoutError) as error:
            return unknown(str(error) or "no answer in time")
        return replace(unknown(""), succeeds=True)

    async def _forget_when_unblocked(self, blocked: DryRunResult, request: DryRun) -> None:
        try:
            async with asyncio.timeout(RESULT_RETENTION_S):
                await self._wait_until_unblocked(blocked)
        except (RolloutdError, TimeoutError) as error:
            log.info("%s: its blocker is not watched: %s", blocked.node, str(error) or "the limit is over")
            await self._state.clock.sleep(BLOCKER_RECHECK_S)
        self._state.index.forget_dry_run(blocked.rollout, blocked.node)

    async def _wait_until_unblocked(self, blocked: DryRunResult) -> None:
        if blocked.rollout not in self._state.index.rollouts:
            return
        session = NodeSession(self._state, self._adapters, blocked.rollout, blocked.node)
        specs = (each for each in session.node_plan().isolate if each.name == blocked.step)
        spec = next(specs, None)
        if spec is None:
            return  # the node's labels have changed, and the isolator does not apply to it any more
        with adapter_errors(f"isolator {spec.kind}"):
            isolator = self._adapters.isolators[spec.kind]
            if isinstance(isolator, SupportsBlockerWatch):
                await isolator.wait_until_unblocked(await session.step_context(spec))
            else:
                await self._state.clock.sleep(BLOCKER_RECHECK_S)
