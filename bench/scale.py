"""What the daemon costs at 1,000, 10,000 and 100,000 nodes, with a hundred audit entries for each node.

    python -m bench scale [--json] [--quick] [--nodes 1000,10000,100000]

Each fleet is a process of its own; `--quick` takes 1,000 and 3,000 nodes.  Times are CPU times of one
process, so that other load does not change them.  A start that takes longer than START_LIMIT_S counts as that
long.  Memory per node is the growth of the resident memory from the next smaller fleet; that of the smallest
fleet is the growth to the next one.  The slope is the exponent of the cost: 0 for one that the fleet's size
does not change, 1 for one that grows with it.  Memory growth compares the most resident memory of two half
hours that begin two hours apart.  The ratio of transitions is to those of 1,000 nodes in the same process, by
turns.  `--json` prints a list of {figure, nodes, value, unit, limit}.

All three sizes take about twelve minutes on two idle cores, and 5 GB in the directory for temporary files,
which is empty again at the end, also when the measurement is ended (SIGTERM, SIGINT).  It exits with 0 if all
figures were measured and are within their limits; else stderr names those that are not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from bench import recovery
from machines.model.events import RequestDenied
from machines.model.rollout import DAEMON
from rolloutd.audit.audit_chain import hash_entry
from rolloutd.service.reload import TeamPlanCompiler
from rolloutd.store import open_store
from rolloutd.store.audit_entries import add_sequence_number, draft_entries
from rolloutd.store.sqlite import database

SIZES = (1_000, 10_000, 100_000)
QUICK_SIZES = (1_000, 3_000)

ENTRIES_PER_NODE = 100
FEW_ENTRIES = 100_000
"""The start beside it has a store with the same nodes and as many entries as a fleet of a thousand."""

BUSY = 20
"""Nodes in flight at a start."""

STARTS = 3
"""Starts of one store; the median is shown."""

START_LIMIT_S = 60.0
FLEET_LIMIT_S = 1500.0

REPEATS = {"pauses": 3}
"""How often a part is measured, each time in a new process; the median is shown.  One slow callback is enough
to make a longest pause wrong; the other parts show medians of their own.
"""

CLIENT_PARTS = frozenset({"pages"})
"""Parts with the API's server and clients."""

