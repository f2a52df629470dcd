"""How many durable transitions a second the store writes, and its share of bare SQLite.

A transition is a node taking one edge of the table: its row updated and its
audit entry chained, in one transaction, answered after the fsync.  Many callers
at once move their own nodes through the whole table, as the drivers do.

Bare SQLite is the same statements with the same texts on the same schema and
the same disk, a hundred transitions to a commit, from a plain loop: no event
loop, no savepoints, no chain, nothing computed.  Rounds of both alternate, and
the medians are compared, because a disk's mood changes.

    python bench/store.py [--transitions 20000] [--callers 500] [--rounds 3] [--dir DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from machines.facts.apply import apply_to_target
from machines.model.events import PhaseMoved, RolloutOpened
from machines.model.plan import Digest, Plan
from machines.model.rollout import DAEMON, Target
from machines.model.selector import Selector
from machines.states import Outcome, Phase, Trigger
from rolloutd.store import DatabaseBackend, open_store
from rolloutd.store.audit_entries import add_sequence_number, draft_entries
from rolloutd.store.schema import TABLES
from rolloutd.store.sqlite import database
from rolloutd.store.writer import write_events

BARE_BATCH = 100
"""Transitions per commit of the bare run."""

EDGES = (
    (Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING, None),
    (Trigger.ISOLATED, Phase.ISOLATING, Phase.MAINTAINING, None),
    (Trigger.MAINTAINED, Phase.MAINTAINING, Phase.VERIFYING, None),
    (Trigger.VERIFIED, Phase.VERIFYING, Phase.DONE, Outcome.CHANGED),
)


def opened(nodes: int) -> RolloutOpened:
    """Return a submit with so many targets."""
    targets = tuple(
        Target("r1", f"n{i}", f"team{i % 20}", (f"team/team{i % 20}", f"rack/r{i % 50}"), "fleet", i)
        for i in range(nodes)
    )
    return RolloutOpened("r1", "bench", {}, {}, Digest("c", "s", "p", "w" * 64), "sel", DAEMON, 0.0, targets)


def moves_to_done(node: str) -> Iterator[PhaseMoved]:
    """Yield a node's way from pending to done."""
    for at, (trigger, source, target, outcome) in enumerate(EDGES, 1):
        yield PhaseMoved("r1", node, trigger, source, target, 1, float(at), outcome=outcome)


def plan_of(_: object) -> Plan:
    """Return a plan; the bench never reads it."""
    return Plan("bench", "infra", Selector(()), (), (), ())


async def through_the_store(state_dir: Path, nodes: int, callers: int) -> float:
    """Return transitions per second through the store."""
    store = await open_store(state_dir, compile_plan=plan_of)
    await store.commit([opened(nodes)], actor=DAEMON, cause="bench", at=0.0)
    names = iter([f"n{i}" for i in range(nodes)])

    async def drive() -> None:
        for node in names:
            for event in moves_to_done(node):
                await store.commit([event], actor=DAEMON, cause="decide", at=event.at)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(drive())
    seconds = time.perf_counter() - began
    await store.close()
    verdict = DatabaseBackend(state_dir / database.FILE_NAME).verify_chain()
    assert verdict.ok, verdict.message
    assert verdict.entries >= nodes * len(EDGES), verdict.message
    return nodes * len(EDGES) / seconds


def through_bare_sqlite(state_dir: Path, nodes: int) -> float:
    """Return transitions per second of the same statements on bare SQLite."""
    state_dir.mkdir()
    connection = database.open_writer(state_dir / database.FILE_NAME)
    connection.execute("BEGIN")
    write_events(connection, [opened(nodes)], 0.0)
    connection.execute("COMMIT")
    targets, table = {target.node: target for target in opened(nodes).targets}, TABLES[Target]
    work = []
    for seq, event in enumerate((event for i in range(nodes) for event in moves_to_done(f"n{i}")), 1):
        targets[event.node] = apply_to_target(targets[event.node], event)
        row = table.encode(targets[event.node])
        (text,) = draft_entries(event, actor=DAEMON, cause="decide", at=event.at, digest="w" * 64)
        work.append((table.update, row, add_sequence_number(text, seq), "0" * 64))
    began = time.perf_counter()
    for start in range(0, len(work), BARE_BATCH):
        connection.execute("BEGIN IMMEDIATE")
        for sql, row, entry, digest in work[start : start + BARE_BATCH]:
            connection.execute(sql, row)
            connection.execute("INSERT INTO audit (entry, hash) VALUES (?, ?)", (entry, digest))
        connection.execute("COMMIT")
    seconds = time.perf_counter() - began
    connection.close()
    return len(work) / seconds


def main() -> None:
    """Run the rounds and print one line of JSON and one for people."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transitions", type=int, default=20_000)
    parser.add_argument("--callers", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--dir", type=Path, default=None, help="where the files are written (its disk counts)"
    )
    asked = parser.parse_args()
    nodes = max(1, asked.transitions // len(EDGES))
    ours, theirs = [], []
    for _ in range(asked.rounds):
        with tempfile.TemporaryDirectory(dir=asked.dir) as directory:
            ours.append(asyncio.run(through_the_store(Path(directory) / "ours", nodes, asked.callers)))
            theirs.append(through_bare_sqlite(Path(directory) / "bare", nodes))
    rate, limit = statistics.median(ours), statistics.median(theirs)
    found = {
        "bench": "store",
        "transitions_per_s": round(rate),
        "bare_sqlite_per_s": round(limit),
        "share": round(rate / limit, 3),
        "transitions": nodes * len(EDGES),
        "callers": asked.callers,
        "rounds": asked.rounds,
        "aim_per_s": 10_000,
    }
    print(json.dumps(found))
    print(
        f"store: {rate:,.0f} durable transitions/s with audit from {asked.callers} callers (aim 10,000),"
        f" {rate / limit:.0%} of bare SQLite's {limit:,.0f}/s"
    )


if __name__ == "__main__":
    main()
