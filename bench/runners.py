"""Measures a run by a runner beside the bare equivalent in the same run: added time, and CPU of the daemon.

AWX and the cluster are the fakes, each in a process of its own; their jobs are real processes on an sshd.
The bare launch has an inventory that is there already, the bare Job is ansible-playbook alone; both are
polled each second, as the runners do.  Prints a line for people and one of JSON for each.

    python -m bench.runners [--runs 5] [--runner awx|kubernetes]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp

from rolloutd.contracts.runner import Work
from rolloutd.ports import Ok, Runner, RunRequest, wait_for_end
from tests.contracts.awx.backend import PIN, AwxBackend, open_backend, open_client
from tests.contracts.kubernetes_jobs.backend import NAMESPACE, open_runner
from tests.contracts.runner_backends import AnsibleBackend
from tests.support.fake_awx.server import TOKEN
from tests.support.fake_kubernetes.cluster import FakeKubernetes
from tests.support.fake_kubernetes.jobs import JobController

AIM_S = 0.5
"""Added time, and CPU time of the daemon's process, per run: a run takes seconds."""

POLL_S = 1.0

Samples = Sequence[tuple[float, float]]
"""Seconds and CPU seconds of each run."""


def serve_awx(directory: Path, channel: Connection) -> None:
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


async def measure_awx(directory: Path, runs: int, channel: Connection) -> tuple[Samples, Samples]:
    url, inventory, template, connection = await asyncio.to_thread(channel.recv)
    async with open_client(directory, url, connection) as backend:
        runner = backend.open_runner()
        return await compare(
            runs,
            lambda number: launch_bare(backend, inventory, template, number),
            lambda number: run_one(
                runner,
                backend.request(Work.SUCCEEDS, f"r{number}", fencing_token=f"1.{number} bench 1000"),
            ),
        )


def serve_cluster(directory: Path, channel: Connection) -> None:
    """Be a cluster until the channel says so."""

    async def run() -> None:
        async with FakeKubernetes() as cluster:
            cluster.objects.create("namespaces", {"metadata": {"name": NAMESPACE}, "spec": {}})
            jobs = JobController(cluster.objects, directory / "pods")
            cluster.server.read_log = jobs.read_log
            working = asyncio.create_task(jobs.run())
            channel.send((cluster.url, cluster.admin_token, cluster.kubeconfig(directory / "kubeconfig")))
            await asyncio.to_thread(channel.recv)
            jobs.end_all()
            working.cancel()

    asyncio.run(run())


async def create_bare(url: str, token: str, command: list[str], number: int) -> None:
    """Create a Job of ansible-playbook alone and wait for it, as `kubectl create job` and `wait` do."""
    name, labels = f"bare-{number}", {"bench": "bare"}
    container = {"name": "run", "image": "rolloutd@sha256:0", "command": command}
    pod = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "given", "secret": {"secretName": name}}],
    }
    template = {"metadata": {"labels": labels, "annotations": {}}, "spec": pod}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {"backoffLimit": 0, "template": template},
    }
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": {}}
    jobs = f"{url}/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
        for path, body in ((f"{url}/api/v1/namespaces/{NAMESPACE}/secrets", secret), (jobs, job)):
            async with session.post(path, json=body) as answer:
                answer.raise_for_status()
        while True:
            async with session.get(f"{jobs}/{name}") as answer:
                conditions = (await answer.json()).get("status", {}).get("conditions") or []
            if conditions:
                break
            await asyncio.sleep(POLL_S)
    if conditions[0]["type"] != "Complete":
        raise RuntimeError(f"the bare Job failed: {conditions}")


async def measure_jobs(directory: Path, runs: int, channel: Connection) -> tuple[Samples, Samples]:
    url, token, kubeconfig = await asyncio.to_thread(channel.recv)
    ansible = AnsibleBackend(directory)
    shared: dict[str, Any] = {}
    inventory = directory / "hosts.json"
    ssh_args = f"-o UserKnownHostsFile={ansible.node.known_hosts}"
    host = {**ansible.connection, "ansible_pipelining": True, "ansible_ssh_common_args": ssh_args}
    inventory.write_text(json.dumps({"all": {"hosts": {"n0": host}}}))

    def command(number: int) -> list[str]:
        variables = json.dumps(
            {"rolloutd_test_run": f"b{number}", "rolloutd_test_log": str(directory / "log")}
        )
        words = ["-i", str(inventory), "-e", variables, str(ansible.tree / "ok.yml")]
        return [str(Path(sys.executable).with_name("ansible-playbook")), *words]

    try:
        runner = open_runner(directory, ansible, kubeconfig, shared)
        return await compare(
            runs,
            lambda number: create_bare(url, token, command(number), number),
            lambda number: run_one(
                runner, ansible.request("ok.yml", f"r{number}", fence=f"1.{number} bench 1000")
            ),
        )
    finally:
        for each in shared.values():
            await each.close()
        await ansible.close()


async def run_one(runner: Runner, request: RunRequest) -> None:
    state = await wait_for_end(runner, await runner.start(request))
    if not isinstance(state.result, Ok):
        raise RuntimeError(f"the run ended as {state.result}")


async def compare(
    runs: int, bare: Callable[[int], Awaitable[None]], ours: Callable[[int], Awaitable[None]]
) -> tuple[Samples, Samples]:
    """Measure both in turn; the first of each opens connections and is left out."""
    of_bare, of_ours = [], []
    for number in range(1, runs + 2):
        of_bare.append(await timed(bare(number)))
        of_ours.append(await timed(ours(number)))
    return of_bare[1:], of_ours[1:]


def figures(runner: str, bare: Samples, ours: Samples) -> dict[str, Any]:
    bare_s, bare_cpu_s = (round(statistics.median(each), 3) for each in zip(*bare, strict=True))
    ours_s, cpu_s = (round(statistics.median(each), 3) for each in zip(*ours, strict=True))
    return {
        "bench": "runners",
        "runner": runner,
        "runs": len(ours),
        "run_s": ours_s,
        "bare_run_s": bare_s,
        "added_s": round(ours_s - bare_s, 3),
        "cpu_s": cpu_s,
        "bare_cpu_s": bare_cpu_s,
        "aim_s": AIM_S,
    }


RUNNERS = {"awx": (serve_awx, measure_awx), "kubernetes": (serve_cluster, measure_jobs)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--runner", choices=list(RUNNERS), action="append")
    asked = parser.parse_args()
    for name in asked.runner or RUNNERS:
        serve, measure = RUNNERS[name]
        own, other = multiprocessing.Pipe()
        with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as directory:
            server = multiprocessing.get_context("spawn").Process(target=serve, args=(Path(directory), other))
            server.start()
            try:
                found = figures(name, *asyncio.run(measure(Path(directory), asked.runs, own)))
            finally:
                own.send("end")
                server.join()
        print(
            f"a run by {name}: {found['run_s']} s, {found['added_s']} s more than a bare one;"
            f" CPU of the daemon {found['cpu_s']} s, bare {found['bare_cpu_s']} s (aim: at most {AIM_S} each)"
        )
        print(json.dumps(found))


if __name__ == "__main__":
    main()
