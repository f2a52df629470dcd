"""Votes by service tokens: this file checks the token, voting.py the vote.

The settings say for which teams and people a service may vote.  The caller who
presents a token needs no right, but is recorded, so that four eyes hold.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from machines.model.plan import GateName
from machines.model.rollout import Actor, ActorKind, Rollout
from rolloutd.commands import tokens, voting
from rolloutd.commands.execution import Principal
from rolloutd.commands.tokens import MAX_TOKEN_LIFETIME_S, Claims, InvalidToken
from rolloutd.concurrency import threads
from rolloutd.errors import NotAllowed, Refused
from rolloutd.settings.model import ServiceAccount

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,62}[A-Za-z0-9_-])?(?:@[A-Za-z0-9.-]{1,253})?")
"""A user name, or a mail address that begins with one."""

MAX_KEY_BYTES = 65_536
"""Bytes read of a key file; a key has a few hundred."""


@dataclass(frozen=True, slots=True)
class ServiceVoter:
    """The person that a service votes for (a Principal)."""

    user: str
    actor: Actor
    teams: frozenset[str]
    admin: bool = False


async def verify_token(accounts: Mapping[str, ServiceAccount], token: str) -> Claims:
    """Return the claims of a token that its service's key signed; raises NotAllowed, Refused."""
    try:
        # Not verified yet: the name only chooses the key.
        service = tokens.read_service_name(token)
        account = accounts.get(service)
        if account is None:
            raise NotAllowed(f"{service!r}: no such service account; add it to the settings")
        return tokens.verify(token, await threads.FILES.run(_read_key, account.key_file))
    except InvalidToken as bad:
        raise NotAllowed(str(bad)) from None


def require_valid_claims(claims: Claims, rollout: Rollout, now: float) -> None:
    """Raise NotAllowed for a token that has expired, is valid too long, or is for another rollout.

    Raises Refused for a yes that could be for several gates.
    """
    if claims.expires <= now:
        raise NotAllowed("the token: expired; ask the service for a new one")
    if claims.expires > now + MAX_TOKEN_LIFETIME_S:
        raise NotAllowed(
            f"the token: valid for more than {MAX_TOKEN_LIFETIME_S / 86_400:.0f} days; shorten it"
        )
    if claims.rollout != rollout.id:
        raise NotAllowed(f"the token: for {claims.rollout}, not for {rollout.id}; use it there")
    digest = rollout.digest_at(GateName(claims.gate))
    if claims.digest != digest:
        raise NotAllowed(
            f"the token: for {claims.digest}, but {claims.gate} of {rollout.id} is for {digest}; "
            "sign a new one"
        )
    if claims.answer == "yes":
        voting.require_named_gate(rollout, GateName(claims.gate), claims.wave)


def service_voter(
    account: ServiceAccount, claims: Claims, presenter: Principal, submitter: Actor
) -> ServiceVoter:
    """Return the person that the service votes for; raises NotAllowed unless the settings allow them.

    Four eyes compare names, so without `people` both names must be plain: a trailing dot, a plus
    address or a Cyrillic letter would make the submitter look like another person.
    """
    person = claims.outside
    if account.people:
        if person not in account.people:
            raise NotAllowed(
                f"{person}: not listed for service account {claims.service}; add them in the settings"
            )
        person = account.people[person]
    else:
        for name in (person, submitter.name.partition(":")[2] or submitter.name):
            if not _PLAIN_NAME.fullmatch(name):
                raise NotAllowed(
                    f"service account {claims.service}: {name!r} cannot be compared with user names; "
                    "list its users under `people`"
                )
    name = f"{claims.service}:{person}"
    return ServiceVoter(name, Actor(ActorKind.SERVICE, name, presenter.actor.uid), frozenset(account.teams))


def ballot(claims: Claims, wave: str) -> voting.Ballot:
    """Return a token's vote, at the gate of this wave."""
    return voting.Ballot(
        gate=GateName(claims.gate),
        yes=claims.answer == "yes",
        reason=claims.reason,
        team=claims.team,
        digest=claims.digest,
        wave=wave or None,
        shown=claims.shown,
        nodes=claims.nodes,
        more=claims.more,
        until=claims.until,
        unseen=claims.unseen,
    )


def _read_key(path: Path) -> bytes:
    try:
        if path.stat().st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise Refused("key-file", f"{path}: readable or writable by other users; chmod 600 it")
        with path.open("rb") as file:
            return file.read(MAX_KEY_BYTES)
    except OSError as error:
        raise Refused(
            "key-file", f"{path}: not readable ({error.strerror}); fix the settings' key_file"
        ) from error
