"""A rollout over 24 real sshd nodes, against a shell script that does the same with bare ansible-playbook.

The script takes the canaries one by one, waits the soak, then runs one loop of
`ansible-playbook --limit` per team, side by side.  The two go in turn; the
figure is the ratio of their walls, which should stay at most 0.6.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.daemon_environment import (
    CHANGE_PLAYBOOK,
    DaemonEnvironment,
    daemon_environment,
    fleet_labels,
    plan,
)

NODES, TEAMS, RACKS = 24, 6, 2
SOAK_S = 1
AIM = 0.6
WORK_S = float(os.environ.get("BENCH_WORK_S", "0"))
"""A longer sleep on each node brings the ratio nearer to one, whatever a run costs."""

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "1"))


def main() -> None:
    """Print one line for people and one of JSON."""
    ours_s, script_s = measure(ROUNDS)
    ratio = round(ours_s / script_s, 3)
    figures = {
        "bench": "fleet",
        "nodes": NODES,
        "rolloutd_s": round(ours_s, 2),
        "script_s": round(script_s, 2),
        "ratio": ratio,
        "aim": AIM,
    }
    print(f"fleet: {ours_s:.2f} s, a script {script_s:.2f} s: ratio {ratio}")
    print(json.dumps(figures))


def measure(rounds: int) -> tuple[float, float]:
    """Return the medians of the walls: of rollouts, and of the script."""
    with tempfile.TemporaryDirectory(prefix="rb-") as directory:
        pools = {"team": {"max_unavailable": 1}, "rack": {"max_unavailable": 100}}
        with daemon_environment(
            Path(directory), fleet_labels(NODES, TEAMS, RACKS), pools=pools, ansible={"parallel": TEAMS}
        ) as made:
            pairs = [(run_rollout(made, number), run_script(made)) for number in range(rounds)]
    return statistics.median(ours for ours, _ in pairs), statistics.median(script for _, script in pairs)


def run_rollout(made: DaemonEnvironment, number: int) -> float:
    """Return the wall of one rollout, from the start vote to done."""
    spec = plan(
        f"bench-{number}",
        canary={"select": "canary=true"},
        soak=f"{SOAK_S}s",
        maintain={
            "playbook": "change.yml",
            "vars": {"log_file": str(made.log_file), "work_s": WORK_S, "round": number},
        },
    )
    made.log_file.unlink(missing_ok=True)
    name = made.submit(spec, {"change.yml": CHANGE_PLAYBOOK})
    began = time.monotonic()
    made.vote(name, "start")
    made.wait_for_gate(name, "continue")
    made.vote(name, "continue")
    made.wait_until(lambda: made.status(name)["state"] == "done", "the rollout is done")
    took = time.monotonic() - began
    assert len(made.spans()) == NODES
    return took


def run_script(made: DaemonEnvironment) -> float:
    """Return the wall of the script over the same nodes."""
    made.log_file.unlink(missing_ok=True)
    playbook = made.directory / "tree" / "change.yml"
    ansible = Path(sys.executable).with_name("ansible-playbook")
    command = (
        f"{ansible} -i {made.directory}/hosts.yml -e log_file={made.log_file} -e work_s={WORK_S}"
        f" --ssh-common-args '-o UserKnownHostsFile={made.directory}/known_hosts' {playbook}"
    )
    canaries = [name for name, labels in made.labels.items() if labels["canary"] == "true"]
    loops = []
    for team in sorted({labels["team"] for labels in made.labels.values()}):
        mine = [n for n, labels in made.labels.items() if labels["team"] == team and n not in canaries]
        loops.append(f"(for n in {' '.join(mine)}; do {command} --limit $n || exit 1; done) &")
    text = "\n".join(
        [
            "set -e",
            f"for n in {' '.join(canaries)}; do {command} --limit $n; done",
            f"sleep {SOAK_S}",
            *loops,
            "wait",
        ]
    )
    began = time.monotonic()
    subprocess.run(["sh", "-c", text], check=True, stdout=subprocess.DEVNULL)
    took = time.monotonic() - began
    assert len(made.spans()) == NODES
    return took


if __name__ == "__main__":
    main()
