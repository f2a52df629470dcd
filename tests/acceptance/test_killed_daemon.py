"""The real daemon, killed again and again in the middle of a rollout over real sshd nodes.

The log that the playbooks write says what really ran: each node exactly once.
ROLLOUTD_TEST_KILLS says how often the daemon is killed (50 in CI's own run of
this file, fewer where it is run by itself).
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from rolloutd.audit_chain import verify_chain
from tests.support.daemon_environment import (
    CHANGE_PLAYBOOK,
    DaemonEnvironment,
    daemon_environment,
    fleet_labels,
    plan,
)

pytestmark = [pytest.mark.servers, pytest.mark.long]

KILLS = int(os.environ.get("ROLLOUTD_TEST_KILLS", "8"))
SEED = int(os.environ.get("ROLLOUTD_TEST_SEED", "1"))
LONGEST_LIFE_S = 2.5
MAX_RUN_PROCESSES = 4
WORK_PER_KILL_S = 0.55  # five rounds of nodes then last about as long as all the lives and restarts
NODES, TEAMS = 24, 6


def test_killed_at_random_moments_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    """SIGKILL at moments spread over every step, with runs in flight."""
    draw = random.Random(SEED)
    with daemon_environment(tmp_path, fleet_labels(NODES, TEAMS, 2), ansible={"parallel": TEAMS}) as made:
        rollout = submit(made, work_s=KILLS * WORK_PER_KILL_S)
        made.vote(rollout, "start")
        crowded = 0
        for number in range(KILLS):
            live(made, rollout, draw.uniform(0.0, LONGEST_LIFE_S))
            in_flight = len(unfinished(made))
            crowded += in_flight >= MAX_RUN_PROCESSES
            made.kill_daemon()
            print(f"kill {number + 1}: {in_flight} runs in flight")
            made.start_daemon()
        status = finish(made, rollout)
        assert (status["percent"], status["done"], status["failed"]) == (100, NODES, 0)
        ran = sorted(span.node for span in made.spans())
        assert ran == sorted(made.labels), "each node exactly once"
        verdict = verify_chain(tmp_path / "state" / "rolloutd.sqlite")
        assert verdict.ok, verdict.message
        votes = [vote for gate in status["gates"] for vote in gate["votes"]]
        assert {vote["withdrawn"] for vote in votes} == {None}
        assert len(votes) == 2, "no vote is lost or doubled"
        made.wait_until(lambda: made.run_processes() == [], "no process is left")
        print(
            f"{KILLS} kills, {crowded} of them with {MAX_RUN_PROCESSES} or more runs in flight: "
            "0 lost, 0 doubled"
        )
        if KILLS >= 50:
            assert crowded >= 5


def submit(made: DaemonEnvironment, *, work_s: float) -> str:
    """Submit a plan whose playbook works so long on each node."""
    variables = {"log_file": str(made.log_file), "work_s": round(work_s, 1)}
    stage = {"playbook": "change.yml", "vars": variables, "on_unknown": "pause"}
    return made.submit(
        plan("killed", canary={"select": "canary=true", "max_parallel": 3}, maintain=stage),
        {"change.yml": CHANGE_PLAYBOOK},
    )


def live(made: DaemonEnvironment, rollout: str, seconds: float) -> None:
    """Let the daemon work for a while, voting when it asks."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        vote_if_asked(made, rollout)
        time.sleep(min(0.05, left))


def finish(made: DaemonEnvironment, rollout: str) -> dict[str, object]:
    """Let the rollout end, and return its status."""

    def over() -> dict[str, object] | None:
        status = vote_if_asked(made, rollout)
        assert status["state"] != "paused", status["reason"]
        return status if status["state"] == "done" else None

    ended: dict[str, object] = made.wait_until(over, "the rollout ends", 600)
    return ended


def vote_if_asked(made: DaemonEnvironment, rollout: str) -> dict[str, object]:
    """Vote at the continue gate as soon as it asks."""
    status = made.status(rollout)
    if any(gate["gate"] == "continue" and gate["state"] == "waiting" for gate in status["gates"]):
        made.vote(rollout, "continue")
    return status


def unfinished(made: DaemonEnvironment) -> list[str]:
    """Return the nodes whose playbook has begun and not ended."""
    return [span.node for span in made.spans() if span.end is None]
