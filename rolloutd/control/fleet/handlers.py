"""Handlers of slots, holds, freezes, the inventory, shells, teams' rules and reboots."""

from __future__ import annotations

import secrets
from datetime import datetime
from functools import partial
from typing import Any

from machines.model.limits import TeamRules
from machines.model.trust_events import HostKeysStored, ShellOpened
from rolloutd.commands import holds_and_freezes, rollout_commands, self_reboots, team_rules
from rolloutd.commands.execution import Events, Principal, UserCommand, execute
from rolloutd.commands.rollout_commands import PERSON_SOURCE, unknown_node
from rolloutd.control import requests, rights
from rolloutd.control.fleet import fleet_serializers, wire_fleet
from rolloutd.control.requests import PageQuery
from rolloutd.control.responses import Encoded
from rolloutd.control.rollouts import serializers
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.engine.state import State
from rolloutd.errors import NodeUnreachable, Refused

routes = RouteTable()


@routes.add("GET", "/v1/locks", is_shared=True, on_standby=True)
async def locks(services: Services, request: Request) -> Encoded[wire_fleet.Locks]:
    """Show every pool's slots and holders, the holds and the freezes."""
    return await fleet_serializers.locks(services.state)


@routes.add("GET", "/v1/inventory", is_shared=True)
async def inventory(services: Services, request: Request[PageQuery]) -> wire_fleet.Inventory:
    """Show all known nodes, and the age of each source's answer."""
    return await fleet_serializers.inventory(services.state, services.kept, request.input)


@routes.add("GET", "/v1/inventory/{n}")
async def inventory_node(services: Services, request: Request) -> wire_fleet.InventoryNodeDetail:
    """Show what each source last reported of a node."""
    name = request.path_params["n"]
    if name not in services.state.index.nodes:
        raise unknown_node(services.state, name)
    return fleet_serializers.inventory_node(services.state, name)


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
    await execute(state, request.identity, UserCommand(f"hold: {body.reason}", decide))
    granted = holds_and_freezes.find_hold(state, body.node, source, name)
    assert granted is not None
    return fleet_serializers.hold(granted)


@routes.add("DELETE", "/v1/holds", access=rights.HOLD_OWNER)
async def release(services: Services, request: Request[requests.ReleaseHold]) -> wire_fleet.ReleaseResponse:
    """Release a hold on a node."""
    body = request.input
    decide = partial(holds_and_freezes.release, node=body.node, source=body.source, id=body.id)
    done = await execute(services.state, request.identity, UserCommand("release", decide))
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
    await execute(services.state, request.identity, UserCommand(f"freeze: {body.reason}", decide))
    return fleet_serializers.freeze(
        next(each for each in services.state.index.freezes if each.id == freeze_id)
    )


@routes.add("DELETE", "/v1/freezes", access=rights.FREEZE_SCOPE)
async def unfreeze(services: Services, request: Request[requests.LiftFreeze]) -> wire_fleet.ReleaseResponse:
    """Lift the only freeze of a scope, or one by its id."""
    body = request.input
    decide = partial(holds_and_freezes.unfreeze, scope=body.scope, reason=body.reason or "")
    command = UserCommand(f"unfreeze: {body.reason or requests.NO_REASON}", decide)
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
    return await fleet_serializers.inventory(services.state, services.kept, requests.PageQuery())


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

    await execute(state, request.identity, UserCommand(f"hosts scan: {body.reason}", decide))
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

    await execute(services.state, request.identity, UserCommand(f"shell: {reason}", decide))
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


def _epoch_seconds(until: datetime | None) -> float | None:
    return None if until is None else until.timestamp()


@routes.add("GET", "/v1/teams/{t}", on_standby=True)
async def team(services: Services, request: Request) -> wire_fleet.Team:
    """Show a team and its own rules."""
    return _team_response(services, team_rules.get_team_rules(services.state, request.path_params["t"]))


@routes.add("PUT", "/v1/teams/{t}", access=rights.OWN_TEAM)
async def set_team(services: Services, request: Request[requests.SetTeamRules]) -> wire_fleet.Team:
    """Set a team's own windows and canaries."""
    body = request.input
    name = request.path_params["t"]
    windows = None if body.windows is None else tuple(each.window() for each in body.windows)
    decide = partial(
        team_rules.set_team_rules, team=name, windows=windows, canaries=body.canaries, reason=body.reason
    )
    await execute(services.state, request.identity, UserCommand(f"team: {body.reason}", decide))
    return _team_response(services, team_rules.get_team_rules(services.state, name))


def _team_response(services: Services, rules: TeamRules) -> wire_fleet.Team:
    settings = services.state.settings.teams[rules.team]
    now = services.state.now()
    return {
        "team": rules.team,
        "members": list(settings.members),
        "windows": [str(each.window()) for each in settings.windows],
        "own_windows": [str(each) for each in rules.windows],
        "canaries": list(settings.canaries),
        "own_canaries": list(rules.canaries),
        "freezes": [
            fleet_serializers.freeze(each)
            for each in services.state.index.freezes
            if each.scope == f"team/{rules.team}" and each.is_active(now)
        ],
    }


@routes.add("GET", "/v1/fleetlock", on_standby=True)
async def reboot_gates(services: Services, request: Request) -> wire_fleet.RebootGates:
    """List the gates of machines that reboot themselves."""
    return {"gates": await fleet_serializers.reboot_gates(services.state)}


@routes.add("PUT", "/v1/fleetlock/{g}/approval", access=rights.VOTER)
async def approve_reboots(
    services: Services, request: Request[requests.ApproveReboots]
) -> wire_fleet.RebootGate:
    """Approve the reboots of a group of machines for a time."""
    group, body = request.path_params["g"], request.input
    decide = partial(
        self_reboots.approve_reboots,
        group=group,
        reason=body.reason,
        until=body.until.timestamp(),
        team=body.team,
    )
    who, approvers = request.identity, services.state.reboot_approvers
    await execute(services.state, who, UserCommand(f"approve reboots: {body.reason}", decide))
    if who.actor.uid is not None:  # who has come back to a team has it again
        approvers[group] = {**approvers.get(group, {}), who.actor.uid: who.teams}
    return (await fleet_serializers.reboot_gates(services.state, group))[0]


@routes.add("DELETE", "/v1/fleetlock/{g}/approval", access=rights.OWN_VOTE)
async def withdraw_approval(
    services: Services, request: Request[requests.ReasonBody]
) -> wire_fleet.RebootGate:
    """Withdraw the caller's approval of the reboots of a group."""
    group, reason = request.path_params["g"], request.input.reason
    decide = partial(self_reboots.withdraw_approval, group=group, reason=reason)
    await execute(services.state, request.identity, UserCommand(f"withdraw: {reason}", decide))
    return (await fleet_serializers.reboot_gates(services.state, group))[0]


@routes.add("GET", "/v1/fleetlock/{g}/nodes/{n}/why")
async def why_reboot_waits(services: Services, request: Request) -> wire_fleet.RebootReason:
    """Explain why a machine of a group may not reboot itself now."""
    group, node = request.path_params["g"], request.path_params["n"]
    reason = self_reboots.explain_reboot(services.state, group, node)
    return {"group": group, "node": node, "reason": serializers.reason(reason)}
