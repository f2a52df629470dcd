"""How soon a node that joins its cluster is enrolled in a running rollout.

    python -m bench joiners [--nodes N] [--joiners N]

The real daemon over the tests' fake of an API server, and a rollout that soaks.
Each joiner is timed from before its object is created to the first answer of the
daemon that names it among the rollout's nodes: one after the other, and then as
many at once, as when a node pool grows.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from tests.support.cluster_environment import POOLS, ClusterEnvironment, cluster_environment, single_node_wave

AIM_S = 5.0
"""What is promised of every joiner."""

POLL_S = 0.02
"""Between two looks at the daemon: what may be told too much."""


async def main() -> None:
    """Measure, and say the median and the longest."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    asked.add_argument("--nodes", type=int, default=100)
    asked.add_argument("--joiners", type=int, default=20)
    options = asked.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        async with cluster_environment(Path(directory), options.nodes) as made:
            rollout = await made.submit("joiners", canary=single_node_wave(made.nodes[0]), soak="1h")
            await made.in_thread(made.daemon.wait_for_gate, rollout, "continue")
            single: list[float] = []
            for number in range(options.joiners):
                single += await _time_joiners(made, rollout, [f"single{number}"])
            burst = await _time_joiners(made, rollout, [f"many{number}" for number in range(options.joiners)])
    for how, took in ("one by one", single), ("at once", burst):
        print(
            f"joiners: {len(took)} {how}, beside {options.nodes} nodes: enrolled after "
            f"{statistics.median(took):.2f} s, the last after {max(took):.2f} s (aim: {AIM_S:g} s)"
        )


async def _time_joiners(made: ClusterEnvironment, rollout: str, names: list[str]) -> list[float]:
    """Create these nodes at once, and return how long each took to be a target."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as creating:
        for number, name in enumerate(names):
            labels = {"example.com/team": POOLS[number % len(POOLS)], "role": "worker"}
            creating.create_task(made.sandbox.node(name, labels))
        missing = {f"{made.sandbox.prefix}-{name}" for name in names}
        took: list[float] = []
        while missing:
            enrolled = missing.intersection(await made.in_thread(made.daemon.nodes, rollout))
            took += [time.monotonic() - began] * len(enrolled)
            missing -= enrolled
            await asyncio.sleep(POLL_S)
    return took


if __name__ == "__main__":
    asyncio.run(main())
