"""Measures a run by a runner beside the bare equivalent in the same run: added time, and CPU of the daemon.

AWX is the fake one, in a process of its own; its job is a real ansible-playbook on an sshd.  The bare launch
has an inventory that is there already, and polls the job each second, as the runner does.  Prints one line
for people and one of JSON.

    python -m bench.runners [--runs 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp

from rolloutd.contracts.runner import Work
from rolloutd.ports import Ok, wait_for_end
from tests.contracts.awx.backend import PIN, AwxBackend, open_backend, open_client
from tests.support.fake_awx.server import TOKEN

AIM_S = 0.5
"""Added time, and CPU time of the daemon's process, per run: a run takes seconds."""

POLL_S = 1.0


def serve(directory: Path, channel: Connection) -> None:
    """Be AWX and its node until the channel says so."""

    async def run() -> None:
        async with open_backend(directory) as backend:
            inventory = {"name": "bare", "organization": 1}
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
                url = backend.fake.url + backend.fake.prefix
                async with session.post(f"{url}/inventories/", json=inventory) as answer:
                    number = (await answer.json())["id"]
                host = {"name": "n0", "variables": json.dumps(backend.host().variables)}
                await session.post(f"{url}/inventories/{number}/hosts/", json=host)
                async with session.post(
                    f"{url}/inventories/{number}/groups/", json={"name": "web"}
                ) as answer:
                    group = (await answer.json())["id"]
                await session.post(f"{url}/groups/{group}/hosts/", json={"id": number + 1})
            template = next(
                each.id for each in backend.fake.templates.values() if "succeeds" in each.playbook
            )
            channel.send((url, number, template, dict(backend.host().variables)))
            await asyncio.to_thread(channel.recv)

    asyncio.run(run())


async def launch_bare(backend: AwxBackend, inventory: int, template: int, number: int) -> None:
    """Launch a job and poll it, as a script would."""
    url = backend.url
    variables = {"rolloutd_test_run": f"bare{number}", "rolloutd_test_log": str(backend.log)}
    body = {"inventory": inventory, "scm_branch": PIN, "extra_vars": variables}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        async with session.post(f"{url}/job_templates/{template}/launch/", json=body) as answer:
            job = (await answer.json())["id"]
        while True:
            async with session.get(f"{url}/jobs/{job}/") as answer:
                state = await answer.json()
            if state["status"] not in ("pending", "waiting", "running"):
                break
            await asyncio.sleep(POLL_S)
    if state["status"] != "successful":
        raise RuntimeError(f"the bare job ended as {state['status']}")


async def timed(work: Awaitable[None]) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of this process."""
    began, cpu = time.perf_counter(), time.process_time()
    await work
    return time.perf_counter() - began, time.process_time() - cpu


async def measure(directory: Path, runs: int, channel: Connection) -> dict[str, Any]:
    url, inventory, template, connection = await asyncio.to_thread(channel.recv)
    ours, bare = [], []
    async with open_client(directory, url, connection) as backend:
        runner = backend.open_runner()

        async def run_one(number: int) -> None:
            request = backend.request(Work.SUCCEEDS, f"r{number}", fencing_token=f"1.{number} bench 1000")
            state = await wait_for_end(runner, await runner.start(request))
            if not isinstance(state.result, Ok):
                raise RuntimeError(f"the run ended as {state.result}")

        for number in range(1, runs + 2):
            bare.append(await timed(launch_bare(backend, inventory, template, number)))
            ours.append(await timed(run_one(number)))
    # The first of each opens connections.
    figures = {
        name: [round(statistics.median(each), 3) for each in zip(*taken[1:], strict=True)]
        for name, taken in (("bare", bare), ("ours", ours))
    }
    return {
        "bench": "runners",
        "runner": "awx",
        "runs": runs,
        "run_s": figures["ours"][0],
        "bare_run_s": figures["bare"][0],
        "added_s": round(figures["ours"][0] - figures["bare"][0], 3),
        "cpu_s": figures["ours"][1],
        "bare_cpu_s": figures["bare"][1],
        "aim_s": AIM_S,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args()
    own, other = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as directory:
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(Path(directory), other))
        server.start()
        try:
            found = asyncio.run(measure(Path(directory), asked.runs, own))
        finally:
            own.send("end")
            server.join()
    print(
        f"a run by AWX: {found['run_s']} s, {found['added_s']} s more than a bare launch and poll;"
        f" CPU of the daemon {found['cpu_s']} s, bare {found['bare_cpu_s']} s (aim: at most {AIM_S} each)"
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
