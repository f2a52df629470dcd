"""Check and traffic probe `prometheus`: a metric is within its limit, or not worse than before the change.

A query without a usable result is unknown (inconclusive): the caller repeats it until its limit.
"""

from __future__ import annotations

import math

from rolloutd.adapters.prometheus.query import Queries, QueryFailed
from rolloutd.ports import AdapterContext, Busy, Failed, Ok, StepContext, Unknown

MAX_TIMEOUT_S = 60.0
"""Limit of one query, whatever the plan says."""


class PrometheusCheck:
    """ports.Check with the parameters `query`, `server`, `max`, `ratio` or `difference`."""

    def __init__(self, context: AdapterContext) -> None:
        self._queries = Queries(context)
        self._clock = context.clock

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        timeout_s = ctx.remaining_s(self._clock.now(), most=MAX_TIMEOUT_S)
        query = str(ctx.params["query"])
        try:
            found = await self._queries.query(query, ctx.params.get("server"), timeout_s=timeout_s)
        except QueryFailed as error:
            return Unknown(f"{ctx.host.name}: {error}")
        shown = f"{ctx.host.name}: {query} is {found:g}"
        limit = ctx.params.get("max")
        if limit is not None and found <= float(limit):
            return Ok(f"{shown}, at most {float(limit):g}", value=found)
        ratio, difference = ctx.params.get("ratio"), ctx.params.get("difference")
        if ratio is None and difference is None:
            return Failed(f"{shown}, more than {limit}")
        if ctx.is_baseline:
            return Ok(f"{shown} before the change", value=found)
        if ctx.baseline is None:
            return Unknown(f"{shown}; there is no value from before the change to compare with")
        before = float(ctx.baseline)
        allowed = before + float(difference or 0.0) if ratio is None else before * float(ratio)
        if found <= allowed:
            return Ok(f"{shown}; before the change {before:g}, so at most {allowed:g}", value=found)
        return Failed(f"{shown}, more than {allowed:g}; before the change it was {before:g}")


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
