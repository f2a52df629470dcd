"""The idle daemon's memory with 10,000 nodes in 500 pools: aim under 150 MiB.

The peer is a bare interpreter that imports the same libraries: what is left is ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.daemon_environment import DaemonEnvironment

NODES, TEAMS, RACKS = 10_000, 400, 100
SETTLE_S = 3.0
AIM_MIB = 150

IMPORTS = "import aiohttp, asyncssh, aiosqlite, apscheduler.schedulers.asyncio, pydantic, jinja2, yaml"


def main() -> None:
    """Print one line for people and one of JSON."""
    with tempfile.TemporaryDirectory(prefix="rb-") as directory:
        made = DaemonEnvironment(Path(directory), {})
        made.forks_daemon = False  # a fork shares the memory of what it has imported
        write_inventory(made)
        made.write_settings(
            pools={"team": {"max_unavailable": 1}, "rack": {"max_unavailable": 2}},
            teams={f"t{number}": {"members": ["root"]} for number in range(TEAMS)},
        )
        try:
            made.start_daemon()
            time.sleep(SETTLE_S)
            assert made.process is not None
            ours = resident_mib(made.process.pid)
            known = len(made.client.get("/v1/inventory")["nodes"])
        finally:
            made.stop()
    floor = libraries_mib()
    figures = {
        "bench": "memory",
        "nodes": known,
        "daemon_mib": round(ours, 1),
        "libraries_mib": round(floor, 1),
        "ratio": round(ours / floor, 2),
        "aim_mib": AIM_MIB,
    }
    print(f"memory: {ours:.0f} MiB idle with {known} nodes; the libraries alone {floor:.0f} MiB")
    print(json.dumps(figures))


def write_inventory(made: DaemonEnvironment) -> None:
    """Write an inventory of so many nodes as Ansible takes it."""
    lines = [
        f"n{number} ansible_host=10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        f" team=t{number % TEAMS} rack=r{number % RACKS} role=worker"
        for number in range(NODES)
    ]
    (made.directory / "hosts.yml").write_text("\n".join(lines) + "\n")
    (made.directory / "hosts.yml").rename(made.directory / "hosts")
    (made.directory / "hosts.yml").symlink_to("hosts")
    (made.directory / "known_hosts").write_text("")


def resident_mib(pid: int) -> float:
    """Return a process's resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)


def libraries_mib() -> float:
    """Return what the libraries alone take in a fresh interpreter."""
    code = f"{IMPORTS}; print(open('/proc/self/status').read())"
    text = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS:")) / 1024


if __name__ == "__main__":
    main()
