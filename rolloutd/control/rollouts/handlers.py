"""Handlers of rollouts: queries, open to every caller, and commands on a whole rollout."""

from __future__ import annotations

from functools import partial

from machines.model.events import NodeOrdered, PhaseMoved
from machines.model.rollout import Rollout
from rolloutd.commands import rollbacks, rollout_commands
from rolloutd.commands.execution import Decide, Events, Principal, UserCommand, current, execute, resolve_live
from rolloutd.commands.resolve import (
    MAX_CLOSED,
    ResolvedRollout,
    resolve_for_deletion,
    resolve_for_reading,
    resolve_rollout,
)
from rolloutd.control import requests, rights
from rolloutd.control.daemons.handlers import daemons_of
from rolloutd.control.requests import StatusQuery
from rolloutd.control.rollouts import serializers, wire
from rolloutd.control.rollouts.coverage import coverage_of
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.engine.state import State

MAX_CLOSED_SHOWN = 20
"""Latest closed rollouts that `status --all` shows in full; `rollouts` lists all."""

routes = RouteTable()

_PATH = "/v1/rollouts/{r}"


@routes.add("GET", "/v1/status", is_shared=True, on_standby=True)
async def status(services: Services, request: Request[StatusQuery]) -> wire.Status:
    """Show all rollouts that are not closed, or with `all` the latest closed ones too."""
    query = request.input
    state = services.state
    # Before the facts: what is committed while closed rollouts are loaded is not in the answer.
    seq = state.changes.latest_seq
    shown = []
    for name, each in tuple(state.index.rollouts.items()):
        covered = await coverage_of(state, services.kept, state.index, each)
        # Again: it may have been deleted, or have changed, while its nodes were examined.
        live = state.index.rollouts.get(name)
        if live is not None and (query.all or not live.closed or state.index.counters(name).in_flight):
            shown.append(
                serializers.rollout(
                    state, services.kept, ResolvedRollout(state.index, live, live=True), covered
                )
            )
    if query.all:
        for closed in await state.store.list_closed_rollouts(MAX_CLOSED_SHOWN):
            if closed.id not in state.index.rollouts:
                resolved = await resolve_rollout(state, closed.id)
                covered = await coverage_of(state, services.kept, resolved.index, resolved.rollout)
                shown.append(serializers.rollout(state, services.kept, resolved, covered))
    return {
        "rollouts": shown,
        "kept_slots": serializers.kept_slots(state.index),
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
    covered = await coverage_of(state, services.kept, resolved.index, resolved.rollout)
    return serializers.rollout(
        state, services.kept, await resolve_for_reading(state, resolved.rollout.id), covered
    )


@routes.add("POST", f"{_PATH}/pause", access=rights.PLAN_OWNER, operation="pause")
async def pause(services: Services, request: Request[requests.ReasonNowBody]) -> wire.Rollout:
    """Start no node of a rollout until it is resumed."""
    return await _command_rollout(services, request, partial(rollout_commands.pause, stop=request.input.now))


@routes.add("POST", f"{_PATH}/resume", access=rights.PLAN_OWNER, operation="resume")
async def resume(services: Services, request: Request[requests.ReasonBody]) -> wire.Rollout:
    """Lift a person's pause."""
    return await _command_rollout(services, request, rollout_commands.resume)


@routes.add("POST", f"{_PATH}/retry", access=rights.PLAN_OWNER, operation="retry_build")
async def retry_build(services: Services, request: Request[requests.ReasonBody]) -> wire.Rollout:
    """Retry the failed build of a rollout at once."""
    return await _command_rollout(services, request, rollout_commands.retry_build)


@routes.add("POST", f"{_PATH}/cancel", access=rights.PLAN_OWNER, operation="cancel")
async def cancel(services: Services, request: Request[requests.ReasonNowBody]) -> wire.Rollout:
    """End a rollout: none of its nodes starts again."""
    return await _command_rollout(services, request, partial(rollout_commands.cancel, stop=request.input.now))


@routes.add("DELETE", _PATH, access=rights.PLAN_OWNER)
async def delete(services: Services, request: Request) -> wire.DeleteResponse:
    """Delete a closed rollout and the output of its runs; its audit stays."""
    rollout_id = (await resolve_for_deletion(services.state, request.path_params["r"])).rollout.id

    async def decide(state: State, who: Principal) -> Events:
        # Under the lock: a rollback may have been ordered meanwhile, or the rollout deleted.
        resolved = await resolve_rollout(state, rollout_id)
        targets = tuple(resolved.index.targets(rollout_id))
        return rollout_commands.delete(state, who, resolved.rollout, targets)

    await execute(services.state, request.identity, UserCommand("delete", decide))
    # In the background: the output of thousands of runs takes longer than a request may.
    services.prune_runs()
    return {"rollout": rollout_id}


@routes.add("POST", f"{_PATH}/rollback", access=rights.PLAN_OWNER, operation="roll_back")
async def roll_back(services: Services, request: Request[requests.RollBack]) -> wire.RollbackResponse:
    """Order the rollback of nodes, of a wave or of a whole rollout, also of one that has ended."""
    body = request.input
    resolved = await resolve_rollout(services.state, request.path_params["r"])
    nodes = [resolved.target(node).node for node in dict.fromkeys(body.nodes)]

    async def decide(state: State, who: Principal, rollout: Rollout) -> Events:
        later = await state.store.find_later_changes(rollout.id)
        if body.withdraw:
            return rollbacks.withdraw(state, who, rollout, body.nodes, body.wave, body.reason)
        if nodes:
            targets = [state.index.target(rollout.id, node) for node in nodes]
            return rollbacks.roll_back_nodes(state, who, rollout, targets, body.reason, later)
        return rollbacks.roll_back_wave(state, who, rollout, body.wave, body.reason, later)

    command = UserCommand(request.cause, decide, resolved)
    events = (await execute(services.state, request.identity, command)).events
    moved = (each for each in events if isinstance(each, NodeOrdered | PhaseMoved))
    return {"rollout": resolved.rollout.id, "nodes": [each.node for each in moved]}


async def _command_rollout(
    services: Services, request: Request[requests.ReasonBody], decide: Decide
) -> wire.Rollout:
    resolved = await resolve_live(services.state, request.path_params["r"])
    command = UserCommand(request.cause, partial(decide, reason=request.input.reason), resolved)
    done = await execute(services.state, request.identity, command)
    covered = await coverage_of(services.state, services.kept, done.rollout.index, done.rollout.rollout)
    return serializers.rollout(services.state, services.kept, current(services.state, done.rollout), covered)
