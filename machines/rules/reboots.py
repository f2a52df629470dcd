"""The rule by which a machine that reboots itself gets a slot: that of a start, without a rollout.

It asks what each start asks of the node, its team and its pools, and the gate of the machine's group.  Waves
and traffic are a rollout's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from machines.facts.index import Index
from machines.facts.node_work import WorkKind
from machines.facts.votes import people_by_team
from machines.model.reasons import Params, Reason, ReasonCode, Remedy, RemedyKind
from machines.model.reboots import RebootApproval, RebootGate
from machines.model.rollout import ActorKind, Target
from machines.rules import node_claims, pools, start_blockers
from machines.states import Phase

PEOPLE_DECIDE_FIRST: Final = frozenset(
    {
        ReasonCode.PAUSED,
        ReasonCode.REJECTED,
        ReasonCode.NODE_FAILED,
        ReasonCode.DISTURBED,
        ReasonCode.ROLLING_BACK,
        ReasonCode.ROLLBACK_LIMIT,
        ReasonCode.ROLLBACK_FAILED,
    }
)
"""Why a rollout is stopped although it was going on: then its nodes that are not done do not reboot either.

A gate that waits is a question about the rollout's change, and may wait for weeks: reboots go on.
"""

NO_TEAM: Final = "none"


def reboot_blocker(index: Index, node: str, now: float, gate: RebootGate | None) -> Reason | None:
    """Return why a node of the inventory may not reboot now, None if a slot of each of its pools is free."""
    team = index.nodes[node].team
    candidate = Target("", node, team, (), "", 0)
    observed = start_blockers.observation_blocker(index, candidate)
    # A cordon is no obstacle: the machine may have drained itself before it asks.
    is_locked = observed is not None and observed.code is ReasonCode.FOREIGN_LOCK
    return (
        start_blockers.observe_only_blocker(index)
        or start_blockers.mismatch_blocker(index, "all", f"node/{node}", f"team/{team}")
        or node_claims.quarantine_blocker(index, candidate)
        or start_blockers.stale_blocker(index, candidate, now)
        or _gate_blocker(index, gate, team, now)
        or _stopped_rollout_blocker(index, node, now)
        or start_blockers.target_freeze_blocker(index, candidate, now)
        or start_blockers.closed_window(
            start_blockers.team_window_groups(index, team), node, team, now, needed_s=0.0
        )
        or node_claims.work_blocker(index, WorkKind.HOLD, node, now)
        or (observed if is_locked else None)
        or pools.slot_blocker(index, candidate, now)
    )


def return_blocker(index: Index, node: str) -> Reason | None:
    """Return why a node is not back after its reboot, None if it was freshly seen up.

    A cordon or lock of others keeps nothing: it takes a slot by itself.
    """
    reason = start_blockers.observation_blocker(index, Target("", node, None, (), "", 0))
    is_taken = reason is not None and reason.code in (ReasonCode.FOREIGN_CORDON, ReasonCode.FOREIGN_LOCK)
    return None if is_taken else reason


@dataclass(frozen=True, slots=True)
class RebootGateView:
    """The state of a group's gate; `teams` are (team, wanted, had), `missing` is what it lacks, in params."""

    is_open: bool
    owners_voted: int
    teams: tuple[tuple[str, int, int], ...]
    approvals: tuple[RebootApproval, ...]
    missing: Params


def active_approvals(index: Index, group: str, now: float) -> tuple[RebootApproval, ...]:
    return tuple(each for each in index.reboot_approvals if each.group == group and now < each.until)


def reboot_gate_view(
    index: Index, gate: RebootGate, teams: Iterable[str | None], now: float
) -> RebootGateView:
    """Return the state of a group's gate for the nodes of these teams; each team's is its own."""
    active = active_approvals(index, gate.group, now)
    people = people_by_team([_for_present_teams(each, gate) for each in active])
    want = gate.need.each_team
    owners = len(people.get(gate.owner or "", ()))
    # No person can vote for a node without a team, so such a node waits.
    names = sorted({team or NO_TEAM for team in teams}) if want else []
    votes = tuple((team, want, len(people.get(team, ()))) for team in names)
    lacking = [(team, have) for team, _, have in votes if have < want]
    settings_teams = index.limits.teams
    missing: Params = {
        "owner": gate.owner,
        "owners_want": gate.need.owner,
        "owners_have": owners,
        "teams": tuple(
            {
                "team": team,
                "want": want,
                "have": have,
                "known_team": settings_teams is None or team in settings_teams,
            }
            for team, have in lacking
        ),
        "submitter": None,
    }
    is_open = owners >= gate.need.owner and not lacking
    return RebootGateView(is_open, owners, votes, active, missing)


def _for_present_teams(approval: RebootApproval, gate: RebootGate) -> RebootApproval:
    """Return an approval with the teams that its person still has; one through a service keeps its teams."""
    uid = approval.actor.uid
    if approval.actor.kind is not ActorKind.PERSON or uid is None or uid not in gate.members:
        return approval
    present = gate.members[uid]
    return replace(approval, teams=tuple(each for each in approval.teams if each in present))


def _gate_blocker(index: Index, gate: RebootGate | None, team: str | None, now: float) -> Reason | None:
    if gate is None:
        return None
    view = reboot_gate_view(index, gate, (team,), now)
    if view.is_open:
        return None
    group = f"fleetlock/{gate.group}"
    remedy = Remedy(RemedyKind.APPROVE_REBOOTS, {"group": group})
    return Reason(ReasonCode.GATE_CLOSED, group, view.missing, remedy=remedy)


def _stopped_rollout_blocker(index: Index, node: str, now: float) -> Reason | None:
    """Return why an open rollout has stopped in which the node is not done."""
    for target in index.targets_on(node):
        rollout = index.rollout(target.rollout)
        if target.phase is Phase.DONE or rollout.closed:
            continue
        reason = start_blockers.rollout_blocker(index, rollout, now)
        if reason is not None and reason.code in PEOPLE_DECIDE_FIRST:
            params: Params = {"rollout": rollout.id}
            return Reason(ReasonCode.ROLLOUT_STOPPED, node, params, reason.since, reason.remedy)
    return None
