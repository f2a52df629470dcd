"""Handlers of machines that reboot themselves: the gate of a group, and why one waits."""

from __future__ import annotations

from functools import partial

from rolloutd.commands import self_reboots
from rolloutd.commands.execution import UserCommand, execute
from rolloutd.control import requests, rights
from rolloutd.control.fleet import fleet_serializers, wire_fleet
from rolloutd.control.rollouts import serializers
from rolloutd.control.routes import Request, RouteTable, Services

routes = RouteTable()


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
