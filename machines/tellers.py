"""Counts votes for the invariants, in a plain way that shares nothing with ballots.py.

Whether a gate had its votes and a failure is covered is judged here from the
raw votes alone, whoever cast them when.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from machines.facts import Facts
from machines.plan import GateName, Need
from machines.rollout import Actor, ActorKind, Failure, Rollout, Vote
from machines.states import Outcome


def open_failures(facts: Facts, rollout: Rollout) -> list[Failure]:
    """Return the failures that no proceed votes cover in the number asked, whoever cast them when."""
    if not rollout.failures:
        return []
    need = rollout.plan.gates.get(GateName.PROCEED, Need(owner=1))
    votes = [
        vote
        for vote in rollout.votes
        if vote.gate is GateName.PROCEED
        and vote.yes
        and vote.withdrawn_at is None
        and vote.digest == rollout.digest.whole
    ]
    owning = teams(facts, rollout)
    wanted = Need(max(need.owner, 0 if need.each_team else 1), need.each_team, need.four_eyes)
    found = []
    for failure in rollout.failures:
        covering = [vote for vote in votes if failure.id in _covered(vote, rollout.failures)]
        if lacking(rollout, wanted, covering, owning):
            found.append(failure)
    return found


def _covered(vote: Vote, failures: Sequence[Failure]) -> set[str]:
    shown = [failure for failure in failures if failure.id in vote.shown]
    later = [
        f
        for f in failures
        if f not in shown and f.at >= vote.at and (vote.until is None or f.at <= vote.until)
    ]
    alike = {failure.signature for failure in shown}
    named = [failure for failure in later if failure.node in vote.nodes]
    more = [failure for failure in later if failure not in named and failure.signature in alike]
    return {failure.id for failure in (*shown, *named, *more[: vote.more])}


def teams(facts: Facts, rollout: Rollout) -> set[str]:
    """Return the teams that own a target which has not left."""
    return {
        target.team
        for target in facts.targets(rollout.id)
        if target.team is not None and target.outcome is not Outcome.LEFT
    }


def lacking(rollout: Rollout, need: Need, votes: Sequence[Vote], teams: Iterable[str]) -> str | None:
    """Return who is missing among these votes, None when they are enough."""
    here = {_known_as(vote.actor): vote.actor.uid for vote in votes if vote.actor.kind is ActorKind.PERSON}
    people: dict[object, set[str]] = {}
    for vote in votes:
        submitter, actor = rollout.submitted_by, vote.actor
        by_service = actor.kind is ActorKind.SERVICE
        same = actor.uid is not None and actor.uid == submitter.uid
        if by_service or None in (actor.uid, submitter.uid):
            same |= _known_as(actor) == _known_as(submitter)
        if need.four_eyes and same:
            continue
        uid = here.get(_known_as(actor)) if by_service else actor.uid
        people.setdefault(_known_as(actor) if uid is None else uid, set()).update(vote.teams)
    owners = sum(rollout.plan.owner in member for member in people.values())
    if owners < need.owner:
        return f"{owners} of {need.owner} owners"
    if need.per_team:
        return None
    for team in sorted(teams):
        if sum(team in member for member in people.values()) < need.each_team:
            return f"team {team}"
    return None


def _known_as(actor: Actor) -> str:
    """Return by which name one person is known, whoever carried their word."""
    return actor.name.split(":", actor.kind is ActorKind.SERVICE)[-1].split("@")[0].casefold()
