"""A rollout's past from the audit: the phase of each node at any moment, and what was decided.

It is loaded backwards, page by page.  A transition names its source, so a moment is
known as soon as all transitions after it are; nothing before it is needed.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from sys import intern
from typing import Any, NamedTuple

from rolloutd.texts.audit_names import with_current_names
from tui.state.values import NodeState

MAX_TRANSITIONS = 60_000
"""Transitions kept: all of a rollout of ten thousand nodes, about ten megabytes."""

MAX_DECISIONS = 1_000

ROLLOUT_HISTORY_EVENTS = (
    "VoteCast",
    "GateOpened",
    "RolloutPaused",
    "RolloutResumed",
    "RolloutCancelled",
    "RolloutEnded",
)
FLEET_HISTORY_EVENTS = ("FreezeStarted", "FreezeLifted")
DECISIONS = frozenset((*ROLLOUT_HISTORY_EVENTS, *FLEET_HISTORY_EVENTS))

_at, _seq = attrgetter("at"), itemgetter("seq")


class Transition(NamedTuple):
    """A node changed its phase."""

    at: float
    node: str
    source: str
    target: str
    outcome: str | None


class PastPhase(NamedTuple):
    """The phase of a node at a moment; `since` is None if its beginning is not loaded."""

    phase: str
    outcome: str | None
    since: float | None


class History:
    """The transitions and decisions of one rollout; entries before `first_seq` are not loaded yet."""

    def __init__(self, rollout: str, first_seq: int) -> None:
        self.rollout = rollout
        self.first_seq = first_seq
        self.is_complete = False
        self.has_decisions = False
        self.decisions: list[Mapping[str, Any]] = []
        self._by_node: dict[str, list[Transition]] = {}
        self._in_order: deque[Transition] = deque()

    @property
    def loaded_from(self) -> float:
        """The instant from which on everything is known."""
        if self.is_complete:
            return -math.inf
        return self._in_order[0].at if self._in_order else math.inf

    @property
    def latest_at(self) -> float:
        """The instant of the last transition; none after it comes with an earlier one."""
        return self._in_order[-1].at if self._in_order else -math.inf

    @property
    def is_full(self) -> bool:
        return len(self._in_order) >= MAX_TRANSITIONS

    def add_entry(self, entry: Mapping[str, Any]) -> None:
        """Add an entry of the stream, of any event and any rollout."""
        if entry["event"] == "PhaseMoved" and entry["rollout"] == self.rollout:
            transition = _parse_transition(entry)
            self._in_order.append(transition)
            self._by_node.setdefault(transition.node, []).append(transition)
            if len(self._in_order) > MAX_TRANSITIONS:
                self._drop_oldest()
        elif entry["event"] in DECISIONS and entry["rollout"] in (None, self.rollout):
            self.decisions.append(entry)
            del self.decisions[:-MAX_DECISIONS]

    def add_earlier(self, entries: Sequence[Mapping[str, Any]], *, is_complete: bool) -> None:
        """Add a page of transitions before `first_seq`, oldest first."""
        self.is_complete = is_complete
        if entries:
            self.first_seq = entries[0]["seq"]
        for entry in reversed(entries):
            transition = _parse_transition(entry)
            self._in_order.appendleft(transition)
            self._by_node.setdefault(transition.node, []).insert(0, transition)

    def add_decisions(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Add earlier decisions, but none that the stream has brought already."""
        known = {entry["seq"] for entry in self.decisions}
        for entry in entries:
            if entry["seq"] not in known:
                insort(self.decisions, with_current_names(entry), key=_seq)
        self.has_decisions = True

    def phase_at(self, node: NodeState, at: float) -> PastPhase:
        """Return a node's phase at a moment; `node` is its present state."""
        transitions = self._by_node.get(node.node, ())
        index = bisect_right(transitions, at, key=_at)
        if index:
            last = transitions[index - 1]
            return PastPhase(last.target, last.outcome, last.at)
        if transitions:
            return PastPhase(transitions[0].source, None, None)
        return PastPhase(node.phase, node.outcome, node.since)

    def spans(self, node: NodeState, begin: float, end: float) -> Iterator[tuple[float, float, PastPhase]]:
        """Yield the node's phases between two instants, each with its begin and its end."""
        transitions = self._by_node.get(node.node, ())
        current, since = self.phase_at(node, begin), begin
        for index in range(bisect_right(transitions, begin, key=_at), len(transitions)):
            each = transitions[index]
            if each.at >= end:
                break
            yield since, each.at, current
            current, since = PastPhase(each.target, each.outcome, each.at), each.at
        yield since, end, current

    def transitions_before(self, at: float, count: int) -> list[Transition]:
        """Return the last transitions until a moment, the latest first."""
        found: list[Transition] = []
        for each in reversed(self._in_order):
            if each.at <= at:
                found.append(each)
                if len(found) == count:
                    break
        return found

    def _drop_oldest(self) -> None:
        dropped = self._in_order.popleft()
        of_node = self._by_node[dropped.node]
        del of_node[0]
        if not of_node:
            del self._by_node[dropped.node]
        self.is_complete = False


def _parse_transition(entry: Mapping[str, Any]) -> Transition:
    # The decoder makes a new string for every value; thousands of transitions share few names.
    fields, outcome = entry["fields"], entry["fields"]["outcome"]
    return Transition(
        fields["at"],
        intern(entry["node"]),
        intern(fields["source"]),
        intern(fields["target"]),
        None if outcome is None else intern(outcome),
    )
