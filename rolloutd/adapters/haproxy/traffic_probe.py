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


def make(context: AdapterContext) -> HaproxyTrafficProbe:
    return HaproxyTrafficProbe(context)


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
        total = pluralize(sum(counts.values()), "session")
        where = f"{backend}/{server} ({', '.join(f'{name} {count}' for name, count in counts.items())})"
        if sum(counts.values()) <= int(ctx.params.get("max", 0)):
            return Ok(f"{total} of {where}")
        return Busy(f"{node} is busy: {total} of {where}", count=sum(counts.values()))
