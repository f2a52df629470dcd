"""Handlers of commands: they translate a request into a command, and what was done into a response."""

from __future__ import annotations

import secrets
from datetime import datetime
from functools import partial
from typing import Any

from machines.model.events import NodeOrdered, PhaseMoved
from machines.model.plan import GateName
from machines.model.rollout import Rollout, Target
from machines.model.trust_events import HostKeysStored, ShellOpened
from rolloutd.commands import holds_and_freezes, rollbacks, rollout_commands, voting
from rolloutd.commands.execution import Command, Decide, Executed, current, execute, resolve_live
from rolloutd.commands.resolve import ResolvedRollout, ensure_loaded, resolve_for_deletion, resolve_rollout
from rolloutd.commands.rollout_commands import PERSON_SOURCE, Events, Principal
from rolloutd.control import (
    fleet_serializers,
    gate_serializers,
    requests,
    rights,
    serializers,
    wire,
    wire_fleet,
)
from rolloutd.control.ballots import make_ballot
from rolloutd.control.coverage import coverage_of
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.engine.state import State
from rolloutd.errors import NodeUnreachable, Refused

NO_REASON = "no reason given"

_ROLLOUT_PATH, _NODE_PATH = "/v1/rollouts/{r}", "/v1/rollouts/{r}/nodes/{n}"

routes = RouteTable()


# -- gates --------------------------------------------------------------------


@routes.add("POST", f"{_ROLLOUT_PATH}/votes", access=rights.VOTER)
async def vote(services: Services, request: Request[requests.CastVote]) -> wire.Gate:
    """Vote yes or no at a gate."""
    resolved = await resolve_live(services.state, request.path_params["r"])
    ballot = await make_ballot(services.state, services.sources, resolved, request.input)
    return await _change_votes(services, request, partial(voting.vote, ballot=ballot))


@routes.add("POST", f"{_ROLLOUT_PATH}/withdraw", access=rights.OWN_VOTE)
async def withdraw(services: Services, request: Request[requests.WithdrawVote]) -> wire.Gate:
    """Withdraw one's own votes at a gate."""
    body = request.input
    command = partial(
        voting.withdraw, gate=GateName(body.gate), reason=body.reason, team=body.team, wave=body.wave
    )
    return await _change_votes(services, request, command)


# -- rollouts -----------------------------------------------------------------


@routes.add("POST", f"{_ROLLOUT_PATH}/pause", access=rights.PLAN_OWNER)
async def pause(services: Services, request: Request[requests.ReasonNowBody]) -> wire.Rollout:
    """Start no node of a rollout until it is resumed."""
    return await _command_rollout(services, request, partial(rollout_commands.pause, stop=request.input.now))


@routes.add("POST", f"{_ROLLOUT_PATH}/resume", access=rights.PLAN_OWNER)
async def resume(services: Services, request: Request[requests.ReasonBody]) -> wire.Rollout:
    """Lift a person's pause."""
    return await _command_rollout(services, request, rollout_commands.resume)


@routes.add("POST", f"{_ROLLOUT_PATH}/retry", access=rights.PLAN_OWNER)
async def retry_build(services: Services, request: Request[requests.ReasonBody]) -> wire.Rollout:
    """Retry the failed build of a rollout at once."""
    return await _command_rollout(services, request, rollout_commands.retry_build)


@routes.add("POST", f"{_ROLLOUT_PATH}/cancel", access=rights.PLAN_OWNER)
async def cancel(services: Services, request: Request[requests.ReasonNowBody]) -> wire.Rollout:
    """End a rollout: none of its nodes starts again."""
    return await _command_rollout(services, request, partial(rollout_commands.cancel, stop=request.input.now))


@routes.add("DELETE", _ROLLOUT_PATH, access=rights.PLAN_OWNER)
async def delete(services: Services, request: Request) -> wire.DeleteResponse:
    """Delete a closed rollout and the output of its runs; its audit stays."""
    rollout_id = (await resolve_for_deletion(services.state, request.path_params["r"])).rollout.id

    async def decide(state: State, who: Principal) -> Events:
        # Under the lock: a rollback may have been ordered meanwhile, or the rollout deleted.
        resolved = await resolve_rollout(state, rollout_id)
        targets = tuple(resolved.index.targets(rollout_id))
        return rollout_commands.delete(state, who, resolved.rollout, targets)

    await execute(services.state, request.identity, Command("delete", decide))
    # In the background: the output of thousands of runs takes longer than a request may.
    services.prune_runs()
    return {"rollout": rollout_id}


