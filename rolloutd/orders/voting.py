"""What people may say at a gate, and take back.

A vote is bound to the digest, to the teams its voter is a member of, and at
`proceed` to the failures it was shown.  Whether a gate is asked, what it wants
and which votes count is the core's to say; here is decided whose vote it is and
what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from machines import ballots, gates
from machines.events import RolloutCancelled, VoteCast, VoteWithdrawn
from machines.plan import GateName
from machines.rollout import ActorKind, Failure, Rollout, Vote
from rolloutd.errors import NotAllowed, NotFound, Passed, Refused
from rolloutd.orders.steering import Asker, Events
from rolloutd.state import State

MOST_VOTES = 5_000
"""Votes kept of one rollout, withdrawn ones too: a hundred teams that change their minds often."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """What somebody says at a gate; None is what they left to us."""

    gate: GateName
    yes: bool
    reason: str
    team: str | None = None
    digest: str | None = None
    wave: str | None = None
    shown: tuple[str, ...] | None = None
    nodes: tuple[str, ...] = ()
    more: int = 0
    until: float | None = None


def vote(state: State, who: Asker, rollout: Rollout, ballot: Ballot) -> Events:
    """Return what follows from a vote; a no at `start` cancels the rollout with it."""
    now = state.now()
    teams = _speaks_for(state, who, rollout, ballot.gate, ballot.team)
    wave = wave_of(state, rollout, ballot.gate, ballot.wave)
    _mind_gate(state, rollout, ballot, wave, now)
    shown = _shown(state, rollout, ballot) if ballot.gate is GateName.PROCEED else ()
    _mind_extent(rollout, ballot, now)
    cast = Vote(
        id=f"{rollout.id}#v{len(rollout.votes) + 1}",
        gate=ballot.gate,
        digest=rollout.digest.whole,
        actor=who.actor,
        yes=ballot.yes,
        reason=ballot.reason,
        at=now,
        teams=teams,
        wave=wave,
        shown=shown,
        nodes=ballot.nodes,
        more=ballot.more,
        until=ballot.until,
    )
    _mind_eyes(who, rollout, cast)
    _mind_earlier(state, rollout, cast)
    if cast.yes or cast.gate is not GateName.START:
        return (VoteCast(rollout.id, cast),)
    if ballots.is_opened(rollout, GateName.START):
        raise Refused("open", f"{rollout.id} has started already: pause it or cancel it")
    said = f"{who.user} said no at start: {ballot.reason}"
    return (VoteCast(rollout.id, cast), RolloutCancelled(rollout.id, who.actor, said, now))


def withdraw(
    state: State,
    who: Asker,
    rollout: Rollout,
    gate: GateName,
    reason: str,
    *,
    team: str | None,
    wave: str | None,
) -> Events:
    """Take one's own votes at a gate back: a yes until the gate opens, a no at any time."""
    place = wave_of(state, rollout, gate, wave)
    mine = [
        each
        for each in ballots.cast_at(rollout, gate, place)
        if _same(each, who) and (team is None or team in each.teams)
    ]
    if not mine:
        _speaks_for(state, who, rollout, gate, team)  # whoever has no say there is told so
        raise Refused("no-vote", f"{who.user} has no vote at {gate} of {rollout.id} to take back")
    if rollout.closed:
        raise Refused("closed", f"{rollout.id} is closed: its votes stay as they were")
    view = gates.gate_view(state.index, rollout, gate, place, state.now())
    shut = not ballots.is_opened(rollout, gate, place) and view.state != "open"
    free = [each for each in mine if shut or not each.yes]
    if not free:
        raise Refused(
            "open", f"{gate} of {rollout.id} is open already: a yes can no longer be taken back; pause it"
        )
    return tuple(VoteWithdrawn(rollout.id, each.id, who.actor, reason, state.now()) for each in free)


def wave_of(state: State, rollout: Rollout, gate: GateName, named: str | None) -> str:
    """Return the wave of the gate that is meant: the one named, else the first that is not open yet."""
    if gate is not GateName.CONTINUE:
        return ""
    waves = [spec.name for spec in rollout.plan.waves if spec.gate is GateName.CONTINUE]
    if named is not None:
        if named not in waves:
            known = ", ".join(waves) or "none"
            raise NotFound(f"{rollout.id} has no continue gate at a wave {named}; it has: {known}")
        return named
    if not waves:
        raise Refused("not-asked", f"not asked yet: {rollout.id} has no continue gate")
    shut = [name for name in waves if not ballots.is_opened(rollout, gate, name)]
    return (shut or waves[-1:])[0]


# -- whose vote it is ---------------------------------------------------------


def answerable(state: State, rollout: Rollout, gate: GateName) -> tuple[str, ...]:
    """Return the teams whose members have a say at a gate: the owners, and those it asks."""
    asked = {rollout.plan.owner}
    tally = state.index.tally(rollout.id)
    if ballots.need_of(rollout, gate).each_team:
        asked.update(tally.teams)
    elif gate is not GateName.PROCEED:
        asked.update(
            each.needs_vote_of for each in state.index.targets(rollout.id) if each.needs_vote_of is not None
        )
    return tuple(sorted(asked))


