"""Measures what runs cost against bare ansible-playbook: CPU, wall, memory, and a fleet's makespan.

Both sides run the same playbook on the same real sshd by turns; ours also has the fence, as
every run of a rollout.  CPU time is that of all processes on the controller's side, the fork
server's included.  P1 is one command without facts, P2 has facts and ten tasks (templates,
loops, handlers, a role), P3 four tasks with become.  Each has three figures.  The first is of
a node's first run, which logs in as the bare one does.  `in flight` is of a later run of the
same attempt, which uses the ssh master that the first one has opened; bare Ansible has none to
use.  `pipelining` is a first run with `ansible.pipelining: on`.  Prints a line for each figure
with its aim, and one of JSON.

    python -m bench.runs [--quick] [--only P1]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench import fleet as makespan
from bench.run_playbooks import PLAYBOOKS, WAIT, write_tree
from bench.start_run import fleet, groups
from rolloutd.adapters.ansible.environment import build_inventory
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.adapters.ansible.tree_cache import TreeCache
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.ports import ConnectionDefaults, Host, InventorySnapshot, Ok, PinnedSource, RunRequest
from rolloutd.service.memory import memory_bytes
from tests.support.sshd import Sshd

ROUNDS = 11
MAX_S = {"p1.yml": 60.0, "p2.yml": 150.0, "p3.yml": 75.0}
MANY_ROUNDS, MANY_MAX_S = 5, 35.0
"""A busy machine makes fewer rounds, so that all is measured within eight minutes."""

MIN_ROUNDS = 3

FEW, MANY, SIDE_BY_SIDE = 24, 10_000, 6

AIMS = {
    "P1 CPU": 0.25,
    "P1 wall": 0.45,
    "P2 CPU": 0.45,
    "P2 wall": 0.75,
    "P3 CPU": 0.30,
    "P3 wall": 0.55,
    "CPU among 10,000": 0.10,
    "CPU among 10,000 to among 24": 1.3,
    "memory": 0.7,
    "makespan": 0.6,
}
"""Each is a ratio to bare ansible-playbook, but for the one of rolloutd to itself."""

IN_FLIGHT, PIPELINING = ", in flight", ", pipelining"

LIMIT_S = 60.0

ANSIBLE = Path(sys.executable).with_name("ansible-playbook")


@dataclass(frozen=True, slots=True)
class Cost:
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians: of the ratios, of the bare costs and of ours."""

    ratio: Cost
    bare: Cost
    ours: Cost
    rounds: int

    @classmethod
    def of(cls, bare: Sequence[Cost], ours: Sequence[Cost]) -> Comparison:
        pairs = zip(bare, ours, strict=True)
        ratios = [Cost(o.cpu_s / b.cpu_s, o.wall_s / b.wall_s) for b, o in pairs]
        return cls(median(ratios), median(bare), median(ours), len(ours))


