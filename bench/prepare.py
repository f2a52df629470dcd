"""Measures preparation on real nodes: sshd, all on this machine.

1. A rollout of "copy 20 MiB, unpack, restart", with a prepare stage, and as one playbook: the wall time and
   the slot-seconds, which a node is out of service.  One pool of each team has one slot.
2. A fleet that gets 5 MiB, without a limit and at a limited rate: the rate on the nodes' disks between the
   first and the last tenth of the bytes, and the daemon's CPU and wall time for each node of a second
   rollout, which skips all stages.  What the nodes do takes this machine's CPU, too, so a limit near to what
   it carries without one is not reached.

    python -m bench.prepare [--nodes 24] [--teams 4] [--mib 20] [--fleet 200] [--rate-mib 8]
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import tarfile
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.support.daemon_environment import DaemonEnvironment, daemon_environment, fleet_labels, plan
from tests.support.prepared_fleet import SHARED_BY_NODES, prepared_fleet

RESTART = """\
    - name: restart
      ansible.builtin.shell: ln -sfn "{{ unpacked }}" "{{ home }}/current" && sleep 1
      changed_when: true
"""

WHOLE = f"""\
- hosts: all
  gather_facts: false
  tasks:
    - name: directory
      ansible.builtin.file: {{path: "{{{{ unpacked }}}}", state: directory}}
    - name: copy and unpack
      ansible.builtin.unarchive: {{src: files/app-1.0.tar, dest: "{{{{ unpacked }}}}"}}
{RESTART}"""

CONFIGURE = f"""\
- hosts: all
  gather_facts: false
  tasks:
{RESTART}"""


def measure(directory: Path, nodes: int, teams: int, mib: int) -> dict[str, Any]:
    """Return wall time and slot-seconds of both rollouts."""
    (directory / "app.bin").write_bytes(os.urandom(mib << 20))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(directory / "app.bin", "app.bin")
    content = packed.getvalue()
    labels = fleet_labels(nodes, teams, 1)
    for name, each in labels.items():
        home = directory / "homes" / name
        home.mkdir(parents=True)
        each |= {"home": str(home), "rolloutd_fact_path": str(home / "facts")}
    cache = f"{directory}/homes/{{{{ node.name }}}}/cache"
    with daemon_environment(directory, labels) as env:
        manifest = env.write_artifacts({"app-1.0.tar": content}, unpack=True)
        playbooks = {"whole.yml": WHOLE, "configure.yml": CONFIGURE}
        common: dict[str, Any] = {"max_parallel": teams, "soak": "0s"}
        whole = {"playbook": "whole.yml", "vars": {"unpacked": "{{ home }}/unpacked"}}
        unpacked = f"{{{{ home }}}}/cache/{hashlib.sha256(content).hexdigest()}/unpacked"
        configure = {"playbook": "configure.yml", "vars": {"unpacked": unpacked}}
        stage = {"stage": {"manifest": manifest, "to": cache, "may_change": SHARED_BY_NODES}}
        return {
            "whole": run(env, plan("whole", maintain=whole, **common), playbooks),
            "prepared": run(env, plan("prepared", prepare=[stage], maintain=configure, **common), playbooks),
        }


def run(env: DaemonEnvironment, wanted: dict[str, Any], playbooks: dict[str, str]) -> dict[str, float]:
    rollout, began = env.submit(wanted, playbooks), time.monotonic()
    env.finish(rollout, 1500.0)
    wall = time.monotonic() - began
    slots = (seconds(node["since"]) - seconds(node["admitted_at"]) for node in env.nodes(rollout).values())
    return {"wall_s": round(wall, 1), "slot_s": round(sum(slots), 1)}


def measure_fleet(directory: Path, nodes: int, rate_mib: int) -> dict[str, Any]:
    """Return the rate of a first rollout, and the costs of a second one; a rate of 0 is no limit."""
    directory.mkdir()
    rate = f"{rate_mib}MiB/s" if rate_mib else None
    with prepared_fleet(directory, nodes, size=5 << 20, rate=rate) as fleet:
        first, again = fleet.prepare(), fleet.prepare(supersede=True, again=True)
    return {
        "nodes": nodes,
        "limit_mib_s": rate_mib,
        "rate_mib_s": round(first.rate_bps() / (1 << 20), 2),
        "first_s": round(first.wall_s, 1),
        "first_cpu_ms": round(1000 * first.cpu_s / nodes, 1),
        "again_ms": round(1000 * again.wall_s / nodes, 1),
        "again_cpu_ms": round(1000 * again.cpu_s / nodes, 1),
    }


def seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--teams", type=int, default=4)
    parser.add_argument("--mib", type=int, default=20)
    parser.add_argument("--fleet", type=int, default=200)
    parser.add_argument("--rate-mib", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rolloutd-prepare-") as directory:
        found = measure(Path(directory), args.nodes, args.teams, args.mib) if args.nodes else {}
    with tempfile.TemporaryDirectory(prefix="rolloutd-prepare-") as directory:
        rates = dict.fromkeys((0, args.rate_mib)) if args.fleet else {}
        fleets = [measure_fleet(Path(directory, str(rate)), args.fleet, rate) for rate in rates]
    for name, each in found.items():
        print(f"{name}: {each['wall_s']} s, {each['slot_s'] / 60:.1f} slot-minutes, {args.nodes} nodes")
    for fleet in fleets:
        limit = f"of {fleet['limit_mib_s']} MiB/s" if fleet["limit_mib_s"] else "MiB/s without a limit"
        print(f"fleet of {fleet['nodes']}: {fleet['rate_mib_s']} {limit}, ", end="")
        print(
            f"then {fleet['again_cpu_ms']} ms of CPU and {fleet['again_ms']} ms for each node that has it all"
        )
    print(json.dumps({"bench": "prepare", "nodes": args.nodes, "mib": args.mib, **found, "fleets": fleets}))


if __name__ == "__main__":
    main()
