"""Measures a rollout of "copy 20 MiB, unpack, restart": with a prepare stage, and as one playbook.

Both rollouts run on the same real nodes (sshd, all on this machine), one pool of each team with one slot.
Prints the wall time and the slot-seconds, which a node is out of service.

    python -m bench.prepare [--nodes 24] [--teams 4] [--mib 20]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from rolloutd.planfile.manifest import format_manifest
from tests.support.daemon_environment import DaemonEnvironment, daemon_environment, fleet_labels, plan

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
      ansible.builtin.unarchive: {{src: app.tar, dest: "{{{{ unpacked }}}}"}}
{RESTART}"""

CONFIGURE = f"""\
- hosts: all
  gather_facts: false
  tasks:
{RESTART}"""

# The nodes are one machine, on which this program and the other nodes work meanwhile.
OTHERS = ["port/*", "process/*", "mount/*", "route/*", "address/*", "module/*"]


def measure(directory: Path, nodes: int, teams: int, mib: int) -> dict[str, Any]:
    """Return wall time and slot-seconds of both rollouts."""
    tree = directory / "tree"
    tree.mkdir()
    (directory / "app.bin").write_bytes(os.urandom(mib << 20))
    with tarfile.open(tree / "app.tar", "w") as archive:
        archive.add(directory / "app.bin", "app.bin")
    content = (tree / "app.tar").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    entry = {"name": "app", "version": "1", "kind": "archive", "path": "app.tar", "unpack": True}
    manifest = format_manifest([{**entry, "sha256": digest, "size": len(content)}])
    labels = fleet_labels(nodes, teams, 1)
    for name, each in labels.items():
        home = directory / "homes" / name
        home.mkdir(parents=True)
        each |= {"home": str(home), "rolloutd_fact_path": str(home / "facts")}
    cache = f"{directory}/homes/{{{{ node.name }}}}/cache"
    with daemon_environment(directory, labels) as env:
        playbooks = {"whole.yml": WHOLE, "configure.yml": CONFIGURE, "artifacts.yml": manifest}
        common: dict[str, Any] = {"max_parallel": teams, "soak": "0s"}
        whole = {"playbook": "whole.yml", "vars": {"unpacked": "{{ home }}/unpacked"}}
        configure = {
            "playbook": "configure.yml",
            "vars": {"unpacked": f"{{{{ home }}}}/cache/{digest}/unpacked"},
        }
        stage = {"stage": {"to": cache, "may_change": OTHERS}}
        return {
            "whole": run(env, plan("whole", maintain=whole, **common), playbooks),
            "prepared": run(env, plan("prepared", prepare=[stage], maintain=configure, **common), playbooks),
        }


def run(env: DaemonEnvironment, wanted: dict[str, Any], playbooks: dict[str, str]) -> dict[str, float]:
    rollout, began = env.submit(wanted, playbooks), time.monotonic()

    def is_done() -> bool:
        status = env.status(rollout)
        for gate in status["gates"]:
            if gate["state"] == "waiting":
                env.vote(rollout, gate["gate"])
        return bool(status["state"] == "done")

    env.wait_until(is_done, f"{rollout} is done", 1500.0)
    wall = time.monotonic() - began
    slots = (seconds(node["since"]) - seconds(node["admitted_at"]) for node in env.nodes(rollout).values())
    return {"wall_s": round(wall, 1), "slot_s": round(sum(slots), 1)}


def seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--teams", type=int, default=4)
    parser.add_argument("--mib", type=int, default=20)
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="rolloutd-prepare-"))
    try:
        found = measure(directory, args.nodes, args.teams, args.mib)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for name, each in found.items():
        print(f"{name}: {each['wall_s']} s, {each['slot_s'] / 60:.1f} slot-minutes, {args.nodes} nodes")
    print(json.dumps({"bench": "prepare", "nodes": args.nodes, "mib": args.mib, **found}))


if __name__ == "__main__":
    main()
