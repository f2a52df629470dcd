"""Dry runs of the isolation of waiting nodes, and the watch of what blocks them.

A dry run that exceeds its time limit is unknown and stops no node.  A node with a permanent blocker gets the
next dry run when the blocker has changed.  It knows isolators as ports.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from machines.facts.dry_runs import RESULT_RETENTION_S, DryRunResult
from machines.model.decision import DryRun
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.state import State
from rolloutd.errors import RolloutdError
from rolloutd.ports import Busy, Ok, SupportsBlockerWatch, SupportsDryRun
from rolloutd.ports.guards import adapter_errors, validate_result

log = logging.getLogger(__name__)

DRY_RUN_TIMEOUT_S = 10.0
"""Time limit of one dry run, because it delays the start of its node."""

BLOCKER_RECHECK_S = 60.0
"""Pause before the next dry run of a blocked node, if its isolator cannot watch the blocker."""


async def run_dry_run(state: State, adapters: AdapterSet, request: DryRun) -> None:
    """Find out whether the node could be isolated now, and record the answer."""
    result = await _ask_isolators(state, adapters, request)
    # After the wait, which a commit may end with other facts.
    state.index.record_dry_run(result)


async def _ask_isolators(state: State, adapters: AdapterSet, request: DryRun) -> DryRunResult:
    def unknown(why: str) -> DryRunResult:
        return DryRunResult(request.rollout, request.node, None, state.now(), why)

    session = NodeSession(state, adapters, request.rollout, request.node)
    try:
        async with asyncio.timeout(DRY_RUN_TIMEOUT_S):
            for spec in session.node_plan().isolate:
                isolator = adapters.isolators[spec.kind]
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


async def watch_blocker(state: State, adapters: AdapterSet, blocked: DryRunResult) -> None:
    """Wait until a permanent blocker has changed, and forget the dry run that found it."""
    try:
        async with asyncio.timeout(RESULT_RETENTION_S):
            await _wait_until_unblocked(state, adapters, blocked)
    except (RolloutdError, TimeoutError) as error:
        log.info("%s: its blocker is not watched: %s", blocked.node, str(error) or "the limit is over")
        await state.clock.sleep(BLOCKER_RECHECK_S)
    state.index.forget_dry_run(blocked.rollout, blocked.node)


async def _wait_until_unblocked(state: State, adapters: AdapterSet, blocked: DryRunResult) -> None:
    if blocked.rollout not in state.index.rollouts:
        return
    session = NodeSession(state, adapters, blocked.rollout, blocked.node)
    specs = (each for each in session.node_plan().isolate if each.name == blocked.step)
    spec = next(specs, None)
    if spec is None:
        return  # the node's labels have changed, and the isolator does not apply to it any more
    with adapter_errors(f"isolator {spec.kind}"):
        isolator = adapters.isolators[spec.kind]
        if isinstance(isolator, SupportsBlockerWatch):
            await isolator.wait_until_unblocked(await session.step_context(spec))
        else:
            await state.clock.sleep(BLOCKER_RECHECK_S)
