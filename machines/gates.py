"""Who must still vote, and why a gate is shut.

A gate counts people: so many owners, so many of each team.  Votes are bound to
the digest; a proceed vote is bound to the failures it was shown as well.  This
file decides whether a gate has its votes; what may then start is schedule.py's.

Two rules that are easily got wrong:

- A gate that was opened stays open for everybody who comes later (a joiner, a
  team that takes over a node) but shuts again when votes it rested on are
  withdrawn.  Expiry counts only until it opens.
- A failure is settled by votes that cover it, and only by them: a retry alone
  resumes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from machines.ballots import alive_at, cast_at, covered_by, has_voted, is_opened, need_of, voices_of
from machines.index import Index
from machines.moments import stamp
from machines.plan import GateName, Need
from machines.rollout import Failure, Reason, Rollout, Target, Vote

NAMED = 3
"""Failures named in one sentence."""


@dataclass(frozen=True, slots=True)
class GateView:
    """A gate as people see it; `teams` are (team, wanted, had)."""

    gate: GateName
    wave: str
    state: str
    owner_want: int
    owner_have: int
    teams: tuple[tuple[str, int, int], ...] = ()
    votes: tuple[Vote, ...] = ()
    missing: str = ""
    unsettled: tuple[Failure, ...] = ()


# -- gates ---------------------------------------------------------------------


def gate_view(index: Index, rollout: Rollout, gate: GateName, wave: str, now: float) -> GateView:
    """Return how a gate stands: not-asked, waiting, open or rejected."""
    if gate is GateName.PROCEED:
        return _proceed_view(index, rollout)
    need, votes = need_of(rollout, gate), cast_at(rollout, gate, wave)
    opened = is_opened(rollout, gate, wave)
    counted = votes if opened else alive_at(rollout, votes, now)
    voices = voices_of(rollout, need, counted)
    teams = _teams(need, voices, asked_of(index, rollout, gate, wave, opened))
    owners = len(voices.get(rollout.plan.owner, ()))
    missing = _missing(index, rollout, need, owners, teams)
    held_back = not need.per_team and any(have < want for _, want, have in teams)
    if any(not vote.yes for vote in votes):
        state = "rejected"
        missing = _rejection(votes)
    elif owners >= need.owner and not held_back and (opened or is_asked(index, rollout, gate, wave)):
        state = "open"
    else:
        state = "waiting" if is_asked(index, rollout, gate, wave) else "not-asked"
    if state == "waiting" and rollout.supersedes is not None:
        missing += f" (votes for {rollout.supersedes} were for another digest and are void here)"
    return GateView(gate, wave, state, need.owner, owners, teams, votes, missing)


def is_open(index: Index, rollout: Rollout, gate: GateName, wave: str, now: float) -> bool:
    """Say whether a gate was opened and none of the votes it rested on was withdrawn since."""
    if not is_opened(rollout, gate, wave):
        return False
    if all(vote.yes and vote.withdrawn_at is None for vote in rollout.votes):
        return True
    return gate_view(index, rollout, gate, wave, now).state == "open"


def asked_of(index: Index, rollout: Rollout, gate: GateName, wave: str, opened: bool) -> tuple[str, ...]:
    """Return the teams whose votes the gate rests on.

    Before it opens: every team that owns a target.  Afterwards: those that
    voted, also if they withdrew; who came later is asked node by node.
    """
    teams = index.tally(rollout.id).teams
    if opened and not need_of(rollout, gate).per_team:
        voted = {
            team
            for vote in rollout.votes
            if vote.gate is gate and vote.wave == wave and vote.yes and vote.digest == rollout.digest.whole
            for team in vote.teams
        }
        return tuple(sorted(team for team in teams if team in voted))
    return tuple(sorted(teams))


def is_asked(index: Index, rollout: Rollout, gate: GateName, wave: str) -> bool:
    """Say whether it is time to vote: start at once, continue after its wave, proceed after a failure."""
    match gate:
        case GateName.START:
            return True
        case GateName.CONTINUE:
            return _is_continue_asked(index, rollout, wave)
        case GateName.PROCEED:
            return bool(unsettled(index, rollout)) or bool(_rejects(rollout))


def _is_continue_asked(index: Index, rollout: Rollout, wave: str) -> bool:
    """Say whether the gate after the wave is asked: it and all before it are over."""
    if not is_opened(rollout, GateName.START):
        return False
    for spec in rollout.plan.waves:
        if not index.is_wave_over(rollout.id, spec.name):
            return False
        if spec.name == wave:
            return spec.gate is not None
    return False


def may_vote(index: Index, rollout: Rollout, gate: GateName, wave: str, now: float) -> Reason | None:
    """Return why nobody can vote at the gate now, None when people can."""
    index.advance(now)
    if rollout.closed:
        ended = "was cancelled" if rollout.cancelled is not None else "has ended"
        return Reason("closed", f"{rollout.id} {ended}; there is nothing to vote on")
    if is_opened(rollout, gate, wave) or is_asked(index, rollout, gate, wave):
        return None
    match gate:
        case GateName.CONTINUE if wave not in {spec.name for spec in rollout.plan.waves if spec.gate is gate}:
            return Reason(
                "not-asked", f"not asked yet: {rollout.id} has no continue gate after a wave '{wave}'"
            )
        case GateName.CONTINUE:
            text = f"continue is asked once all nodes of wave {wave} are done"
        case GateName.PROCEED:
            text = "proceed is asked while a failure is not settled, and there is none"
        case GateName.START:
            text = "start is asked from submit on"
    return Reason("not-asked", f"not asked yet: {text}")


def team_waits(index: Index, target: Target) -> Reason | None:
    """Return why this node waits for its own team's vote alone, None when it does not."""
    rollout = index.rollout(target.rollout)
    team = target.needs_vote_of
    if team is not None and not _joiner_voted(rollout, team, target):
        lacks = f"team {team} has not voted for it" if _can_vote(index, team) else _nobody(team)
        text = f"{target.node} came after the start was approved; {lacks}"
        by = _voters(index, rollout, team, GateName.START, target.node)
        return Reason("needs-vote", text, target.since, by)
    for each in rollout.opened:
        need = need_of(rollout, each.gate)
        if each.gate is GateName.PROCEED or not need.per_team or target.team is None:
            continue
        if not has_voted(rollout, need, cast_at(rollout, each.gate, each.wave), target.team):
            lacks = "" if _can_vote(index, target.team) else f": {_nobody(target.team)}"
            text = f"team {target.team} has not voted at {each.gate}; its nodes wait{lacks}"
            by = _voters(index, rollout, target.team, each.gate, target.node)
            return Reason("needs-vote", text, each.at, by)
    return None


