"""Votes: which of them count, for which teams, and which failures they settle.

Votes are bound to the digest; a proceed vote is also bound to the failures that it was shown.  A gate counts
people, not votes: a person who votes twice, or through a service, counts once.  This file knows a rollout and
its votes, not its progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from machines.model.plan import ADMINS, GateName, VoteRequirement
from machines.model.reboots import RebootApproval
from machines.model.rollout import ActorKind, Failure, GateOpening, Rollout, Vote

NOT_FOR_JOINERS = (GateName.PILOT, GateName.PROCEED)
"""Gates at which the team of a joiner is not asked: they concern single nodes."""

DEFAULT_REQUIREMENT = VoteRequirement(owner=1)
"""What a gate asks for that the plan does not mention: no gate opens without a vote."""


def requirement(rollout: Rollout, gate: GateName) -> VoteRequirement:
    """Return what the gate asks for; proceed after a failure always asks for at least one owner.

    A rollout against a verdict needs an owner's and an admin's vote before it starts.
    """
    need = rollout.plan.gates.get(gate, DEFAULT_REQUIREMENT)
    # The owner alone must not repeat what is known to fail: that is what the verdict is for.
    if rollout.overrides and gate is rollout.plan.entry_gate:
        return replace(need, owner=max(1, need.owner), admin=1)
    if gate is GateName.PROCEED and not need.owner and not need.each_team:
        # Whatever the plan says, no rollout continues after a failure that no person has seen.
        return replace(need, owner=1)
    return need


def valid_votes(rollout: Rollout, gate: GateName, wave: str = "") -> tuple[Vote, ...]:
    """Return the votes at a gate that are for this digest and not withdrawn."""
    return tuple(
        vote
        for vote in rollout.votes
        if vote.gate is gate
        # Only continue has several gates; at the others the wave of a vote has no meaning.
        and (gate is not GateName.CONTINUE or vote.wave == wave)
        and vote.digest == rollout.digest_at(gate)
        and vote.withdrawn_at is None
    )


def was_opened(rollout: Rollout, gate: GateName, wave: str = "") -> bool:
    return any(each.gate is gate and each.wave == wave for each in rollout.opened)


def voters_by_team(rollout: Rollout, votes: Iterable[Vote]) -> dict[str, set[int | str]]:
    """Return the people who said yes, by each team that they vote for."""
    return people_by_team([vote for vote in votes if vote.yes and is_eligible(rollout, vote)])


def people_by_team(votes: Sequence[Vote | RebootApproval]) -> dict[str, set[int | str]]:
    """Return the people who cast these votes, by each team that they vote for."""
    # A person who votes in person and through a service counts once, by uid where one vote has it.
    uids = {
        vote.actor.person_key: vote.actor.uid for vote in votes if vote.actor.kind is not ActorKind.SERVICE
    }
    people: dict[str, set[int | str]] = {}
    for vote in votes:
        actor = vote.actor
        uid = uids.get(actor.person_key) if actor.kind is ActorKind.SERVICE else actor.uid
        for team in vote.teams:
            people.setdefault(team, set()).add(actor.person_key if uid is None else uid)
    return people


def admins_voted(rollout: Rollout, need: VoteRequirement, voters: Mapping[str, set[int | str]]) -> int:
    """Return how many people said yes as admins, other than those that the owner's votes need."""
    admins, owners = voters.get(ADMINS, set()), voters.get(rollout.plan.owner, set())
    return min(len(admins), max(0, len(admins | owners) - need.owner))


def unexpired(rollout: Rollout, votes: Iterable[Vote], now: float) -> tuple[Vote, ...]:
    # Only votes at a closed gate expire: a rollout of weeks must not stop because its approval is old.
    ttl = rollout.plan.vote_ttl_s
    return tuple(vote for vote in votes if ttl is None or now < vote.at + ttl)


