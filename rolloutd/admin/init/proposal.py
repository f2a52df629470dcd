"""Proposal of labels, pools and teams from what an inventory reports; values in, values out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rolloutd.admin.init.settings_edit import APPEND, Change
from rolloutd.texts.formats import join_limited, pluralize

JSON = Any

TEAM = "team"

USUAL_LABELS = (TEAM, "rack", "zone", "site", "power", "role", "env", "canary", "cluster")
"""Host variables that become labels if a host has them; others only when a flag names them."""

FAILURE_DOMAINS = ("rack", "zone", "power")
"""Labels of nodes that fail together, so that one of them is also one pool."""

CLUSTER_LABELS = {
    TEAM: re.compile(r"(^|/)team$"),
    "zone": re.compile(r"^topology\.kubernetes\.io/zone$"),
    "rack": re.compile(r"(^|/)rack$"),
    "canary": re.compile(r"(^|/)canary$"),
}
"""Labels of a cluster's nodes that give a label of the fleet; the first in the order of names counts."""

MAX_OTHER_VALUES = 20
"""Distinct values from which a variable is more likely a name than a label."""

MAX_NAMED = 5
"""Names in a sentence; the others are counted."""

MAX_TEAMS = 1000
"""As many as the settings may have."""

_TEAM_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def choose_labels(hosts: Iterable[Mapping[str, JSON]]) -> list[str]:
    """Return the usual labels that some host has as a variable with one plain value."""
    named = {name for variables in hosts for name, value in variables.items() if is_plain(value)}
    return [label for label in USUAL_LABELS if label in named]


def other_labels(hosts: Sequence[Mapping[str, JSON]]) -> list[str]:
    """Return further variables that could be labels: most hosts have one of a few values."""
    values: dict[str, Counter[str]] = {}
    for variables in hosts:
        for name, value in variables.items():
            if is_plain(value) and not name.startswith("ansible_") and name not in USUAL_LABELS:
                values.setdefault(name, Counter())[str(value)] += 1
    return sorted(
        name
        for name, counted in values.items()
        if 1 < len(counted) <= MAX_OTHER_VALUES and counted.total() * 2 > len(hosts)
    )


def is_plain(value: JSON) -> bool:
    """Return whether a variable's value is one text that is no template."""
    return isinstance(value, bool | int) or (isinstance(value, str) and value != "" and "{{" not in value)


def choose_cluster_labels(nodes: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return for a cluster's nodes which of their labels gives which label of the fleet."""
    keys = sorted({key for labels in nodes for key in labels})
    chosen = {label: next(filter(pattern.search, keys), None) for label, pattern in CLUSTER_LABELS.items()}
    return {label: key for label, key in chosen.items() if key is not None}


def propose_pools(nodes: Mapping[str, Mapping[str, str]]) -> list[Change]:
    """Return the pools of nodes with these labels: teams, and what fails together."""
    teams = _members(nodes, TEAM)
    unowned = len(nodes) - sum(teams.values())
    reason = f"How many nodes of each team may be down at once; init proposed one; {_describe(TEAM, teams)}."
    if unowned:
        problem = "share the pool team/none"
        reason += f" {pluralize(unowned, 'node')} without the label team {problem}."
    changes = [Change(("pools", TEAM), {"max_unavailable": 1}, reason)]
    for key in FAILURE_DOMAINS:
        values = _members(nodes, key)
        if len(values) > 1:
            reason = f"Nodes of one {key} fail together; {_describe(key, values)}."
            changes.append(Change(("pools", key), {"max_unavailable": 1}, reason))
    return changes


def propose_teams(
    nodes: Mapping[str, Mapping[str, str]], has_group: Callable[[str], bool], owner: str | None
) -> list[Change]:
    """Return a team for each value of the label `team`; with `owner` also one that has a voter."""
    changes = []
    for team in sorted(_members(nodes, TEAM))[:MAX_TEAMS]:
        if not _TEAM_NAME.fullmatch(team):
            continue
        if has_group(team):
            members, reason = [f"@{team}"], f"The group {team} of this machine votes for its nodes."
        else:
            # It must stay true after a user or a later init has named members.
            problem = f"When init made this team, the machine had no group {team} to vote for its nodes."
            members, reason = [], f'{problem} Name members, such as [alice, "@{team}"].'
        changes.append(Change(("teams", team), {"members": members}, reason))
    if owner is not None and not any(change.value["members"] for change in changes):
        reason = f'Owners of plans approve them; {owner} ran init. Name a group, such as "@ops".'
        changes = [change for change in changes if change.path != ("teams", "infra")]
        changes.insert(0, Change(("teams", "infra"), {"members": [owner]}, reason))
    return changes


def invalid_team_names(nodes: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the values of the label `team` that the settings cannot name."""
    values = {labels[TEAM] for labels in nodes if labels.get(TEAM)}
    return sorted(value for value in values if not _TEAM_NAME.fullmatch(value))


def source_change(kind: str, params: Mapping[str, JSON], reason: str) -> Change:
    return Change(("inventory", APPEND), {kind: dict(params)}, reason)


def _members(nodes: Mapping[str, Mapping[str, str]], key: str) -> dict[str, int]:
    return dict(Counter(labels[key] for labels in nodes.values() if labels.get(key)))


def _describe(key: str, values: Mapping[str, int]) -> str:
    if not values:
        return f"no node has the label {key}"
    parts = [f"{value} {number}" for value, number in sorted(values.items(), key=lambda item: -item[1])]
    return f"nodes by {key}: {join_limited(parts, MAX_NAMED)}"
