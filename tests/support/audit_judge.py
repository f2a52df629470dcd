"""The audit of a real daemon, judged by the oracle.

The audit has no observations: the judge says that every node was up, so it fits tests in which no node ends.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from machines.model.events import Event, NodesDiscovered, PhaseMoved, StepRecorded
from machines.model.step_record import StepAction, StepState
from machines.states import Phase
from rolloutd.settings import Settings
from rolloutd.settings.compile import compile_plan
from rolloutd.store import SqliteBackend
from rolloutd.store.audit_replay import decode_event
from rolloutd.store.backend import Connection
from rolloutd.store.queries import load_rollout
from tests.support.oracle_feed import OracleFeed


def judge_audit(state_dir: Path, settings: Settings) -> list[str]:
    """Return what the oracle says of all that the audit of a stopped daemon has."""
    return SqliteBackend(state_dir / "rolloutd.sqlite").read_now(lambda db: _judge(db, settings))


def _judge(connection: Connection, settings: Settings) -> list[str]:
    judge = _AuditJudge()
    for (rollout,) in connection.execute("SELECT id FROM rollout").fetchall():
        found = load_rollout(connection, rollout, lambda content: compile_plan(content, teams=settings.teams))
        judge.plans[rollout] = found.plan
    judge.on_settings(settings)
    for at, event in _events(connection):
        judge.at = at
        judge.on_event(event)
    return judge.violations


def _events(connection: Connection) -> Iterator[tuple[float, Event]]:
    for (text,) in connection.execute("SELECT entry FROM audit ORDER BY seq"):
        entry = json.loads(text)
        yield entry["at"], decode_event(entry)


class _AuditJudge(OracleFeed):
    """Feeds the oracle from events alone: records say what runs on a node and whether it is isolated."""

    def __init__(self) -> None:
        super().__init__(lambda: self.at)
        self.at = 0.0
        self._nodes: set[str] = set()
        self._runs: set[tuple[object, ...]] = set()
        self._holders: dict[str, set[str]] = defaultdict(set)

    def on_event(self, event: Event) -> None:
        """Hear one committed event."""
        if isinstance(event, NodesDiscovered):
            self._nodes |= {node.name for node in event.nodes}
        if isinstance(event, PhaseMoved) and event.target is Phase.ISOLATING:
            for node in self._nodes:
                self.feed_oracle("saw", node=node, up=True, foreign=False)
        super().on_event(event)
        if isinstance(event, StepRecorded):
            self._on_step(event)

    def _on_step(self, event: StepRecorded) -> None:
        record = event.record
        place = {"rollout": record.rollout, "node": record.node}
        holders = self._holders[record.node]
        if event.isolated is True:
            holders.add(record.rollout)
            self.feed_oracle("isolated", **place)
        elif event.isolated is False:
            holders.discard(record.rollout)
            if not holders:
                self.feed_oracle("back", **place)
        if record.action is not StepAction.RUN:
            return
        run = (record.rollout, record.node, record.attempt, record.step, record.number)
        if record.state is not StepState.INTENDED:
            self._runs.discard(run)
            self.feed_oracle("maintained", **place)
        elif run not in self._runs:  # an intent is written again when its run has a handle
            self._runs.add(run)
            self.feed_oracle("maintain", **place)
