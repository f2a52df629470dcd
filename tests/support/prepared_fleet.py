"""Preparation of many real nodes, measured from outside: bytes on their disks, CPU time of the daemon."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rolloutd.control.client import api_path
from tests.support.daemon_environment import DaemonEnvironment, daemon_environment, fleet_labels, plan

NODES_PER_SSHD = 16

SAMPLE_S = 0.05

SAMPLER_SHARE = 0.05
"""Limit of the sampler's share of a processor: the nodes and the daemon are on this machine too."""

# All nodes are this machine, on which other programs work meanwhile.
SHARED_BY_NODES = [
    "port/*",
    "process/*",
    "mount/*",
    "route/*",
    "address/*",
    "module/*",
    "sysctl/*",
    "package-lock/*",
]

INSTALL = """\
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.raw: echo installed >> {{ runs }}
"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the preparation of all nodes took, and how many stages ended in each state."""

    nodes: int
    began: float
    wall_s: float
    cpu_s: float
    states: Mapping[tuple[str, str], int]
    """By (stage, state)."""
    samples: list[tuple[float, int]] = field(repr=False)
    """Bytes on all nodes together; none was written after the instant."""

    def transfer_s(self) -> float:
        """Return the seconds until all bytes were there: at least what they took, also on a busy machine."""
        total = self.samples[-1][1]
        return next(at for at, size in self.samples if size == total) - self.began

    def rate_bps(self) -> float:
        """Return the rate between the first and the last tenth of the transfer."""
        total = self.samples[-1][1]
        inner = [each for each in self.samples if 0.1 * total < each[1] < 0.9 * total]
        (begin, first), (end, last) = inner[0], inner[-1]
        return (last - first) / (end - begin)


class PreparedFleet:
    """A daemon over nodes that share few servers, and plans with a stage for all and an install for some."""

    def __init__(self, env: DaemonEnvironment, *, size: int, rate: str | None) -> None:
        self._env = env
        manifest = env.write_artifacts({"app-1.0.bin": os.urandom(size)})
        self._caches = env.directory / "cache"
        cache = f"{self._caches}/{{{{ node.name }}}}"
        stage = {"manifest": manifest, "to": cache, "max_parallel": 200, "may_change": SHARED_BY_NODES}
        if rate is not None:
            stage["rate"] = rate
        install = {"playbook": "install.yml", "may_change": SHARED_BY_NODES, "where": "canary=true"}
        self._plan = plan(
            "fleet", prepare=[{"stage": stage}, {"install": install}], windows=[closed_window()]
        )

    def prepare(self, **more: Any) -> Prepared:
        """Submit the plan and wait until all nodes are prepared."""
        env = self._env
        rollout = env.submit(self._plan, {"install.yml": INSTALL, "change.yml": INSTALL}, **more)
        cpu_s, began = env.daemon_cpu_s(), time.monotonic()
        with self._sampled() as samples:
            env.vote(rollout, "start")
            env.wait_until(lambda: self._is_prepared(rollout), f"{rollout} is prepared", 600.0)
        wall_s, cpu_s = time.monotonic() - began, env.daemon_cpu_s() - cpu_s
        rows = env.client.get(api_path("rollouts", rollout, "prepare"))["preparations"]
        states = Counter((row["stage"], row["state"]) for row in rows)
        return Prepared(len(env.labels), began, wall_s, cpu_s, states, samples)

    def installed(self) -> dict[str, int]:
        """Return how often the install playbook ran on each node that has it."""
        runs = Path(self._env.directory, "runs")
        return {file.name: len(file.read_text().splitlines()) for file in runs.iterdir()}

    def _is_prepared(self, rollout: str) -> bool:
        prepared = self._env.status(rollout)["prepared"]
        return bool(prepared["done"] == len(self._env.labels))

    @contextmanager
    def _sampled(self) -> Iterator[list[tuple[float, int]]]:
        samples: list[tuple[float, int]] = []
        ended = threading.Event()

        def sample() -> None:
            took_s = 0.0
            while not ended.wait(max(SAMPLE_S, took_s / SAMPLER_SHARE)):
                cpu_s = time.thread_time()
                size = _bytes_below(self._caches)
                samples.append((time.monotonic(), size))
                took_s = time.thread_time() - cpu_s

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield samples
        finally:
            ended.set()
            thread.join()


@contextmanager
def prepared_fleet(directory: Path, nodes: int, *, size: int, rate: str | None) -> Iterator[PreparedFleet]:
    labels = fleet_labels(nodes, 2, 1)
    (directory / "runs").mkdir()
    for name, each in labels.items():
        each["runs"] = str(directory / "runs" / name)
    with daemon_environment(directory, labels, nodes_per_sshd=NODES_PER_SSHD) as env:
        yield PreparedFleet(env, size=size, rate=rate)


def closed_window() -> dict[str, str]:
    """Return a window that is not open for hours: preparation needs none, and no node is isolated."""
    start, end = (datetime.now(UTC) + timedelta(hours=hours) for hours in (6, 8))
    return {"days": "mon-sun", "from": f"{start:%H:%M}", "to": f"{end:%H:%M}", "zone": "UTC"}


def _bytes_below(directory: Path) -> int:
    found = 0
    for place, _, names in os.walk(directory):  # it passes over directories that are renamed meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                found += Path(place, name).stat().st_size
    return found
