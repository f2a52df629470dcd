"""Traffic probe `prometheus`: a metric of the node, compared with a maximum."""

from __future__ import annotations

import math

from rolloutd.adapters.prometheus.query import Queries, QueryFailed
from rolloutd.ports import AdapterContext, Busy, Ok, StepContext, Unknown


class PrometheusTrafficProbe:
    """ports.TrafficProbe with the parameters `query`, `max`, `server`."""

    def __init__(self, context: AdapterContext) -> None:
        self._queries = Queries(context)
        self._clock = context.clock

    async def probe(self, ctx: StepContext) -> Ok | Busy | Unknown:
        node, query = ctx.host.name, str(ctx.params["query"])
        timeout_s = ctx.remaining_s(self._clock.now())
        try:
            found = await self._queries.query(query, ctx.params.get("server"), timeout_s=timeout_s)
        except QueryFailed as error:
            return Unknown(f"{node}: traffic is unknown: {error}")
        most = float(ctx.params.get("max", 0.0))
        if found <= most:
            return Ok(f"{node} is idle: {query} is {found:g}")
        count = math.ceil(found) if math.isfinite(found) else None
        return Busy(f"{node} is busy: {query} is {found:g}, more than {most:g}", count=count)
