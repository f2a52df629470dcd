"""Measures how long a daemon needs after a restart: from reading its settings to its first decision.

The database is written by the real store: one rollout with 100,000 finished and
200 busy nodes, and an audit that tells of every step of them.  Each round is a
process of its own that runs the whole daemon, its drivers and its look at the
audit's chain included; only the inventory does not answer, as after a power cut.
Beside it, what a bare loop needs to read the same rows from the same file.

    python bench/recovery.py [--finished 100000] [--busy 200] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from machines.model.events import GateOpened, NodesDiscovered, PhaseMoved, RolloutOpened
from machines.model.node import Node
from machines.model.plan import Digest, GateName
from machines.model.rollout import DAEMON, Target
from machines.states import Outcome, Phase, Trigger
from rolloutd import planfile
from rolloutd.app import serve
from rolloutd.audit.audit_chain import hash_entry
from rolloutd.service.reload import TeamPlanCompiler
from rolloutd.settings import load
from rolloutd.store import open_store
from rolloutd.store.audit_entries import add_sequence_number, draft_entries

ROOT = Path(__file__).resolve().parent.parent

AIM_S = 2.0

LIMIT_S = 300.0
"""When a daemon that has not decided is given up."""

TEAMS, RACKS = 400, 200

PLAN = b"""\
apiVersion: rolloutd/v1
kind: MaintenancePlan
metadata: {name: bench, owner: infra}
spec:
  source: {git: "https://git.example/playbooks.git", ref: v1}
  targets: role=worker
  maintain: {playbook: change.yml}
  verify: [{reachable: {within: 10m}}]
  canary: {select: "canary=true"}
"""

EDGES = (
    (Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING, None),
    (Trigger.ISOLATED, Phase.ISOLATING, Phase.MAINTAINING, None),
    (Trigger.MAINTAINED, Phase.MAINTAINING, Phase.VERIFYING, None),
    (Trigger.VERIFIED, Phase.VERIFYING, Phase.DONE, Outcome.CHANGED),
)


def main() -> None:
    """Measure and print; with --round, be one round."""
    parser = argparse.ArgumentParser(description="Measure how long a restart takes.")
    parser.add_argument("--finished", type=int, default=100_000)
    parser.add_argument("--busy", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.round is not None:
        print(json.dumps(asyncio.run(recover(options.round))))
        return
    with tempfile.TemporaryDirectory(prefix="rolloutd-bench-") as directory:
        config = Path(directory) / "config.yaml"
        asyncio.run(prepare(Path(directory), config, options.finished, options.busy))
        command = [sys.executable, __file__, "--round", str(config)]
        took, worked, bare = [], [], []
        for _ in range(options.rounds):
            bare.append(read_rows(Path(directory) / "state" / "rolloutd.sqlite"))
            done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=LIMIT_S)
            found = json.loads(done.stdout)
            took.append(found["recovery_s"])
            worked.append(found["cpu_s"])
    report(options, statistics.median(took), statistics.median(worked), statistics.median(bare))


def report(options: argparse.Namespace, took_s: float, cpu_s: float, bare_s: float) -> None:
    """Print one line of JSON and one for people."""
    found = {
        "bench": "recovery",
        "recovery_s": round(took_s, 3),
        "cpu_s": round(cpu_s, 3),
        "bare_rows_s": round(bare_s, 3),
        "finished": options.finished,
        "busy": options.busy,
        "rounds": options.rounds,
        "aim_s": AIM_S,
    }
    print(json.dumps(found))
    print(
        f"recovery: {took_s:.2f} s from settings to first decision (aim {AIM_S:.0f}; {cpu_s:.2f} of work)"
        f" with {options.finished} finished and {options.busy} busy nodes; the bare rows take {bare_s:.2f} s"
    )


# -- one round ----------------------------------------------------------------


async def recover(config: Path) -> dict[str, float]:
    """Run the daemon until it says that it has decided; return what that took."""
    logging.disable(logging.WARNING)
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        address = config.parent / "n"
        address.unlink(missing_ok=True)
        told.bind(str(address))
        told.setblocking(False)
        os.environ["NOTIFY_SOCKET"] = str(address)
        began, worked = time.perf_counter(), time.process_time()
        serving = asyncio.create_task(serve(load(config)))
        async with asyncio.timeout(LIMIT_S):
            while b"READY=1" not in await loop.sock_recv(told, 65536):
                pass
        took, worked = time.perf_counter() - began, time.process_time() - worked
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
    return {"recovery_s": took, "cpu_s": worked}


def read_rows(database: Path, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long it takes to read every node and target, and nothing else (seconds)."""
    began = clock()
    with closing(sqlite3.connect(database)) as connection:
        for sql in ("SELECT * FROM node ORDER BY name", "SELECT * FROM target ORDER BY rollout, position"):
            for _ in connection.execute(sql):
                pass
    return clock() - began


