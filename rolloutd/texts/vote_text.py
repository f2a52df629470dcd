"""Sentences for what a gate waits for: votes, failures, rejections; a part of reason_text.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from machines.model.plan import ADMINS
from machines.model.timefmt import format_rfc3339

Params = Mapping[str, Any]


def describe_missing_votes(params: Params) -> str:
    """Return what a gate waits for: rejections to withdraw, failures to cover, votes; empty for nothing."""
    if params.get("rejections"):
        return "; ".join(
            f"{each['by']} said no at {format_rfc3339(each['at'])}: {each['reason']}"
            for each in params["rejections"]
        )
    # Without their messages, which may have hundreds of characters: `why` and `approve` print them.
    failures = "; ".join(f"{each['node']} failed in {each['step']}" for each in params.get("failures", ()))
    more = params.get("more_failures", 0)
    votes = "; ".join(_missing_votes(params)) if "owner" in params else ""
    if votes and params["submitter"] is not None:
        votes += f" (four eyes: the vote of {params['submitter']} does not count)"
    text = "; ".join(part for part in (failures + (f" and {more} more" if more else ""), votes) if part)
    if params.get("superseded"):
        text += f" (votes for {params['superseded']} do not count here)"
    return text.strip()


def describe_not_asked(rollout: str, params: Params) -> str:
    """Return why a gate takes no votes now."""
    match params:
        case {"gate": "continue", "has_gate": False, "wave": wave}:
            return f"{rollout}: no continue gate after a wave '{wave}'; see rolloutctl gates"
        case {"gate": "continue", "wave": wave}:
            return f"continue of {rollout}: not asked yet; vote when all nodes of wave {wave} are done"
        case {"gate": "pilot"}:
            return f"pilot of {rollout}: not asked; its plan has no pilot"
        case {"gate": "start", "pilot": pilot}:
            return f"start of {rollout}: not asked yet; vote when the pilot {pilot} is done"
        case {"gate": gate}:
            return f"{gate} of {rollout}: not asked yet; no failure is unresolved"
    raise AssertionError(params)


def _missing_votes(params: Params) -> Sequence[str]:
    """Return one part per voter; teams that miss equally many votes share one, as there may be dozens."""
    found, alike = [], dict[tuple[int, int], list[str]]()
    want, missing = params["owners_want"], params["owners_want"] - params["owners_have"]
    if missing > 0:
        found.append(_missing(missing, want, f"of the owner, team {params['owner']},"))
    for each in params["teams"]:
        team, want, missing = each["team"], each["want"], each["want"] - each["have"]
        if team == ADMINS:
            found.append("an admin's vote is missing, because the submit overrides a verdict")
        elif each["known_team"]:
            alike.setdefault((missing, want), []).append(team)
        else:
            found.append(f"{_missing(missing, want, f'of team {team}')} ({describe_unknown_team(team)})")
    for (missing, want), teams in alike.items():
        named = f"teams {', '.join(teams[:-1])} and {teams[-1]}"
        if len(teams) == 1:
            found.append(_missing(missing, want, f"of team {teams[0]}"))
        elif want == 1:
            found.append(f"the votes of {named} are missing")
        else:
            found.append(f"{missing} of {want} votes of each of {named} are missing")
    return found


def _missing(missing: int, want: int, voter: str) -> str:
    if want == 1:
        return f"the vote {voter} is missing"
    return f"{missing} of {want} votes {voter} {'is' if missing == 1 else 'are'} missing"


def describe_unknown_team(team: str) -> str:
    return f"the settings have no team {team}; an admin must add it"


def describe_failure(node: str, params: Params) -> str:
    return f"{node} failed in {params['step']}: {params['message']}"
