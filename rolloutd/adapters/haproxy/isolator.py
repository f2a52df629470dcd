"""Isolator and traffic probe `haproxy`: a node's server on every balancer; no session is cut.

Every pass of an isolation reads the server on all balancers before it changes it on any: if one does not
answer or does not know the server, nothing changes.  A return restores each balancer by itself.

A server goes from `ready` to `drain`, and to `maint` when its sessions have ended.  The state and the weight
from before are restored exactly; what others had drained stays drained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rolloutd import ports
from rolloutd.adapters.haproxy.runtime_api import (
    AdminState,
    Balancer,
    BalancerUnreachable,
    HaproxyFailed,
    ServerState,
    choose_balancers,
    server_names,
)
from rolloutd.errors import RolloutdError
from rolloutd.texts.formats import pluralize

POLL_S = 0.5
"""Interval between two counts of sessions: two short commands each."""

POLLS = 40
"""Counts of one `isolate`, some 20 s: the driver then repeats it at once, and reads commands in between."""


class HaproxyIsolator:
    """ports.Isolator by the admin state of a server."""

    def __init__(self, context: ports.AdapterContext, *, polls: int = POLLS) -> None:
        self._context = context
        self._clock = context.clock
        self._polls = polls

    async def inspect(self, ctx: ports.StepContext) -> ports.IsolationStatus | ports.Busy:
        """Raises HaproxyFailed if a balancer or the server on it is unknown."""
        try:
            found = await self._server(ctx).read()
        except BalancerUnreachable as error:
            return ports.Busy(str(error))
        prior = {name: {"state": str(each.admin), "weight": each.weight} for name, each in found.items()}
        is_isolated = all(each.admin is AdminState.MAINT and not each.sessions for each in found.values())
        return ports.IsolationStatus(
            is_isolated, prior if ctx.prior is None else ctx.prior, describe(ctx.host.name, found)
        )

    async def isolate(self, ctx: ports.StepContext) -> ports.StepResult:
        """Drain for one pass; Busy while sessions are left or a balancer does not answer."""
        text = ""
        try:
            server = self._server(ctx)
            for _ in range(self._polls):
                found = await server.read()
                text = describe(ctx.host.name, found)
                states = {each.admin for each in found.values()}
                if AdminState.READY in states:
                    # On all balancers at once: one that is still ready gets the others' clients.
                    await server.set_state(found, AdminState.READY, AdminState.DRAIN)
                elif count_sessions(found):
                    await self._clock.sleep(POLL_S)
                elif ctx.cordon_only or states == {AdminState.MAINT}:
                    return ports.Ok(text)
                else:
                    # Sessions are counted again afterwards: one may have come in meanwhile.
                    await server.set_state(found, AdminState.DRAIN, AdminState.MAINT)
            return ports.Busy(text)
        except BalancerUnreachable as error:
            return ports.Busy(str(error))
        except HaproxyFailed as error:
            return ports.Failed(str(error))

    async def return_to_service(self, ctx: ports.StepContext) -> ports.StepResult:
        """Restore the server on each balancer that answers; one that does not keeps it from no other.

        Repeated, it changes only what the others still have open.
        """
        found: dict[str, ServerState] = {}
        problems: dict[str, RolloutdError] = {}
        try:
            server = self._server(ctx)
        except HaproxyFailed as error:
            return ports.Failed(str(error))
        for balancer in server.balancers:
            try:
                found[balancer.name] = await server.restore(balancer, ctx.prior[balancer.name])
            except (BalancerUnreachable, HaproxyFailed) as error:
                problems[balancer.name] = error
        if not problems:
            return ports.Ok(describe(ctx.host.name, found))
        text = f"not restored on {', '.join(problems)}: {'; '.join(map(str, problems.values()))}"
        if found:
            text = f"{text}; restored: {describe(ctx.host.name, found)}"
        is_refused = all(isinstance(error, HaproxyFailed) for error in problems.values())
        return ports.Failed(text) if is_refused else ports.Busy(text)

    def _server(self, ctx: ports.StepContext) -> _Server:
        # The balancers that the attempt began with: another one has no recorded state to restore.
        names = () if ctx.prior is None else tuple(ctx.prior)
        return _Server(choose_balancers(ctx.params, self._context, names=names), *server_names(ctx.params))


class HaproxyTrafficProbe:
    """ports.TrafficProbe by the current and queued sessions of a server.

    Those of a process that a reload has replaced are not among them: only HAProxy's master socket has them.
    """

    def __init__(self, context: ports.AdapterContext) -> None:
        self._context = context

    async def probe(self, ctx: ports.StepContext) -> ports.Ok | ports.Busy | ports.Unknown:
        node = ctx.host.name
        try:
            backend, server = server_names(ctx.params)
            balancers = choose_balancers(ctx.params, self._context)
            counts = {each.name: (await each.read(backend, server)).sessions for each in balancers}
        except (BalancerUnreachable, HaproxyFailed) as error:
            return ports.Unknown(f"{node}: traffic is unknown: {error}")
        total = sum(counts.values())
        parts = ", ".join(f"{name} {count}" for name, count in counts.items())
        text = f"{pluralize(total, 'session')} of {backend}/{server} ({parts})"
        if total <= int(ctx.params.get("max", 0)):
            return ports.Ok(text)
        return ports.Busy(f"{node} is busy: {text}", count=total)


@dataclass(frozen=True, slots=True)
class _Server:
    balancers: Sequence[Balancer]
    backend: str
    server: str

    async def read(self) -> dict[str, ServerState]:
        return {each.name: await each.read(self.backend, self.server) for each in self.balancers}

    async def set_state(self, found: Mapping[str, ServerState], old: AdminState, new: AdminState) -> None:
        """Change the state on each balancer that has the old one."""
        for balancer in self.balancers:
            if found[balancer.name].admin is old:
                await balancer.set_state(self.backend, self.server, new)

    async def restore(self, balancer: Balancer, prior: Mapping[str, ports.JSON]) -> ServerState:
        """Restore weight and state on one balancer; the weight first, because `ready` lets clients in."""
        now = await balancer.read(self.backend, self.server)
        if now.weight != prior["weight"]:
            await balancer.set_weight(self.backend, self.server, prior["weight"])
        if now.admin != prior["state"]:
            await balancer.set_state(self.backend, self.server, AdminState(prior["state"]))
        return await balancer.read(self.backend, self.server)


def count_sessions(found: Mapping[str, ServerState]) -> int:
    return sum(each.sessions for each in found.values())


def describe(node: str, found: Mapping[str, ServerState]) -> str:
    """Return what was found, such as `n1: 12 sessions (lb1 drain 8, lb2 drain 4)`."""
    parts = ", ".join(f"{name} {each.admin} {each.sessions}" for name, each in found.items())
    return f"{node}: {pluralize(count_sessions(found), 'session')} ({parts})"
