"""Invariants of gates: whether one may open, counted from the raw votes alone.

It shares no code with facts/votes.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from machines.invariants.facts import InvariantFacts
from machines.model.events import GateOpened
from machines.model.plan import ADMINS, GateName, VoteRequirement
from machines.model.rollout import Actor, ActorKind, Failure, Rollout, Vote
from machines.states import Phase


def gate_violation(facts: InvariantFacts, event: GateOpened, now: float) -> str | None:
    rollout = facts.rollouts.get(event.rollout)
    if rollout is None:
        return f"there is no rollout {event.rollout}"
    # It never opens as such: each failure has its own votes, which open_failures() counts.
    if event.gate is GateName.PROCEED:
        return None
    if event.gate is GateName.START and (problem := _evidence_violation(facts, rollout)):
        return f"gate {event.gate} of {rollout.id} cannot open: {problem}"
    ttl = rollout.plan.vote_ttl_s
    votes = [
        vote
        for vote in rollout.votes
        if vote.gate is event.gate
        and vote.wave == event.wave
        and vote.yes
        and vote.withdrawn_at is None
        and vote.digest == digest_at(rollout, event.gate)
        and (ttl is None or now < vote.at + ttl)
    ]
    need = rollout.plan.gates.get(event.gate, VoteRequirement(owner=1))
    teams = set(facts.counters(rollout.id).teams)
    if event.gate is GateName.PILOT and rollout.plan.pilot is not None:
        owner = facts.target(rollout.id, str(rollout.plan.pilot.node)).team
        teams = set() if owner is None else {owner}
    if rollout.overrides and event.gate is rollout.plan.entry_gate:
        need = replace(need, owner=max(1, need.owner), admin=1)
    missing = missing_votes(rollout, need, votes, teams)
    return f"gate {event.gate} of {rollout.id} cannot open: missing {missing}" if missing else None


def _evidence_violation(facts: InvariantFacts, rollout: Rollout) -> str | None:
    """Return why the evidence of the pilot does not allow the start, None without a pilot."""
    if rollout.plan.pilot is None or rollout.plan.pilot.node is None:
        return None
    target, evidence = facts.target(rollout.id, rollout.plan.pilot.node), rollout.pilot_evidence
    if target.phase not in (Phase.DONE, Phase.FAILED):
        return f"its pilot {target.node} is {target.phase}"
    if evidence is None or evidence.pilot_since != target.since:
        return f"the evidence of its pilot {target.node} is not attached"
    return None


def digest_at(rollout: Rollout, gate: GateName) -> str:
    evidence = rollout.pilot_evidence
    return rollout.digest.whole if gate is not GateName.START or evidence is None else evidence.digest


def open_failures(facts: InvariantFacts, rollout: Rollout) -> list[Failure]:
    """Return the failures that too few proceed votes cover."""
    if not rollout.failures:
        return []
    # Each admission asks; the answer depends on the rollout's own rows and its teams, whose change drops it.
    known = facts.recounted_failures.get(rollout.id)
    if known is None:
        known = facts.recounted_failures[rollout.id] = _count_open_failures(facts, rollout)
    return known


def _count_open_failures(facts: InvariantFacts, rollout: Rollout) -> list[Failure]:
    need = rollout.plan.gates.get(GateName.PROCEED, VoteRequirement(owner=1))
    votes = [
        vote
        for vote in rollout.votes
        if vote.gate is GateName.PROCEED
        and vote.yes
        and vote.withdrawn_at is None
        and vote.digest == rollout.digest.whole
    ]
    owners = facts.counters(rollout.id).teams.keys()
    signatures = {failure.id: failure.signature for failure in rollout.failures}
    covered = {vote.id: _covered_ids(vote, rollout.failures, signatures) for vote in votes}
    required = VoteRequirement(max(need.owner, 0 if need.each_team else 1), need.each_team, need.four_eyes)
    found = []
    for failure in rollout.failures:
        covering = [vote for vote in votes if failure.id in covered[vote.id]]
        if missing_votes(rollout, required, covering, owners):
            found.append(failure)
    return found


def _covered_ids(vote: Vote, failures: Sequence[Failure], signatures: Mapping[str, str]) -> set[str]:
    ids, nodes = set(vote.shown), set(vote.nodes)
    shown = {failure.id for failure in failures if failure.id in ids}
    later = [
        f
        for f in failures
        if f.id not in shown and f.at >= vote.at and (vote.until is None or f.at <= vote.until)
    ]
    alike = {signatures[failure] for failure in shown}
    named = {failure.id for failure in later if failure.node in nodes}
    more = [each.id for each in later if each.id not in named and signatures[each.id] in alike]
    return shown | named | set(more[: vote.more])


def missing_votes(
    rollout: Rollout, need: VoteRequirement, votes: Sequence[Vote], teams: Iterable[str]
) -> str | None:
    """Return which votes are missing, None when they are enough."""
    uids_by_name = {
        _person_key(vote.actor): vote.actor.uid for vote in votes if vote.actor.kind is ActorKind.PERSON
    }
    people: dict[object, set[str]] = {}
    for vote in votes:
        submitter, actor = rollout.submitted_by, vote.actor
        by_service = actor.kind is ActorKind.SERVICE
        same = actor.uid is not None and actor.uid == submitter.uid
        # A service's uid is not its voter's. Without both persons' uids, equal names count as one person.
        if by_service or None in (actor.uid, submitter.uid):
            same |= _person_key(actor) == _person_key(submitter)
        if need.four_eyes and same:
            continue
        uid = uids_by_name.get(_person_key(actor)) if by_service else actor.uid
        people.setdefault(_person_key(actor) if uid is None else uid, set()).update(vote.teams)
    owners = sum(rollout.plan.owner in member for member in people.values())
    if owners < need.owner:
        return f"{owners} of {need.owner} owners"
    if need.admin:
        admins = sum(ADMINS in member for member in people.values())
        # One person who is owner and admin gives one of the two votes, not both.
        both = sum(bool({ADMINS, rollout.plan.owner} & member) for member in people.values())
        if admins < need.admin or both < need.owner + need.admin:
            return "an admin"
    if need.per_team:
        return None
    for team in sorted(teams):
        if sum(team in member for member in people.values()) < need.each_team:
            return f"team {team}"
    return None


def _person_key(actor: Actor) -> str:
    """Return the name that identifies a person, in person and through services alike."""
    return actor.name.split(":", actor.kind is ActorKind.SERVICE)[-1].split("@")[0].casefold()
