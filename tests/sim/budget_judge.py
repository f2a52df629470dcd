"""Judges which isolations give way while a pool has more nodes down than its budget.

It counts by the oracle's log and knows nothing of the daemon's decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from machines.model.events import Event, PhaseMoved, StepRecorded
from machines.model.step_record import StepAction
from machines.states import Phase, Trigger
from tests.oracle import Oracle

GIVEN_WAY_WITHIN_S = 120.0
"""So long a pool may be over its budget before an isolated node of it must wait: the longest lock of the
database, and some tries to write.
"""

OVER_UNTIL_S = 300.0
"""So long before an abort its pool was over its budget: an observation may come between two commits."""

OVER_BUDGET = "is over its budget of"
"""What the text of an abort says whose pool was over its budget."""

Place = tuple[str, str]
"""Rollout and node."""


class BudgetJudge:
    """Gets every commit, and looks at the pools of isolating nodes."""

    def __init__(
        self,
        oracle: Callable[[], Oracle],
        now: Callable[[], float],
        monotonic: Callable[[], float],
        report: Callable[[str], None],
    ) -> None:
        self._oracle, self._now, self._monotonic, self._report = oracle, now, monotonic, report
        self.is_on = True
        """Off in a large fleet: each look is over the pools of all isolating nodes."""
        self._isolating: set[Place] = set()
        self._over_since: dict[Place, float] = {}
        """Since when every isolating node of a pool of the place must give way (monotonic)."""
        self._pools_over_at: dict[str, float] = {}
        """When a pool was last seen over its budget (monotonic)."""
        self._returning_since: dict[Place, float] = {}

    def on_commit(self, events: Sequence[Event]) -> None:
        """Hear what was committed, after the oracle has."""
        if not self.is_on:
            return
        for event in events:
            if isinstance(event, PhaseMoved):
                self._on_transition(event)
            elif isinstance(event, StepRecorded):
                place = event.record.rollout, event.record.node
                if event.record.action is StepAction.REVERT and place in self._isolating:
                    self._returning_since.setdefault(place, self._monotonic())
        self.look()

    def look(self) -> None:
        """Take note of the pools that are over their budget now."""
        for place in self._isolating:
            rollout, node = place
            oracle, now = self._oracle(), self._now()
            excess = {pool: oracle.excess(pool, now) for pool in oracle.pools_of(rollout, node)}
            for pool, (_, at_most) in excess.items():
                if at_most > 0:
                    self._pools_over_at[pool] = self._monotonic()
            if any(sure > 0 and sure >= self._isolating_in(pool) for pool, (sure, _) in excess.items()):
                self._over_since.setdefault(place, self._monotonic())
            else:
                self._over_since.pop(place, None)

    def _on_transition(self, event: PhaseMoved) -> None:
        place = event.rollout, event.node
        if event.source is Phase.ISOLATING:
            since = self._over_since.pop(place, None)
            if event.target is Phase.MAINTAINING and since is not None:
                self._judge_change(event, self._monotonic() - since)
            if event.trigger is Trigger.ISOLATION_ABORTED and OVER_BUDGET in event.text:
                self._judge_abort(event)
            self._isolating.discard(place)
            self._returning_since.pop(place, None)
        if event.target is Phase.ISOLATING:
            self._isolating.add(place)

    def _judge_change(self, event: PhaseMoved, over_s: float) -> None:
        """Accuse a change that begins although its node must wait for a slot."""
        oracle, node = self._oracle(), event.node
        # A node that failed before, that goes back, or that others keep down would not be in service.
        has_failed = any(each["node"] == node for each in oracle.failures[event.rollout])
        is_shared = oracle.in_progress.get(node, []) != [event.rollout] or node in oracle.failed
        if over_s > GIVEN_WAY_WITHIN_S and not (event.rolling_back or has_failed or is_shared):
            self._report(f"{node} of {event.rollout} is changed in a pool over its budget for {over_s:.0f} s")

    def _judge_abort(self, event: PhaseMoved) -> None:
        """Accuse an abort for a pool that was within its budget."""
        place = event.rollout, event.node
        began = self._returning_since.get(place, self._monotonic())
        pools = [pool for pool in self._oracle().pools_of(*place) if pool in event.text]
        since = began - OVER_UNTIL_S
        if not any(self._pools_over_at.get(pool, -math.inf) >= since for pool in pools):
            self._report(
                f"{event.node} of {event.rollout} gave way to a pool within its budget: {event.text}"
            )

    def _isolating_in(self, pool: str) -> int:
        return len({node for _, node in self._isolating}.intersection(self._oracle().members_of(pool)))
