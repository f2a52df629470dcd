"""Handlers of commands: each is decided and written under one lock.

No event is written between the decision and the commit, so a command is judged
by the facts that it changes.  The rules of the commands are in rolloutd.commands.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

from machines.model.events import NodeOrdered, PhaseMoved
from machines.model.plan import GateName
from machines.model.rollout import Rollout
from machines.model.trust_events import HostKeysStored, ShellOpened
from rolloutd.commands import holds_and_freezes, rollbacks, rollout_commands, voting
from rolloutd.commands.rollout_commands import Events
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
from rolloutd.control.resolve import ResolvedRollout, ensure_loaded, resolve_for_deletion, resolve_rollout
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.engine.state import State
from rolloutd.errors import NodeUnreachable, Refused

NO_REASON = "no reason given"

_ROLLOUT_PATH, _NODE_PATH = "/v1/rollouts/{r}", "/v1/rollouts/{r}/nodes/{n}"

Command = Callable[..., Events]
"""Decides a command: takes state, caller, rollout and, for a node, the target; returns events."""

routes = RouteTable()


# -- gates --------------------------------------------------------------------


@routes.add("POST", f"{_ROLLOUT_PATH}/votes", access=rights.VOTER)
async def vote(services: Services, request: Request[requests.CastVote]) -> wire.Gate:
    """Vote yes or no at a gate."""
    resolved = await resolve_live(services, request)
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
    state = services.state
    rollout_id = (await resolve_for_deletion(state, request.path_params["r"])).rollout.id
    async with state.exclusive_commit(request.identity.actor) as commit:
        # Again under the lock: a rollback may have been ordered meanwhile, or the rollout deleted.
        resolved = await resolve_rollout(state, rollout_id)
        targets = tuple(resolved.index.targets(rollout_id))
        await commit(rollout_commands.delete(state, request.identity, resolved.rollout, targets), "delete")
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
    state, who, node = services.state, request.identity, request.path_params["n"]
    resolved = await resolve_live(services, request)
    async with state.exclusive_commit(who.actor) as commit:
        rollout, target = current_rollout(state, resolved), resolved.target(node)
        later = await state.store.find_later_changes(rollout.id)
        events = rollbacks.roll_back_nodes(state, who, rollout, [target], request.input.reason, later)
        await commit(events, f"{request.operation}: {request.input.reason}")
    return serializers.node(state, _reresolve(state, resolved), resolved.target(node))


@routes.add("POST", f"{_ROLLOUT_PATH}/rollback", access=rights.PLAN_OWNER)
async def roll_back(services: Services, request: Request[requests.RollBack]) -> wire.RollbackResponse:
    """Order the rollback of nodes, of a wave or of a whole rollout, also of one that has ended."""
    body = request.input
    state, who = services.state, request.identity
    resolved = await resolve_rollout(state, request.path_params["r"])
    targets = [resolved.target(node) for node in dict.fromkeys(body.nodes)]
    async with state.exclusive_commit(who.actor) as commit:
        await ensure_loaded(state, resolved.rollout.id)
        rollout = current_rollout(state, resolved)
        later = await state.store.find_later_changes(rollout.id)
        if body.withdraw:
            events = rollbacks.withdraw(state, who, rollout, body.nodes, body.wave, body.reason)
        elif targets:
            targets = [state.index.target(rollout.id, target.node) for target in targets]
            events = rollbacks.roll_back_nodes(state, who, rollout, targets, body.reason, later)
        else:
            events = rollbacks.roll_back_wave(state, who, rollout, body.wave, body.reason, later)
        await commit(events, f"{request.operation}: {body.reason}")
    moved = (each for each in events if isinstance(each, NodeOrdered | PhaseMoved))
    return {"rollout": rollout.id, "nodes": [each.node for each in moved]}


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
    async with state.exclusive_commit(request.identity.actor) as commit:
        target, events = rollout_commands.return_node(state, request.identity, node, reason)
        await commit(events, f"return: {reason}")
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
    body = request.input
    async with services.state.exclusive_commit(request.identity.actor) as commit:
        granted, events = holds_and_freezes.hold(
            services.state,
            request.identity,
            body.node,
            body.reason,
            source=body.source,
            id=body.id,
            until=_epoch_seconds(body.until),
        )
        await commit(events, f"hold: {body.reason}")
    return fleet_serializers.hold(granted)


@routes.add("DELETE", "/v1/holds", access=rights.HOLD_OWNER)
async def release(services: Services, request: Request[requests.ReleaseHold]) -> wire_fleet.ReleaseResponse:
    """Release a hold on a node."""
    body = request.input
    async with services.state.exclusive_commit(request.identity.actor) as commit:
        events = holds_and_freezes.release(
            services.state, request.identity, body.node, source=body.source, id=body.id
        )
        await commit(events, "release")
    return {"lifted": len(events)}


@routes.add("POST", "/v1/freezes", access=rights.FREEZE_SCOPE)
async def freeze(services: Services, request: Request[requests.StartFreeze]) -> wire_fleet.Freeze:
    """Start no node in a scope until the freeze is lifted."""
    body = request.input
    freeze_id = f"freeze-{secrets.token_hex(4)}"
    async with services.state.exclusive_commit(request.identity.actor) as commit:
        events = holds_and_freezes.freeze(
            services.state, request.identity, body.scope, body.reason, _epoch_seconds(body.until), freeze_id
        )
        await commit(events, f"freeze: {body.reason}")
    return fleet_serializers.freeze(
        next(each for each in services.state.index.freezes if each.id == freeze_id)
    )


@routes.add("DELETE", "/v1/freezes", access=rights.FREEZE_SCOPE)
async def unfreeze(services: Services, request: Request[requests.LiftFreeze]) -> wire_fleet.ReleaseResponse:
    """Lift the only freeze of a scope, or one by its id."""
    body = request.input
    async with services.state.exclusive_commit(request.identity.actor) as commit:
        events = holds_and_freezes.unfreeze(services.state, request.identity, body.scope, body.reason or "")
        await commit(events, f"unfreeze: {body.reason or NO_REASON}")
    return {"lifted": len(events)}


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
    event = HostKeysStored(
        name,
        tuple(body.stored),
        tuple(body.replaced),
        tuple(body.confirmed_by),
        request.identity.actor,
        body.reason,
        state.now(),
    )
    await state.commit([event], actor=request.identity.actor, cause=f"hosts scan: {body.reason}")
    return fleet_serializers.inventory_node(state, name)


@routes.add("GET", "/v1/nodes/{n}/shell", access=rights.NODE_TEAM)
async def shell_command(services: Services, request: Request) -> wire_fleet.ShellCommand:
    """Show the command that opens a shell on a node."""
    return _shell_command(services, request)


@routes.add("POST", "/v1/nodes/{n}/shell", access=rights.NODE_TEAM)
async def open_shell(services: Services, request: Request[requests.ReasonBody]) -> wire_fleet.ShellCommand:
    """Record in the audit that the caller opens a shell on a node, and return its command."""
    state, actor, reason = services.state, request.identity.actor, request.input.reason
    shell = _shell_command(services, request)
    event = ShellOpened(shell["node"], tuple(shell["command"]), actor, reason, state.now())
    await state.commit([event], actor=actor, cause=f"shell: {reason}")
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
    services: Services, request: Request[requests.WithdrawVote], command: Command
) -> wire.Gate:
    name = GateName(request.input.gate)
    resolved = await resolve_live(services, request)
    # Resolved before the vote, which may open the gate: without a name the next gate would answer.
    wave = voting.resolve_wave(services.state, resolved.rollout, name, request.input.wave)
    await _decide_and_commit(services, request, resolved, command)
    return gate_response(services, resolved, name, wave)


async def _command_rollout(
    services: Services, request: Request[requests.ReasonBody], command: Command
) -> wire.Rollout:
    resolved = await resolve_live(services, request)
    await _decide_and_commit(services, request, resolved, partial(command, reason=request.input.reason))
    found = _reresolve(services.state, resolved)
    covered = await coverage_of(services.state, found.index, found.rollout)
    return serializers.rollout(services.state, _reresolve(services.state, resolved), covered)


async def _command_node(
    services: Services, request: Request[requests.ReasonBody], command: Command
) -> wire.Node:
    resolved = await resolve_live(services, request)
    await _decide_and_commit(services, request, resolved, partial(command, reason=request.input.reason))
    target = resolved.target(request.path_params["n"])
    return serializers.node(services.state, _reresolve(services.state, resolved), target)


async def _decide_and_commit(
    services: Services,
    request: Request[requests.ReasonBody],
    resolved: ResolvedRollout,
    command: Command,
) -> None:
    """Decide by facts that nothing else can change meanwhile, and write."""
    state, node = services.state, request.path_params.get("n")
    async with state.exclusive_commit(request.identity.actor) as commit:
        target = () if node is None else (resolved.target(node),)
        events = command(state, request.identity, current_rollout(state, resolved), *target)
        await commit(events, f"{request.operation}: {request.input.reason}")


async def resolve_live(services: Services, request: Request[object]) -> ResolvedRollout:
    """Return the rollout of the path; raises Refused if it is closed."""
    resolved = await resolve_rollout(services.state, request.path_params["r"])
    if not resolved.live:
        raise Refused("closed", f"{resolved.rollout.id}: the rollout is closed; submit its plan again")
    return resolved


def current_rollout(state: State, resolved: ResolvedRollout) -> Rollout:
    """Return the rollout as it is now; others may have changed it since it was resolved."""
    return state.index.rollouts.get(resolved.rollout.id, resolved.rollout)


def _reresolve(state: State, resolved: ResolvedRollout) -> ResolvedRollout:
    return ResolvedRollout(state.index, current_rollout(state, resolved), live=True)


def gate_response(services: Services, resolved: ResolvedRollout, name: GateName, wave: str) -> wire.Gate:
    """Return the current state of a gate."""
    index, now, rollout = (
        services.state.index,
        services.state.now(),
        current_rollout(services.state, resolved),
    )
    return gate_serializers.gate(
        index, rollout, gate_serializers.gate_view(index, rollout, name, wave, now), now
    )


def _epoch_seconds(until: datetime | None) -> float | None:
    return None if until is None else until.timestamp()
