"""What teams set for themselves, and votes that services hand in for people."""

from __future__ import annotations

from collections.abc import Sequence

from machines.limits import TeamRules
from machines.plan import GateName
from rolloutd.compile import compile_windows
from rolloutd.control import requests, views, wire
from rolloutd.control.answers import WrongRequest
from rolloutd.control.finding import Found, find
from rolloutd.control.handlers.ordering import gate_of
from rolloutd.control.routes import Call, Desk, Route
from rolloutd.errors import Conflict, NotAllowed, Refused
from rolloutd.orders import teaming, voting, vouching
from rolloutd.orders.tokens import SPENT


async def team(desk: Desk, call: Call) -> wire.Team:
    """Show a team, and what it has set for itself."""
    return _team(desk, teaming.rules_of(desk.state, call.names["t"]))


async def set_team(desk: Desk, call: Call) -> wire.Team:
    """Set a team's own windows and canaries."""
    body: requests.SetTeam = call.body
    name = call.names["t"]
    windows = None
    if body.windows is not None:
        try:
            windows = compile_windows([each.model_dump(mode="json", by_alias=True) for each in body.windows])
        except ValueError as wrong:
            raise WrongRequest(f"the body: windows: {wrong}") from None
    async with desk.state.deciding(call.who.actor) as commit:
        events = teaming.set_rules(desk.state, call.who, name, windows, body.canaries, body.reason)
        await commit(events, f"team: {body.reason}")
    return _team(desk, teaming.rules_of(desk.state, name))


async def vote_by_token(desk: Desk, call: Call) -> wire.Gate:
    """Take the vote that a service's signed token carries."""
    body: requests.TokenVote = call.body
    accounts = desk.state.settings.service_accounts
    claims = await vouching.read(accounts, body.token)
    found = await find(desk.state, call.names["r"])
    if not found.live:
        raise Refused("closed", f"{found.rollout.id} is closed: there is nothing to vote on")
    vouching.mind(claims, found.rollout, desk.state.now())
    asker = vouching.voucher(accounts[claims.service], claims, call.who)
    wave = voting.wave_of(desk.state, found.rollout, GateName(claims.gate), claims.wave)
    try:
        async with desk.state.deciding(asker.actor) as commit:
            rollout = desk.state.index.rollouts.get(found.rollout.id, found.rollout)
            events = vouching.events(desk.state, asker, rollout, claims)
            await commit(events, f"{claims.answer} by token: {claims.reason}")
    except Conflict as conflict:
        if SPENT in str(conflict):
            raise NotAllowed("the token was used before: each may be used once") from conflict
        raise
    except Refused as refused:
        # Said by the vote that the same token has cast, mostly; the store knows it for certain.
        if await desk.state.store.is_spent(claims.id):
            raise NotAllowed("the token was used before: each may be used once") from refused
        raise
    return gate_of(desk, Found(found.index, found.rollout, live=True), GateName(claims.gate), wave)


def _team(desk: Desk, rules: TeamRules) -> wire.Team:
    settings = desk.state.settings.teams[rules.team]
    now = desk.state.now()
    return {
        "team": rules.team,
        "members": list(settings.members),
        "windows": [str(each) for each in compile_windows(settings.window_content)],
        "own_windows": [str(each) for each in rules.windows],
        "canaries": list(settings.canaries),
        "own_canaries": list(rules.canaries),
        "freezes": [
            views.freeze(each)
            for each in desk.state.index.freezes
            if each.scope == f"team/{rules.team}" and each.is_active(now)
        ],
    }


ROUTES: Sequence[Route] = (
    Route("GET", "/v1/teams/{t}", team, "A team and what it has set for itself", wire.Team),
    Route(
        "PUT",
        "/v1/teams/{t}",
        set_team,
        "Set a team's own windows and canaries",
        wire.Team,
        body=requests.SetTeam,
        who="members of the team, and admins",
    ),
    Route(
        "POST",
        "/v1/rollouts/{r}/votes/token",
        vote_by_token,
        "Take the vote that a service's signed token carries",
        wire.Gate,
        body=requests.TokenVote,
        who="whoever carries a token that a service of the settings has signed",
    ),
)