def _speaks_for(
    state: State, who: Asker, rollout: Rollout, gate: GateName, named: str | None
) -> tuple[str, ...]:
    asked = answerable(state, rollout, gate)
    mine = tuple(team for team in asked if team in who.teams)
    if named is not None:
        if named not in who.teams:
            raise NotAllowed(f"{who.user} is no member of {named} and cannot speak for it")
        mine = tuple(team for team in mine if team == named)
    if not mine:
        raise NotAllowed(
            f"{who.user} may not vote at {gate} of {rollout.id}: members of {_either(asked)} may"
            + (f", and {named} is not asked there" if named is not None else "")
        )
    return mine


def _mind_eyes(who: Asker, rollout: Rollout, cast: Vote) -> None:
    if cast.yes and not ballots.may_fill(rollout, cast):
        raise NotAllowed(
            f"{who.user} submitted {rollout.id}, or speaks for or through who did, and its gate {cast.gate} "
            "asks for four eyes: somebody else must say yes"
        )


def _mind_earlier(state: State, rollout: Rollout, cast: Vote) -> None:
    """Refuse a vote that says nothing that its voter has not said."""
    earlier = [
        each
        for each in ballots.cast_at(rollout, cast.gate, cast.wave)
        if each.actor.is_same_human(cast.actor) and ballots.counts(rollout, each, cast.at)
    ]
    if cast.yes and any(not each.yes for each in earlier):
        raise Refused(
            "said-no", f"you said no at {cast.gate} of {rollout.id}: take that back first (withdraw)"
        )
    same = [each for each in earlier if each.yes == cast.yes]
    spoken = {team for each in same for team in each.teams}
    if not same or not spoken.issuperset(cast.teams) or _adds(state, rollout, cast, same):
        return
    raise Refused(
        "already-voted", f"you have voted at {cast.gate} of {rollout.id} already, for {_either(cast.teams)}"
    )


def _adds(state: State, rollout: Rollout, cast: Vote, same: Sequence[Vote]) -> bool:
    """Say whether the vote reaches failures or joiners that the earlier ones do not."""
    if not cast.yes:
        return False
    if cast.gate is GateName.PROCEED:
        covered = {failure for each in same for failure in ballots.covered_by(each, rollout.failures)}
        return not covered.issuperset(cast.shown) or cast.more > 0 or bool(cast.nodes)
    latest = max(each.at for each in same)
    return any(
        target.needs_vote_of in cast.teams and target.since > latest
        for target in state.index.targets(rollout.id)
    )


# -- what a proceed vote is bound to --------------------------------------------


def _shown(state: State, rollout: Rollout, ballot: Ballot) -> tuple[str, ...]:
    """Return the failures that the vote covers from the first: those shown, else the unsettled ones.

    Nodes that are named leave the failures of other nodes out.
    """
    for node in ballot.nodes:
        try:
            state.index.target(rollout.id, node)
        except KeyError:
            raise NotFound(f"{rollout.id} has no node {node}") from None
    unsettled = gates.unsettled(state.index, rollout)
    if ballot.shown is not None:
        known = {failure.id for failure in rollout.failures}
        strange = [each for each in ballot.shown if each not in known]
        if strange:
            raise NotFound(f"{rollout.id} has no failure {strange[0]}")
        return tuple(dict.fromkeys(ballot.shown))
    shown = tuple(failure.id for failure in unsettled if not ballot.nodes or failure.node in ballot.nodes)
    if ballot.yes and not shown:
        raise Refused("nothing-to-settle", _nothing(rollout, ballot, unsettled))
    return shown


def _nothing(rollout: Rollout, ballot: Ballot, unsettled: Sequence[Failure]) -> str:
    if ballot.nodes and unsettled:
        return f"not asked yet: none of {_either(ballot.nodes)} has an unsettled failure in {rollout.id}"
    return f"not asked yet: {rollout.id} has no unsettled failure"


def _mind_gate(state: State, rollout: Rollout, ballot: Ballot, wave: str, now: float) -> None:
    """Refuse a vote for another digest, at a gate that is not asked, or beyond what is kept."""
    if ballot.digest is not None and ballot.digest != rollout.digest.whole:
        raise Refused(
            "other-digest",
            f"{rollout.id} has the digest {rollout.digest.whole}, not {ballot.digest}: look at it again",
        )
    reason = gates.may_vote(state.index, rollout, ballot.gate, wave, now)
    if reason is not None:
        raise Refused(reason.code, reason.text)
    if len(rollout.votes) >= MOST_VOTES:
        raise Refused(
            "too-many-votes", f"{rollout.id} has {MOST_VOTES} votes already: cancel it and submit again"
        )


def _mind_extent(rollout: Rollout, ballot: Ballot, now: float) -> None:
    widened = bool(ballot.nodes) or ballot.more > 0 or ballot.until is not None or ballot.shown is not None
    if widened and ballot.gate is not GateName.PROCEED:
        raise Refused("proceed-only", "failures, nodes, more and until belong to votes at proceed only")
    if ballot.until is not None and ballot.until <= now:
        raise Passed("past", "the time named by `until` has passed already")


def _same(cast: Vote, who: Asker) -> bool:
    if cast.actor.kind is not who.actor.kind:
        return False
    if cast.actor.kind is ActorKind.SERVICE:
        return cast.actor.name == who.actor.name
    return cast.actor.uid == who.actor.uid


def _either(names: Sequence[str]) -> str:
    return " or ".join(names)
