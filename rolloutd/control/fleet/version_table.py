"""Nodes and plans with the version that each node has: the answer of `GET /v1/changes`, turned by node.

The command line, the report and the console draw it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the command line's start-up counts
    from rolloutd.control.fleet.wire_fleet import Change, ChangeState

NEXT_STEPS: Mapping[ChangeState, str] = {
    "failed": "rolloutctl why ROLLOUT NODE shows the failure; then retry, skip or rollback",
    "unknown": "nothing shows how its run ended: inspect the node, then retry or skip",
    "drifted": "rolloutctl drift ROLLOUT shows what differs; a plan with keep corrects it",
    "held": "rolloutctl locks shows who holds the node; release lets it start",
    "pending": "rolloutctl why ROLLOUT NODE shows what it waits for",
    "in-flight": "the rollout works on it; rolloutctl logs ROLLOUT NODE shows what it does",
    "skipped": "pinned, or rolled back: it keeps its version until the plan is submitted again",
    "never": "no rollout selects it: change the plan's targets, or enrol",
    "done": "nothing: it has the version",
}
"""What to do about each state, the most urgent state first."""

WAITING: frozenset[ChangeState] = frozenset({"pending", "held", "skipped"})
"""States of a node that has the version of before; after a failed run it may have either."""

CARRIED: frozenset[ChangeState] = frozenset({"done", "drifted"})
"""States of a node that got the change, and so no longer has the plan's change before it."""


class Cell(NamedTuple):
    """What a node has of a plan: its latest change there, and the one before that the node still has."""

    change: Change
    state: ChangeState
    before: Change | None = None

    @property
    def version(self) -> str:
        """The version that the node has, or that the latest run was to bring; empty if it has none."""
        if self.state in WAITING:
            return "" if self.before is None else self.before["version"]
        return self.change["version"]

    def describe(self, latest: Change) -> str:
        """Return the cell under a heading that names the plan's latest change: `pending, has v1.4.1`."""
        if self.state == "done":
            return self.version
        text = self.state if self.change is latest else f"{self.state} {self.change['version']}"
        if self.before is None:
            return text
        return f"{text}, {'has' if self.state in WAITING else 'from'} {self.before['version']}"


@dataclass(frozen=True, slots=True)
class VersionTable:
    """The latest change of each plan, and the cells of each node by plan; none where no rollout came."""

    latest: Mapping[str, Change] = field(default_factory=dict)
    rows: Mapping[str, Mapping[str, Cell]] = field(default_factory=dict)

    def states(self) -> Mapping[ChangeState, int]:
        """Return how often each state occurs, the most urgent first."""
        found = [cell.state for row in self.rows.values() for cell in row.values()]
        return {state: found.count(state) for state in NEXT_STEPS if state in found}


def version_table(changes: Sequence[Change]) -> VersionTable:
    latest: dict[str, Change] = {}
    rows: dict[str, dict[str, Cell]] = {}
    for change in changes:
        plan = change["plan"]
        latest.setdefault(plan, change)
        for each in change["nodes"]:
            row, state = rows.setdefault(each["node"], {}), each["state"]
            if state in ("never", "replaced"):
                continue
            cell = row.get(plan)
            # What failed holds back what is newer.
            if cell is None or (cell.state in ("pending", "held") and state in ("failed", "unknown")):
                row[plan] = Cell(change, state)
            elif (
                state in ("done", "drifted") and cell.before is None and cell.state not in ("done", "drifted")
            ):
                row[plan] = cell._replace(before=change)
    return VersionTable(latest, rows)
