"""Handlers of votes: at a gate, withdrawn, and by a service's token."""

from __future__ import annotations

from functools import partial

from machines.model.plan import GateName
from rolloutd.commands import service_votes, voting
from rolloutd.commands.execution import Decide, UserCommand, current, execute, resolve_live
from rolloutd.commands.resolve import ResolvedRollout
from rolloutd.control import rights
from rolloutd.control.plans.review import not_shown_to_voter
from rolloutd.control.rollouts import gate_serializers, wire
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.control.votes.vote_requests import CastVote, TokenVote, WithdrawVote
from rolloutd.errors import NotAllowed, Refused, TokenAlreadyUsed

routes = RouteTable()


@routes.add("POST", "/v1/rollouts/{r}/votes", access=rights.VOTER, operation="vote")
async def vote(services: Services, request: Request[CastVote]) -> wire.Gate:
    """Vote yes or no at a gate."""
    state = services.state
    resolved = await resolve_live(state, request.path_params["r"])
    ballot = request.input.ballot(resolved.rollout)
    not_shown = await not_shown_to_voter(state, services.sources, resolved, ballot)
    decide = partial(voting.vote, ballot=ballot, not_shown=not_shown)
    await execute(state, request.identity, UserCommand(request.cause, decide, resolved))
    return gate_response(services, resolved, ballot.gate, ballot.wave or "")


@routes.add("POST", "/v1/rollouts/{r}/withdraw", access=rights.OWN_VOTE, operation="withdraw")
async def withdraw(services: Services, request: Request[WithdrawVote]) -> wire.Gate:
    """Withdraw one's own votes at a gate."""
    body, gate = request.input, GateName(request.input.gate)
    resolved = await resolve_live(services.state, request.path_params["r"])
    wave = voting.resolve_wave(resolved.rollout, gate, body.wave)
    decide = partial(voting.withdraw, gate=gate, reason=body.reason, team=body.team, wave=wave or None)
    await execute(services.state, request.identity, UserCommand(request.cause, decide, resolved))
    return gate_response(services, resolved, gate, wave)


def gate_response(services: Services, resolved: ResolvedRollout, name: GateName, wave: str) -> wire.Gate:
    index, now = services.state.index, services.state.now()
    rollout = current(services.state, resolved).rollout
    return gate_serializers.gate(
        index, rollout, gate_serializers.gate_view(index, rollout, name, wave, now), now
    )


@routes.add("POST", "/v1/rollouts/{r}/votes/token", access=rights.TOKEN_BEARER)
async def vote_by_token(services: Services, request: Request[TokenVote]) -> wire.Gate:
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
    wave = voting.resolve_wave(resolved.rollout, gate, claims.wave)
    if claims.answer == "withdraw":
        decide: Decide = partial(
            voting.withdraw, gate=gate, reason=claims.reason, team=claims.team, wave=wave or None
        )
    else:
        ballot = service_votes.ballot(claims, wave)
        not_shown = await not_shown_to_voter(state, services.sources, resolved, ballot)
        decide = partial(voting.vote, ballot=ballot, not_shown=not_shown)
    command = UserCommand(
        f"{claims.answer} by token: {claims.reason}",
        decide,
        resolved,
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
