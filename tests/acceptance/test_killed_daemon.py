"""The real daemon and its fork servers, killed again and again in a rollout over real sshd nodes.

The log that the playbooks write says what really ran: each node exactly once.
ROLLOUTD_TEST_KILLS says how often the daemon is killed (50 in CI's own run of
this file, fewer where it is run by itself); while it prepares nodes at most 20 times.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from rolloutd.control.client import api_path
from rolloutd.store import SqliteBackend
from tests.support.daemon_environment import (
    CHANGE_PLAYBOOK,
    WARM,
    DaemonEnvironment,
    daemon_environment,
    fleet_labels,
    plan,
)
from tests.support.prepared_fleet import SHARED_BY_NODES, closed_window

pytestmark = [pytest.mark.servers, pytest.mark.long]

KILLS = int(os.environ.get("ROLLOUTD_TEST_KILLS", "8"))
SEED = int(os.environ.get("ROLLOUTD_TEST_SEED", "1"))
LONGEST_LIFE_S = 2.5
LOOK_S = 0.05
SERVER_DIES = 0.1  # at each look, if there is one
CROWD = 5  # runs in flight; there are six teams, and each pool has one node in flight
CROWD_LIMIT_S = 20.0  # near its end the rollout has nodes of fewer teams
FORKED = "Ansible started as a fork"
WORK_PER_KILL_S = 0.25  # five rounds of nodes then last about as long as all the lives and restarts
NODES, TEAMS = 24, 6
PREPARE_KILLS, PREPARED_NODES, INSTALLS = 20, 8, ("unpack", "install")
LONGEST_PREPARING_S, WORK_OF_INSTALL_S = 1.8, 1.0


def test_killed_at_random_moments_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    """SIGKILL at moments spread over every step, with runs in flight."""
    draw = random.Random(SEED)
    with daemon_environment(tmp_path, fleet_labels(NODES, TEAMS, 2), ansible={"parallel": TEAMS}) as made:
        rollout = submit(made, work_s=KILLS * WORK_PER_KILL_S)
        made.vote(rollout, "start")
        crowded = servers_killed = 0
        for number in range(KILLS):
            servers_killed += live(made, rollout, draw)
            if number % 3 == 0:
                await_crowd(made, rollout)
            in_flight = len(unfinished(made))
            crowded += in_flight >= CROWD
            made.kill_daemon()
            print(f"kill {number + 1}: {in_flight} runs in flight")
            made.start_daemon()
        status = made.finish(rollout, 600)
        assert (status["percent"], status["done"], status["failed"]) == (100, NODES, 0)
        ran = sorted(span.node for span in made.spans())
        assert ran == sorted(made.labels), "each node exactly once"
        verdict = SqliteBackend(tmp_path / "state" / "rolloutd.sqlite").verify_chain()
        assert verdict.ok, verdict.message
        votes = [vote for gate in status["gates"] for vote in gate["votes"]]
        assert {vote["withdrawn"] for vote in votes} == {None}
        assert len(votes) == 2, "no vote is lost or doubled"
        made.wait_until(lambda: made.run_processes() == [], "no process is left")
        print(
            f"{KILLS} kills, {crowded} of them with {CROWD} or more runs in flight, "
            f"and {servers_killed} of fork servers: 0 lost, 0 doubled"
        )
        ways = [ways_of(run) for run in (tmp_path / "state" / "runs").iterdir()]
        print(f"{sum(FORKED in way for way in ways)} of {len(ways)} runs were forks")
        if KILLS >= 50:
            assert crowded >= 5
            assert (servers_killed >= 1) == (WARM == "auto")
            assert any(FORKED in way for way in ways) == (WARM == "auto")


def test_killed_while_it_prepares_no_stage_is_lost_or_doubled(tmp_path: Path) -> None:
    draw, kills = random.Random(SEED), min(KILLS, PREPARE_KILLS)
    labels = fleet_labels(PREPARED_NODES, 2, 1)
    content = random.Random(SEED).randbytes(1 << 18)
    with daemon_environment(tmp_path, labels, nodes_per_sshd=PREPARED_NODES) as made:
        rollout = submit_prepared(made, content)
        made.vote(rollout, "start")
        running = 0
        for number in range(kills):
            if number % 2 == 0:
                made.wait_until(lambda: has_stage_to_kill(made, rollout), "a stage runs, or none is left")
            time.sleep(draw.uniform(0.0, LONGEST_PREPARING_S))
            running += any(row["state"] == "running" for row in preparations(made, rollout))
            made.kill_daemon()
            made.start_daemon()
        made.wait_until(
            lambda: made.status(rollout)["prepared"]["done"] == PREPARED_NODES, "all are prepared"
        )
        rows = preparations(made, rollout)
        assert sorted((row["node"], row["stage"]) for row in rows) == sorted(
            (name, stage) for name in labels for stage in ("stage", *INSTALLS)
        )
        assert {(row["state"], row["attempt"]) for row in rows} == {("done", 1)}
        for name in INSTALLS:
            ran = [line.split()[:2] for line in (tmp_path / name).read_text().splitlines()]
            assert sorted(ran) == sorted([what, node] for what in ("begin", "end") for node in labels)
        for name in labels:
            # Beside what the node remembers of its comparison with the staged file.
            staged = (tmp_path / "cache" / name).rglob("*.bin")
            (file,) = [path for path in staged if ".compared" not in path.parts]
            assert file.read_bytes() == content
        assert SqliteBackend(tmp_path / "state" / "rolloutd.sqlite").verify_chain().ok
        made.wait_until(lambda: made.run_processes() == [], "no process is left")
        print(f"{kills} kills, {running} of them with stages under way: 0 lost, 0 doubled")
        assert running >= kills / 4


def submit_prepared(made: DaemonEnvironment, content: bytes) -> str:
    """Submit a plan that brings an artifact and then runs two installs, and isolates no node."""
    stages: list[dict[str, Any]] = [
        {
            "stage": {
                "manifest": made.write_artifacts({"app-1.0.bin": content}),
                "to": f"{made.directory}/cache/{{{{ node.name }}}}",
                "rate": "512KiB/s",
                "max_parallel": 2,
                "may_change": SHARED_BY_NODES,
            }
        }
    ]
    for name in INSTALLS:
        variables = {"log_file": str(made.directory / name), "work_s": WORK_OF_INSTALL_S}
        install = {"name": name, "playbook": "install.yml", "vars": variables, "max_parallel": 2}
        stages.append({"install": {**install, "may_change": SHARED_BY_NODES}})
    playbooks = {"install.yml": CHANGE_PLAYBOOK, "change.yml": CHANGE_PLAYBOOK}
    return made.submit(plan("prepared", prepare=stages, windows=[closed_window()]), playbooks)


def has_stage_to_kill(made: DaemonEnvironment, rollout: str) -> bool:
    """Return whether a stage runs, or all have ended."""
    states = [row["state"] for row in preparations(made, rollout)]
    return "running" in states or set(states) == {"done"}


def preparations(made: DaemonEnvironment, rollout: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = made.client.get(api_path("rollouts", rollout, "prepare"))["preparations"]
    return rows


def submit(made: DaemonEnvironment, *, work_s: float) -> str:
    """Submit a plan whose playbook works so long on each node."""
    variables = {"log_file": str(made.log_file), "work_s": round(work_s, 1)}
    stage = {"playbook": "change.yml", "vars": variables, "on_unknown": "pause"}
    return made.submit(
        plan("killed", canary={"select": "canary=true", "max_parallel": 3}, maintain=stage),
        {"change.yml": CHANGE_PLAYBOOK},
    )


def live(made: DaemonEnvironment, rollout: str, draw: random.Random) -> int:
    """Let the daemon work for a while, voting when it asks; return how many fork servers were killed."""
    until = time.monotonic() + draw.uniform(0.0, LONGEST_LIFE_S)
    killed = 0
    while (left := until - time.monotonic()) > 0:
        vote_if_asked(made, rollout)
        if draw.random() < SERVER_DIES:
            killed += made.kill_fork_servers()
        time.sleep(min(LOOK_S, left))
    return killed


def await_crowd(made: DaemonEnvironment, rollout: str) -> None:
    """Let the daemon work until runs of most teams are active, unless canaries are, which are three at once.

    A life lasts about as long as a restart, and the start of a run needs a search for stale processes, of a
    second.  Without this, how many runs are in flight at a kill depends on the machine's load.
    """
    until = time.monotonic() + CROWD_LIMIT_S
    while len(unfinished(made)) < CROWD and time.monotonic() < until:
        status = vote_if_asked(made, rollout)
        if not TEAMS <= status["done"] <= NODES - CROWD:
            return
        time.sleep(LOOK_S)


def ways_of(run: Path) -> str:
    """Return what a run's log says about its start."""
    events = run / "events.jsonl"
    return events.read_text() if events.exists() else ""


def vote_if_asked(made: DaemonEnvironment, rollout: str) -> dict[str, object]:
    """Vote at the continue gate as soon as it asks."""
    status = made.status(rollout)
    if any(gate["gate"] == "continue" and gate["state"] == "waiting" for gate in status["gates"]):
        made.vote(rollout, "continue")
    return status


def unfinished(made: DaemonEnvironment) -> list[str]:
    """Return the nodes whose playbook has begun and not ended."""
    return [span.node for span in made.spans() if span.end is None]
