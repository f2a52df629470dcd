"""Measures what it takes to begin a run in a fleet of 10,000 nodes: time, and bytes on the disk.

Every run needs the whole inventory, because a playbook may ask for any host's
variables.  Ansible itself is left out: /bin/true stands for it.  Prints one line
for people and one of JSON.

    python -m bench.start_run [--hosts 10000] [--runs 20]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.ports import Host, InventorySnapshot, PinnedSource, RunRequest

AIM_S = 0.02
"""A run takes seconds; what we do before it should not be seen."""


def fleet(count: int) -> dict[str, dict[str, Any]]:
    """Return hosts with as many variables as an inventory usually has."""
    return {
        f"n{number}": {
            "ansible_host": f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
            "ansible_user": "ops",
            "ansible_python_interpreter": "/usr/bin/python3",
            "team": f"team-{number % 500}",
            "rack": f"r{number % 250}",
            "role": "worker",
            **{f"variable_{each}": f"value {each} of host {number}" for each in range(10)},
        }
        for number in range(count)
    }


def groups(hosts: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the hosts by rack, as groups of the inventory."""
    found: dict[str, list[str]] = {}
    for name, variables in hosts.items():
        found.setdefault(f"rack_{variables['rack']}", []).append(name)
    return found


async def measure(base: Path, count: int, runs: int) -> dict[str, object]:
    """Return the median time of a start, and the bytes that each left on the disk."""
    tree = base / "tree"
    tree.mkdir()
    (tree / "play.yml").write_text("- hosts: all\n")
    hosts = fleet(count)
    shell = SshShell(None)
    snapshot = InventorySnapshot(hosts, groups(hosts), generation=1)
    runner = AnsibleRunner(
        base / "runs",
        shell,
        lambda source: tree,
        lambda: snapshot,
        ansible_playbook="/bin/true",
        parallel=runs,
    )
    took = []
    for number in range(runs):
        request = RunRequest(
            run_id=f"r{number}",
            host=Host(f"n{number}", connection=hosts[f"n{number}"]),
            source=PinnedSource("tree", "bench"),
            playbook="play.yml",
        )
        began = time.perf_counter()
        await runner.start(request)
        took.append(time.perf_counter() - began)
    await runner.close()
    await shell.close()
    return {
        "bench": "start_run",
        "hosts": count,
        "runs": runs,
        "first_s": round(took[0], 4),
        "start_s": round(statistics.median(took[1:]), 4),
        "bytes_per_run": round(disk_bytes(base / "runs") / runs),
        "aim_s": AIM_S,
    }


def disk_bytes(directory: Path) -> int:
    """Return what the files below take on the disk, each once however many names it has."""
    stats = [Path(place, name).lstat() for place, _, names in os.walk(directory) for name in names]
    return sum({each.st_ino: each.st_blocks * 512 for each in stats}.values())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=20)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as directory:
        found = asyncio.run(measure(Path(directory), asked.hosts, asked.runs))
    print(
        f"start of a run among {found['hosts']} hosts: {found['start_s']} s (aim: at most {AIM_S}),"
        f" the first {found['first_s']} s; {found['bytes_per_run']} bytes a run, of {found['runs']} runs"
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
