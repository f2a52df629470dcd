"""Return to service of nodes that stayed isolated for a hold, once no hold is left.

The observation of a node shows that it was left isolated, so the release also works when the hold ended while
the daemon was down.  A node that failed, or that a rollout has isolated, is not released yet.
It knows isolators as ports.
"""

from __future__ import annotations

import logging
from collections import Counter

from machines.facts.node_work import NodeWork, WorkKind
from machines.model.decision import Release
from machines.model.events import IsolationReleased
from machines.model.node import Observation
from machines.rules.releases import release_blocker
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.state import State
from rolloutd.errors import RolloutdError
from rolloutd.ports import Busy, Failed, Ok, SupportsHoldRelease, Unknown
from rolloutd.ports.guards import adapter_errors, validate_result

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Pause before a release is tried again, doubled with each try because each is in the audit.

The first pause is long enough for the observation that shows the node in service again.
"""

RETRY_MAX_S = 300.0
"""Longest such pause."""


async def release(state: State, adapters: AdapterSet, tries: Counter[str], command: Release) -> None:
    """Return a node to service, then pause; `tries` has the number of tries by node."""
    node = command.node
    if (left := _left_cordoned(state, node)) is None:
        return
    await _release(state, adapters, left)
    tries[node] += 1
    # The pause is part of the job, so that no second release of the node starts meanwhile.
    await state.clock.sleep(min(RETRY_S * 2 ** (tries[node] - 1), RETRY_MAX_S))
    if _left_cordoned(state, node) is None:
        del tries[node]


def _left_cordoned(state: State, node: str) -> Observation | None:
    return next((each for each in state.index.left_cordoned() if each.node == node), None)


async def _release(state: State, adapters: AdapterSet, left: Observation) -> None:
    kind, work = left.left_isolated_by, None
    try:
        with adapter_errors(f"isolator {kind}"):
            isolator = adapters.isolators[kind]
            assert isinstance(isolator, SupportsHoldRelease), f"{kind} cannot release nodes"
        async with state.exclusive_commit() as commit:
            if release_blocker(state.index, left, state.now()) is not None:
                return  # a new hold or a rollout took the node meanwhile
            # Written first: a daemon that has lost its term must not touch the node.
            await commit([IsolationReleased(left.node, kind, state.now())], "no hold is left")
            # Before the lock is free: a hold granted now would see its node return to service.
            work = NodeWork(WorkKind.RELEASE, left.node)
            state.index.record_work(work)
        state.require_leadership()
        with adapter_errors(f"isolator {kind}"):
            response = await isolator.release(state.host(left.node))
        result = validate_result(f"isolator {kind}", response, Ok, Failed, Busy, Unknown)
    except (RolloutdError, TimeoutError) as error:
        why = str(error) or "no answer in time"
        log.warning("%s: could not be returned to service after its hold: %s", left.node, why)
        return
    finally:
        if work is not None:
            state.end_work(work)
    log_result = log.info if isinstance(result, Ok) else log.warning
    log_result("%s: released, because no hold is left: %s", left.node, result.text)
