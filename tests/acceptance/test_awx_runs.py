"""Rollouts whose playbooks AWX runs: the daemon killed, AWX cut off, launches and events late or lost.

Real are the daemon, sshd and ansible-playbook; AWX is the fake.  What ran on a node is judged by what the
playbooks wrote there.  ROLLOUTD_TEST_RUNNER_RUNS and ROLLOUTD_TEST_RUNNER_KILLS say how many (`make
runners`).
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rolloutd.control.client import ApiError, DaemonUnreachable, api_path
from rolloutd.store import SqliteBackend
from tests.support.daemon_environment import WAIT_LIMIT_S, DaemonEnvironment, fleet_labels, plan
from tests.support.fake_awx import FakeAwx
from tests.support.fake_awx.server import TOKEN
from tests.support.git_repository import Repository, git_server
from tests.support.sshd import Sshd

pytestmark = [pytest.mark.servers, pytest.mark.long]

RUNS = int(os.environ.get("ROLLOUTD_TEST_RUNNER_RUNS", "6"))
KILLS = int(os.environ.get("ROLLOUTD_TEST_RUNNER_KILLS", "2"))
SEED = int(os.environ.get("ROLLOUTD_TEST_SEED", "1"))
IS_WHOLE = RUNS >= 100
TEAMS, PARALLEL = 8, 8
LONGEST_LIFE_S = 6.0
WORK_S = 1.0
CUT_OFF_S = 60.0 if IS_WHOLE else 2.0
LATE_S = 1.5  # a launch is committed at most so long after its client has gone; the settings say 3 s

PLAYBOOK = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: work
      ansible.builtin.shell: |
        echo "begin {{ inventory_hostname }} $(date +%s.%N)" >> {{ log_file }}
        sleep {{ work_s }}
        echo "end {{ inventory_hostname }} $(date +%s.%N)" >> {{ log_file }}
"""


@dataclass
class AwxEnvironment:
    """A daemon whose nodes' playbooks a fake AWX runs."""

    fake: FakeAwx
    daemon: DaemonEnvironment
    git_url: str

    async def in_thread(self, question: Callable[..., Any], *words: Any, **more: Any) -> Any:
        """Ask the daemon beside the loop in which AWX is."""
        return await asyncio.to_thread(question, *words, **more)

    async def submit(self, name: str) -> str:
        body = plan_of_git(name, self.daemon, self.git_url)
        return str(await self.in_thread(self.daemon.submit, body, {"unused.yml": "[]\n"}))


def plan_of_git(name: str, daemon: DaemonEnvironment, url: str) -> dict[str, Any]:
    """Return a plan whose playbook AWX can run."""
    variables = {"log_file": str(daemon.log_file), "work_s": WORK_S}
    stage = {"playbook": "change.yml", "vars": variables, "on_unknown": "pause"}
    canary = {"select": "canary=true", "max_parallel": 8}
    return plan(name, source={"git": url, "ref": "main"}, maintain=stage, canary=canary)


@asynccontextmanager
async def awx_with_playbooks(directory: Path) -> AsyncIterator[tuple[FakeAwx, str, dict[str, Any]]]:
    """Start AWX with a project of the playbooks; yield it, their git URL, and the runner's parameters."""
    (directory / "git").mkdir()
    repository = Repository(directory / "git" / "changes")
    pin = repository.commit("change.yml", PLAYBOOK)
    (directory / "awx.token").write_text(TOKEN)
    async with git_server(directory / "git") as url, FakeAwx() as fake:
        git_url = f"{url}/changes"
        project = fake.add_project("playbooks", git_url, {pin: repository.directory}.__getitem__)
        fake.add_template("change", project, "change.yml")
        yield (
            fake,
            git_url,
            {
                "url": fake.url,
                "token_file": str(directory / "awx.token"),
                "organization": "rolloutd",
                "projects": {git_url: "playbooks"},
                "late_launch": "3s",
                "late_events": "2s",
            },
        )


def start_nodes(daemon: DaemonEnvironment, fake: FakeAwx) -> Sshd:
    """Start the nodes; the key of one sshd is that of AWX's machine credential, and valid for all."""
    daemon.nodes_per_sshd = 16
    daemon.start_nodes()
    sshd = next(iter(daemon.sshds.values()))
    key = (sshd.directory / "client_key.pub").read_text()
    for each in set(daemon.sshds.values()):
        with (each.directory / "authorized_keys").open("a") as file:
            file.write(key)
    fake.jobs.credential.user, fake.jobs.credential.key_file = sshd.user, str(sshd.key_file)
    return sshd


@asynccontextmanager
async def awx_environment(directory: Path, nodes: int) -> AsyncIterator[AwxEnvironment]:
    """Start the nodes, AWX with a project of the playbooks, and the daemon."""
    daemon = DaemonEnvironment(directory, fleet_labels(nodes, min(TEAMS, nodes), 1))
    async with awx_with_playbooks(directory) as (fake, git_url, params):
        try:
            await asyncio.to_thread(start_nodes, daemon, fake)
            daemon.write_settings(
                runners=[{"match": "role=worker", "parallel": PARALLEL, "awx": params}],
                pools={"team": {"max_unavailable": PARALLEL}},
            )
            await asyncio.to_thread(daemon.start_daemon)
            yield AwxEnvironment(fake, daemon, git_url)
        finally:
            await asyncio.to_thread(daemon.stop)


