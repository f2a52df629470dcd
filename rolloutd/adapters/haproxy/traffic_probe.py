"""Traffic probe `haproxy`: the sessions of a node's server, on all balancers together."""

from __future__ import annotations

from rolloutd.adapters.haproxy.runtime_api import (
    BalancerUnreachable,
    HaproxyFailed,
    choose_balancers,
    server_names,
)
from rolloutd.ports import AdapterContext, Busy, Ok, StepContext, Unknown
from rolloutd.text import pluralize


class HaproxyTrafficProbe:
    """ports.TrafficProbe by the current and queued sessions of a server."""

    def __init__(self, context: AdapterContext) -> None:
        self._context = context

    async def probe(self, ctx: StepContext) -> Ok | Busy | Unknown:
        node = ctx.host.name
        try:
            backend, server = server_names(ctx.params)
            balancers = choose_balancers(ctx.params, self._context)
            counts = {each.name: (await each.read(backend, server)).sessions for each in balancers}
        except (BalancerUnreachable, HaproxyFailed) as error:
            return Unknown(f"{node}: traffic is unknown: {error}")
        total = sum(counts.values())
        parts = ", ".join(f"{name} {count}" for name, count in counts.items())
        text = f"{pluralize(total, 'session')} of {backend}/{server} ({parts})"
        if total <= int(ctx.params.get("max", 0)):
            return Ok(text)
        return Busy(f"{node} is busy: {text}", count=total)
