"""A service hands in somebody's vote: the token is judged here, the vote by voting.py.

What a service may say is in the settings: for which teams, and, where they
name people, for whom.  The account that hands a token in needs no right of its
own; it is remembered, so that nobody passes four eyes by carrying a token.
"""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from machines.events import VoteCast, VoteWithdrawn
from machines.plan import GateName
from machines.rollout import Actor, ActorKind, Rollout
from rolloutd.errors import NotAllowed, Refused
from rolloutd.orders import tokens, voting
from rolloutd.orders.steering import Asker, Events
from rolloutd.orders.tokens import LONGEST_LIFE_S, BadToken, Claims
from rolloutd.settings.outside import ServiceAccount
from rolloutd.state import State

LONGEST_KEY = 65_536
"""Bytes read of a key file; keys have some hundred."""


@dataclass(frozen=True, slots=True)
class Voucher:
    """Somebody for whom a service speaks (orders.Asker)."""

    user: str
    actor: Actor
    teams: frozenset[str]
    admin: bool = False


async def read(accounts: Mapping[str, ServiceAccount], token: str) -> Claims:
    """Return what a token says once its service's key has signed it; raises NotAllowed, Refused."""
    try:
        service = tokens.peek(token)
        account = accounts.get(service)
        if account is None:
            raise NotAllowed(f"the settings have no service account {service!r}")
        return tokens.read(token, await asyncio.to_thread(_key, account.key_file))
    except BadToken as bad:
        raise NotAllowed(str(bad)) from None


def mind(claims: Claims, rollout: Rollout, now: float) -> None:
    """Raise NotAllowed for a token that has expired, lives too long, or is for something else."""
    if claims.expires <= now:
        raise NotAllowed("the token has expired: ask the service for another one")
    if claims.expires > now + LONGEST_LIFE_S:
        raise NotAllowed(f"the token lives longer than {LONGEST_LIFE_S / 86_400:.0f} days")
    if claims.rollout != rollout.id:
        raise NotAllowed(f"the token is for {claims.rollout}, not for {rollout.id}")
    if claims.digest != rollout.digest.whole:
        raise NotAllowed(
            f"the token is for the digest {claims.digest}; {rollout.id} has {rollout.digest.whole}"
        )


def voucher(account: ServiceAccount, claims: Claims, who: Asker) -> Voucher:
    """Return the asker that the service stands for; raises NotAllowed for somebody the settings leave out."""
    person = claims.outside
    if account.people:
        if person not in account.people:
            raise NotAllowed(f"{person} is not among the people of the service account {claims.service}")
        person = account.people[person]
    name = f"{claims.service}:{person}"
    return Voucher(name, Actor(ActorKind.SERVICE, name, who.actor.uid), frozenset(account.teams))


def events(state: State, asker: Voucher, rollout: Rollout, claims: Claims) -> Events:
    """Return what follows from the token's vote, bound to the token; raises as voting does."""
    gate = GateName(claims.gate)
    if claims.answer == "withdraw":
        found = voting.withdraw(
            state, asker, rollout, gate, claims.reason, team=claims.team, wave=claims.wave
        )
    else:
        if gate is GateName.PROCEED and claims.shown is None:
            raise Refused("no-failures-shown", "a token at proceed must name the failures it was shown")
        ballot = voting.Ballot(
            gate=gate,
            yes=claims.answer == "yes",
            reason=claims.reason,
            team=claims.team,
            digest=claims.digest,
            wave=claims.wave,
            shown=claims.shown,
            nodes=claims.nodes,
            more=claims.more,
            until=claims.until,
        )
        found = voting.vote(state, asker, rollout, ballot)
    return tuple(
        replace(each, token=claims.id, outside=claims.outside)
        if isinstance(each, VoteCast | VoteWithdrawn)
        else each
        for each in found
    )


def _key(path: Path) -> bytes:
    try:
        if path.stat().st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise Refused("key-file", f"{path} can be read or written by others: its service may not vote")
        with path.open("rb") as file:
            return file.read(LONGEST_KEY)
    except OSError as error:
        raise Refused("key-file", f"{path} cannot be read: {error.strerror}") from error
