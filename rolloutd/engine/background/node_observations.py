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
from functools import partial

from machines.model.node import NodeHealth, NodeKind, Observation
from rolloutd.engine.state import State
from rolloutd.engine.tasks import BackgroundJobs
from rolloutd.errors import RolloutdError
from rolloutd.ports import ConfirmsReports, Host, Observer, Watch
from rolloutd.ports.guards import adapter_errors, validate_result

log = logging.getLogger(__name__)

RESTART_DELAY_S = 10.0
"""Pause before a broken watch restarts: short, because observations are valid for a minute."""


class HostOnlyObserver:
    """An observer of plain hosts only: ssh does not show whether a Kubernetes node is cordoned.

    `name` is its place in the settings.
    """

    def __init__(self, observer: Observer, name: str) -> None:
        self._observer = observer
        self.name = name

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        plain = [host for host in hosts if host.kind is NodeKind.HOST]
        return await self._observer.observe(plain) if plain else ()


class OnDemandObserver:
    def __init__(self, state: State, observers: Sequence[Observer]) -> None:
        self._state = state
        self._observers = tuple(observers)
        self._jobs: BackgroundJobs[str] = BackgroundJobs("observe", state, lambda: state.wake_up())

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
            for each in await self._ask(observer, hosts):
                if each.node in observations:  # ignore a node that was not requested
                    observations[each.node] = _pick_worse(observations[each.node], each)
        return observations

    async def _ask(self, observer: Observer, hosts: Sequence[Host]) -> Sequence[Observation]:
        """Ask one observer; without an answer, that is why plain hosts are unknown."""
        name = observer.name if isinstance(observer, HostOnlyObserver) else "an observer"
        try:
            with adapter_errors(name):
                found = await observer.observe(hosts)
                answers = [validate_result(name, each, Observation) for each in found]
        except (RolloutdError, TimeoutError) as error:
            problem, now = str(error) or "no answer in time", self._state.now()
            log.warning("%s failed: %s", name, problem)
            self._state.record_try(name, problem)
            plain = (host.name for host in hosts if host.kind is NodeKind.HOST)
            return [Observation(node, NodeHealth.UNKNOWN, now, problem) for node in plain]
        if answers:
            self._state.record_try(name)
        return answers


def _pick_worse(known: Observation, new: Observation) -> Observation:
    if new.sight is NodeHealth.DOWN or new.cordoned_by_other or known.sight is NodeHealth.UNKNOWN:
        return new
    return known


async def run_watch(state: State, watch: Watch, on_inventory_changed: Callable[[], None]) -> None:
    """Run the watch until cancelled, and restart it when it breaks."""

    source, reported_names = watch.source, state.canonical_names

    def record(observations: Sequence[Observation]) -> None:
        # The watch uses its source's names, the index the fleet's; an empty name is a rejected node.
        named = [(state.canonical_names.get((source, each.node), each.node), each) for each in observations]
        state.index.record_observations(
            [
                each if (name, source) == (each.node, each.watch) else replace(each, node=name, watch=source)
                for name, each in named
                if name
            ],
            state.now(),
        )
        state.wake_up()

    def confirm() -> bool:
        nonlocal reported_names
        index = state.index
        # What was reported under another name, or is dropped, cannot be confirmed.
        if reported_names != state.canonical_names or index.lacks_reports(source):
            reported_names = state.canonical_names
            index.expect_reports(source)
            return False
        now = state.now()
        index.record_confirmation(source, now, now)
        state.wake_up()
        return True

    if isinstance(watch, ConfirmsReports):
        watch.confirm_to(confirm)
    name = f"watch {source}"
    while True:
        try:
            with adapter_errors(name):
                await watch.run(record, on_inventory_changed, partial(state.record_try, name))
        except (RolloutdError, TimeoutError) as error:
            log.error("%s: broken, it restarts: %s", name, error)
            state.record_try(name, str(error) or "no answer in time")
        await state.clock.sleep(RESTART_DELAY_S)
