"""Handlers of the daemon: health, settings, the caller, who leads, and how a leader steps down."""

from __future__ import annotations

import os
import platform

from machines.model.trust_events import LeaderSteppedDown
from rolloutd.commands.execution import Events, Principal, UserCommand, execute
from rolloutd.control import requests, rights
from rolloutd.control.daemons import runner_serializers, wire_daemons
from rolloutd.control.formats import format_timestamp
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.engine.state import State
from rolloutd.errors import Refused
from rolloutd.ports import Peers
from rolloutd.settings import Settings

routes = RouteTable()


@routes.add("GET", "/v1/health", on_standby=True)
async def health(services: Services, request: Request) -> wire_daemons.Health:
    """Report that the daemon runs, and its trouble."""
    state = services.state
    return {
        "version": services.version,
        "epoch": state.index.epoch,
        "pid": os.getpid(),
        "since": format_timestamp(services.started_at),
        "observe_only": state.index.limits.observe_only,
        "trouble": "; ".join(state.problems()) or None,
        "runs": runner_serializers.runs(state.runners, state.index.limits.runners),
    }


@routes.add("GET", "/v1/whoami", on_standby=True)
async def whoami(services: Services, request: Request) -> wire_daemons.WhoAmI:
    """Return the caller, as the socket identifies them."""
    identity = request.identity
    plans = (each.plan.owner for each in services.state.index.rollouts.values() if not each.closed)
    return {
        "user": identity.user,
        "uid": identity.uid,
        "groups": sorted(identity.groups),
        "teams": sorted(identity.teams),
        "owner_of": sorted({owner for owner in plans if owner in identity.teams}),
        "admin": identity.admin,
    }


@routes.add("GET", "/v1/settings", on_standby=True)
async def settings(services: Services, request: Request) -> wire_daemons.SettingsSummary:
    """Show the settings' limits, admins and teams."""
    return _settings(services.state.settings)


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

    await execute(services.state, request.identity, UserCommand(f"step down: {reason}", decide))
    services.step_down()
    return {"standbys": [each["name"] for each in standbys]}


def daemons_of(services: Services) -> wire_daemons.Daemons:
    """Return who leads the store and who waits."""
    state = services.state
    own = Peers(state.settings.name or platform.node(), state.epoch, services.started_at)
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


def _settings(current: Settings) -> wire_daemons.SettingsSummary:
    """Return limits, admins and teams; hosts, keys and paths stay private."""
    return {
        "observe_only": current.observe_only,
        "max_parallel": current.max_parallel,
        "admins": list(current.admins),
        "teams": [
            {
                "team": name,
                "members": list(team.members),
                "checks": len(team.verify),
                "windows": len(team.windows),
                "canaries": list(team.canaries),
            }
            for name, team in sorted(current.teams.items())
        ],
        "pools": [
            {"key": key, "max_unavailable": str(pool.max_unavailable)} for key, pool in current.pools.items()
        ],
    }
