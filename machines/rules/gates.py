"""Gates: who must still vote, and whether a gate is open.

A gate counts people: it needs a number of owners, and a number of members of each team.  Votes are bound to
the digest; a proceed vote is also bound to the failures that it was shown.  What may start behind a gate is
decided in machines/scheduler/.

Two rules are easily got wrong:

- An opened gate stays open for every later node (a joiner, a node that changes team) but shuts again when
  votes that it rested on are withdrawn.  Votes expire only until it opens.
- A failure is settled by votes that cover it, and only by them: a retry alone resumes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from machines.facts.index import Index
from machines.facts.votes import (
    NOT_FOR_JOINERS,
    admins_voted,
    covered_failures,
    gate_without_vote,
    is_eligible,
    requirement,
    unexpired,
    valid_votes,
    voters_by_team,
    was_opened,
)
from machines.model.plan import ADMINS, PILOT_WAVE, GateName, VoteRequirement
from machines.model.reasons import Param, Params, Reason, ReasonCode, Remedy, RemedyKind
from machines.model.rollout import Failure, Rollout, Target, Vote

MAX_NAMED_FAILURES = 3
"""Failures named in one reason; more would not be read."""


@dataclass(frozen=True, slots=True)
class GateView:
    """The state of a gate; `teams` are (team, wanted, had), `missing` says in params what it waits for."""

    gate: GateName
    wave: str
    state: str
    owners_required: int
    owners_voted: int
    teams: tuple[tuple[str, int, int], ...]
    votes: tuple[Vote, ...]
    missing: Params
    unresolved: tuple[Failure, ...] = ()


# -- gates ---------------------------------------------------------------------


def gate_view(index: Index, rollout: Rollout, gate: GateName, wave: str, now: float) -> GateView:
    """Return the state of a gate: not-asked, waiting, open or rejected."""
    if gate is GateName.PROCEED:
        return _proceed_view(index, rollout)
    need, votes = requirement(rollout, gate), valid_votes(rollout, gate, wave)
    opened = was_opened(rollout, gate, wave)
    counted = votes if opened else unexpired(rollout, votes, now)
    voters = voters_by_team(rollout, counted)
    teams = _team_votes(need, voters, required_teams(index, rollout, gate, wave, opened))
    admins = ((ADMINS, need.admin, admins_voted(rollout, need, voters)),) if need.admin else ()
    is_blocked = any(have < want for _, want, have in (*(() if need.per_team else teams), *admins))
    teams += admins
    owners = len(voters.get(rollout.plan.owner, ()))
    missing = _missing_votes(index, rollout, need, owners, teams)
    is_asked = is_voting_open(index, rollout, gate, wave)
    # One no outweighs every yes: it is the only way to stop what others have approved.
    if any(not vote.yes for vote in votes):
        state, missing = "rejected", _rejections(votes)
    elif owners >= need.owner and not is_blocked and (opened or is_asked):
        state = "open"
    else:
        state = "waiting" if is_asked else "not-asked"
    if state == "waiting" and rollout.supersedes is not None:
        missing |= {"superseded": rollout.supersedes}
    return GateView(gate, wave, state, need.owner, owners, teams, votes, missing)


def is_open(index: Index, rollout: Rollout, gate: GateName, wave: str, now: float) -> bool:
    """Return whether a gate was opened and still has the votes that it rested on."""
    if not was_opened(rollout, gate, wave):
        return False
    # The usual case, checked for every node: without a no and a withdrawal, a new count changes nothing.
    if all(vote.yes and vote.withdrawn_at is None for vote in rollout.votes):
        return True
    return gate_view(index, rollout, gate, wave, now).state == "open"


def required_teams(
    index: Index, rollout: Rollout, gate: GateName, wave: str, opened: bool
) -> tuple[str, ...]:
    """Return the teams whose votes the gate rests on.

    Before it opens: every team that owns a target.  Afterwards: the teams that voted, also if they withdrew;
    later teams are asked node by node.
    """
    if gate is GateName.PILOT and rollout.plan.pilot_node is not None:
        team = index.target(rollout.id, rollout.plan.pilot_node).team
        return () if team is None else (team,)
    teams = index.counters(rollout.id).teams
    if opened and not requirement(rollout, gate).per_team:
        voted = {
            team
            for vote in rollout.votes
            if vote.gate is gate and vote.wave == wave and vote.yes and vote.digest == rollout.digest_at(gate)
            # A vote that never counted opened nothing, so the gate does not rest on it.
            if is_eligible(rollout, vote)
            for team in vote.teams
        }
        return tuple(sorted(team for team in teams if team in voted))
    return tuple(sorted(teams))


def is_voting_open(index: Index, rollout: Rollout, gate: GateName, wave: str) -> bool:
    """Return whether users can vote: at continue after its wave, at proceed after a failure."""
    if rollout.closed:
        return False
    match gate:
        case GateName.PILOT:
            return rollout.plan.pilot_node is not None
        case GateName.START:
            return rollout.plan.pilot_node is None or has_pilot_evidence(index, rollout)
        case GateName.PROCEED:
            # While a no stands, the gate stays open for votes, so that the no can be withdrawn.
            rejected = any(not vote.yes for vote in valid_votes(rollout, GateName.PROCEED))
            return rejected or bool(index.unresolved_failures(rollout.id))
        case GateName.CONTINUE:
            if not was_opened(rollout, GateName.START):
                return False
            for spec in rollout.plan.waves:
                if not index.is_wave_over(rollout.id, spec.name):
                    return False
                if spec.name == wave:
                    return spec.gate is not None
            return False


def voting_blocker(index: Index, rollout: Rollout, gate: GateName, wave: str, now: float) -> Reason | None:
    """Return why no vote is accepted at the gate now, None when votes are."""
    index = index.at(now)
    if rollout.closed:
        return Reason(ReasonCode.CLOSED, rollout.id, {"cancelled": rollout.cancelled is not None})
    # An open gate takes votes too, because the teams of joiners vote late.
    if was_opened(rollout, gate, wave) or is_voting_open(index, rollout, gate, wave):
        return None
    has_gate = gate is GateName.PROCEED or (gate, wave) in rollout.plan.gates_in_order
    pilot = rollout.plan.pilot_node
    params: Params = {"gate": gate.value, "wave": wave, "has_gate": has_gate, "pilot": pilot}
    return Reason(ReasonCode.NOT_ASKED, rollout.id, params)


def has_pilot_evidence(index: Index, rollout: Rollout) -> bool:
    """Return whether the evidence of the pilot's latest attempt is attached."""
    evidence = rollout.pilot_evidence
    # A pilot that was retried since ended at another instant: votes must not rest on what it showed before.
    is_over = index.is_wave_over(rollout.id, PILOT_WAVE)
    return is_over and evidence is not None and evidence.pilot_since == index.wave_end(rollout.id, PILOT_WAVE)


