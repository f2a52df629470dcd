"""Handlers of teams' own rules and of votes by service tokens."""

from __future__ import annotations

from functools import partial

from machines.model.limits import TeamRules
from machines.model.plan import GateName
from rolloutd.commands import service_votes, team_rules, voting
from rolloutd.commands.execution import Command, execute, resolve_live
from rolloutd.control import fleet_serializers, requests, rights, wire, wire_fleet
from rolloutd.control.handlers.commands import gate_response
from rolloutd.control.review import unseen_by_voters
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.errors import NotAllowed, Refused, TokenAlreadyUsed

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
    await execute(services.state, request.identity, Command(f"team: {body.reason}", decide))
    return _team_response(services, team_rules.get_team_rules(services.state, name))


@routes.add("POST", "/v1/rollouts/{r}/votes/token", access=rights.TOKEN_BEARER)
async def vote_by_token(services: Services, request: Request[requests.TokenVote]) -> wire.Gate:
    """Cast the vote in a service's signed token."""
    state = services.state
    accounts = state.settings.service_accounts
    claims = await service_votes.verify_token(accounts, request.input.token)
    resolved = await resolve_live(state, request.path_params["r"])
    service_votes.require_valid_claims(claims, resolved.rollout, state.now())
    voter = service_votes.service_voter(
        accounts[claims.service], claims, request.identity, resolved.rollout.submitted_by
    )
    gate = GateName(claims.gate)
    wave = voting.resolve_wave(state, resolved.rollout, gate, claims.wave)
    unseen = await unseen_by_voters(state, services.sources, resolved)
    command = Command(
        f"{claims.answer} by token: {claims.reason}",
        partial(service_votes.vote_events, claims=claims, unseen=unseen),
        resolved.rollout.id,
        token=claims.id,
        outside=claims.outside,
    )
    try:
        await execute(state, voter, command)
    except (TokenAlreadyUsed, Refused) as refused:
        # The first use of a token often causes the refusal of the second; only the store knows for certain.
        if await state.store.is_token_used(claims.id):
            raise NotAllowed("the token was used before; ask the service for a new one") from refused
        raise
    return gate_response(services, resolved, gate, wave)


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
