"""Measures the run step, from spawn to recorded outcome, against bare ansible-playbook.

All run the same playbook on the same node, a real sshd on loopback, from the
same inventory, by turns; each side begins without an ssh master.  Real runs have
the fence, so it is by these that the aim is judged; what it costs is told by the
same without it.  Prints one line for people and one of JSON.

    python bench/run_step.py [--rounds 11]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.ports import Ok, RunRequest
from tests.support.sshd import Sshd

AIM = 1.05

PLAYBOOK = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: ask the kernel
      ansible.builtin.command: uname -r
      changed_when: false
"""


Side = tuple[RunRequest, list[float]]


def run_bare_ansible(tree: Path, inventory: Path, environment: dict[str, str]) -> float:
    """Return the seconds of bare ansible-playbook."""
    binary = Path(sys.executable).with_name("ansible-playbook")
    began = time.perf_counter()
    subprocess.run(
        [binary, "-i", inventory, "--limit", "n0", "play.yml"],
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - began


async def run_step(runner: AnsibleRunner, request: RunRequest) -> float:
    """Return the seconds of the same by the runner."""
    began = time.perf_counter()
    handle = await runner.start(request)
    while (state := await runner.wait_for_change(handle)).result is None:
        pass
    spent = time.perf_counter() - began
    assert isinstance(state.result, Ok), state.result
    return spent


def alternate_sides(number: int, *sides: Side) -> Iterator[Side]:
    """Yield the sides, each first as often as any other."""
    yield from (*sides[number % len(sides) :], *sides[: number % len(sides)])


async def measure(base: Path, node: Sshd, rounds: int) -> dict[str, object]:
    """Return the medians and their ratios."""
    tree = base / "tree"
    tree.mkdir()
    (tree / "play.yml").write_text(PLAYBOOK)
    hosts = {"n0": node.connection()}
    common = {"ansible_ssh_common_args": f"-o UserKnownHostsFile={node.known_hosts}"}
    inventory = base / "inventory.json"
    inventory.write_text(json.dumps({"all": {"hosts": {"n0": {**hosts["n0"], **common}}}}))
    shell = SshShell(known_hosts=node.known_hosts)
    runner = AnsibleRunner(base / "runs", shell, known_hosts=node.known_hosts)
    theirs, ours, fenced = [], [], []
    for number in range(rounds + 1):
        sockets = base / f"cp{number}"
        environment = {**os.environ, "ANSIBLE_SSH_CONTROL_PATH_DIR": str(sockets)}
        theirs.append(await asyncio.to_thread(run_bare_ansible, tree, inventory, environment))
        request = RunRequest(run_id=f"r{number}", node="n0", tree=tree, playbook="play.yml", inventory=hosts)
        fence = {"fence": f"1.{number} bench 1", "fence_dir": str(base / "fence")}
        sides = ((request, ours), (replace(request, run_id=f"f{number}", **fence), fenced))
        for asked, told in alternate_sides(number, *sides):
            told.append(await run_step(runner, asked))
    await runner.close()
    await shell.close()
    bare_s, step_s, fenced_s = (statistics.median(each[1:]) for each in (theirs, ours, fenced))
    return {
        "bench": "run_step",
        "rounds": rounds,
        "bare_s": round(bare_s, 4),
        "step_s": round(fenced_s, 4),
        "ratio": round(fenced_s / bare_s, 4),
        "without_fence_s": round(step_s, 4),
        "ratio_without_fence": round(step_s / bare_s, 4),
        "aim": AIM,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    node = Sshd()
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as directory:
        node.start(Path(directory) / "sshd")
        try:
            found = asyncio.run(measure(Path(directory), node, rounds))
        finally:
            node.stop()
    print(
        f"run step {found['step_s']} s, bare ansible-playbook {found['bare_s']} s: "
        f"{found['ratio']} times (aim: at most {AIM}), without the fence {found['ratio_without_fence']};"
        f" medians of {rounds} by turns"
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
