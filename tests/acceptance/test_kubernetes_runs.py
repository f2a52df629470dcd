"""Rollouts whose playbooks pods of a cluster run: the daemon killed, the API cut off, pods lost or doubled.

Real are the daemon, the program in the pods, sshd and ansible-playbook; the cluster is the fake.  What ran on
a node is judged by what the playbooks wrote there.  `make runners` runs the whole number.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rolloutd.store import SqliteBackend
from tests.acceptance.test_awx_runs import (
    CUT_OFF_S,
    IS_WHOLE,
    KILLS,
    LONGEST_LIFE_S,
    PARALLEL,
    PLAYBOOK,
    RUNS,
    SEED,
    TEAMS,
    WORK_S,
    judge,
    walk_once,
)
from tests.contracts.kubernetes_jobs.backend import NAMESPACE, shipped_rules
from tests.support.daemon_environment import WAIT_LIMIT_S, DaemonEnvironment, fleet_labels, plan
from tests.support.fake_kubernetes.cluster import FakeKubernetes
from tests.support.fake_kubernetes.jobs import JobController
from tests.support.ports import free_port

pytestmark = [pytest.mark.servers, pytest.mark.long]


@dataclass
class JobsEnvironment:
    """A daemon whose nodes' playbooks pods of a fake cluster run."""

    cluster: FakeKubernetes
    jobs: JobController
    daemon: DaemonEnvironment


@asynccontextmanager
async def cluster_with_jobs(
    directory: Path,
) -> AsyncIterator[tuple[FakeKubernetes, JobController, dict[str, Any]]]:
    """Start a cluster whose pods run; yield it, its controller, and the runner's parameters."""
    async with FakeKubernetes() as cluster:
        cluster.objects.create("namespaces", {"metadata": {"name": NAMESPACE}, "spec": {}})
        jobs = JobController(cluster.objects, directory / "pods")
        cluster.server.read_log = jobs.read_log
        token = cluster.token(shipped_rules())
        params = {
            "kubeconfig": str(cluster.kubeconfig(directory / "kubeconfig", token=token)),
            "image": "rolloutd@sha256:0",
            "python": sys.executable,
            "trees": {"listen": f"127.0.0.1:{free_port()}"},
        }
        working = asyncio.create_task(jobs.run())
        try:
            yield cluster, jobs, params
        finally:
            jobs.end_all()
            working.cancel()
            await asyncio.wait({working})


@asynccontextmanager
async def jobs_environment(directory: Path, nodes: int) -> AsyncIterator[JobsEnvironment]:
    daemon = DaemonEnvironment(directory, fleet_labels(nodes, min(TEAMS, nodes), 1))
    daemon.nodes_per_sshd = 16
    async with cluster_with_jobs(directory) as (cluster, jobs, params):
        try:
            await asyncio.to_thread(daemon.start_nodes)
            daemon.write_settings(
                runners=[{"match": "role=worker", "name": "fra", "parallel": PARALLEL, "kubernetes": params}],
                pools={"team": {"max_unavailable": PARALLEL}},
            )
            await asyncio.to_thread(daemon.start_daemon)
            yield JobsEnvironment(cluster, jobs, daemon)
        finally:
            await asyncio.to_thread(daemon.stop)


async def test_killed_and_cut_off_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    draw, count = random.Random(SEED), Counter[str]()
    async with jobs_environment(tmp_path, RUNS) as env:
        variables = {"log_file": str(env.daemon.log_file), "work_s": WORK_S}
        stage = {"playbook": "change.yml", "vars": variables, "on_unknown": "pause"}
        body = plan("killed", maintain=stage, canary={"select": "canary=true", "max_parallel": 8})
        rollout = await asyncio.to_thread(env.daemon.submit, body, {"change.yml": PLAYBOOK})
        await asyncio.to_thread(env.daemon.vote, rollout, "start")
        walking = asyncio.create_task(_walk(env, rollout, draw, count))
        for number in range(KILLS):
            await asyncio.sleep(draw.uniform(0.2, LONGEST_LIFE_S))
            if walking.done():
                break
            if number == KILLS // 2:
                await env.cluster.stop()
                await asyncio.sleep(CUT_OFF_S)
                await env.cluster.start()
                count["cut off"] += 1
            await asyncio.to_thread(env.daemon.kill_daemon)
            await asyncio.to_thread(env.daemon.start_daemon)
            count["kill"] += 1
        unknown = await walking
        status = await asyncio.to_thread(env.daemon.status, rollout)
        assert (status["percent"], status["done"], status["failed"]) == (100, RUNS, 0)
        judge(env.daemon, await asyncio.to_thread(env.daemon.nodes, rollout), unknown)
        verdict = SqliteBackend(tmp_path / "state" / "rolloutd.sqlite").verify_chain()
        assert verdict.ok, verdict.message
        print(f"{RUNS} runs, {dict(count)}, {sum(unknown.values())} unknown: 0 lost, 0 doubled")


async def _walk(env: JobsEnvironment, rollout: str, draw: random.Random, count: Counter[str]) -> Counter[str]:
    """Vote and retry as people do until the rollout is done; return the failed attempts by node."""
    unknown: Counter[str] = Counter()
    deadline = asyncio.get_running_loop().time() + WAIT_LIMIT_S * (8 if IS_WHOLE else 2)
    since = 0
    while asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.3)
        since += 1
        if since % 25 == 0:
            _disturb(env, draw, count)
        if await asyncio.to_thread(walk_once, env.daemon, rollout, unknown):
            return unknown
    raise AssertionError(f"{rollout} is not done\n{env.daemon.log_tail()}")


def _disturb(env: JobsEnvironment, draw: random.Random, count: Counter[str]) -> None:
    """Start a second pod of a run, lose one, or lose the beginning of its log."""
    pods = env.cluster.objects.all("pods", NAMESPACE)
    running = [each for each in pods if each["status"]["phase"] == "Running"]
    if not running:
        return
    pod = draw.choice(running)
    job = pod["metadata"]["labels"]["batch.kubernetes.io/job-name"]
    kind = draw.choice(["second pod", "lost", "log"])
    count[kind] += 1
    if kind == "second pod":
        env.jobs.add_pod(env.cluster.objects.get("jobs", NAMESPACE, job))
    elif kind == "lost":
        env.jobs.lose(job)
    else:
        env.jobs.log_begins_at[pod["metadata"]["name"]] = 2
