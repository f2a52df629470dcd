"""Handlers of leadership: who leads, and how a leader steps down."""

from __future__ import annotations

import os

from machines.model.trust_events import LeaderSteppedDown
from rolloutd.commands.execution import Command, execute
from rolloutd.commands.rollout_commands import Events, Principal
from rolloutd.control import requests, rights, wire_daemons
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.control.serializers import format_timestamp
from rolloutd.engine.state import State
from rolloutd.errors import Refused
from rolloutd.ports import Peers

routes = RouteTable()


@routes.add("POST", "/v1/leader/step-down", access=rights.LEADERSHIP_ADMIN)
async def step_down(
    services: Services, request: Request[requests.ReasonBody]
) -> wire_daemons.StepDownResponse:
    """Hand leadership over to a standby at once, and end this daemon; runs continue."""
    reason = request.input.reason
    standbys = daemons_of(services)["standbys"]
    if not standbys:
        raise Refused("no-standby", "leader: no standby is there; start a second daemon first")

    def decide(state: State, who: Principal) -> Events:
        return (LeaderSteppedDown(state.epoch, who.actor, reason, state.now()),)

    await execute(services.state, request.identity, Command(f"step down: {reason}", decide))
    services.step_down()
    return {"standbys": [each["name"] for each in standbys]}


def daemons_of(services: Services) -> wire_daemons.Daemons:
    """Return who leads the store and who waits."""
    state = services.state
    own = Peers(state.settings.name or os.uname().nodename, state.epoch, services.started_at)
    peers = services.leadership.peers or own
    leader = peers if services.is_standby else own
    return {
        "role": "standby" if services.is_standby else "leader",
        "leader": {"name": leader.leader, "epoch": leader.epoch, "since": format_timestamp(leader.since)},
        "standbys": [
            {
                "name": each.name,
                "behind_entries": max(0, state.changes.latest_seq - each.seq),
                "seen_at": format_timestamp(each.seen_at),
            }
            for each in peers.standbys
        ],
        "synchronous": peers.is_synchronous,
    }
