"""How near a forecast comes on real nodes: 24 sshd nodes and the demo's fleet, three rollouts each.

    python -m bench.forecast_fleet [ssh|demo] [ROLLOUTS]

Each forecast is made at the gate after the canaries, and assumes that the votes come VOTE_AFTER_S later, as
they do.  Measured is the distance of its p50 from the real end, as a share of the time that the fleet
after the canaries took; and the daemon's own score is compared with the one computed here.
Prints a line for each rollout as it ends, and one of JSON.  It takes at most LIMIT_S for each fleet.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rolloutd.control.client import Client, api_path
from rolloutd.demo.environment import demo_environment
from rolloutd.demo.scenario import start_rollout
from tests.support.daemon_environment import CHANGE_PLAYBOOK, daemon_environment, fleet_labels, plan

NODES, TEAMS, RACKS = 24, 6, 2
DEMO_NODES = 12
ROLLOUTS = 3
PARALLEL_RUNS = 4
"""Fewer slots than teams, so that runs wait for the runner."""

WORK_S = 6.0
"""Duration of the change without Ansible's own second; concurrent runs share two cores here."""

VOTE_AFTER_S = 15.0
"""Time for the forecast, which takes a second or two of CPU; it does not count."""

LIMIT_S = 900.0
"""Three rollouts take five minutes on an idle machine."""

POLL_S = 0.1

AIM = 0.15


@dataclass(frozen=True, slots=True)
class Fleet:
    """A daemon over real nodes; `submit` opens the rollout with a number."""

    name: str
    client: Client
    submit: Callable[[int], str]


def main(options: list[str]) -> int:
    """Measure, and return 0 if every forecast came within its aim."""
    fleets = {"ssh": ssh_fleet, "demo": demo_fleet}
    wanted = [each for each in options if each in fleets] or list(fleets)
    rollouts = next((int(each) for each in options if each.isdecimal()), ROLLOUTS)
    measured = []
    for name in wanted:
        with (
            tempfile.TemporaryDirectory(prefix="forecast-", ignore_cleanup_errors=True) as directory,
            fleets[name](Path(directory)) as fleet,
        ):
            deadline = time.monotonic() + LIMIT_S
            for number in range(rollouts):
                try:
                    measured.append(measure(fleet, number, deadline))
                except TimeoutError as late:
                    print(f"forecast_fleet: {name}: {late}; measure again on an idle machine")
                    return 1
                print_line(measured[-1])
    print(json.dumps(measured))
    return 0 if all(each["own_score"] == each["score"] and each["error"] <= AIM for each in measured) else 1


@contextmanager
def ssh_fleet(directory: Path) -> Iterator[Fleet]:
    labels = fleet_labels(NODES, TEAMS, RACKS)
    with daemon_environment(directory, labels, ansible={"parallel": PARALLEL_RUNS}) as environment:

        def submit(number: int) -> str:
            variables = {"log_file": str(environment.log_file), "work_s": WORK_S, "number": str(number)}
            maintain = {"playbook": "change.yml", "vars": variables}
            content = plan("forecast", canary={"select": "canary=true"}, soak="1s", maintain=maintain)
            return environment.submit(content, {"change.yml": CHANGE_PLAYBOOK})

        yield Fleet("ssh", environment.client, submit)


@contextmanager
def demo_fleet(directory: Path) -> Iterator[Fleet]:
    with demo_environment(directory.resolve(), nodes=DEMO_NODES, keep=True) as demo:
        text = demo.plan_file.read_text()

        def submit(number: int) -> str:
            # Another value each time, so that each node has something to change.
            demo.plan_file.write_text(text.replace("65535", str(65535 - number)))
            return start_rollout(demo, lambda message: None, {})

        yield Fleet("demo", demo.client, submit)


