"""What the user may do, and who else may.

The daemon decides.  The console only avoids requests that the daemon would
refuse, and names the people to ask.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from rolloutd.control.rollouts import wire
from tui.state.model import Model
from tui.state.values import RolloutState

MAX_NAMED_MEMBERS = 3
"""The teams screen shows all members."""


@dataclass(frozen=True, slots=True)
class Permission:
    """Whether an operation is allowed; `reason` says who may do it instead."""

    is_allowed: bool
    reason: str = ""


ALLOWED = Permission(is_allowed=True)
UNKNOWN_USER = Permission(is_allowed=False, reason="your user is not known yet")


def team_permission(model: Model, team: str | None) -> Permission:
    """Return whether the user may do what the node's team may."""
    who = "admins" if team is None else f"{team_with_members(model, team)} and admins"
    return _permission(model, {team}, who)


def hold_and_freeze_permission(model: Model) -> Permission:
    teams = () if model.current_user is None else model.current_user["teams"]
    return _permission(model, set(teams), "members of any team and admins")


def vote_permission(model: Model, rollout: RolloutState, gate: wire.Gate) -> Permission:
    teams = dict.fromkeys([rollout.status["owner"], *(need["team"] for need in gate["needs"]["teams"])])
    who = "; ".join(team_with_members(model, team) for team in teams)
    return _permission(model, teams.keys(), who, includes_admins=False)


def _permission(
    model: Model, teams: Set[str | None] | Set[str], who: str, *, includes_admins: bool = True
) -> Permission:
    """Return whether the user is in one of the teams, or an admin; else `who` may."""
    me = model.current_user
    if me is None:
        return UNKNOWN_USER
    if (me["admin"] and includes_admins) or not teams.isdisjoint(me["teams"]):
        return ALLOWED
    return Permission(is_allowed=False, reason=f"not permitted: {who} may")


def needs_my_vote(model: Model, rollout: RolloutState, gate: wire.Gate) -> bool:
    """Return whether a gate waits for a vote that the user can cast and has not cast."""
    me = model.current_user
    if me is None or gate["state"] != "waiting":
        return False
    # A daemon from before an upgrade does not send whether the submitter's vote counts.
    if gate["needs"].get("four_eyes") and rollout.status["submitted_by"] == me["user"]:
        return False
    missing = [need["team"] for need in gate["needs"]["teams"] if need["have"] < need["want"]]
    if gate["needs"]["owner"]["have"] < gate["needs"]["owner"]["want"]:
        missing.append(rollout.status["owner"])
    voted = {
        team
        for vote in gate["votes"]
        if vote["uid"] == me["uid"] and vote["counts"]
        for team in vote["teams"]
    }
    return any(team in me["teams"] and team not in voted for team in missing)


def team_with_members(model: Model, team: str) -> str:
    """Return a team with its first members: `team infra (ana, bo)`."""
    teams = () if model.settings is None else model.settings["teams"]
    names = next((each["members"] for each in teams if each["team"] == team), [])
    if not names:
        return f"team {team}"
    more = f" and {len(names) - MAX_NAMED_MEMBERS} more" if len(names) > MAX_NAMED_MEMBERS else ""
    return f"team {team} ({', '.join(names[:MAX_NAMED_MEMBERS])}{more})"
