"""Commands at gates: vote and withdraw.

A vote is bound to the digest, to the voter's teams, and at `proceed` to the
failures that were shown.  The core knows which votes a gate wants and counts; this
file decides whose vote it is and what it covers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from machines.facts import votes
from machines.model.events import RolloutCancelled, VoteCast, VoteWithdrawn
from machines.model.plan import ADMINS, GateName
from machines.model.rollout import ActorKind, Rollout, Vote
from machines.rules import gates
from rolloutd.commands.execution import Events, Principal
from rolloutd.engine.state import State
from rolloutd.errors import DeadlineInPast, FailuresNotShown, NotAllowed, NotFound, Refused
from rolloutd.texts.reason_text import describe

MAX_VOTES_KEPT = 5_000
"""Votes of one rollout, including withdrawn ones: enough for a hundred teams that vote often."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """A vote to cast; None selects the default.  `unseen` approves also what the review cannot show."""

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
    unseen: bool = False

    @property
    def needs_review(self) -> bool:
        return self.yes and not self.unseen and self.gate is not GateName.PROCEED


def vote(state: State, who: Principal, rollout: Rollout, ballot: Ballot, not_shown: Sequence[str]) -> Events:
    """Return the events of a vote; a no at `start` also cancels the rollout.

    `not_shown`: what runs and the review cannot show.  It has no default, so no way to vote can forget it.
    """
    cast = _new_vote(state, who, rollout, ballot, not_shown)
    if cast.yes or cast.gate not in (GateName.PILOT, GateName.START):
        return (VoteCast(rollout.id, cast),)
    if votes.was_opened(rollout, cast.gate):
        raise Refused("open", f"{rollout.id}: started already; pause or cancel it")
    cancel_reason = f"{who.user} said no at {cast.gate}: {ballot.reason}"
    return (VoteCast(rollout.id, cast), RolloutCancelled(rollout.id, who.actor, cancel_reason, cast.at))


def _unused_id(rollout: Rollout) -> str:
    """Return an id for the next vote; a settled forgery may have left a gap in the numbers."""
    taken = {vote.id for vote in rollout.votes}
    ids = (f"{rollout.id}#v{number}" for number in itertools.count(len(taken) + 1))
    return next(each for each in ids if each not in taken)


def _new_vote(
    state: State, who: Principal, rollout: Rollout, ballot: Ballot, not_shown: Sequence[str]
) -> Vote:
    """Return the vote to cast; raises NotAllowed, NotFound or Refused."""
    now = state.now()
    teams = _voting_teams(state, who, rollout, ballot.gate, ballot.team)
    wave = resolve_wave(rollout, ballot.gate, ballot.wave)
    _require_open_vote(state, rollout, ballot, wave, now)
    shown = _covered_failures(state, rollout, ballot) if ballot.gate is GateName.PROCEED else ()
    _require_valid_extent(ballot, now)
    cast = Vote(
        id=_unused_id(rollout),
        gate=ballot.gate,
        digest=rollout.digest_at(ballot.gate),
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
    _require_four_eyes(who, rollout, cast)
    _require_new_vote(state, rollout, cast)
    if ballot.needs_review and not_shown:
        more = f" and {len(not_shown) - 1} more" if len(not_shown) > 1 else ""
        raise Refused(
            "unseen",
            f"{rollout.id}: the review cannot show all: {not_shown[0]}{more}; vote with --unseen",
        )
    return cast


@dataclass(frozen=True, slots=True)
class ApprovalEffect:
    """The missing votes that an approval gives, by team; `opens`: none is missing then."""

    owner: bool
    teams: tuple[str, ...]
    opens: bool


def approval_effect(
    state: State, who: Principal, rollout: Rollout, gate: GateName, wave: str
) -> ApprovalEffect:
    """Return the effect of the caller's approval without a vote; raises what vote() raises."""
    unresolved = state.index.unresolved_failures(rollout.id) if gate is GateName.PROCEED else ()
    shown = tuple(failure.id for failure in unresolved) if gate is GateName.PROCEED else None
    ballot = Ballot(gate, yes=True, reason="", wave=wave or None, shown=shown)
    cast, now = _new_vote(state, who, rollout, ballot, ()), state.now()
    before = gates.gate_view(state.index, rollout, gate, wave, now)
    after = gates.gate_view(state.index, replace(rollout, votes=(*rollout.votes, cast)), gate, wave, now)
    had = {team: have for team, _, have in before.teams}
    per_team = votes.requirement(rollout, gate).per_team
    return ApprovalEffect(
        owner=before.owners_voted < min(after.owners_voted, after.owners_required),
        teams=tuple(team for team, want, have in after.teams if had.get(team, 0) < min(have, want)),
        opens=after.owners_voted >= after.owners_required
        and all(have >= want for team, want, have in after.teams if team == ADMINS or not per_team),
    )