@dataclass(slots=True)
class Bench:
    """One node, one tree, a runner and the inventories of both sides."""

    base: Path
    node: Sshd
    runner: AnsibleRunner
    variants: Mapping[str, AnsibleRunner]
    """All runners, the one above included, by what their figures are called."""
    few_runner: AnsibleRunner
    """Like the first, but never among many: a runner has a fork server for one inventory only."""
    fleets: Mapping[int, Mapping[str, Any]]
    snapshots: list[InventorySnapshot]
    """The inventory of the runners, the only item."""
    number: int = 0
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def tree(self) -> Path:
        return self.base / "tree"

    def inventory(self, hosts: int) -> Path:
        return self.base / f"{hosts}.yml"

    def command(self, playbook: str, hosts: int, node: str = "n0") -> list[str]:
        return [str(ANSIBLE), "-i", str(self.inventory(hosts)), "--limit", node, playbook]

    def environment(self) -> dict[str, str]:
        """Return the environment of a bare run that finds no ssh master."""
        self.number += 1
        return {**os.environ, "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.base / f"cp{self.number}")}

    def request(self, playbook: str, hosts: int, node: str = "n0") -> RunRequest:
        self.number += 1
        self.snapshots[:] = [InventorySnapshot(self.fleets[hosts], groups(self.fleets[hosts]), hosts)]
        return RunRequest(
            run_id=f"r{self.number}",
            host=Host(node, connection=self.fleets[hosts][node]),
            source=PinnedSource("tree", "bench"),
            playbook=playbook,
            fencing_token=f"1.{self.number} bench 1",
        )

    def run_bare(self, playbook: str, hosts: int) -> Cost:
        """Run ansible-playbook as a user does."""
        began, used = time.perf_counter(), children_cpu_s()
        subprocess.run(
            self.command(playbook, hosts),
            cwd=self.tree,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return Cost(children_cpu_s() - used, time.perf_counter() - began)

    async def run_ours(self, runner: AnsibleRunner, playbook: str, hosts: int) -> Cost:
        """Run the same by the runner; its wrapper records the CPU time of the run's processes."""
        request = self.request(playbook, hosts)
        began, used = time.perf_counter(), own_cpu_s(runner)
        handle = await runner.start(request)
        while (state := await runner.wait_for_change(handle)).result is None:
            pass
        wall_s = time.perf_counter() - began
        directory = RunDirectory(self.base / "runs" / handle)
        assert isinstance(state.result, Ok), (state.result, directory.read_output_tail())
        status = directory.read_status()
        assert status is not None
        return Cost(own_cpu_s(runner) - used + status.cpu_s, wall_s)


def own_cpu_s(runner: AnsibleRunner) -> float:
    """Return the CPU time of this process, which stands for the daemon, and of its fork servers."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime + sum(map(process_cpu_s, runner.status.servers))


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def process_cpu_s(pid: int) -> float:
    """Return the CPU time of a process without its children."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


async def compare(
    bench: Bench, playbook: str, hosts: int, rounds: int, max_s: float, *runners: AnsibleRunner
) -> list[Comparison]:
    """Run bare Ansible and each runner by turns; return each runner's comparison."""
    bare, *ours = await run_by_turns(
        rounds,
        max_s,
        partial(asyncio.to_thread, bench.run_bare, playbook, hosts),
        *(partial(bench.run_ours, runner, playbook, hosts) for runner in runners),
    )
    return [Comparison.of(bare, costs) for costs in ours]


async def run_by_turns(rounds: int, max_s: float, *sides: Callable[[], Awaitable[Cost]]) -> list[list[Cost]]:
    """Return each side's costs: only runs of one round meet the same load of the machine."""
    costs: list[list[Cost]] = [[] for _ in sides]
    began = time.monotonic()
    for number in range(rounds + 1):
        if number > MIN_ROUNDS and time.monotonic() - began > max_s:
            break
        for each in range(len(sides)):
            side = (each + number) % len(sides)
            costs[side].append(await sides[side]())
    return [each[1:] for each in costs]  # the first round fills caches


def median(costs: Sequence[Cost]) -> Cost:
    return Cost(
        statistics.median(each.cpu_s for each in costs), statistics.median(each.wall_s for each in costs)
    )


async def compare_memory(bench: Bench) -> float:
    """Return the ratio of the memory (PSS) of runs side by side, with the fork server, to bare ones."""
    nodes = [f"n{number}" for number in range(SIDE_BY_SIDE)]
    began = bench.base / "began"
    waiting = f"{began}/go"

    async def measure(roots: Iterable[int]) -> int:
        async with asyncio.timeout(LIMIT_S):
            while len(list(began.glob("n*"))) < len(nodes):
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)  # until the last forks have what they need
        used = memory_bytes(descendants(roots))
        Path(waiting).touch()
        return used

    began.mkdir()
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    bench.command(WAIT, FEW, node),
                    cwd=bench.tree,
                    env=bench.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            )
            for node in nodes
        ]
        bare = await measure([each.pid for each in processes])
    shutil.rmtree(began)
    began.mkdir()
    handles = [await bench.runner.start(bench.request(WAIT, FEW, node)) for node in nodes]
    ours = await measure(bench.runner.status.servers)
    for handle in handles:
        while (await bench.runner.wait_for_change(handle)).result is None:
            pass
    return ours / bare


