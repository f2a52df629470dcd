"""One fleet of `bench scale` and its clients: what the pages of its lists and a forecast cost.

    python -m bench._scale_clients pages NODES

The fleet is that of `_scale_fleet`, behind the API's real server.  At its end the observations of all nodes
expire.  Prints one JSON object of figures.
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench._scale_fleet import Fleet, longest_pause, measure_expiry, measure_forecast, with_fleet
from rolloutd.concurrency import threads
from rolloutd.control.client import Client, api_path
from rolloutd.control.kept_answers import KeptAnswers
from rolloutd.control.responses import MAX_PAUSE_S, SharedAnswers
from rolloutd.control.routes import Services
from rolloutd.control.server import ControlServer
from rolloutd.control.status_feed import StatusFeed
from tests.contracts.fakes.leadership import FakeLeadership, Seat

PAGE = 1000
"""Rows of a first page: the most that the API gives at once."""

ROUNDS = 5
"""How often each page is asked for, each time after a node has changed."""


@asynccontextmanager
async def served(fleet: Fleet, status_feed: StatusFeed | None = None) -> AsyncIterator[Path]:
    """Serve the API of a fleet, and yield its socket."""
    sys.setswitchinterval(threads.SWITCH_INTERVAL_S)  # as the daemon does
    unused: Any = None
    state = fleet.state
    needed = {"state": state, "started_at": state.now(), "version": "bench", "is_standby": False}
    needed["leadership"], needed["answers"] = FakeLeadership(Seat()), SharedAnswers()
    needed["status_feed"], needed["kept"] = status_feed or StatusFeed(), KeptAnswers()
    services = Services(**({each.name: unused for each in fields(Services)} | needed))
    path = fleet.directory / "s"
    server = ControlServer(services, path=path)
    await server.start()
    try:
        yield path
    finally:
        await server.stop()


async def measure_pages(fleet: Fleet) -> dict[str, float]:
    """Return the CPU time of each list's first page, its client included, and the longest pause (ms)."""
    rollout = await fleet.submit("sat", 1)
    await fleet.open_start_gate(rollout)
    await fleet.settle()
    queries: dict[str, tuple[str, dict[str, int]]] = {
        "status": (api_path("status"), {}),
        "nodes": (api_path("rollouts", rollout, "nodes"), {"limit": PAGE}),
        "changes": (api_path("changes"), {"limit": PAGE}),
        "inventory": (api_path("inventory"), {"limit": PAGE}),
    }
    costs: dict[str, list[float]] = {name: [] for name in queries}
    pauses = []
    async with served(fleet) as path:
        for number in range(ROUNDS):
            fleet.inventory.relabel(number + 1)
            await fleet.daemon._inventory_refresher.refresh()
            await fleet.settle()
            with longest_pause() as found:
                for name, (route, query) in queries.items():
                    began = time.process_time()
                    await asyncio.to_thread(Client(path).get, route, query)
                    costs[name].append((time.process_time() - began) * 1000)
                    await asyncio.sleep(MAX_PAUSE_S)  # the routes' own pause between two answers
                await fleet.settle()  # a decision after the answers, whose facts they share
            pauses += found
    pages = {f"first page {name}": statistics.median(values) for name, values in costs.items()}
    return {**pages, "loop pause pages": statistics.median(pauses)}


async def measure_all(fleet: Fleet) -> dict[str, float]:
    """Measure all on one fleet: making it takes most of the time."""
    return {**await measure_pages(fleet), **await measure_forecast(fleet), **await measure_expiry(fleet)}


def main() -> None:
    """Measure what is asked for."""
    logging.disable(logging.ERROR)
    measure = {"pages": measure_all}[sys.argv[1]]
    print(json.dumps(asyncio.run(with_fleet(int(sys.argv[2]), measure))))


if __name__ == "__main__":
    main()
