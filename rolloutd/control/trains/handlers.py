"""Handlers of trains: rollouts that share the outage of a node."""

from __future__ import annotations

from functools import partial

from machines.model.train import Train
from machines.scheduler.train_savings import outages_ahead, train_savings
from rolloutd.commands import trains
from rolloutd.commands.execution import Events, Principal, UserCommand, current, execute, resolve_live
from rolloutd.control import requests, rights
from rolloutd.control.formats import format_timestamp
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.control.trains import train_serializers, wire_trains
from rolloutd.engine.state import State

routes = RouteTable()


@routes.add("GET", "/v1/trains", on_standby=True)
async def list_trains(services: Services, request: Request) -> wire_trains.Trains:
    """List the trains."""
    return {"trains": [await train_response(services.state, each) for each in services.state.index.trains]}


@routes.add("GET", "/v1/trains/{t}", on_standby=True)
async def show_train(services: Services, request: Request) -> wire_trains.Train:
    """Show a train, its order and the outages that it saves."""
    return await train_response(
        services.state, trains.require_train(services.state.index, request.path_params["t"])
    )


@routes.add("PUT", "/v1/trains/{t}", access=rights.TRAIN_OWNER)
async def add_to_train(services: Services, request: Request[requests.AddToTrain]) -> wire_trains.Train:
    """Make a train, or add rollouts at its end; it is approved for those that the caller owns."""
    state, body, name = services.state, request.input, request.path_params["t"]
    resolved = [await resolve_live(state, each) for each in body.rollouts]
    shown = None if body.shown is None else trains.Shown(tuple(body.shown.rollouts), body.shown.wait_s)

    def decide(state: State, who: Principal) -> Events:
        rollouts = [current(state, each).rollout for each in resolved]
        return trains.add(state, who, name, rollouts, body.reason, body.wait_s, shown=shown)

    await execute(state, request.identity, UserCommand(f"train: {body.reason}", decide))
    return await train_response(state, trains.require_train(state.index, name))


@routes.add("POST", "/v1/trains/{t}/approve", access=rights.TRAIN_OWNER)
async def approve_train(services: Services, request: Request[requests.ApproveTrain]) -> wire_trains.Train:
    """Approve a train for the rollouts that the caller owns, or for one of them."""
    state, body, name = services.state, request.input, request.path_params["t"]
    rollout = None if body.rollout is None else (await resolve_live(state, body.rollout)).rollout
    shown = trains.Shown(tuple(body.rollouts), body.wait_s)
    decide = partial(trains.approve, name=name, reason=body.reason, shown=shown, rollout=rollout)
    await execute(state, request.identity, UserCommand(f"train: {body.reason}", decide))
    return await train_response(state, trains.require_train(state.index, name))


@routes.add("DELETE", "/v1/trains/{t}", access=rights.TRAIN_OWNER)
async def remove_train(services: Services, request: Request[requests.ReasonBody]) -> wire_trains.Train:
    """Remove a train: what its rollouts share already, they finish together."""
    state, name, reason = services.state, request.path_params["t"], request.input.reason
    removed = trains.require_train(state.index, name)
    decide = partial(trains.remove, name=name, reason=reason)
    await execute(state, request.identity, UserCommand(f"train: {reason}", decide))
    return await train_response(state, removed)


async def train_response(state: State, train: Train) -> wire_trains.Train:
    index = state.index
    # Rollouts that ended before the daemon's start are in the store alone.
    savings = train_savings(
        [
            index.targets(each) if each in index.rollouts else await state.store.load_targets(each)
            for each in train.rollouts
        ]
    )
    return {
        "name": train.name,
        "rollouts": list(train.rollouts),
        "approved": train.is_approved,
        "missing": [each for each in train.rollouts if each not in train.approvals],
        "nodes_shared": savings.nodes_shared,
        "outages_saved": savings.outages_saved,
        "outages_ahead": outages_ahead(index, train),
        "state": train_serializers.train_state(index, train),
        "wait_s": train.wait_s,
        "by": train.by.name,
        "at": format_timestamp(train.at),
    }