# -- nodes --------------------------------------------------------------------


@routes.add("POST", f"{_NODE_PATH}/advance", access=rights.PLAN_OR_NODE_OWNER)
async def advance(services: Services, request: Request[requests.ReasonBody]) -> wire.Node:
    """Move a waiting node to the front of its wave."""
    return await _command_node(services, request, rollout_commands.advance)


@routes.add("POST", f"{_NODE_PATH}/retry", access=rights.PLAN_OWNER)
async def retry(services: Services, request: Request[requests.ReasonBody]) -> wire.Node:
    """Retry a failed node."""
    return await _command_node(services, request, rollout_commands.retry)


@routes.add("POST", f"{_NODE_PATH}/rollback", access=rights.PLAN_OWNER)
async def rollback(services: Services, request: Request[requests.ReasonBody]) -> wire.Node:
    """Run the rollback playbook on a failed node, or order that of a changed one."""

    async def decide(state: State, who: Principal, rollout: Rollout, target: Target, reason: str) -> Events:
        later = await state.store.find_later_changes(rollout.id)
        return rollbacks.roll_back_nodes(state, who, rollout, [target], reason, later)

    return await _command_node(services, request, decide)


@routes.add("POST", f"{_ROLLOUT_PATH}/rollback", access=rights.PLAN_OWNER)
async def roll_back(services: Services, request: Request[requests.RollBack]) -> wire.RollbackResponse:
    """Order the rollback of nodes, of a wave or of a whole rollout, also of one that has ended."""
    body = request.input
    resolved = await resolve_rollout(services.state, request.path_params["r"])
    nodes = [resolved.target(node).node for node in dict.fromkeys(body.nodes)]

    async def decide(state: State, who: Principal) -> Events:
        await ensure_loaded(state, resolved.rollout.id)
        rollout = current(state, resolved).rollout
        later = await state.store.find_later_changes(rollout.id)
        if body.withdraw:
            return rollbacks.withdraw(state, who, rollout, body.nodes, body.wave, body.reason)
        if nodes:
            targets = [state.index.target(rollout.id, node) for node in nodes]
            return rollbacks.roll_back_nodes(state, who, rollout, targets, body.reason, later)
        return rollbacks.roll_back_wave(state, who, rollout, body.wave, body.reason, later)

    command = Command(f"{request.operation}: {body.reason}", decide)
    events = (await execute(services.state, request.identity, command)).events
    moved = (each for each in events if isinstance(each, NodeOrdered | PhaseMoved))
    return {"rollout": resolved.rollout.id, "nodes": [each.node for each in moved]}


@routes.add("POST", f"{_NODE_PATH}/skip", access=rights.PLAN_OWNER)
async def skip(services: Services, request: Request[requests.SkipNode]) -> wire.Node:
    """Leave a node out of a rollout."""
    command = partial(rollout_commands.skip, isolation_choice=request.input.put_back)
    return await _command_node(services, request, command)


@routes.add("POST", "/v1/nodes/{n}/return", access=rights.ISOLATION_OWNER)
async def return_node(services: Services, request: Request[requests.OptionalReasonBody]) -> wire.Node:
    """Return a node to service that was left isolated."""
    state, node = services.state, request.path_params["n"]
    reason = request.input.reason or NO_REASON
    target = rollout_commands.isolated_target(state, node)
    decide = partial(rollout_commands.return_node, node=node, reason=reason)
    await execute(state, request.identity, Command(f"return: {reason}", decide))
    rollout = ResolvedRollout(state.index, state.index.rollout(target.rollout), live=True)
    return serializers.node(state, rollout, rollout.target(node))


# -- holds and freezes --------------------------------------------------------