def needs_pilot_evidence(index: Index, rollout: Rollout) -> bool:
    """Return whether the pilot is done, or failed and covered, and its evidence is not attached yet."""
    if rollout.plan.pilot_node is None or was_opened(rollout, GateName.START):
        return False
    return index.is_wave_over(rollout.id, PILOT_WAVE) and not has_pilot_evidence(index, rollout)


def missing_team_vote(index: Index, target: Target) -> Reason | None:
    """Return why this node waits for its own team's vote alone, None when it does not."""
    rollout = index.rollout(target.rollout)
    # The start gate takes no vote before the pilot is done, so the pilot must not wait for one.
    if target.wave == PILOT_WAVE and not was_opened(rollout, GateName.START):
        return None
    team = target.needs_vote_of
    if team is not None and (place := _joiner_gate(index, rollout, team, target)) is not None:
        return _team_vote_reason(index, target, team, place, target.since, joined=True)
    if target.team is None or (opened := gate_without_vote(rollout, target.team, per_team=True)) is None:
        return None
    place = (opened.gate, opened.wave)
    return _team_vote_reason(index, target, target.team, place, opened.at, joined=False)


def _team_vote_reason(
    index: Index, target: Target, team: str, place: tuple[GateName, str], since: float, *, joined: bool
) -> Reason:
    known, (gate, wave) = _is_known_team(index, team), place
    # Without its wave, a vote at continue is for the first of these gates that is not open yet.
    args = {"rollout": target.rollout, "gate": gate.value, "team": team, **({"wave": wave} if wave else {})}
    remedy = Remedy(RemedyKind.APPROVE, args)
    if not known:
        remedy = Remedy(RemedyKind.ADD_TEAM, {"rollout": target.rollout, "node": target.node, "team": team})
    params: Params = {
        "team": team,
        "gate": gate.value,
        "joined": joined,
        "known_team": known,
        "free_joiners": index.rollout(target.rollout).free_joiners,
    }
    return Reason(ReasonCode.NEEDS_VOTE, target.node, params, since, remedy)


