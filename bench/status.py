"""Measures `rolloutctl status --json` from spawn to exit, against a bare interpreter.

The daemon is real, in a directory of its own, with nothing to do: what is
measured is what a person waits for.  Both sides are run by turns.  Prints one
line of JSON and one for people.

    python bench/status.py [--rounds 21]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rolloutd.control.client import Client, DaemonUnreachable, api_path

ROOT = Path(__file__).resolve().parent.parent

AIM_MS = 150.0

READY_LIMIT_S = 60.0
"""How long the daemon may take to be there before the measurement is given up."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure how long rolloutctl status takes.")
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="rolloutd-bench-") as directory:
        socket = Path(directory) / "s"
        daemon = start_daemon(Path(directory), socket)
        try:
            await_daemon(socket, daemon)
            status = [sys.executable, "-m", "rolloutd.cli", "--socket", str(socket), "status", "--json"]
            bare = [sys.executable, "-c", "pass"]
            times = [(wall_ms(status), wall_ms(bare)) for _ in range(rounds)]
        finally:
            daemon.terminate()
            daemon.wait()
    ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    found = {
        "bench": "status",
        "wall_ms": round(ours, 1),
        "bare_python_ms": round(theirs, 1),
        "rounds": rounds,
        "aim_ms": AIM_MS,
    }
    print(json.dumps(found))
    print(f"status: {ours:.0f} ms from spawn to exit (aim {AIM_MS:.0f}), bare Python {theirs:.0f} ms")


def start_daemon(directory: Path, socket: Path) -> subprocess.Popen[bytes]:
    """Start a daemon that has nothing to do."""
    config = directory / "config.yaml"
    config.write_text(json.dumps({"state_dir": str(directory / "state"), "socket": str(socket)}))
    with (directory / "log").open("wb") as log:
        command = [sys.executable, "-m", "rolloutd", "--config", str(config)]
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def await_daemon(socket: Path, daemon: subprocess.Popen[bytes]) -> None:
    """Return once the daemon answers."""
    until = time.monotonic() + READY_LIMIT_S
    while True:
        try:
            Client(socket).get(api_path("health"))
        except DaemonUnreachable as none:
            if daemon.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the daemon did not start: {(socket.parent / 'log').read_text()}") from none
            time.sleep(0.05)
        else:
            return


def wall_ms(command: list[str]) -> float:
    """Return how long a command takes from spawn to exit."""
    began = time.perf_counter()
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True, env=os.environ)
    return (time.perf_counter() - began) * 1000


if __name__ == "__main__":
    main()
