"""Return to service of nodes that stayed isolated for a hold, once no hold is left.

The observation of a node shows that it was left isolated, so the release also works when the hold ended while
the daemon was down.  A node that failed, or that a rollout has isolated, is not released yet.
It knows isolators as ports.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from machines.facts.availability import active_hold
from machines.facts.node_work import NodeWork, WorkKind, conflicting_work
from machines.model.events import IsolationReleased
from machines.model.node import Observation
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.state import State
from rolloutd.engine.tasks import BackgroundJobs
from rolloutd.errors import RolloutdError
from rolloutd.ports import Busy, Failed, Ok, SupportsHoldRelease, Unknown
from rolloutd.ports.guards import adapter_errors, validate_result

log = logging.getLogger("rolloutd.engine.background.hold_release")

RETRY_S = 5.0
"""Pause before a release is tried again, doubled with each try because each is in the audit.

The first pause is long enough for the observation that shows the node in service again.
"""

RETRY_MAX_S = 300.0
"""Longest such pause."""


class IsolationReleaser:
    """The releases under way."""

    def __init__(self, state: State, adapters: AdapterSet) -> None:
        self._state = state
        self._adapters = adapters
        self._jobs: BackgroundJobs[str] = BackgroundJobs("hold-release", state, lambda: state.wake_up())
        self._tries: dict[str, int] = {}

    def release_unheld(self, tasks: asyncio.TaskGroup) -> None:
        """Start to return the nodes to service that have no hold any more."""
        observations = self._state.index.left_cordoned()
        names = {seen.node for seen in observations}
        self._tries = {node: tries for node, tries in self._tries.items() if node in names}
        for observation in observations:
            if self._can_release(observation):
                job = partial(self._release_with_backoff, observation)
                self._jobs.start(tasks, job, observation.node, name=f"release {observation.node}")

    def _can_release(self, observation: Observation) -> bool:
        index = self._state.index
        if index.limits.observe_only or observation.node not in index.nodes:
            return False
        if observation.cordoned_by_other and active_hold(index, observation.node) is not None:
            return False
        return conflicting_work(index, WorkKind.RELEASE, observation.node, self._state.now()) is None

    async def _release_with_backoff(self, observation: Observation, node: str) -> None:
        await self._release(observation)
        tries = self._tries[node] = self._tries.get(node, 0) + 1
        # The pause is part of the job, so that no second release of the node starts meanwhile.
        await self._state.clock.sleep(min(RETRY_S * 2 ** (tries - 1), RETRY_MAX_S))

    async def _release(self, observation: Observation) -> None:
        work: NodeWork | None = None
        try:
            with adapter_errors(f"isolator {observation.left_isolated_by}"):
                isolator = self._adapters.isolators[observation.left_isolated_by]
                assert isinstance(isolator, SupportsHoldRelease), (
                    f"{observation.left_isolated_by} cannot release nodes"
                )
            async with self._state.exclusive_commit() as commit:
                if not self._can_release(observation):
                    return  # a new hold or a rollout took the node meanwhile
                # Written first: a daemon that has lost its term must not touch the node.
                event = IsolationReleased(observation.node, observation.left_isolated_by, self._state.now())
                await commit([event], "no hold is left")
                # Before the lock is free: a hold granted now would see its node return to service.
                work = NodeWork(WorkKind.RELEASE, observation.node)
                self._state.index.record_work(work)
            with adapter_errors(f"isolator {observation.left_isolated_by}"):
                response = await isolator.release(self._state.host(observation.node))
            result = validate_result(
                f"isolator {observation.left_isolated_by}", response, Ok, Failed, Busy, Unknown
            )
        except (RolloutdError, TimeoutError) as error:
            why = str(error) or "no answer in time"
            log.warning("%s: could not be returned to service after its hold: %s", observation.node, why)
            return
        finally:
            if work is not None:
                self._state.end_work(work)
        log_result = log.info if isinstance(result, Ok) else log.warning
        log_result("%s: released, because no hold is left: %s", observation.node, result.text)
