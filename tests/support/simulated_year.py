"""A year of weekly rollouts of one plan, written by the real store and cleaned by the real retention."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from machines.facts.projection import Projection
from machines.model.events import Event, NodesDiscovered, RolloutEnded, StepRecorded
from machines.model.rollout import DAEMON
from machines.model.step_record import StepAction, StepState
from rolloutd.audit.audit_segments import SEGMENTS_DIRECTORY
from rolloutd.engine.background.audit_export import AuditExporter
from rolloutd.engine.background.retention import RetentionCleaner
from rolloutd.engine.change_notifier import ChangeNotifier
from rolloutd.engine.state import State
from rolloutd.settings import Settings
from rolloutd.settings.compile import compile_limits
from rolloutd.store import FILE_NAME, Store, open_store
from tests.contracts.fakes.artifacts import FakeArtifactStore
from tests.contracts.store_backends import moves_to_done, node, plan_of, rollout_opened, step

WEEK_S = 7 * 86_400.0

KEPT_WEEKS = 9
"""Weeks of records: about the shortest that the settings allow."""

NODES_PER_COMMIT = 100

OUTPUT = "ok: [node]\n" * 40
"""The end of a playbook's output, as a step keeps it."""


@dataclass(frozen=True, slots=True)
class Week:
    """What is kept after a week; `table_bytes` leave the audit and its indexes out."""

    table_bytes: int
    audit_bytes: int
    segment_bytes: int
    free_bytes: int
    closed_rollouts: int
    rollouts_in_memory: int


class PassingClock:
    """ports.Clock in which no time passes but by weeks: a pause takes none."""

    def __init__(self) -> None:
        self.at = 1_800_000_000.0

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        return


async def simulate_year(
    directory: Path, nodes: int, weeks: int = 52, keep_audit: str | None = None
) -> list[Week]:
    """Return what is kept after each week; `keep_audit` as in the settings."""
    clock = PassingClock()
    store = await open_store(directory, compile_plan=plan_of, inline=True, now=clock.now)
    try:
        keep = {"records": f"{KEPT_WEEKS * 7}d", "runs": "28d", "audit": keep_audit}
        settings = Settings.model_validate({"keep": keep})
        snapshot = await store.load_snapshot()
        index = Projection.build(snapshot, compile_limits(settings), plan_of)
        state = State(index, store, clock, settings, ChangeNotifier(), epoch=snapshot.epoch)
        await store.sign_audit_checkpoint(clock.now(), all_rows=True)
        audit = AuditExporter(state, directory / SEGMENTS_DIRECTORY, store.backend.load_signing_key())
        retention = RetentionCleaner(state, FakeArtifactStore(), [], audit)
        names = [f"n{number:06}" for number in range(nodes)]
        await _commit(state, [NodesDiscovered(tuple(map(node, names)))])
        kept = []
        for week in range(weeks):
            for events in _rollout(f"r{week}", names, clock.now()):
                await _commit(state, events)
            clock.at += WEEK_S
            await retention.remove_expired()
            kept.append(await _measure(state, store, directory / FILE_NAME))
        problem = (await store.verify_audit_checkpoint()).problem
        assert not problem, problem
        return kept
    finally:
        await store.close()


def _rollout(rollout: str, names: Sequence[str], at: float) -> Iterator[list[Event]]:
    """Yield the commits of a rollout that changes every node."""
    opened = rollout_opened(rollout, names, at=at)
    yield [replace(opened, name="weekly")]
    for first in range(0, len(names), NODES_PER_COMMIT):
        part = names[first : first + NODES_PER_COMMIT]
        yield [event for name in part for event in _node_events(rollout, name, at)]
    yield [RolloutEnded(rollout, at)]


def _node_events(rollout: str, name: str, at: float) -> list[Event]:
    begun = replace(step(StepState.INTENDED, name, step="isolate.0.command", at=at), rollout=rollout)
    run = replace(begun, step="run.configure", action=StepAction.RUN, handle=f"{rollout}.{name}")
    check = replace(begun, step="verify.0.reachable", action=StepAction.CHECK, state=StepState.OK)
    records = (
        begun,
        replace(begun, state=StepState.OK),
        run,
        replace(run, state=StepState.OK, output=OUTPUT),
        check,
    )
    admitted, isolated, maintained, verified = moves_to_done(name, rollout)
    steps = [StepRecorded(each) for each in records]
    return [admitted, *steps[:2], isolated, *steps[2:4], maintained, *steps[4:], verified]


async def _commit(state: State, events: Sequence[Event]) -> None:
    # Past the invariants, which would ask for votes and observations: what is measured is what is kept.
    await state.store.commit(events, actor=DAEMON, cause="a year", at=state.now())
    for event in events:
        state.index.apply(event)


async def _measure(state: State, store: Store, path: Path) -> Week:
    volume = await store.measure(state.now())
    with closing(sqlite3.connect(path)) as connection:
        sizes = dict(connection.execute("SELECT name, sum(pgsize) FROM dbstat GROUP BY name").fetchall())
    audit = sum(size for name, size in sizes.items() if name.startswith("audit"))
    segments = path.with_name(SEGMENTS_DIRECTORY)
    return Week(
        sum(sizes.values()) - audit,
        audit,
        sum(file.stat().st_size for file in segments.glob("*")),
        volume.free_bytes,
        volume.closed_rollouts,
        len(state.index.rollouts),
    )