def _joiner_gate(index: Index, rollout: Rollout, team: str, target: Target) -> tuple[GateName, str] | None:
    """Return the gate and wave at which the team must still vote for a node that joined it, if it must."""
    # An opened gate that asks each team counts its people; one yes that counts nowhere must not replace them.
    if team == target.team and (opened := gate_without_vote(rollout, team)) is not None:
        return opened.gate, opened.wave
    # Only a node that was never admitted entered its phase by joining.  Later a retry or an aborted isolation
    # moves `since`, and the vote that admitted the node must still count.
    has_begun = target.attempt > 0 or index.has_failed(rollout.id, target.node)
    joined_at = 0.0 if has_begun else target.since
    has_voted = any(
        vote.yes
        and vote.gate not in NOT_FOR_JOINERS  # a proceed vote is about failures only
        and vote.digest == rollout.digest_at(vote.gate)
        and vote.withdrawn_at is None
        and team in vote.teams
        and vote.at >= joined_at
        and is_eligible(rollout, vote)
        for vote in rollout.votes
    )
    return None if has_voted else (GateName.START, "")


# -- failures ------------------------------------------------------------------


def _proceed_view(index: Index, rollout: Rollout) -> GateView:
    need, votes = requirement(rollout, GateName.PROCEED), valid_votes(rollout, GateName.PROCEED)
    open_failures = index.unresolved_failures(rollout.id)
    # A gate that has opened shows the votes that covered the latest failure.
    to_cover = open_failures or rollout.failures[-1:]
    counted = [
        vote
        for vote in votes
        if vote.yes and all(f.id in covered_failures(vote, rollout.failures) for f in to_cover)
    ]
    voters = voters_by_team(rollout, counted)
    teams = _team_votes(need, voters, sorted(index.counters(rollout.id).teams))
    owners = len(voters.get(rollout.plan.owner, ()))
    missing: dict[str, Param] = {}
    if any(not vote.yes for vote in votes):
        state, missing = "rejected", _rejections(votes)
    elif open_failures and not rollout.closed:
        state = "waiting"
        missing = _missing_votes(index, rollout, need, owners, teams) | {
            "failures": tuple(
                {"node": each.node, **each.params} for each in open_failures[:MAX_NAMED_FAILURES]
            ),
            "more_failures": max(0, len(open_failures) - MAX_NAMED_FAILURES),
        }
    else:
        state = "open" if rollout.failures and not open_failures else "not-asked"
    return GateView(GateName.PROCEED, "", state, need.owner, owners, teams, votes, missing, open_failures)


# -- what is missing -----------------------------------------------------------


def _team_votes(
    need: VoteRequirement, voters: dict[str, set[int | str]], teams: Iterable[str]
) -> tuple[tuple[str, int, int], ...]:
    if not need.each_team:
        return ()
    return tuple((team, need.each_team, len(voters.get(team, ()))) for team in teams)


def _missing_votes(
    index: Index, rollout: Rollout, need: VoteRequirement, owners: int, teams: Iterable[tuple[str, int, int]]
) -> dict[str, Param]:
    return {
        "owner": rollout.plan.owner,
        "owners_want": need.owner,
        "owners_have": owners,
        "teams": tuple(
            {"team": team, "want": want, "have": have, "known_team": _is_known_team(index, team)}
            for team, want, have in teams
            if have < want
        ),
        "submitter": rollout.submitted_by.name if need.four_eyes else None,
    }


def _rejections(votes: Iterable[Vote]) -> dict[str, Param]:
    rejections = (vote for vote in votes if not vote.yes)
    return {
        "rejections": tuple(
            {"by": vote.actor.name, "at": vote.at, "reason": vote.reason} for vote in rejections
        )
    }


def _is_known_team(index: Index, team: str) -> bool:
    """Return whether the settings have the team: without members it can never vote."""
    known = index.limits.teams
    return known is None or team == ADMINS or team in known
