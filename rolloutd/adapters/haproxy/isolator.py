"""Isolator and traffic probe `haproxy`: a node's server on every balancer; no session is cut.

Every pass of an isolation reads the server on all balancers before it changes it on any: if one does not
answer or does not know the server, nothing changes.  A return restores each balancer by itself.

A server goes from `ready` to `drain`, and to `maint` when its sessions have ended; its weight is never set.
What another client has set is left alone.  HAProxy names no owner of a state.  Before our intent is recorded,
every state but `ready` is another client's.  After it, every state but `ready` is, that this daemon did not
set; one that continues an isolation takes the states that it reads first as set by its predecessor.
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
        self._own_states: OwnStates = {}

    async def dry_run(self, ctx: ports.StepContext) -> ports.Ok | ports.Busy:
        """Raises HaproxyFailed as inspect() does, BalancerUnreachable if a balancer does not answer."""
        found = await self._server(ctx).read()
        foreign = find_not_ready(found)
        return _busy_by_other(ctx, found, foreign) if foreign else ports.Ok(describe(ctx.host.name, found))

    async def inspect(self, ctx: ports.StepContext) -> ports.IsolationStatus | ports.Busy:
        """Raises HaproxyFailed if a balancer or the server on it is unknown."""
        try:
            server = self._server(ctx)
            found = await server.read()
        except BalancerUnreachable as error:
            return ports.Busy(str(error))
        if ctx.prior is None:
            foreign = find_not_ready(found)
            server.forget_own_states()
        else:
            foreign = server.find_foreign(found)
        # During our isolation, one that another client shares is not lost, but the run must not continue.
        is_lost = len(find_not_ready(found)) < len(found) or count_sessions(found)
        if foreign and (ctx.prior is None or not is_lost):
            return _busy_by_other(ctx, found, foreign)
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
                elif foreign := server.find_foreign(found):
                    return _busy_by_other(ctx, found, foreign)
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

        Repeated, it changes only what the others still have open.  Ok names what other clients changed.
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
            changes = _describe_changes(found, ctx.prior)
            return ports.Ok(
                describe(ctx.host.name, found) + (f"; left as changed: {changes}" if changes else "")
            )
        text = f"not restored on {', '.join(problems)}: {'; '.join(map(str, problems.values()))}"
        if found:
            text = f"{text}; restored: {describe(ctx.host.name, found)}"
        is_refused = all(isinstance(error, HaproxyFailed) for error in problems.values())
        return ports.Failed(text) if is_refused else ports.Busy(text)

    def _server(self, ctx: ports.StepContext) -> _Server:
        # The balancers that the attempt began with: another one has no recorded state to restore.
        names = () if ctx.prior is None else tuple(ctx.prior)
        balancers = choose_balancers(ctx.params, self._context, names=names)
        return _Server(balancers, *server_names(ctx.params), self._own_states)


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


OwnStates = dict[tuple[str, str, str], frozenset[AdminState]]
"""What this daemon set, by balancer, backend and server; two states while an answer is missing."""


@dataclass(frozen=True, slots=True)
class _Server:
    balancers: Sequence[Balancer]
    backend: str
    server: str
    own_states: OwnStates

    async def read(self) -> dict[str, ServerState]:
        return {each.name: await each.read(self.backend, self.server) for each in self.balancers}

    async def set_state(self, found: Mapping[str, ServerState], old: AdminState, new: AdminState) -> None:
        """Change the state on each balancer that has the old one."""
        for balancer in self.balancers:
            if found[balancer.name].admin is old:
                await self._set_state(balancer, old, new)

    async def restore(self, balancer: Balancer, prior: Mapping[str, ports.JSON]) -> ServerState:
        """Restore the state on one balancer, unless another client has set it since."""
        now = await balancer.read(self.backend, self.server)
        if now.admin is AdminState.READY or self.find_foreign({balancer.name: now}):
            return now
        # An earlier version isolated servers that others had drained, so it is not always `ready`.
        await self._set_state(balancer, now.admin, AdminState(prior["state"]))
        return await balancer.read(self.backend, self.server)

    def forget_own_states(self) -> None:
        """Forget an earlier isolation: its states are not those of the one that begins."""
        for balancer in self.balancers:
            self.own_states[self._key(balancer.name)] = frozenset((AdminState.READY,))

    def find_foreign(self, found: Mapping[str, ServerState]) -> list[str]:
        """Return the balancers where another client took the server out of service during our isolation."""
        own = {
            name: self.own_states.setdefault(self._key(name), frozenset((each.admin,)))
            for name, each in found.items()
        }
        return [name for name in find_not_ready(found) if found[name].admin not in own[name]]

    async def _set_state(self, balancer: Balancer, old: AdminState, new: AdminState) -> None:
        key = self._key(balancer.name)
        self.own_states[key] = frozenset((old, new))
        await balancer.set_state(self.backend, self.server, new)
        self.own_states[key] = frozenset((new,))

    def _key(self, balancer: str) -> tuple[str, str, str]:
        return balancer, self.backend, self.server


def count_sessions(found: Mapping[str, ServerState]) -> int:
    return sum(each.sessions for each in found.values())


def describe(node: str, found: Mapping[str, ServerState]) -> str:
    """Return what was found, such as `n1: 12 sessions (lb1 drain 8, lb2 drain 4)`."""
    parts = ", ".join(f"{name} {each.admin} {each.sessions}" for name, each in found.items())
    return f"{node}: {pluralize(count_sessions(found), 'session')} ({parts})"


def find_not_ready(found: Mapping[str, ServerState]) -> list[str]:
    """Return the balancers that send no new clients to the server."""
    return [name for name, each in found.items() if each.admin is not AdminState.READY]


def _busy_by_other(
    ctx: ports.StepContext, found: Mapping[str, ServerState], balancers: Sequence[str]
) -> ports.Busy:
    states = ", ".join(f"{found[name].admin} on {name}" for name in balancers)
    return ports.Busy(f"{ctx.host.name} is set to {states}, not by this rollout", is_permanent=True)


def _describe_changes(found: Mapping[str, ServerState], prior: ports.JSON) -> str:
    """Return how a returned server differs from what was found, such as `lb2 weight 100 (40 before)`."""
    pairs = {name: (each, prior[name]) for name, each in found.items()}
    states = [f"{name} {now.admin}" for name, (now, old) in pairs.items() if now.admin != old["state"]]
    weights = [
        f"{name} weight {now.weight} ({old['weight']} before)"
        for name, (now, old) in pairs.items()
        if now.weight != old["weight"]
    ]
    return ", ".join(states + weights)