async def test_killed_and_cut_off_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    async with awx_environment(tmp_path, RUNS) as env:
        faults = Faults(env.fake, draw)
        env.fake.intercept = faults.before_launch
        env.fake.jobs.shuffle = draw
        env.fake.jobs.is_lost = lambda _, __: draw.random() < 0.02
        rollout = await env.submit("killed")
        await env.in_thread(env.daemon.vote, rollout, "start")
        walking = asyncio.create_task(walk(env, rollout, faults))
        for number in range(KILLS):
            await asyncio.sleep(draw.uniform(0.2, LONGEST_LIFE_S))
            if walking.done():
                break
            if number == KILLS // 2:
                env.fake.is_cut_off = True
                await asyncio.sleep(CUT_OFF_S)
                env.fake.is_cut_off = False
            await env.in_thread(env.daemon.kill_daemon)
            await env.in_thread(env.daemon.start_daemon)
            faults.count["kill"] += 1
        unknown = await walking
        status = await env.in_thread(env.daemon.status, rollout)
        assert (status["percent"], status["done"], status["failed"]) == (100, RUNS, 0)
        judge(env.daemon, await env.in_thread(env.daemon.nodes, rollout), unknown)
        verdict = SqliteBackend(tmp_path / "state" / "rolloutd.sqlite").verify_chain()
        assert verdict.ok, verdict.message
        assert TOKEN not in (tmp_path / "daemon.log").read_text()
        assert TOKEN.encode() not in (tmp_path / "state" / "rolloutd.sqlite").read_bytes()
        print(f"{RUNS} runs, {dict(faults.count)}, {sum(unknown.values())} unknown: 0 lost, 0 doubled")


class Faults:
    """What AWX does to launches and jobs, drawn from a seed."""

    def __init__(self, fake: FakeAwx, draw: random.Random) -> None:
        self._fake, self._draw = fake, draw
        self.count: Counter[str] = Counter()

    async def before_launch(self, request: web.Request) -> web.StreamResponse | None:
        if request.method != "POST" or not request.path.endswith("/launch/"):
            return None
        fate = self._draw.random()
        if fate < 0.1:
            self._fake.lost_answers += 1
            self.count["answer lost"] += 1
        elif fate < 0.2:
            self._fake.late_commits += 1
            self.count["late commit"] += 1
            asyncio.get_running_loop().call_later(self._draw.uniform(0.1, LATE_S), self._fake.commit_late)
        return None

    def disturb_job(self) -> None:
        """Let AWX lose sight of a job whose playbook runs, or begin it twice."""
        running = [
            job
            for job in self._fake.jobs.by_id.values()
            if job.status == "running" and job.id in self._fake.jobs.processes
        ]
        if not running:
            return
        job = self._draw.choice(running)
        kind = self._draw.choice(["reap", "requeue"])
        self.count[kind] += 1
        (self._fake.jobs.reap if kind == "reap" else self._fake.jobs.requeue)(job)


async def walk(env: AwxEnvironment, rollout: str, faults: Faults) -> Counter[str]:
    """Vote and retry as people do until the rollout is done; return the failed attempts by node."""
    unknown: Counter[str] = Counter()
    deadline = asyncio.get_running_loop().time() + WAIT_LIMIT_S * (8 if IS_WHOLE else 1)
    since = 0
    while asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.3)
        since += 1
        if since % 25 == 0:
            faults.disturb_job()
        if await env.in_thread(walk_once, env.daemon, rollout, unknown):
            return unknown
    raise AssertionError(f"{rollout} is not done\n{env.daemon.log_tail()}")


def walk_once(daemon: DaemonEnvironment, rollout: str, unknown: Counter[str]) -> bool:
    try:
        status = daemon.status(rollout)
        for gate in status["gates"]:
            if gate["gate"] == "continue" and gate["state"] == "waiting":
                daemon.vote(rollout, "continue")
        failed = [node for node, each in daemon.nodes(rollout).items() if each["phase"] == "failed"]
        for node in failed:
            failure = daemon.client.get(api_path("rollouts", rollout, "nodes", node))["failure"]
            daemon.client.post(api_path("rollouts", rollout, "nodes", node, "retry"), {"reason": "seen"})
            assert failure["code"] != "never-started", failure["message"]
            unknown[node] += 1
            print(f"{node}: {failure['code']}: {failure['message']}")
        if status["state"] == "paused" and not failed:
            daemon.vote(rollout, "proceed", reason="retried")
        return bool(status["state"] == "done")
    except (ApiError, DaemonUnreachable):
        return False


def judge(daemon: DaemonEnvironment, nodes: dict[str, Any], failed: Counter[str]) -> None:
    """No node ran its playbook more often than it had attempts, and never twice at once."""
    spans: dict[str, list[Any]] = {}
    for span in daemon.spans():
        spans.setdefault(span.node, []).append(span)
    for node, state in nodes.items():
        ran = sorted(spans.get(node, []), key=lambda span: span.begin)
        assert state["outcome"] == "changed", (node, state)
        assert 1 <= len(ran) <= 1 + failed[node], (node, ran, failed[node])
        assert ran[-1].end is not None
        for earlier, later in pairwise(ran):
            assert earlier.end is None or earlier.end <= later.begin, (node, ran)
