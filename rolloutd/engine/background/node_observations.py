"""Observations of nodes, by watches and on demand.

On demand only the peers of a node that could otherwise start are observed, so a fleet at rest causes no
traffic.  While a watch is broken its nodes' observations expire; an expired one counts as down, so nothing
starts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from machines.model.node import NodeHealth, NodeKind, Observation
from rolloutd.engine.state import State
from rolloutd.engine.tasks import BackgroundJobs
from rolloutd.errors import RolloutdError
from rolloutd.ports import Host, Observer, Watch
from rolloutd.ports.guards import adapter_errors, validate_result

log = logging.getLogger("rolloutd.engine.background.node_observations")


RESTART_DELAY_S = 10.0
"""Pause before a broken watch restarts: short, because observations are valid for a minute."""


class HostOnlyObserver:
    """An observer of plain hosts only: ssh does not show whether a Kubernetes node is cordoned."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        """Observe the plain hosts among the given ones."""
        plain = [host for host in hosts if host.kind is NodeKind.HOST]
        return await self._observer.observe(plain) if plain else ()


class OnDemandObserver:
    """The observations under way."""

    def __init__(self, state: State, observers: Sequence[Observer]) -> None:
        self._state = state
        self._observers = tuple(observers)
        self._jobs: BackgroundJobs[str] = BackgroundJobs(lambda: state.wake_up())

    def request_observations(self, tasks: asyncio.TaskGroup, nodes: Sequence[str]) -> None:
        """Start to observe those of the nodes that are not being observed yet."""
        self._jobs.start(tasks, self._observe, *nodes, name="observe")

    async def observe_now(self, nodes: Sequence[str]) -> None:
        """Observe these nodes, even those that are being observed already, and wait for the results."""
        await self._jobs.run(self._observe, *nodes)

    async def _observe(self, *nodes: str) -> None:
        hosts = [self._state.host(node) for node in nodes if node in self._state.index.nodes]
        observations = await self._query_observers(hosts)
        now = self._state.now()
        self._state.index.record_observations([observations[host.name] for host in hosts], now)

    async def _query_observers(self, hosts: Sequence[Host]) -> dict[str, Observation]:
        """Merge the observers' answers: down or cordoned by another party wins over up, up over unknown."""
        now = self._state.now()
        observations = {
            host.name: Observation(host.name, NodeHealth.UNKNOWN, now, "no observer can see it")
            for host in hosts
        }
        for observer in self._observers:
            try:
                with adapter_errors("an observer"):
                    answers = list(await observer.observe(hosts))
                for each in answers:
                    observation = validate_result("an observer", each, Observation)
                    if observation.node in observations:  # ignore a node that was not requested
                        observations[observation.node] = _pick_worse(
                            observations[observation.node], observation
                        )
            except (RolloutdError, TimeoutError) as error:
                log.warning("an observer failed: %s", str(error) or "no answer in time")
        return observations


def _pick_worse(known: Observation, new: Observation) -> Observation:
    if new.sight is NodeHealth.DOWN or new.cordoned_by_other or known.sight is NodeHealth.UNKNOWN:
        return new
    return known


async def run_watch(state: State, watch: Watch, on_inventory_changed: Callable[[], None]) -> None:
    """Run the watch until cancelled, and restart it when it breaks."""

    def record(observations: Sequence[Observation]) -> None:
        # The watch uses its source's names, the index the fleet's; an empty name is a rejected node.
        named = [
            (state.canonical_names.get((watch.source, each.node), each.node), each) for each in observations
        ]
        state.index.record_observations(
            [replace(each, node=name) for name, each in named if name], state.now()
        )
        state.wake_up()

    while True:
        try:
            with adapter_errors(f"watch {watch.source}"):
                await watch.run(record, on_inventory_changed)
        except (RolloutdError, TimeoutError) as error:
            log.error("watch %s: broken, it restarts: %s", watch.source, error)
        await state.clock.sleep(RESTART_DELAY_S)
