"""How long a preview over 10,000 nodes blocks the event loop: aim under 20 ms.

The control server is real, over the tests' fakes.  A task on its loop sleeps for a millisecond again and
again; what it sleeps longer is a pause of the loop.  The peer is the same task, in the same run, while
nothing is asked.  Prints JSON, then one line for people.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from machines.model.node import Node, NodeHealth, Observation
from tests.rolloutd.control_environment import PLAN, control_environment

NODES, TEAMS, RACKS = 10_000, 250, 250
ROUNDS = 5
TICK_S = 0.001
AIM_MS = 20.0


async def main() -> None:
    """Measure, and print."""
    nodes = tuple(
        Node(
            f"n{number}",
            sources=("hosts",),
            labels={"team": f"t{number % TEAMS}", "rack": f"r{number // 7 % RACKS}"},
        )
        for number in range(NODES)
    )
    with tempfile.TemporaryDirectory(prefix="rb-") as directory:
        async with control_environment(Path(directory), nodes=nodes) as made:
            now = made.clock.now()
            seen = [Observation(node.name, NodeHealth.UP, now) for node in nodes]
            made.state.index.record_observations(seen, now)
            await made.submit()
            gc.collect()
            gc.freeze()  # as the daemon does after its start
            quiet = [await longest_pause_ms(asyncio.sleep(0.5)) for _ in range(ROUNDS)]
            took, pauses = [], []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                pauses.append(await longest_pause_ms(preview(Path(directory) / "run" / "control.sock")))
                took.append((time.perf_counter() - began) * 1000)
    figures = {
        "bench": "preview",
        "nodes": NODES,
        "rounds": ROUNDS,
        "longest_pause_ms": round(statistics.median(pauses), 1),
        "worst_pause_ms": round(max(pauses), 1),
        "longest_pause_without_ms": round(statistics.median(quiet), 1),
        "preview_ms": round(statistics.median(took)),
        "aim_ms": AIM_MS,
    }
    print(json.dumps(figures))
    print(
        f"preview: {figures['preview_ms']} ms for {NODES:,} nodes; meanwhile the loop pauses for "
        f"{figures['longest_pause_ms']} ms at most (worst of {ROUNDS}: {figures['worst_pause_ms']}; without "
        f"it {figures['longest_pause_without_ms']}); aim {AIM_MS:.0f} ms"
    )


async def longest_pause_ms(work: Awaitable[object]) -> float:
    """Return by how much the loop's longest tick is late while the work is done."""
    pauses = [0.0]

    async def tick() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(TICK_S)
            pauses.append(time.perf_counter() - began - TICK_S)

    ticking = asyncio.create_task(tick())
    await work
    ticking.cancel()
    with suppress(asyncio.CancelledError):
        await ticking
    return max(pauses) * 1000


async def preview(socket: Path) -> None:
    """Ask for a preview, and read the answer without decoding it."""
    body = json.dumps({"file": "plan.yaml", "text": PLAN.replace("sysctl", "other")}).encode()
    reader, writer = await asyncio.open_unix_connection(socket)
    head = (
        "POST /v1/plans/preview HTTP/1.1\r\nHost: rolloutd\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError((await reader.read()).decode())
    while await reader.read(1 << 16):
        pass
    writer.close()


if __name__ == "__main__":
    asyncio.run(main())
