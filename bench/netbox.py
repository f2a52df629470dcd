"""How long the NetBox source takes to read a fleet, against REST through pynetbox in the same run.

    python -m bench netbox [--devices N] [--rounds N]

The server is the tests' fake in a process of its own, or a real NetBox if the environment names one, as in
tests/contracts/netbox.  Both sides are run by turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.contracts.netbox.backends import TOKEN_FILE, URL, Server
from tests.support.fake_netbox import FakeNetbox, Fleet
from tests.support.fake_netbox.server import V2

AIM_S = 2.0
"""What is promised of 2,000 devices where the server can."""


def main() -> None:
    """Measure, and say the medians."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    asked.add_argument("--devices", type=int, default=2000)
    asked.add_argument("--rounds", type=int, default=3)
    options = asked.parse_args()
    with tempfile.TemporaryDirectory() as directory, open_server(Path(directory), options.devices) as server:
        peer_name, peer = find_peer(server)
        times, counts = [], set()
        for _ in range(options.rounds):
            ours_s, count = timed(lambda: len(asyncio.run(server.inventory(objects=["devices"]).refresh())))
            times.append((ours_s, timed(peer)[0]))
            counts.add(count)
    ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    kind = "a real NetBox" if URL in os.environ else "the tests' fake"
    print(
        f"netbox: {max(counts)} devices of {kind} in {ours:.2f} s (aim: {AIM_S:g} s), "
        f"{peer_name} {theirs:.2f} s; median of {options.rounds}"
    )


def timed(read: Callable[[], Any]) -> tuple[float, Any]:
    began = time.monotonic()
    found = read()
    return time.monotonic() - began, found


def find_peer(server: Server) -> tuple[str, Callable[[], Any]]:
    import pynetbox

    api = pynetbox.api(server.url, token=server.token_file.read_text().strip())
    return "REST through pynetbox", lambda: list(api.dcim.devices.filter(limit=1000))


@contextlib.contextmanager
def open_server(directory: Path, devices: int) -> Iterator[Server]:
    if URL in os.environ:
        yield Server(os.environ[URL].rstrip("/"), Path(os.environ[TOKEN_FILE]), directory)
        return
    token_file = directory / "netbox.token"
    token_file.write_text(V2)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs, devices), daemon=True)
    process.start()
    try:
        yield Server(ours.recv(), token_file, directory)
    finally:
        process.terminate()
        process.join()


def serve(report: Connection, devices: int) -> None:
    async def run() -> None:
        async with FakeNetbox(Fleet.of(devices)) as fake:
            report.send(fake.url)
            await asyncio.Event().wait()

    asyncio.run(run())


if __name__ == "__main__":
    main()
