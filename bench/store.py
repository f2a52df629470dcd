"""How many durable transitions a second the store writes, and how fast it is read again, on each database.

A transition is a node taking one edge of the table: its row updated and its audit entry chained, in one
transaction, answered after the fsync.  Many callers at once move their own nodes through the whole table, as
the drivers do.  The bare database does the same statements with the same texts on the same tables and disk, a
hundred transitions to a commit, from a plain loop: no event loop, no chain, nothing computed, no trigger.

Recovery is a start: the store opened and all facts of the rollout read.  Bare, it is the same rows fetched.
Rounds of all alternate, and the medians are compared, because a disk's mood changes.  PostgreSQL is the
distribution's, on a Unix socket, with fsync and without a standby server; where there is none it is left out.

    python -m bench.store [--transitions 20000] [--callers 500] [--rounds 3] [--dir DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from machines.facts.apply import apply_to_target
from machines.model.events import PhaseMoved, RolloutOpened
from machines.model.plan import Digest, Plan
from machines.model.rollout import DAEMON, Target
from machines.model.selector import Selector
from machines.states import Outcome, Phase, Trigger
from rolloutd.store import backend_of, open_store
from rolloutd.store.audit_entries import add_sequence_number, draft_entries
from rolloutd.store.backend import Connection
from rolloutd.store.postgresql.connection import Address, PostgresqlConnection
from rolloutd.store.schema import TABLES
from rolloutd.store.sqlite import database
from rolloutd.store.stored_rows import write_events
from tests.support.postgresql import ROLE, Postgresql, find_programs, running_server

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


@dataclass(frozen=True, slots=True)
class Engine:
    """A database: `make` returns the address of an empty one, `open_bare` a session without our triggers."""

    name: str
    make: Callable[[], Address | None]
    open_bare: Callable[[Path, Address | None], Connection]


@dataclass(frozen=True, slots=True)
class Round:
    """Transitions per second, and seconds to read the facts again."""

    per_s: float
    recovery_s: float


async def through_the_store(state_dir: Path, address: Address | None, nodes: int, callers: int) -> Round:
    state_dir.mkdir(exist_ok=True)
    store = await open_store(state_dir, address, compile_plan=plan_of)
    # One more, which stays pending: of a rollout that has ended only the header is read.
    await store.commit([opened(nodes + 1)], actor=DAEMON, cause="bench", at=0.0)
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
    began = time.perf_counter()
    store = await open_store(state_dir, address, compile_plan=plan_of)
    assert len((await store.load_snapshot()).targets) == nodes + 1
    recovery_s = time.perf_counter() - began
    await store.close()
    verdict = backend_of(state_dir, address).verify_chain()
    assert verdict.ok, verdict.message
    assert verdict.entries >= nodes * len(EDGES), verdict.message
    return Round(nodes * len(EDGES) / seconds, recovery_s)


def through_bare(engine: Engine, state_dir: Path, address: Address | None, nodes: int) -> Round:
    """Run the same statements without the store."""
    state_dir.mkdir()
    with closing(engine.open_bare(state_dir, address)) as connection:  # type: ignore[type-var]
        connection.execute("BEGIN")
        write_events(connection, [opened(nodes + 1)], 0.0)
        connection.execute("COMMIT")
        targets, table = {target.node: target for target in opened(nodes).targets}, TABLES[Target]
        work = []
        for seq, event in enumerate((event for i in range(nodes) for event in moves_to_done(f"n{i}")), 1):
            targets[event.node] = apply_to_target(targets[event.node], event)
            row = table.encode(targets[event.node])
            (text,) = draft_entries(event, actor=DAEMON, cause="decide", at=event.at, digest="w" * 64)
            work.append((table.update, row, (seq, add_sequence_number(text, seq), "0" * 64)))
        began = time.perf_counter()
        for start in range(0, len(work), BARE_BATCH):
            connection.execute("BEGIN")
            for sql, row, entry in work[start : start + BARE_BATCH]:
                connection.execute(sql, row)
                connection.execute("INSERT INTO audit (seq, entry, hash) VALUES (?, ?, ?)", entry)
            connection.execute("COMMIT")
        seconds = time.perf_counter() - began
    began = time.perf_counter()
    with closing(engine.open_bare(state_dir, address)) as connection:  # type: ignore[type-var]
        for name in ("rollout", "target", "node", "step"):
            connection.execute(f"SELECT * FROM {name}").fetchall()
    return Round(len(work) / seconds, time.perf_counter() - began)


def sqlite_engine() -> Engine:
    return Engine("sqlite", lambda: None, lambda path, _: database.open_writer(path / database.FILE_NAME))


def postgresql_engine(server: Postgresql) -> Engine:
    def make() -> Address:
        return Address(server.dsn(server.make_database(), ROLE))

    def open_bare(_: Path, address: Address | None) -> PostgresqlConnection:
        assert address is not None
        superuser = Address(address.dsn.replace(f"user={ROLE}", "user=postgres"))
        # No trigger runs in a replica's session but those that protect the audit.
        connection = PostgresqlConnection(superuser, {"session_replication_role": "replica"})
        connection.execute("ALTER TABLE audit DISABLE TRIGGER ALL")
        return connection

    return Engine("postgresql", make, open_bare)


def main() -> None:
    """Run the rounds and print one line of JSON, and one for people of each database."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transitions", type=int, default=20_000)
    parser.add_argument("--callers", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--dir", type=Path, default=None, help="where the files are written (its disk counts)"
    )
    asked = parser.parse_args()
    nodes = max(1, asked.transitions // len(EDGES))
    with ExitStack() as stack:
        engines = [sqlite_engine()]
        if find_programs() is not None:
            server = running_server(asked.dir, fsync="on", full_page_writes="on", max_wal_size="1GB")
            engines.append(postgresql_engine(stack.enter_context(server)))
        rounds: dict[str, list[tuple[Round, Round]]] = {engine.name: [] for engine in engines}
        for _ in range(asked.rounds):
            for engine in engines:
                with tempfile.TemporaryDirectory(dir=asked.dir) as directory:
                    ours = through_the_store(Path(directory) / "ours", engine.make(), nodes, asked.callers)
                    bare = through_bare(engine, Path(directory) / "bare", engine.make(), nodes)
                    rounds[engine.name].append((asyncio.run(ours), bare))
    results = {name: summary(measured) for name, measured in rounds.items()}
    counts = {"transitions": nodes * len(EDGES), "callers": asked.callers, "rounds": asked.rounds}
    print(json.dumps({"bench": "store", **results, **counts, "aim_per_s": 10_000}))
    for name, of in results.items():
        print(
            f"store on {name}: {of['per_s']:,.0f} durable transitions/s with audit from {asked.callers}"
            f" callers, {of['share']:.0%} of the bare database's {of['bare_per_s']:,.0f}/s; read again in"
            f" {of['recovery_s']:.2f} s, {of['recovery_ratio']:.1f} times the bare rows'"
        )


def summary(rounds: list[tuple[Round, Round]]) -> dict[str, float]:
    """Return medians and their ratios."""
    per_s, bare_per_s = (statistics.median(each[at].per_s for each in rounds) for at in (0, 1))
    recovery_s, bare_s = (statistics.median(each[at].recovery_s for each in rounds) for at in (0, 1))
    return {
        "per_s": round(per_s),
        "bare_per_s": round(bare_per_s),
        "share": round(per_s / bare_per_s, 3),
        "recovery_s": round(recovery_s, 3),
        "bare_recovery_s": round(bare_s, 3),
        "recovery_ratio": round(recovery_s / bare_s, 2),
    }


if __name__ == "__main__":
    main()