def withdraw(
    state: State,
    who: Principal,
    rollout: Rollout,
    gate: GateName,
    reason: str,
    *,
    team: str | None,
    wave: str | None,
) -> Events:
    """Withdraw one's own votes at a gate: a yes until the gate opens, a no at any time."""
    gate_wave = resolve_wave(rollout, gate, wave)
    own_votes = [
        each
        for each in votes.valid_votes(rollout, gate, gate_wave)
        if _is_same_voter(each, who) and (team is None or team in each.teams)
    ]
    if not own_votes:
        _voting_teams(state, who, rollout, gate, team)  # raises NotAllowed for a caller without a vote there
        raise Refused("no-vote", f"{gate} of {rollout.id}: {who.user} has no vote there; nothing to withdraw")
    if rollout.closed:
        raise Refused("closed", f"{rollout.id}: closed; its votes cannot change")
    view = gates.gate_view(state.index, rollout, gate, gate_wave, state.now())
    is_closed = not votes.was_opened(rollout, gate, gate_wave) and view.state != "open"
    withdrawable = [each for each in own_votes if is_closed or not each.yes]
    if not withdrawable:
        raise Refused("open", f"{gate} of {rollout.id}: open, so a yes stays; pause the rollout")
    return tuple(VoteWithdrawn(rollout.id, each.id, who.actor, reason, state.now()) for each in withdrawable)


def resolve_wave(rollout: Rollout, gate: GateName, requested: str | None) -> str:
    """Return the requested wave, else the first one whose gate is not open."""
    if gate is not GateName.CONTINUE:
        return ""
    waves = [spec.name for spec in rollout.plan.waves if spec.gate is GateName.CONTINUE]
    if requested is not None:
        if requested not in waves:
            known = ", ".join(waves) or "none"
            raise NotFound(f"{rollout.id}: no continue gate after wave {requested}; it has: {known}")
        return requested
    if not waves:
        raise Refused("not-asked", f"continue of {rollout.id}: no wave has this gate; see rolloutctl gates")
    closed_waves = [name for name in waves if not votes.was_opened(rollout, gate, name)]
    return (closed_waves or waves[-1:])[0]


def require_named_gate(rollout: Rollout, gate: GateName, wave: str | None) -> None:
    """Raise Refused for a yes that may be counted late and could be for one of several gates."""
    waves = [name for each, name in rollout.plan.gates_in_order if each is GateName.CONTINUE]
    if gate is GateName.CONTINUE and wave is None and len(waves) > 1:
        raise Refused(
            "no-wave",
            f"{rollout.id}: continue without a wave; name one of {', '.join(waves)}, and vote again",
        )


# -- voters -------------------------------------------------------------------


def eligible_teams(state: State, rollout: Rollout, gate: GateName) -> tuple[str, ...]:
    """Return the teams that may vote at a gate: the owner, and those it asks."""
    teams = {rollout.plan.owner}
    if votes.requirement(rollout, gate).admin:
        teams.add(ADMINS)
    tally = state.index.counters(rollout.id)
    if gate is GateName.PILOT:
        teams.update(gates.required_teams(state.index, rollout, gate, "", opened=False))
    elif votes.requirement(rollout, gate).each_team:
        teams.update(tally.teams)
    elif gate is not GateName.PROCEED:
        teams.update(
            each.needs_vote_of for each in state.index.targets(rollout.id) if each.needs_vote_of is not None
        )
    return tuple(sorted(teams))


def _voting_teams(
    state: State, who: Principal, rollout: Rollout, gate: GateName, requested_team: str | None
) -> tuple[str, ...]:
    teams = eligible_teams(state, rollout, gate)
    own_teams = tuple(team for team in teams if team in who.teams or (team == ADMINS and who.admin))
    if requested_team is not None:
        if requested_team not in who.teams:
            raise NotAllowed(f"{who.user}: not a member of {requested_team}; vote as another team")
        own_teams = tuple(team for team in own_teams if team == requested_team)
    if not own_teams:
        raise NotAllowed(
            f"{who.user} may not vote at {gate} of {rollout.id}"
            + (f" as {requested_team}" if requested_team is not None else "")
            + f"; ask a member of {' or '.join(team for team in teams if team != ADMINS)}"
            + (" or an admin" if ADMINS in teams else "")
        )
    return own_teams


def _require_four_eyes(who: Principal, rollout: Rollout, cast: Vote) -> None:
    if cast.yes and not votes.is_eligible(rollout, cast):
        raise NotAllowed(
            f"{who.user} submitted {rollout.id}, or votes for or through its submitter; "
            f"{cast.gate} needs four eyes, so ask another person"
        )