def gate_without_vote(rollout: Rollout, team: str, *, per_team: bool = False) -> GateOpening | None:
    """Return the first opened gate that asks this team and lacks its votes.

    `per_team`: only a gate that asks each team for its own nodes.
    """
    for each in rollout.opened:
        need = requirement(rollout, each.gate)
        is_asked = need.per_team if per_team else need.each_team > 0
        if is_asked and each.gate not in NOT_FOR_JOINERS:
            votes = valid_votes(rollout, each.gate, each.wave)
            if len(voters_by_team(rollout, votes).get(team, ())) < need.each_team:
                return each
    return None


def is_counted(rollout: Rollout, vote: Vote, now: float) -> bool:
    """Return whether a vote counts at its gate: for this digest, unexpired, not excluded by four eyes."""
    valid = valid_votes(rollout, vote.gate, vote.wave)
    current = valid if was_opened(rollout, vote.gate, vote.wave) else unexpired(rollout, valid, now)
    return vote in current and (not vote.yes or is_eligible(rollout, vote))


def is_eligible(rollout: Rollout, vote: Vote) -> bool:
    """Return whether four eyes, if the gate asks for them, allow this person's vote."""
    # Four eyes are judged when votes are counted: the plan may ask for them at one gate and not at another.
    submitter, actor = rollout.submitted_by, vote.actor
    # The same uid is the submitter too when the vote goes through a service, with any name.
    is_submitter = (actor.uid is not None and actor.uid == submitter.uid) or actor.is_same_person(submitter)
    return not (is_submitter and requirement(rollout, vote.gate).four_eyes)


# -- failures ------------------------------------------------------------------


def unresolved_failures(rollout: Rollout, teams: Iterable[str]) -> tuple[Failure, ...]:
    """Return the unsettled failures, given the teams that own a target."""
    if not rollout.failures:
        return ()
    votes = [vote for vote in valid_votes(rollout, GateName.PROCEED) if vote.yes]
    covered = {vote.id: covered_failures(vote, rollout.failures) for vote in votes}
    required_teams = tuple(teams)
    return tuple(
        failure
        for failure in rollout.failures
        if not _resolves(rollout, [vote for vote in votes if failure.id in covered[vote.id]], required_teams)
    )


def covered_failures(vote: Vote, failures: Iterable[Failure]) -> frozenset[str]:
    """Return the ids of the failures that a proceed vote covers.

    Those that it was shown; later ones of the nodes that it names; and `more` later ones with the same
    signature.  `until` ends the last two.
    """
    known = tuple(failures)
    signatures = {failure.signature for failure in known if failure.id in vote.shown}
    covered, more = set(vote.shown), vote.more
    for failure in known:
        expired = vote.until is not None and failure.at > vote.until
        # What happened before the vote and was not shown was not known to the voter.
        if failure.id in covered or failure.at < vote.at or expired:
            continue
        if failure.node in vote.nodes:
            covered.add(failure.id)
        elif more > 0 and failure.signature in signatures:
            covered.add(failure.id)
            more -= 1
    return frozenset(covered)


def looks_ahead(rollout: Rollout) -> bool:
    """Return whether a proceed vote may cover failures that come after it."""
    return any(vote.nodes or vote.more for vote in valid_votes(rollout, GateName.PROCEED))


def _resolves(rollout: Rollout, votes: list[Vote], teams: tuple[str, ...]) -> bool:
    """Return whether these votes were enough at any time; from then on they do not expire."""
    need = requirement(rollout, GateName.PROCEED)
    # At the instant of each vote, because a settled failure must not open again when votes expire.
    for latest in votes:
        current_votes = unexpired(rollout, (vote for vote in votes if vote.at <= latest.at), latest.at)
        voters = voters_by_team(rollout, current_votes)
        enough = all(len(voters.get(team, ())) >= need.each_team for team in teams)
        if enough and len(voters.get(rollout.plan.owner, ())) >= need.owner:
            return True
    return False
