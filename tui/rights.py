"""Who may do what, as far as the console can tell, and who could instead.

The daemon decides; this only spares people a question whose answer is known,
and names those who could.  It judges by who the daemon says we are and by the
teams of its settings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rolloutd.control import wire
from tui.model import Model
from tui.values import RolloutState

NAMED = 3
"""Members of a team that are named; the teams screen has them all."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether something may be done; `why` says who could instead."""

    may: bool
    why: str = ""


YES = Verdict(may=True)


def steering(model: Model, rollout: RolloutState) -> Verdict:
    """Say whether we may pause, resume, cancel, retry, skip and roll back."""
    me = model.me
    if me is None:
        return Verdict(may=False, why="who you are is not known yet")
    owner = rollout.status["owner"]
    if me["admin"] or owner in me["teams"]:
        return YES
    return Verdict(may=False, why=f"not yours: {who_is(model, owner)} and admins may")


def administering(model: Model) -> Verdict:
    """Say whether we may hold and freeze."""
    me = model.me
    if me is None:
        return Verdict(may=False, why="who you are is not known yet")
    if me["admin"] or me["teams"]:
        return YES
    return Verdict(may=False, why="not yours: members of the teams in the settings and admins may")


def voting(model: Model, rollout: RolloutState, gate: wire.Gate) -> Verdict:
    """Say whether we have a say at a gate."""
    me = model.me
    if me is None:
        return Verdict(may=False, why="who you are is not known yet")
    asked = asked_teams(rollout, gate)
    if set(asked) & set(me["teams"]):
        return YES
    return Verdict(may=False, why="not yours: " + "; ".join(who_is(model, team) for team in asked) + " may")


def asked_teams(rollout: RolloutState, gate: wire.Gate) -> list[str]:
    """Return the teams that a gate asks, the owner first."""
    teams = [need["team"] for need in gate["needs"]["teams"]]
    return [rollout.status["owner"], *(team for team in teams if team != rollout.status["owner"])]


def waits_for_me(model: Model, rollout: RolloutState, gate: wire.Gate) -> bool:
    """Say whether a gate waits for a vote that we can give and have not given."""
    me = model.me
    if me is None or gate["state"] != "waiting":
        return False
    if four_eyes(model, rollout, gate) and rollout.status["submitted_by"] == me["user"]:
        return False
    wanted = [need["team"] for need in gate["needs"]["teams"] if need["have"] < need["want"]]
    if gate["needs"]["owner"]["have"] < gate["needs"]["owner"]["want"]:
        wanted.append(rollout.status["owner"])
    spoken = {
        team
        for vote in gate["votes"]
        if vote["uid"] == me["uid"] and vote["counts"]
        for team in vote["teams"]
    }
    return any(team in me["teams"] and team not in spoken for team in wanted)


def four_eyes(model: Model, rollout: RolloutState, gate: wire.Gate) -> bool:
    """Say whether a gate refuses the submitter's yes; unknown until the plan was read."""
    plan = model.plans.get(rollout.id)
    asked = {} if plan is None else plan["content"]["spec"].get("gates") or {}
    return bool((asked.get(gate["gate"]) or {}).get("four_eyes"))


def who_is(model: Model, team: str) -> str:
    """Return a team with the first of its members."""
    settings = model.settings
    known = {} if settings is None else {each["team"]: each["members"] for each in settings["teams"]}
    members = known.get(team)
    if not members:
        return f"team {team}"
    return f"team {team} ({_some(members)})"


def _some(members: Iterable[str]) -> str:
    names = list(members)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
