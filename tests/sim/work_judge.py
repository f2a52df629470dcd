"""Judges which work is done on a node at the same time, by a list of its own.

Attempts, stages and holds are those that were committed; the other work is what the daemon has in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Final

from machines.facts.index import Index
from machines.model.events import (
    DaemonStarted,
    Event,
    HoldReleased,
    HoldTaken,
    PhaseMoved,
    PreparationRecorded,
    RolloutDeleted,
)
from machines.model.preparation import PreparationState
from machines.model.rollout import Hold
from machines.states import IN_FLIGHT_PHASES

NEVER_TOGETHER: Final = frozenset(
    frozenset(pair)
    for pair in (
        ("attempt", "check-mode"),
        ("attempt", "cleaning"),
        ("attempt", "releasing"),
        ("check-mode", "check-mode"),
        ("check-mode", "cleaning"),
        ("stage", "check-mode"),
        ("stage", "cleaning"),
        ("hold", "cleaning"),
    )
)
"""Work of which neither begins beside the other, whichever came first."""


class WorkJudge:
    """Gets every commit, and looks at the facts of the current daemon whenever work begins."""

    def __init__(self, now: Callable[[], float], report_violation: Callable[[str], None]) -> None:
        self.current_facts: Callable[[], Index | None] = lambda: None
        self._now = now
        self._report = report_violation
        self._attempts: set[tuple[str, str]] = set()
        self._stages: set[tuple[str, str, str]] = set()
        self._deleted: set[str] = set()
        self._holds: dict[tuple[str, str, str], Hold] = {}

    def on_commit(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case PhaseMoved():
                    is_at_work = event.target in IN_FLIGHT_PHASES
                    (self._attempts.add if is_at_work else self._attempts.discard)(
                        (event.node, event.rollout)
                    )
                case RolloutDeleted(rollout=rollout):
                    self._deleted.add(rollout)
                case DaemonStarted():
                    # A daemon does not load deleted rollouts, so it continues none of their cleanups.
                    self._stages = {key for key in self._stages if key[1] not in self._deleted}
                case HoldTaken(hold=hold):
                    self._holds[hold.node, hold.source, hold.id] = hold
                case HoldReleased():
                    self._holds.pop((event.node, event.source, event.id), None)
                case PreparationRecorded(preparation=row):
                    key = (row.node, row.rollout, row.stage)
                    is_running = row.state is PreparationState.RUNNING
                    if is_running and key not in self._stages and self._is_held(row.node):
                        self._report(
                            f"stage {row.stage} of {row.rollout} begins on {row.node}, which is held"
                        )
                    (self._stages.add if is_running else self._stages.discard)(key)
        self.look()

    def look(self) -> None:
        """Report work that meets on a node."""
        facts = self.current_facts()
        if facts is None:
            return
        for node in facts.nodes:
            recorded = [work.kind.value for work in facts.recorded_work(node)]
            pairs = combinations((*recorded, *self._committed_work(node)), 2) if recorded else ()
            for pair in pairs:
                if frozenset(pair) in NEVER_TOGETHER:
                    self._report(f"{' and '.join(pair)} on {node} at once")

    def has_other_work(self, node: str) -> bool:
        """Return whether a stage or other work than an attempt or a hold is on the node."""
        facts = self.current_facts()
        recorded = facts is not None and any(facts.recorded_work(node))
        return recorded or "stage" in self._committed_work(node)

    def _committed_work(self, node: str) -> list[str]:
        found = ["attempt"] if any(name == node for name, _ in self._attempts) else []
        found += ["stage"] if any(name == node for name, _, _ in self._stages) else []
        return found + (["hold"] if self._is_held(node) else [])

    def _is_held(self, node: str) -> bool:
        holds = (hold for (name, _, _), hold in self._holds.items() if name == node)
        return any(hold.until is None or self._now() < hold.until for hold in holds)
