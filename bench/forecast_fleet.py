"""How near a forecast comes: 24 real sshd nodes, three rollouts, forecast when the canaries are done.

Each forecast is made at the gate after the canaries, which then gets its votes during the soak.  Printed are
the distance of its p50 from the real end, as a share of the time that the fleet after the canaries took, and
the daemon's own score compared with the one computed here.  Prints a line for each rollout with its aim, and
one of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rolloutd.control.client import api_path
from tests.support.daemon_environment import CHANGE_PLAYBOOK, daemon_environment, fleet_labels, plan

NODES, TEAMS, RACKS = 24, 6, 2
ROLLOUTS = 3
PARALLEL_RUNS = 4
WORK_S = 15.0
"""Duration of the change without Ansible's own second; concurrent runs share two cores here."""

SOAK_S = 20.0
"""Time for the forecast and the votes; it does not count."""

AIM = 0.15


def main() -> int:
    """Measure, and return 0 if every forecast came within its aim."""
    with tempfile.TemporaryDirectory(prefix="forecast-", ignore_cleanup_errors=True) as directory:
        labels = fleet_labels(NODES, TEAMS, RACKS)
        # Fewer slots than teams, so that runs wait for the runner.
        with daemon_environment(Path(directory), labels, ansible={"parallel": PARALLEL_RUNS}) as made:
            measured = [measure(made, f"forecast-{number}") for number in range(ROLLOUTS)]
    print(f"load: {os.getloadavg()[0]:.1f}")
    for each in measured:
        verdict = "ok" if each["error"] <= AIM else "MISSED"
        text = f"p50 is off by {each['error']:.1%} of {each['took_s']:.1f} s (aim {AIM:.0%})"
        print(f"{each['rollout']}: {text} {verdict}")
        own, ours = each["own_score"], each["score"]
        print(f"  score: {own['within_p90']:.1%} by p90, {own['median_error_s']} s; computed here {ours}")
    print(json.dumps(measured))
    agree = all(each["own_score"]["within_p90"] == each["score"]["within_p90"] for each in measured)
    return 0 if agree and all(each["error"] <= AIM for each in measured) else 1


def measure(made: Any, name: str) -> dict[str, Any]:
    """Take a plan to its end, and compare it with what was forecast after the canaries."""
    content = plan(
        name,
        canary={"select": "canary=true"},
        soak=f"{SOAK_S:.0f}s",
        maintain={
            "playbook": "change.yml",
            "vars": {"log_file": str(made.log_file), "work_s": WORK_S, "why": name},
        },
    )
    rollout = made.submit(content, {"change.yml": CHANGE_PLAYBOOK})
    made.vote(rollout, "start")
    made.wait_for_gate(rollout, "continue")
    path = api_path("rollouts", rollout, "forecast")
    forecast = made.client.post(path, {"draws": 200, "publish": "calendar"})
    made.vote(rollout, "continue")
    made.wait_until(lambda: made.status(rollout)["state"] == "done", "the rollout ends")
    nodes = made.nodes(rollout)
    ends = {name: instant(node["since"]) for name, node in nodes.items()}
    end = max(ends.values())
    errors = []
    for each in forecast["nodes"]:
        p50, p90 = (instant(each["ends_at"][side]) for side in ("p50", "p90"))
        # Instants in answers are whole seconds.
        errors.append((abs(ends[each["node"]] - p50), ends[each["node"]] < p90 + 1.0))
    made_at = instant(forecast["made_at"])
    began = min(span.begin for span in made.spans() if span.begin > made_at)
    own = made.client.get(api_path("forecasts", "score"), {"rollout": rollout})["forecasts"]
    published = next(each for each in own if each["occasion"] == "calendar")
    return {
        "rollout": rollout,
        "took_s": end - began,
        "error": abs(end - instant(forecast["ends_at"]["p50"])) / (end - began),
        "late_s": round(end - instant(forecast["ends_at"]["p50"]), 1),
        "own_score": {key: published[key] for key in ("within_p90", "median_error_s", "nodes")},
        "score": {
            "within_p90": round(sum(within for _, within in errors) / len(errors), 4),
            "median_error_s": round(statistics.median(seconds for seconds, _ in errors), 1),
        },
    }


def instant(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


if __name__ == "__main__":
    sys.exit(main())
