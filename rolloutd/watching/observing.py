"""Asks the observers about nodes whose last observation is too old to decide on.

Demand-driven: only the pool mates of a node that could otherwise start are
asked for, so a fleet at rest is left in peace.  A node is never asked for twice
at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from machines.node import Kind, Observation, Sight
from rolloutd.errors import RolloutdError
from rolloutd.ports import Host, Observer
from rolloutd.ports.border import answer_of, answering_for
from rolloutd.state import State

log = logging.getLogger("rolloutd.watching.observing")


class PlainHosts:
    """An observer of plain hosts alone: an answer over ssh says nothing of a Kubernetes node's cordon."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        """Observe the plain ones among the hosts; nothing is said of the others."""
        plain = [host for host in hosts if host.kind is Kind.HOST]
        return await self._observer.observe(plain) if plain else ()


class Observing:
    """Observations on their way."""

    def __init__(self, state: State, observers: Sequence[Observer]) -> None:
        self._state = state
        self._observers = tuple(observers)
        self._asked: set[str] = set()

    def ask(self, tasks: asyncio.TaskGroup, nodes: Sequence[str]) -> None:
        """Observe these nodes beside the loop, those already asked for left out."""
        wanted = [node for node in nodes if node not in self._asked]
        if wanted:
            self._asked.update(wanted)
            tasks.create_task(self._observe(wanted), name="observe")

    async def look(self, nodes: Sequence[str]) -> None:
        """Observe these nodes and return once they were; for somebody who waits for the answer."""
        self._asked.update(nodes)
        await self._observe(nodes)

    async def _observe(self, nodes: Sequence[str]) -> None:
        try:
            hosts = [self._state.host(node) for node in nodes if node in self._state.index.nodes]
            seen = await self._seen(hosts)
            now = self._state.now()
            self._state.index.observed([seen[host.name] for host in hosts], now)
        finally:
            self._asked.difference_update(nodes)
            self._state.poke()

    async def _seen(self, hosts: Sequence[Host]) -> dict[str, Observation]:
        """Return what the observers say: down if any says so, up if any does and none says down."""
        now = self._state.now()
        told = {
            host.name: Observation(host.name, Sight.UNKNOWN, now, "no observer can see it") for host in hosts
        }
        for observer in self._observers:
            try:
                with answering_for("an observer"):
                    seen = list(await observer.observe(hosts))
                for each in seen:
                    observation = answer_of("an observer", each, Observation)
                    if observation.node in told:  # of others nobody has asked it
                        told[observation.node] = _worse(told[observation.node], observation)
            except (RolloutdError, TimeoutError) as error:
                log.warning("an observer failed: %s", str(error) or "no answer in time")
        return told


def _worse(known: Observation, new: Observation) -> Observation:
    if new.sight is Sight.DOWN or new.foreign or known.sight is Sight.UNKNOWN:
        return new
    return known