# -- the database -------------------------------------------------------------


async def prepare(directory: Path, config: Path, finished: int, busy: int) -> None:
    """Write settings and a database with so many nodes in it."""
    (directory / "state").mkdir(mode=0o700)
    settings = {
        "state_dir": "state",
        "socket": "s",
        "inventory": [{"ansible": {"path": "no-hosts.yml"}}],
        "pools": {"team": {"max_unavailable": "100%"}, "rack": {"max_unavailable": "100%"}},
        "max_parallel": 1000,
    }
    config.write_text(json.dumps(settings))
    source = f"ansible:{directory / 'no-hosts.yml'}"
    content = planfile.read(PLAN, "plan.yml").content
    store = await open_store(directory / "state", compile_plan=TeamPlanCompiler({}))
    try:
        nodes = tuple(node_of(number, source) for number in range(finished + busy))
        # Nobody answers there, so the busy nodes' drivers try and wait, as they would at night.
        ways = {node.name: {"ansible_host": "127.0.0.1", "ansible_port": 9} for node in nodes}
        targets = tuple(target_of(number, node) for number, node in enumerate(nodes))
        digest = Digest("c" * 64, "s" * 64, "p" * 64, "w" * 64)
        opened = RolloutOpened(
            "bench-1", "bench", content, {"kind": "git", "pin": "0" * 40}, digest, "x", DAEMON, 0.0, targets
        )
        gates = [GateOpened("bench-1", gate, "", 1.0) for gate in (GateName.START,)]
        for events in ([NodesDiscovered(nodes, ways)], [opened], gates):
            await store.commit(events, actor=DAEMON, cause="bench", at=1.0)
    finally:
        await store.close()
    finish(directory / "state" / "rolloutd.sqlite", finished, busy)


def node_of(number: int, source: str) -> Node:
    """Return a node; every thousandth is a canary."""
    labels = {"team": f"t{number % TEAMS}", "rack": f"r{number % RACKS}", "role": "worker"}
    return Node(f"n{number:06}", sources=(source,), labels=labels)


def target_of(number: int, node: Node) -> Target:
    """Return the node as a target."""
    team, rack = node.labels["team"], node.labels["rack"]
    return Target("bench-1", node.name, team, (f"team/{team}", f"rack/{rack}"), "fleet", number)


def finish(database: Path, finished: int, busy: int) -> None:
    """Let the first nodes be done and the rest verify, with the rows and entries that their ways leave."""
    now = time.time()
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        connection.execute(
            "UPDATE target SET attempt = 1, since = ?, admitted_at = ?,"
            " phase = CASE WHEN position < ? THEN 'done' ELSE 'verifying' END,"
            " outcome = CASE WHEN position < ? THEN 'changed' END",
            (now, now, finished, finished),
        )
        seq, head = connection.execute("SELECT seq, hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
        rows: list[tuple[Any, ...]] = []
        for number in range(finished + busy):
            for event in moves(f"n{number:06}", EDGES if number < finished else EDGES[:3], now):
                (drafted,) = draft_entries(event, actor=DAEMON, cause="bench", at=now, digest="w" * 64)
                seq += 1
                text = add_sequence_number(drafted, seq)
                head = hash_entry(head, text)
                rows.append((seq, text, head))
        connection.executemany("INSERT INTO audit (seq, entry, hash) VALUES (?, ?, ?)", rows)
        connection.execute("COMMIT")


def moves(node: str, edges: tuple[Any, ...], at: float) -> list[PhaseMoved]:
    """Return a node's way."""
    return [
        PhaseMoved("bench-1", node, trigger, source, target, 1, at, outcome=outcome)
        for trigger, source, target, outcome in edges
    ]


if __name__ == "__main__":
    main()
