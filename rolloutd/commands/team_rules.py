"""Commands on a team's own windows and canaries.

They only tighten: nodes start if the windows of the plan, the settings and the team
are all open, and the team's canaries go first together with those of the settings.
"""

from __future__ import annotations

from collections.abc import Sequence

from machines.model.events import TeamRulesChanged
from machines.model.limits import TeamRules
from machines.model.windows import Window, next_opening
from rolloutd.commands.execution import Events, Principal
from rolloutd.commands.rollout_commands import require_member, unknown_node
from rolloutd.engine.state import State
from rolloutd.errors import NotFound, Refused
from rolloutd.texts.formats import suggest_name


def get_team_rules(state: State, team: str) -> TeamRules:
    """Return the team's own rules; raises NotFound."""
    if team not in state.settings.teams:
        action = suggest_name(team, state.settings.teams, "add it to the settings")
        raise NotFound(f"{team}: no such team; {action}")
    return state.index.team_rules.get(team, TeamRules(team))


def set_team_rules(
    state: State,
    who: Principal,
    team: str,
    windows: Sequence[Window] | None,
    canaries: Sequence[str] | None,
    reason: str,
) -> Events:
    """Set a team's own windows, canaries or both; None keeps them."""
    before = get_team_rules(state, team)
    require_member(who, team, f"set the rules of {team}")
    after = TeamRules(
        team,
        before.windows if windows is None else tuple(windows),
        before.canaries if canaries is None else tuple(dict.fromkeys(canaries)),
    )
    if windows and next_opening(after.windows, state.now()) is None:
        raise Refused("never-open", "windows: none opens within two weeks; widen one")
    for name in canaries or ():
        node = state.index.nodes.get(name)
        if node is None:
            raise unknown_node(state, name)
        if node.team != team:
            raise Refused("not-yours", f"{name}: belongs to {node.team or 'no team'}; name a node of {team}")
    return () if after == before else (TeamRulesChanged(after, who.actor, reason, state.now()),)