def _joiner_voted(rollout: Rollout, team: str, target: Target) -> bool:
    """Say whether the team voted since the node waits for it, other than for going on after a failure."""
    return any(
        vote.yes
        and vote.gate is not GateName.PROCEED
        and vote.digest == rollout.digest.whole
        and vote.withdrawn_at is None
        and team in vote.teams
        and vote.at >= target.since
        for vote in rollout.votes
    )


# -- failures ------------------------------------------------------------------


def unsettled(index: Index, rollout: Rollout) -> tuple[Failure, ...]:
    """Return the failures that no sufficient proceed vote covers, oldest first."""
    return index.unsettled(rollout.id)


def _rejects(rollout: Rollout) -> tuple[Vote, ...]:
    return tuple(vote for vote in cast_at(rollout, GateName.PROCEED) if not vote.yes)


def _proceed_view(index: Index, rollout: Rollout) -> GateView:
    need, votes = need_of(rollout, GateName.PROCEED), cast_at(rollout, GateName.PROCEED)
    open_failures = unsettled(index, rollout)
    asked = open_failures or rollout.failures[-1:]
    counted = [
        vote for vote in votes if vote.yes and all(f.id in covered_by(vote, rollout.failures) for f in asked)
    ]
    voices = voices_of(rollout, need, counted)
    teams = _teams(need, voices, sorted(index.tally(rollout.id).teams))
    owners = len(voices.get(rollout.plan.owner, ()))
    missing = ""
    if any(not vote.yes for vote in votes):
        state, missing = "rejected", _rejection(votes)
    elif open_failures:
        state = "waiting"
        missing = f"{_named(open_failures)}; {_missing(index, rollout, need, owners, teams)}"
    else:
        state = "open" if rollout.failures else "not-asked"
    return GateView(GateName.PROCEED, "", state, need.owner, owners, teams, votes, missing, open_failures)