def _require_new_vote(state: State, rollout: Rollout, cast: Vote) -> None:
    """Raise Refused for a vote that adds nothing to the voter's earlier ones."""
    earlier = [
        each
        for each in votes.valid_votes(rollout, cast.gate, cast.wave)
        if each.actor.is_same_person(cast.actor) and votes.is_counted(rollout, each, cast.at)
    ]
    if cast.yes and any(not each.yes for each in earlier):
        raise Refused("said-no", f"{cast.gate} of {rollout.id}: you voted no; withdraw that vote first")
    same = [each for each in earlier if each.yes == cast.yes]
    covered_teams = {team for each in same for team in each.teams}
    if not same or not covered_teams.issuperset(cast.teams) or _covers_more(state, rollout, cast, same):
        return
    said, action = ("yes", "no vote is needed") if cast.yes else ("no", "withdraw that vote to continue")
    by = f"you voted already, {said} for {' or '.join(cast.teams)}"
    raise Refused("already-voted", f"{cast.gate} of {rollout.id}: {by}; {action}")


def _covers_more(state: State, rollout: Rollout, cast: Vote, same: Sequence[Vote]) -> bool:
    """Return whether the vote covers failures or joiners that the earlier ones do not."""
    if not cast.yes:
        return False
    if cast.gate is GateName.PROCEED:
        covered = {failure for each in same for failure in votes.covered_failures(each, rollout.failures)}
        return not covered.issuperset(cast.shown) or cast.more > 0 or bool(cast.nodes)
    latest = max(each.at for each in same)
    return any(
        target.needs_vote_of in cast.teams and target.since > latest
        for target in state.index.targets(rollout.id)
    )


# -- the extent of a vote -----------------------------------------------------


def _covered_failures(state: State, rollout: Rollout, ballot: Ballot) -> tuple[str, ...]:
    """Return the failures that the vote covers: those shown; a no is for all that are unresolved."""
    for node in ballot.nodes:
        try:
            state.index.target(rollout.id, node)
        except KeyError:
            raise NotFound(
                f"{rollout.id}: no node {node}; list them with rolloutctl nodes {rollout.id}"
            ) from None
    if ballot.shown is None:
        # A node may fail between reading and vote: no vote covers what its voter has not read.
        if ballot.yes:
            raise FailuresNotShown(
                "no-failures-shown",
                f"proceed of {rollout.id}: no failures named; send their ids as `shown`",
            )
        return tuple(failure.id for failure in state.index.unresolved_failures(rollout.id))
    known = {failure.id for failure in rollout.failures}
    unknown = [each for each in ballot.shown if each not in known]
    if unknown:
        raise NotFound(f"{rollout.id}: no failure {unknown[0]}; reload and vote again")
    if ballot.yes and not ballot.shown:
        raise Refused("nothing-to-settle", f"proceed of {rollout.id}: the vote covers no failure; name one")
    return tuple(dict.fromkeys(ballot.shown))


def _require_open_vote(state: State, rollout: Rollout, ballot: Ballot, wave: str, now: float) -> None:
    """Raise Refused for another digest, a gate that is not asked, or too many votes."""
    digest = rollout.digest_at(ballot.gate)
    if ballot.digest is not None and ballot.digest != digest:
        raise Refused(
            "other-digest",
            f"{rollout.id}: {ballot.gate} is for digest {digest}, not {ballot.digest}; review it again",
        )
    reason = gates.voting_blocker(state.index, rollout, ballot.gate, wave, now)
    if reason is not None:
        raise Refused(reason.code, describe(reason))
    if len(rollout.votes) >= MAX_VOTES_KEPT:
        raise Refused(
            "too-many-votes",
            f"{rollout.id}: the maximum of {MAX_VOTES_KEPT} votes is reached; cancel and resubmit it",
        )


def _require_valid_extent(ballot: Ballot, now: float) -> None:
    has_extent = bool(ballot.nodes) or ballot.more > 0 or ballot.until is not None or ballot.shown is not None
    if has_extent and ballot.gate is not GateName.PROCEED:
        raise Refused("proceed-only", "shown, nodes, more and until: only at proceed; remove them")
    if ballot.until is not None and ballot.until <= now:
        raise DeadlineInPast("past", "until: in the past; give a future time")


def _is_same_voter(cast: Vote, who: Principal) -> bool:
    if cast.actor.kind is not who.actor.kind:
        return False
    if cast.actor.kind is ActorKind.SERVICE:
        return cast.actor.name == who.actor.name
    return cast.actor.uid == who.actor.uid