@routes.add("PUT", "/v1/holds", access=rights.NODE_TEAM)
async def hold(services: Services, request: Request[requests.TakeHold]) -> wire_fleet.Hold:
    """Take a node's slots; observe its pool first if it is unknown whether one is free."""
    try:
        return await _take_hold(services, request)
    except holds_and_freezes.SlotStateUnknown as unknown:
        # Once: if the nodes are still unknown, that is the answer.
        await services.observe_nodes(unknown.nodes)
        return await _take_hold(services, request)


async def _take_hold(services: Services, request: Request[requests.TakeHold]) -> wire_fleet.Hold:
    body, state = request.input, services.state
    source, name = body.source or PERSON_SOURCE, body.id or request.identity.user
    decide = partial(
        holds_and_freezes.hold,
        node=body.node,
        reason=body.reason,
        source=source,
        id=name,
        until=_epoch_seconds(body.until),
    )
    await execute(state, request.identity, Command(f"hold: {body.reason}", decide))
    granted = holds_and_freezes.find_hold(state, body.node, source, name)
    assert granted is not None
    return fleet_serializers.hold(granted)


@routes.add("DELETE", "/v1/holds", access=rights.HOLD_OWNER)
async def release(services: Services, request: Request[requests.ReleaseHold]) -> wire_fleet.ReleaseResponse:
    """Release a hold on a node."""
    body = request.input
    decide = partial(holds_and_freezes.release, node=body.node, source=body.source, id=body.id)
    done = await execute(services.state, request.identity, Command("release", decide))
    return {"lifted": len(done.events)}


@routes.add("POST", "/v1/freezes", access=rights.FREEZE_SCOPE)
async def freeze(services: Services, request: Request[requests.StartFreeze]) -> wire_fleet.Freeze:
    """Start no node in a scope until the freeze is lifted."""
    body, freeze_id = request.input, f"freeze-{secrets.token_hex(4)}"
    decide = partial(
        holds_and_freezes.freeze,
        scope=body.scope,
        reason=body.reason,
        until=_epoch_seconds(body.until),
        freeze_id=freeze_id,
    )
    await execute(services.state, request.identity, Command(f"freeze: {body.reason}", decide))
    return fleet_serializers.freeze(
        next(each for each in services.state.index.freezes if each.id == freeze_id)
    )


@routes.add("DELETE", "/v1/freezes", access=rights.FREEZE_SCOPE)
async def unfreeze(services: Services, request: Request[requests.LiftFreeze]) -> wire_fleet.ReleaseResponse:
    """Lift the only freeze of a scope, or one by its id."""
    body = request.input
    decide = partial(holds_and_freezes.unfreeze, scope=body.scope, reason=body.reason or "")
    command = Command(f"unfreeze: {body.reason or NO_REASON}", decide)
    return {"lifted": len((await execute(services.state, request.identity, command)).events)}


@routes.add("POST", "/v1/inventory/refresh", access=rights.ANY_TEAM_MEMBER)
async def refresh(services: Services, request: Request[requests.EmptyBody]) -> wire_fleet.RefreshResponse:
    """Read the inventory sources again, in the background."""
    services.refresh_inventory()
    return {"sources": sorted(services.state.sources)}


@routes.add("POST", "/v1/inventory/accept", access=rights.INVENTORY_ADMIN)
async def accept_inventory(
    services: Services, request: Request[requests.AcceptInventory]
) -> wire_fleet.Inventory:
    """Let the held answer of an inventory source take effect."""
    body = request.input
    await services.accept_inventory(body.source, request.identity.actor, body.reason)
    return await fleet_serializers.inventory(services.state, requests.PageQuery())


@routes.add("POST", "/v1/inventory/{n}/pin", access=rights.INVENTORY_ADMIN)
async def pin_identity(
    services: Services, request: Request[requests.ReasonBody]
) -> wire_fleet.InventoryNodeDetail:
    """Accept what a node's sources report now: its host key and machine id, or its removal."""
    name = request.path_params["n"]
    if name not in services.state.index.nodes:
        raise rollout_commands.unknown_node(services.state, name)
    before = fleet_serializers.inventory_node(services.state, name)
    await services.pin_identity(name, request.identity.actor, request.input.reason)
    # With its removal accepted the node is gone: the caller gets it as it was.
    is_known = name in services.state.index.nodes
    return fleet_serializers.inventory_node(services.state, name) if is_known else before