# -- sentences -----------------------------------------------------------------


def _teams(
    need: Need, voices: dict[str, set[int | str]], teams: Iterable[str]
) -> tuple[tuple[str, int, int], ...]:
    if not need.each_team:
        return ()
    return tuple((team, need.each_team, len(voices.get(team, ()))) for team in teams)


def _missing(
    index: Index, rollout: Rollout, need: Need, owners: int, teams: Iterable[tuple[str, int, int]]
) -> str:
    wanted = "; ".join(_wants(index, rollout, need, owners, teams))
    submitter = rollout.submitted_by.name
    return (
        f"{wanted} (four eyes: the vote of {submitter} does not count)"
        if wanted and need.four_eyes
        else wanted
    )


def _wants(
    index: Index, rollout: Rollout, need: Need, owners: int, teams: Iterable[tuple[str, int, int]]
) -> Iterator[str]:
    if owners < need.owner:
        yield _lacking(need.owner - owners, need.owner, f"of the owner, team {rollout.plan.owner},")
    alike: dict[tuple[int, int], list[str]] = {}
    for team, want, have in teams:
        if have >= want:
            continue
        if _can_vote(index, team):
            alike.setdefault((want - have, want), []).append(team)
        else:
            yield f"{_lacking(want - have, want, f'of team {team}')} ({_nobody(team)}: an admin adds it)"
    for (lacking, want), names in alike.items():
        yield _lacking_of(lacking, want, names)


def _lacking_of(lacking: int, want: int, teams: list[str]) -> str:
    """Say together what teams lack that lack the same: there may be dozens."""
    if len(teams) == 1:
        return _lacking(lacking, want, f"of team {teams[0]}")
    named = f"teams {', '.join(teams[:-1])} and {teams[-1]}"
    return (
        f"the votes of {named} are missing"
        if want == 1
        else f"{lacking} of {want} votes of each of {named} are missing"
    )


def _lacking(lacking: int, want: int, whose: str) -> str:
    if want == 1:
        return f"the vote {whose} is missing"
    return f"{lacking} of {want} votes {whose} {'is' if lacking == 1 else 'are'} missing"


def _can_vote(index: Index, team: str) -> bool:
    """Say whether the settings know the team, so that somebody can vote for it."""
    known = index.limits.teams
    return known is None or team in known


def _nobody(team: str) -> str:
    return f"the settings have no team {team}, so nobody can vote for it"


def _voters(index: Index, rollout: Rollout, team: str, gate: GateName, node: str) -> str:
    """Return who can give a team's vote, or what else lifts the wait for it."""
    if _can_vote(index, team):
        return f"a member of team {team}: rolloutctl approve {rollout.id} {gate}"
    return f"an admin, who adds team {team} to the settings, or rolloutctl skip {rollout.id} {node}"


def _rejection(votes: Iterable[Vote]) -> str:
    return "; ".join(
        f"{vote.actor.name} said no at {stamp(vote.at)}: {vote.reason}" for vote in votes if not vote.yes
    )


def _named(failures: tuple[Failure, ...]) -> str:
    told = "; ".join(f"{each.node} failed in {each.step}: {each.message}" for each in failures[:NAMED])
    more = f" and {len(failures) - NAMED} more" if len(failures) > NAMED else ""
    return told + more
