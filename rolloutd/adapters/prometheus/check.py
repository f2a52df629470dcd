"""Check `prometheus`: a metric is within its limit, or not worse than before the change.

A query without a usable result is unknown (inconclusive): the caller repeats it until its limit.
"""

from __future__ import annotations

from collections.abc import Mapping

from rolloutd.adapters.prometheus.query import Queries, QueryFailed
from rolloutd.ports import JSON, AdapterContext, Clock, Failed, Ok, StepContext, Unknown

MAX_TIMEOUT_S = 60.0
"""Limit of one query, whatever the plan says."""


def make(context: AdapterContext) -> PrometheusCheck:
    return PrometheusCheck(Queries(context), context.clock)


class PrometheusCheck:
    """ports.Check with the parameters `query`, `server`, `max`, `ratio` or `difference`."""

    def __init__(self, queries: Queries, clock: Clock) -> None:
        self._queries = queries
        self._clock = clock

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        timeout_s = min(MAX_TIMEOUT_S, max(1.0, ctx.deadline - self._clock.now()))
        server = ctx.params.get("server")
        try:
            found = await self._queries.query(
                str(ctx.params["query"]), None if server is None else str(server), timeout_s=timeout_s
            )
        except QueryFailed as error:
            return Unknown(f"{ctx.host.name}: {error}")
        shown = f"{ctx.host.name}: {ctx.params['query']} is {found:g}"
        limit = ctx.params.get("max")
        if limit is not None and found <= float(limit):
            return Ok(f"{shown}, at most {float(limit):g}", value=found)
        if not _compares(ctx.params):
            return Failed(f"{shown}, more than {limit}")
        if ctx.is_baseline:
            return Ok(f"{shown} before the change", value=found)
        if ctx.baseline is None:
            return Unknown(f"{shown}; there is no value from before the change to compare with")
        before = float(ctx.baseline)
        allowed = _allowed(before, ctx.params)
        if found <= allowed:
            return Ok(f"{shown}; before the change {before:g}, so at most {allowed:g}", value=found)
        return Failed(f"{shown}, more than {allowed:g}; before the change it was {before:g}")


def _compares(params: Mapping[str, JSON]) -> bool:
    return params.get("ratio") is not None or params.get("difference") is not None


def _allowed(before: float, params: Mapping[str, JSON]) -> float:
    """Return the greatest value that is not worse than before by more than the plan allows."""
    if params.get("ratio") is not None:
        return before * float(params["ratio"])
    return before + float(params["difference"])
