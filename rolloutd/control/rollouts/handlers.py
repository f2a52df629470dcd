"""Handlers of queries about rollouts, open to every caller."""

from __future__ import annotations

from rolloutd.commands.resolve import MAX_CLOSED, ResolvedRollout, resolve_for_reading, resolve_rollout
from rolloutd.control.daemons.handlers import daemons_of
from rolloutd.control.requests import StatusQuery
from rolloutd.control.rollouts import serializers, wire
from rolloutd.control.rollouts.coverage import coverage_of
from rolloutd.control.routes import Request, RouteTable, Services

MAX_CLOSED_SHOWN = 20
"""Latest closed rollouts that `status --all` shows in full; `rollouts` lists all."""

routes = RouteTable()


@routes.add("GET", "/v1/status", is_shared=True, on_standby=True)
async def status(services: Services, request: Request[StatusQuery]) -> wire.Status:
    """Show all rollouts that are not closed, or with `all` the latest closed ones too."""
    query = request.input
    state = services.state
    # Before the facts: what is committed while closed rollouts are loaded is not in the answer.
    seq = state.changes.latest_seq
    shown = []
    for name, each in tuple(state.index.rollouts.items()):
        covered = await coverage_of(state, state.index, each)
        # Again: it may have been deleted, or have changed, while its nodes were examined.
        live = state.index.rollouts.get(name)
        if live is not None and (query.all or not live.closed or state.index.counters(name).in_flight):
            shown.append(serializers.rollout(state, ResolvedRollout(state.index, live, live=True), covered))
    if query.all:
        for closed in await state.store.list_closed_rollouts(MAX_CLOSED_SHOWN):
            if closed.id not in state.index.rollouts:
                resolved = await resolve_rollout(state, closed.id)
                covered = await coverage_of(state, resolved.index, resolved.rollout)
                shown.append(serializers.rollout(state, resolved, covered))
    return {
        "rollouts": shown,
        "trouble": "; ".join(state.problems()) or None,
        "seq": seq,
        **daemons_of(services),
    }


@routes.add("GET", "/v1/rollouts", is_shared=True, on_standby=True)
async def rollouts(services: Services, request: Request) -> wire.Rollouts:
    """List all rollouts, latest first."""
    state = services.state
    now = state.now()
    index = state.index.at(now)
    lines = [serializers.rollout_line(index, each, now) for each in index.rollouts.values()]
    lines += [
        serializers.closed_rollout_line(each)
        for each in await state.store.list_closed_rollouts(MAX_CLOSED)
        if each.id not in state.index.rollouts
    ]
    return {"rollouts": sorted(lines, key=lambda each: each["submitted_at"], reverse=True)}


@routes.add("GET", "/v1/rollouts/{r}", is_shared=True, on_standby=True)
async def rollout(services: Services, request: Request) -> wire.Rollout:
    """Show one rollout."""
    state = services.state
    resolved = await resolve_for_reading(state, request.path_params["r"])
    covered = await coverage_of(state, resolved.index, resolved.rollout)
    return serializers.rollout(state, await resolve_for_reading(state, resolved.rollout.id), covered)
