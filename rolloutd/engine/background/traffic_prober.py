"""Traffic probes of nodes that may start if they have no traffic.

It probes a few nodes at a time, as the core requests; only the core keeps the results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from machines.model.decision import ProbeTraffic
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.drivers.traffic_probes import run_all_probes
from rolloutd.engine.state import State
from rolloutd.engine.tasks import BackgroundJobs

MAX_CONCURRENT = 8
"""Nodes at a time: the probes query servers that also serve clients."""


class TrafficProber:
    """The probes under way."""

    def __init__(self, state: State, adapters: AdapterSet) -> None:
        self._state = state
        self._adapters = adapters
        self._jobs: BackgroundJobs[ProbeTraffic] = BackgroundJobs(lambda: state.wake_up(), MAX_CONCURRENT)

    def request_probes(self, tasks: asyncio.TaskGroup, wanted: Sequence[ProbeTraffic]) -> None:
        """Start the probes that are not under way yet."""
        for each in wanted:
            self._jobs.start(tasks, self._probe, each, name=f"probe traffic on {each.rollout}/{each.node}")

    async def _probe(self, request: ProbeTraffic) -> None:
        # While the probe waited for its turn, the node may have left or the rollout may have ended.
        if request.rollout in self._state.index.rollouts and request.node in self._state.index.nodes:
            await run_all_probes(NodeSession(self._state, self._adapters, request.rollout, request.node))
