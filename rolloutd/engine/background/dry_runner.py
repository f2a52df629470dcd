"""Dry runs of the isolation of waiting nodes.

A dry run that exceeds its time limit is unknown and stops no node.  It knows isolators as ports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from machines.facts.dry_runs import DryRunResult
from machines.model.decision import DryRun
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.state import State
from rolloutd.engine.tasks import BackgroundJobs
from rolloutd.errors import RolloutdError
from rolloutd.ports import Busy, Ok, SupportsDryRun
from rolloutd.ports.guards import adapter_errors, validate_result

MAX_CONCURRENT = 8
"""Nodes at a time: a dry run is a request per pod, and drains need the API server too."""

DRY_RUN_TIMEOUT_S = 10.0
"""Time limit of one dry run, because it delays the start of its node."""


class DryRunner:
    """The dry runs under way."""

    def __init__(self, state: State, adapters: AdapterSet) -> None:
        self._state = state
        self._adapters = adapters
        self._jobs: BackgroundJobs[DryRun] = BackgroundJobs(lambda: state.wake_up(), MAX_CONCURRENT)

    def request_dry_runs(self, tasks: asyncio.TaskGroup, wanted: Sequence[DryRun]) -> None:
        """Start the dry runs that are not under way yet."""
        for each in wanted:
            self._jobs.start(tasks, self._dry_run, each, name=f"dry run {each.rollout}/{each.node}")

    async def _dry_run(self, request: DryRun) -> None:
        succeeds, why = await self._dry_run_isolators(request)
        self._state.index.record_dry_run(
            DryRunResult(request.rollout, request.node, succeeds, self._state.now(), why)
        )

    async def _dry_run_isolators(self, request: DryRun) -> tuple[bool | None, str]:
        if request.rollout not in self._state.index.rollouts:
            return None, "its rollout is over"
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
                    result = validate_result(f"isolator {spec.kind}", response, Ok, Busy)
                    if isinstance(result, Busy):
                        return False, result.text
        except (RolloutdError, TimeoutError) as error:
            return None, str(error) or "no answer in time"
        return True, ""
