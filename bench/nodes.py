"""`rolloutctl nodes` of a rollout over 10,000 nodes, beside `kubectl get nodes` of as many.

    python -m bench nodes [--nodes 10000] [--rounds 5]

kubectl is the real one, against the fake of Kubernetes; rolloutctl asks the API's real server of a daemon.
Both servers are in this process, and the commands run by turns.  The CPU time is that of the command alone;
the wall time has its server's answer too, which is Python's on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench._scale_clients import served
from bench._scale_fleet import Fleet, with_fleet
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_kubernetes.access import ALL_RULES


async def measure_nodes(fleet: Fleet, rounds: int) -> dict[str, float]:
    """Return the times of both commands (ms)."""
    rollout = await fleet.submit("sat", 1)
    names = list(fleet.state.index.nodes)
    async with FakeKubernetes() as cluster, served(fleet) as socket:
        cluster.access.anonymous = ALL_RULES  # kubectl sends no token without TLS
        for name in names:
            cluster.objects.create("nodes", {"metadata": {"name": name, "labels": {"team": "infra"}}})
        kubeconfig = cluster.kubeconfig(Path(fleet.directory) / "kubeconfig")
        commands = {
            "kubectl": ("kubectl", "--kubeconfig", str(kubeconfig), "get", "nodes"),
            "rolloutctl": (sys.executable, "-m", "rolloutd.cli", "--socket", str(socket), "nodes", rollout),
        }
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, command in commands.items():
                wall_ms, cpu_ms, lines = await _run(command)
                if lines < len(names):
                    raise RuntimeError(f"{name} printed {lines} lines for {len(names)} nodes")
                found.setdefault(f"{name} wall ms", []).append(wall_ms)
                found.setdefault(f"{name} cpu ms", []).append(cpu_ms)
    return {name: round(statistics.median(values), 1) for name, values in found.items()}


async def _run(command: Sequence[str]) -> tuple[float, float, int]:
    """Return the wall time and the CPU time of a command (ms), and how many lines it has printed."""
    began, before = time.perf_counter(), _children_cpu_s()
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, env={**os.environ, "NO_COLOR": "1"}
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command[0]} exited with {process.returncode}")
    wall_ms = (time.perf_counter() - began) * 1000
    return wall_ms, (_children_cpu_s() - before) * 1000, output.count(b"\n")


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a list of 10,000 nodes, beside kubectl's.")
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    figures = asyncio.run(with_fleet(options.nodes, partial(measure_nodes, rounds=options.rounds)))
    print(json.dumps({"bench": "nodes", "nodes": options.nodes, **figures}))


if __name__ == "__main__":
    main()