def measure(fleet: Fleet, number: int, deadline: float) -> dict[str, Any]:
    """Take a rollout to its end, and compare it with what was forecast after the canaries."""
    rollout = fleet.submit(number)
    vote(fleet, rollout, "start", deadline)
    wait_for(fleet, rollout, lambda status: is_waiting(status, "continue"), "the gate continue", deadline)
    asked_at = time.time()
    options = {"draws": 200, "publish": "calendar", "approve_after_s": VOTE_AFTER_S}
    forecast = fleet.client.post(api_path("rollouts", rollout, "forecast"), options)
    pause_s = asked_at + VOTE_AFTER_S - time.time()
    if pause_s < 0.0:
        raise TimeoutError(f"{rollout}: its forecast took longer than {VOTE_AFTER_S:.0f} s")
    time.sleep(pause_s)
    began = time.time()
    vote(fleet, rollout, "continue", deadline)
    wait_for(fleet, rollout, lambda status: status["state"] == "done", "its end", deadline)
    nodes = fleet.client.get(api_path("rollouts", rollout, "nodes"))["nodes"]
    ends = {node["node"]: instant(node["since"]) for node in nodes}
    late_s = max(ends.values()) - instant(forecast["ends_at"]["p50"])
    took_s = max(ends.values()) - began
    errors = []
    for node in forecast["nodes"]:
        p50, p90 = (instant(node["ends_at"][side]) for side in ("p50", "p90"))
        # Instants in answers are whole seconds.
        errors.append((abs(ends[node["node"]] - p50), ends[node["node"]] < p90 + 1.0))
    scored = fleet.client.get(api_path("forecasts", "score"), {"rollout": rollout})["forecasts"]
    own = next(each for each in scored if each["occasion"] == "calendar")
    score = {
        "nodes": len(errors),
        "within_p90": round(sum(is_within for _, is_within in errors) / len(errors), 4),
        "median_error_s": round(statistics.median(seconds for seconds, _ in errors), 1),
    }
    return {
        "fleet": fleet.name,
        "rollout": rollout,
        "took_s": round(took_s, 1),
        "late_s": round(late_s, 1),
        "p90_after_p50_s": round(forecast["work_s"]["p90"] - forecast["work_s"]["p50"], 1),
        "error": round(abs(late_s) / took_s, 4),
        "own_score": {key: own[key] for key in score},
        "score": score,
        "load": round(os.getloadavg()[0], 1),
    }


def print_line(measured: dict[str, Any]) -> None:
    own, score = measured["own_score"], measured["score"]
    print(
        f"{measured['fleet']} {measured['rollout']}: p50 is off by {measured['error']:.1%} of "
        f"{measured['took_s']} s (aim {AIM:.0%}) {'ok' if measured['error'] <= AIM else 'MISSED'}; "
        f"{score['within_p90']:.0%} of {score['nodes']} nodes by p90, own score "
        f"{'agrees' if own == score else f'DIFFERS: {own}'}; load {measured['load']}",
        flush=True,
    )


def vote(fleet: Fleet, rollout: str, gate: str, deadline: float) -> None:
    wait_for(fleet, rollout, lambda status: is_waiting(status, gate), f"the gate {gate}", deadline)
    body = {"gate": gate, "yes": True, "reason": "measured"}
    fleet.client.post(api_path("rollouts", rollout, "votes"), body)


def is_waiting(status: dict[str, Any], gate: str) -> bool:
    return any(each["gate"] == gate and each["state"] == "waiting" for each in status["gates"])


def wait_for(
    fleet: Fleet, rollout: str, condition: Callable[[dict[str, Any]], bool], what: str, deadline: float
) -> None:
    """Wait until a rollout's status is so; raises TimeoutError, also where a node has failed."""
    while not condition(status := fleet.client.get(api_path("rollouts", rollout))):
        if status["state"] == "paused":
            raise TimeoutError(f"{rollout}: paused before {what}: {status['reason']['text']}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{rollout}: {what} did not come within {LIMIT_S:.0f} s of the measurement")
        time.sleep(POLL_S)


def instant(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
