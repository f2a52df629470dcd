"""Observer `prometheus`: nodes are up or down as the monitoring sees them."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Sequence

from machines.model.node import NodeHealth, Observation
from rolloutd.adapters.prometheus.query import Queries, QueryFailed, ServerSilent
from rolloutd.plugin.templates import RenderFailed, render
from rolloutd.ports import AdapterContext, Host

MAX_CONCURRENT_QUERIES = 8
"""Queries at once: the server also serves dashboards and alerts."""

QUERY_TIMEOUT_S = 10.0
"""Limit of one query; an instant query takes milliseconds."""

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


class PrometheusObserver:
    """ports.Observer with the parameters `query`, `up`, `server` of the settings."""

    def __init__(self, context: AdapterContext) -> None:
        self._queries = Queries(context)
        self._clock = context.clock
        self._params = context.params
        self._up = str(context.params["up"])

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        slots = asyncio.Semaphore(MAX_CONCURRENT_QUERIES)

        silent: list[ServerSilent] = []

        async def observe_one(host: Host) -> Observation:
            async with slots:
                try:
                    health, why = await self._observe_host(host)
                except ServerSilent as error:
                    silent.append(error)
                    health, why = NodeHealth.UNKNOWN, str(error)
            return Observation(host.name, health, self._clock.now(), why)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(observe_one(host)) for host in hosts]
        if silent and len(silent) == len(hosts):
            raise silent[0]
        return [task.result() for task in tasks]

    async def _observe_host(self, host: Host) -> tuple[NodeHealth, str]:
        try:
            text, labels = self._params["query"], host.labels
            query = str(render(text, node=host.name, address=host.address, labels=labels, variables={}))
            found = await self._queries.query(query, self._params.get("server"), timeout_s=QUERY_TIMEOUT_S)
        except ServerSilent:
            raise
        except (QueryFailed, RenderFailed) as error:
            return NodeHealth.UNKNOWN, str(error)
        health = NodeHealth.UP if _holds(self._up, found) else NodeHealth.DOWN
        return health, f"monitoring reports {query} is {found:g}; a node is up at {self._up}"


def _holds(comparison: str, found: float) -> bool:
    symbol = comparison[: 2 if comparison[1] == "=" else 1]
    return _OPERATORS[symbol](found, float(comparison[len(symbol) :]))
