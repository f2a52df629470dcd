"""Handlers of leadership: who leads, and how a leader steps down."""

from __future__ import annotations

import os

from machines.model.trust_events import LeaderSteppedDown
from rolloutd.control import requests, rights, wire_daemons
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.control.serializers import format_timestamp
from rolloutd.errors import Refused
from rolloutd.ports import Peers

routes = RouteTable()


@routes.add("POST", "/v1/leader/step-down", access=rights.LEADERSHIP_ADMIN)
async def step_down(
    services: Services, request: Request[requests.ReasonBody]
) -> wire_daemons.StepDownResponse:
    """Hand leadership over to a standby at once, and end this daemon; runs continue."""
    state, actor, reason = services.state, request.identity.actor, request.input.reason
    standbys = daemons_of(services)["standbys"]
    if not standbys:
        raise Refused("no-standby", "leader: no standby is there; start a second daemon first")
    event = LeaderSteppedDown(state.epoch, actor, reason, state.now())
    await state.commit([event], actor=actor, cause=f"step down: {reason}")
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
