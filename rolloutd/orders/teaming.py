"""What a team sets for itself: its own windows and canaries, on top of the settings.

They only tighten: nodes start where the plan's, the settings' and the team's
own windows are all open, and the team's own canaries go first beside those of
the settings.  Whose word counts is decided here, nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence

from machines.events import TeamSet
from machines.limits import TeamRules
from machines.windows import Window, next_opening
from rolloutd.errors import NotAllowed, NotFound, Refused
from rolloutd.orders.steering import Asker, Events
from rolloutd.state import State


def rules_of(state: State, team: str) -> TeamRules:
    """Return what the team has set for itself; raises NotFound."""
    if team not in state.settings.teams:
        raise NotFound(f"the settings have no team {team}")
    return state.index.team_rules.get(team, TeamRules(team))


def set_rules(
    state: State,
    who: Asker,
    team: str,
    windows: Sequence[Window] | None,
    canaries: Sequence[str] | None,
    reason: str,
) -> Events:
    """Set a team's own windows, canaries or both; None leaves them as they are."""
    before = rules_of(state, team)
    if not who.admin and team not in who.teams:
        raise NotAllowed(f"{who.user} may not set the rules of {team}: members of {team} and admins may")
    after = TeamRules(
        team,
        before.windows if windows is None else tuple(windows),
        before.canaries if canaries is None else tuple(dict.fromkeys(canaries)),
    )
    if windows and next_opening(after.windows, state.now()) is None:
        raise Refused("never-open", "none of these windows opens within two weeks")
    for name in canaries or ():
        node = state.index.nodes.get(name)
        if node is None:
            raise NotFound(f"there is no node {name}; rolloutctl inventory lists them")
        if node.team != team:
            raise Refused("not-yours", f"{name} is a node of {node.team or 'no team'}, not of {team}")
    return () if after == before else (TeamSet(after, who.actor, reason, state.now()),)
