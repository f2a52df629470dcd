"""Handlers of teams' own rules."""

from __future__ import annotations

from functools import partial

from machines.model.limits import TeamRules
from rolloutd.commands import team_rules
from rolloutd.commands.execution import UserCommand, execute
from rolloutd.control import requests, rights
from rolloutd.control.fleet import fleet_serializers, wire_fleet
from rolloutd.control.routes import Request, RouteTable, Services

routes = RouteTable()


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