@routes.add("POST", "/v1/inventory/{n}/host-keys", access=rights.INVENTORY_ADMIN)
async def record_host_keys(
    services: Services, request: Request[requests.StoreHostKeys]
) -> wire_fleet.InventoryNodeDetail:
    """Record in the audit that the caller writes host keys of a node to known_hosts."""
    state, body, name = services.state, request.input, request.path_params["n"]
    if name not in state.index.nodes:
        raise rollout_commands.unknown_node(state, name)
    keys = tuple(body.stored), tuple(body.replaced), tuple(body.confirmed_by)

    def decide(state: State, who: Principal) -> Events:
        return (HostKeysStored(name, *keys, who.actor, body.reason, state.now()),)

    await execute(state, request.identity, Command(f"hosts scan: {body.reason}", decide))
    return fleet_serializers.inventory_node(state, name)


@routes.add("GET", "/v1/nodes/{n}/shell", access=rights.NODE_TEAM)
async def shell_command(services: Services, request: Request) -> wire_fleet.ShellCommand:
    """Show the command that opens a shell on a node."""
    return _shell_command(services, request)


@routes.add("POST", "/v1/nodes/{n}/shell", access=rights.NODE_TEAM)
async def open_shell(services: Services, request: Request[requests.ReasonBody]) -> wire_fleet.ShellCommand:
    """Record in the audit that the caller opens a shell on a node, and return its command."""
    shell, reason = _shell_command(services, request), request.input.reason

    def decide(state: State, who: Principal) -> Events:
        return (ShellOpened(shell["node"], tuple(shell["command"]), who.actor, reason, state.now()),)

    await execute(services.state, request.identity, Command(f"shell: {reason}", decide))
    return shell


def _shell_command(services: Services, request: Request[Any]) -> wire_fleet.ShellCommand:
    state, name = services.state, request.path_params["n"]
    node = state.index.nodes.get(name)
    if node is None:
        raise rollout_commands.unknown_node(state, name)
    rollout_commands.require_member(request.identity, node.team, f"open a shell on {name}")
    try:
        return {"node": name, "command": list(services.shell_command(state.host(name)))}
    except NodeUnreachable as error:
        raise Refused("no-route", str(error)) from error


# -- what handlers share ------------------------------------------------------


async def _change_votes(
    services: Services, request: Request[requests.WithdrawVote], decide: Decide
) -> wire.Gate:
    name = GateName(request.input.gate)
    resolved = await resolve_live(services.state, request.path_params["r"])
    # Resolved before the vote, which may open the gate: without a name the next gate would answer.
    wave = voting.resolve_wave(services.state, resolved.rollout, name, request.input.wave)
    await _execute(services, request, decide)
    return gate_response(services, resolved, name, wave)


async def _command_rollout(
    services: Services, request: Request[requests.ReasonBody], decide: Decide
) -> wire.Rollout:
    done = await _execute(services, request, partial(decide, reason=request.input.reason))
    covered = await coverage_of(services.state, done.rollout.index, done.rollout.rollout)
    return serializers.rollout(services.state, current(services.state, done.rollout), covered)


async def _command_node(
    services: Services, request: Request[requests.ReasonBody], decide: Decide
) -> wire.Node:
    done = await _execute(services, request, partial(decide, reason=request.input.reason))
    target = done.rollout.target(request.path_params["n"])
    return serializers.node(services.state, done.rollout, target)


async def _execute(services: Services, request: Request[requests.ReasonBody], decide: Decide) -> Executed:
    """Execute a command on the rollout of the path, or on its node."""
    path, cause = request.path_params, f"{request.operation}: {request.input.reason}"
    return await execute(
        services.state, request.identity, Command(cause, decide, path["r"], path.get("n", ""))
    )


def gate_response(services: Services, resolved: ResolvedRollout, name: GateName, wave: str) -> wire.Gate:
    """Return the current state of a gate."""
    index, now = services.state.index, services.state.now()
    rollout = current(services.state, resolved).rollout
    return gate_serializers.gate(
        index, rollout, gate_serializers.gate_view(index, rollout, name, wave, now), now
    )


def _epoch_seconds(until: datetime | None) -> float | None:
    return None if until is None else until.timestamp()