LIMITS: dict[str, tuple[str, float | None]] = {
    "start decision": ("s", 3.0),
    "start decision ratio": ("", 1.2),
    "start bare rows": ("s", None),
    "start to bare rows": ("", None),
    "loop pause submit": ("ms", 50.0),
    "loop pause supersede": ("ms", 50.0),
    "loop pause refresh": ("ms", 50.0),
    "refresh cpu": ("s", 1.0),
    "loop pause forecast": ("ms", 20.0),
    "loop pause window": ("ms", 50.0),
    "loop pause failures": ("ms", 50.0),
    "loop pause retry": ("ms", 50.0),
    "loop pause expiry": ("ms", 50.0),
    "decision": ("ms", 2.0),
    "idle cpu": ("% of a core", 1.0),
    "memory growth": ("MiB/h", 1.0),
    "memory per node": ("KiB", 4.0),
    "transitions ratio": ("", 1.1),
    "first page status": ("ms", 100.0),
    "first page nodes": ("ms", 100.0),
    "first page changes": ("ms", 100.0),
    "first page inventory": ("ms", 100.0),
    "loop pause pages": ("ms", 20.0),
}
"""Unit and limit of each figure, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Figure:
    figure: str
    nodes: int
    value: float
    unit: str
    limit: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how costs grow with the fleet.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--nodes", type=lambda text: tuple(map(int, text.split(","))))
    options = parser.parse_args()
    sizes = options.nodes or (QUICK_SIZES if options.quick else SIZES)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="rolloutd-scale-", ignore_cleanup_errors=True) as directory:
        # The parts' directories too: a part that is ended removes nothing itself.
        os.environ["TMPDIR"] = tempfile.tempdir = directory
        figures = measure(sizes)
    if options.json:
        print(json.dumps([asdict(each) for each in figures]))
    else:
        print_table(figures, sizes)
    problems = list(find_problems(figures, sizes))
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(bool(problems))


def find_problems(figures: list[Figure], sizes: tuple[int, ...]) -> Iterator[str]:
    """Yield each figure that is not within its limit or was not measured."""
    found = {(each.figure, each.nodes): each for each in figures}
    for name, (unit, limit) in LIMITS.items():
        for nodes in sizes:
            each = found.get((name, nodes))
            if each is None and name == "memory per node" and len(sizes) < 2:
                continue  # it is the growth from one size to the next
            if each is None:
                yield f"{name} of {nodes} nodes: not measured"
            elif limit is not None and each.value > limit:
                yield f"{name} of {nodes} nodes: {each.value:g} {unit}, the limit is {limit:g}"


def measure(sizes: tuple[int, ...]) -> list[Figure]:
    """Return all figures of all sizes; one that could not be measured is missing and named on stderr."""
    by_size = {nodes: measure_size(nodes) for nodes in sizes}
    resident = {nodes: values.pop("resident") for nodes, values in by_size.items() if "resident" in values}
    for small, large in pairwise(sorted(resident)):
        # From one size to the next: a process has caches of its own, which are as large for a thousand nodes.
        growth = (resident[large] - resident[small]) / (large - small)
        by_size[large]["memory per node"] = growth
        by_size[small].setdefault("memory per node", growth)
    return [
        Figure(name, nodes, round(values[name], 3), unit, limit)
        for name, (unit, limit) in LIMITS.items()
        for nodes, values in by_size.items()
        if name in values
    ]


def measure_size(nodes: int) -> dict[str, float]:
    values: dict[str, float] = {}
    began = time.monotonic()
    for part in ("decision", "transitions", "idle", "pauses", "pages"):
        runs = [found for _ in range(REPEATS.get(part, 1)) if (found := measure_part(part, nodes))]
        names = {name: None for found in runs for name in found}
        # A run may lack a figure: on a busy machine a forecast can miss its own time limit.
        values |= {name: statistics.median(found[name] for found in runs if name in found) for name in names}
        print(f"{part} of {nodes} nodes: measured after {time.monotonic() - began:.0f} s", file=sys.stderr)
    entries = nodes * ENTRIES_PER_NODE
    costs = start_cpu_s(nodes, sorted({FEW_ENTRIES, entries}))
    start, bare = costs[-1]
    return values | {
        "start decision": start,
        "start decision ratio": start / costs[0][0],
        "start bare rows": bare,
        "start to bare rows": start / bare,
    }


def measure_part(part: str, nodes: int) -> dict[str, float]:
    """Return the figures of one part, none if it could not be measured."""
    program = "bench._scale_clients" if part in CLIENT_PARTS else "bench._scale_fleet"
    command = [sys.executable, "-m", program, part, str(nodes)]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=FLEET_LIMIT_S, text=True)
        figures: dict[str, float] = json.loads(done.stdout)
        return figures
    except subprocess.CalledProcessError as failed:
        print(f"{part} of {nodes} nodes failed: {failed.stderr[-2000:]}", file=sys.stderr)
    except subprocess.TimeoutExpired:
        print(f"{part} of {nodes} nodes took longer than {FLEET_LIMIT_S:.0f} s", file=sys.stderr)
    return {}


# -- the start ---------------------------------------------------------------------


def start_cpu_s(nodes: int, entries: Iterable[int]) -> list[tuple[float, float]]:
    """Return the CPU times of a start until its first decision, after a clean stop, with so many entries.

    With each: that of a bare loop that reads the rows of the nodes and targets.
    """
    found = []
    with tempfile.TemporaryDirectory(prefix="rolloutd-scale-") as directory:
        config = Path(directory) / "config.yaml"
        asyncio.run(recovery.prepare(Path(directory), config, nodes - BUSY, BUSY))
        for count in entries:
            path = Path(directory) / "state" / database.FILE_NAME
            append_entries(path, count)
            asyncio.run(sign_checkpoint(Path(directory) / "state"))
            start(config)  # it stops cleanly, so that the next one is a usual start
            times = [(start(config), recovery.read_rows(path, time.process_time)) for _ in range(STARTS)]
            starts, bare = zip(*times, strict=True)
            found.append((statistics.median(starts), statistics.median(bare)))
    return found


async def sign_checkpoint(state_dir: Path) -> None:
    """Sign the rows, as a daemon does once it has verified the whole audit, which takes it minutes."""
    store = await open_store(state_dir, compile_plan=TeamPlanCompiler({}))
    try:
        await store.sign_audit_checkpoint(time.time(), all_rows=True)
    finally:
        await store.close()


def start(config: Path) -> float:
    command = [sys.executable, recovery.__file__, "--round", str(config)]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=START_LIMIT_S)
    except subprocess.TimeoutExpired:
        return START_LIMIT_S
    return float(json.loads(done.stdout)["cpu_s"])


def append_entries(path: Path, entries: int) -> None:
    """Append entries of denied requests until the audit has so many.

    They are the cheapest to replay, because no row follows from them.
    """
    with closing(database.open_writer(path)) as connection:
        newest = connection.execute("SELECT seq, hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
        event = RequestDenied(DAEMON, "submit", "not an owner", 1.0)
        (draft,) = draft_entries(event, actor=DAEMON, cause="bench", at=1.0, digest="")

        def rows() -> Iterator[tuple[int, str, str]]:
            seq, head = newest
            for number in range(seq + 1, entries + 1):
                text = add_sequence_number(draft, number)
                head = hash_entry(head, text)
                yield number, text, head

        connection.execute("BEGIN")
        connection.executemany("INSERT INTO audit (seq, entry, hash) VALUES (?, ?, ?)", rows())
        connection.execute("COMMIT")


# -- the table ---------------------------------------------------------------------


def print_table(figures: list[Figure], sizes: tuple[int, ...]) -> None:
    heads = [f"{nodes:,} nodes" for nodes in sizes]
    print(f"{'':22}{'unit':>12}{'limit':>8}" + "".join(f"{head:>16}" for head in heads) + f"{'slope':>8}")
    for name, (unit, limit) in LIMITS.items():
        values = {each.nodes: each.value for each in figures if each.figure == name}
        cells = "".join(_cell(values.get(nodes), limit) for nodes in sizes)
        most = "-" if limit is None else f"{limit:g}"
        print(f"{name:22}{unit:>12}{most:>8}{cells}{_slope(values):>8}")


def _cell(value: float | None, limit: float | None) -> str:
    if value is None:
        return f"{'-':>16}"
    return f"{value:>15,.2f}{' ' if limit is None or value <= limit else '!'}"


def _slope(values: dict[int, float]) -> str:
    """Return the exponent between the smallest and the largest fleet."""
    positive = sorted((nodes, value) for nodes, value in values.items() if value > 0)
    if len(positive) < 2:
        return "-"
    (small, first), (large, last) = positive[0], positive[-1]
    return f"{math.log(last / first) / math.log(large / small):.2f}"


if __name__ == "__main__":
    main()
