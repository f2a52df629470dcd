"""Which votes count, whose they are, and which failures they settle.

Votes are bound to the digest; a proceed vote is bound to the failures it was
shown as well.  A gate counts people, not votes: one person who spoke twice, or
through a service, is one.  This file knows a rollout and its votes alone, not how
far it has come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from machines.plan import GateName, Need
from machines.rollout import ActorKind, Failure, Rollout, Vote

DEFAULT_NEED = Need(owner=1)
"""What a gate asks for that the plan does not mention: nothing opens by silence."""


def need_of(rollout: Rollout, gate: GateName) -> Need:
    """Return what the gate asks for; going on after a failure always asks for somebody."""
    need = rollout.plan.gates.get(gate, DEFAULT_NEED)
    if gate is GateName.PROCEED and not need.owner and not need.each_team:
        return replace(need, owner=1)
    return need


def cast_at(rollout: Rollout, gate: GateName, wave: str = "") -> tuple[Vote, ...]:
    """Return the votes that count at a gate: for this digest, and not withdrawn."""
    return tuple(
        vote
        for vote in rollout.votes
        if vote.gate is gate
        and (gate is not GateName.CONTINUE or vote.wave == wave)
        and vote.digest == rollout.digest.whole
        and vote.withdrawn_at is None
    )


def is_opened(rollout: Rollout, gate: GateName, wave: str = "") -> bool:
    """Say whether the gate was opened."""
    return any(each.gate is gate and each.wave == wave for each in rollout.opened)


def voices_of(rollout: Rollout, need: Need, votes: Iterable[Vote]) -> dict[str, set[int | str]]:
    """Return the different people who said yes, by each team they may speak for."""
    counted = [vote for vote in votes if vote.yes and _may_fill(rollout, need, vote)]
    uids = {vote.actor.human: vote.actor.uid for vote in counted if vote.actor.kind is not ActorKind.SERVICE}
    people: dict[str, set[int | str]] = {}
    for vote in counted:
        for team in vote.teams:
            people.setdefault(team, set()).add(_person(vote, uids))
    return people


def _may_fill(rollout: Rollout, need: Need, vote: Vote) -> bool:
    return not (need.four_eyes and _same_person(vote, rollout))


def _same_person(vote: Vote, rollout: Rollout) -> bool:
    """Say whether the submitter cast the vote, or handed in a service's, or is whom a service vouches for."""
    submitter = rollout.submitted_by
    if vote.actor.uid is not None and vote.actor.uid == submitter.uid:
        return True
    return vote.actor.is_same_human(submitter)


def _person(vote: Vote, uids: Mapping[str, int | None]) -> int | str:
    actor = vote.actor
    uid = uids.get(actor.human) if actor.kind is ActorKind.SERVICE else actor.uid
    return actor.human if uid is None else uid


def alive_at(rollout: Rollout, votes: Iterable[Vote], now: float) -> tuple[Vote, ...]:
    """Return the votes that have not expired."""
    ttl = rollout.plan.vote_ttl_s
    return tuple(vote for vote in votes if ttl is None or now < vote.at + ttl)


def has_voted(rollout: Rollout, need: Need, votes: Iterable[Vote], team: str) -> bool:
    """Say whether the team gave all the votes that the gate asks of it."""
    return len(voices_of(rollout, need, votes).get(team, ())) >= need.each_team


def counts(rollout: Rollout, vote: Vote, now: float) -> bool:
    """Say whether a vote counts at its gate: for this digest, alive, not shut out by four eyes."""
    cast = cast_at(rollout, vote.gate, vote.wave)
    alive = cast if is_opened(rollout, vote.gate, vote.wave) else alive_at(rollout, cast, now)
    return vote in alive and (not vote.yes or may_fill(rollout, vote))


def may_fill(rollout: Rollout, vote: Vote) -> bool:
    """Say whether four eyes, where they are asked, let this person fill a need."""
    return _may_fill(rollout, need_of(rollout, vote.gate), vote)


# -- failures ------------------------------------------------------------------


def judge_failures(rollout: Rollout, teams: Iterable[str]) -> tuple[Failure, ...]:
    """Return the unsettled failures, given the teams that own a target."""
    if not rollout.failures:
        return ()
    votes = [vote for vote in cast_at(rollout, GateName.PROCEED) if vote.yes]
    covered = {vote.id: covered_by(vote, rollout.failures) for vote in votes}
    asked = tuple(teams)
    return tuple(
        failure
        for failure in rollout.failures
        if not _settles(rollout, [vote for vote in votes if failure.id in covered[vote.id]], asked)
    )


def covered_by(vote: Vote, failures: Iterable[Failure]) -> frozenset[str]:
    """Return the ids of the failures that a proceed vote covers.

    Those it was shown; later ones of the nodes it names; and as many later ones
    of the same signature as it says.  `until` ends the last two.
    """
    known = tuple(failures)
    signatures = {failure.signature for failure in known if failure.id in vote.shown}
    covered, more = set(vote.shown), vote.more
    for failure in known:
        late = vote.until is not None and failure.at > vote.until
        if failure.id in covered or failure.at < vote.at or late:
            continue
        if failure.node in vote.nodes:
            covered.add(failure.id)
        elif more > 0 and failure.signature in signatures:
            covered.add(failure.id)
            more -= 1
    return frozenset(covered)


def _settles(rollout: Rollout, votes: list[Vote], teams: tuple[str, ...]) -> bool:
    """Say whether these votes were enough at some time; from then on they do not expire."""
    need = need_of(rollout, GateName.PROCEED)
    for latest in votes:
        together = alive_at(rollout, (vote for vote in votes if vote.at <= latest.at), latest.at)
        voices = voices_of(rollout, need, together)
        enough = all(len(voices.get(team, ())) >= need.each_team for team in teams)
        if enough and len(voices.get(rollout.plan.owner, ())) >= need.owner:
            return True
    return False