def descendants(roots: Iterable[int]) -> set[int]:
    """Return the roots and their descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, fresh = set(roots), set(roots)
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


@contextlib.contextmanager
def opened(base: Path) -> Iterator[Bench]:
    """Start the node and write both sides' inventories; the hosts of the fleet are all this node."""
    node = Sshd().start(base / "sshd")
    try:
        write_tree(base / "tree", base / "work")
        fleets = {count: fleet(count) for count in (FEW, MANY)}
        arguments = f"-o UserKnownHostsFile={node.known_hosts}"
        for count, hosts in fleets.items():
            for number in range(SIDE_BY_SIDE):
                hosts[f"n{number}"] |= {**node.connection(), "ansible_ssh_common_args": arguments}
            defaults = ConnectionDefaults(None, None, None)
            content = build_inventory(hosts, groups(hosts), defaults=defaults, common_args="")
            (base / f"{count}.yml").write_text(json.dumps(content))  # JSON is YAML
        shell, cache = SshShell(known_hosts=node.known_hosts), TreeCache(base / "cache")
        snapshots: list[InventorySnapshot] = []

        def new_runner(pipelining: bool = False) -> AnsibleRunner:
            return AnsibleRunner(
                base / "runs",
                shell,
                lambda source: base / "tree",
                lambda: snapshots[0],
                fence_dir=str(base / "fence"),
                tree_cache=cache,
                # Measured limits may be lower, and compare_memory() holds each run until all have begun.
                parallel=SIDE_BY_SIDE,
                pipelining=pipelining,
            )

        variants = {name: new_runner(name == PIPELINING) for name in ("", IN_FLIGHT, PIPELINING)}
        yield Bench(base, node, variants[""], variants, new_runner(), fleets, snapshots)
    finally:
        node.stop()


async def measure_runs(bench: Bench, rounds: int, many_rounds: int, only: str | None) -> None:
    """Measure all but the makespan, or one playbook, and print each figure."""
    await bench.variants[IN_FLIGHT].keep_connections({"n0"})
    for name, playbook in PLAYBOOKS.items():
        if only not in (None, name):
            continue
        found = await compare(bench, playbook, FEW, rounds, MAX_S[playbook], *bench.variants.values())
        for each, suffix in zip(found, bench.variants, strict=True):
            note = f"{each.ours.cpu_s:.2f} of {each.bare.cpu_s:.2f} s, median of {each.rounds}"
            report(bench, f"{name} CPU", each.ratio.cpu_s, note, suffix)
            note = f"{each.ours.wall_s:.2f} of {each.bare.wall_s:.2f} s"
            report(bench, f"{name} wall", each.ratio.wall_s, note, suffix)
    if only is None:
        await measure_growth(bench, rounds, many_rounds)
    await bench.variants[IN_FLIGHT].keep_connections(())
    for runner in (*bench.variants.values(), bench.few_runner):
        await runner.close()


async def measure_growth(bench: Bench, rounds: int, many_rounds: int) -> None:
    """Measure runs among many hosts, and runs side by side."""
    playbook = PLAYBOOKS["P1"]
    (many,) = await compare(bench, playbook, MANY, many_rounds, MANY_MAX_S, bench.runner)
    note = f"{many.ours.cpu_s:.2f} of {many.bare.cpu_s:.2f} s, P1, median of {many.rounds}"
    report(bench, "CPU among 10,000", many.ratio.cpu_s, note)
    sides = (bench.few_runner, FEW), (bench.runner, MANY)
    costs = await run_by_turns(
        rounds, MANY_MAX_S, *(partial(bench.run_ours, runner, playbook, hosts) for runner, hosts in sides)
    )
    growth = Comparison.of(*costs)
    note = f"{growth.ours.cpu_s:.2f} of {growth.bare.cpu_s:.2f} s, both ours, median of {growth.rounds}"
    report(bench, "CPU among 10,000 to among 24", growth.ratio.cpu_s, note)
    note = f"{SIDE_BY_SIDE} runs side by side with the fork server, PSS"
    report(bench, "memory", await compare_memory(bench), note)


def report(bench: Bench, name: str, value: float, note: str, suffix: str = "") -> None:
    verdict = "met" if value <= AIMS[name] else "MISSED"
    bench.figures[name + suffix] = round(value, 3)
    print(f"{name}{suffix}: {value:.2f} times ({note}); aim at most {AIMS[name]}: {verdict}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round of each, to see that all works")
    parser.add_argument("--only", choices=PLAYBOOKS, help="measure one playbook and nothing else")
    asked = parser.parse_args()
    rounds, many_rounds = (1, 1) if asked.quick else (ROUNDS, MANY_ROUNDS)
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as directory, opened(Path(directory)) as bench:
        asyncio.run(measure_runs(bench, rounds, many_rounds, asked.only))
        if asked.only is None:
            ours_s, script_s = makespan.measure(rounds=1)
            note = f"{makespan.NODES} nodes, {ours_s:.1f} s, a script {script_s:.1f} s"
            report(bench, "makespan", ours_s / script_s, note)
    print(json.dumps({"bench": "runs", "rounds": rounds, "figures": bench.figures, "aims": AIMS}))


if __name__ == "__main__":
    main()
