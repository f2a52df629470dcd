"""Measures the CPU seconds of a run against bare ansible-playbook, among 24 and among 10,000 hosts.

All run the same playbook on the same node, a real sshd on loopback, by turns.  Bare
Ansible reads the same hosts as YAML.  Counted are this process, which stands for the
daemon, and all children that have ended; ssh's masters are not, on either side.
Prints one line for people and one of JSON.

    python -m bench.run_cpu [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.run_step import run_bare_ansible, run_step
from bench.start_run import fleet, groups
from rolloutd.adapters.ansible.environment import build_inventory
from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.adapters.ansible.tree_cache import TreeCache
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.ports import ConnectionDefaults, RunRequest
from tests.support.sshd import Sshd

FEW, MANY = 24, 10_000

AIM_MANY_TO_FEW = 1.3
AIM_TO_BARE = {FEW: 0.9, MANY: 0.3}

SETTLE_S = 0.3
"""Pause after a run, until its wrapper has ended and is counted."""

PLAYBOOK = """\
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.command: uname -r
      changed_when: false
    - ansible.builtin.stat: {path: /}
    - ansible.builtin.file: {path: /tmp, state: directory}
      check_mode: true
"""


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def write_bare_inventory(path: Path, hosts: Mapping[str, Any], node: Sshd) -> None:
    """Write the hosts as a user would: JSON is YAML."""
    arguments = f"-o UserKnownHostsFile={node.known_hosts}"
    content = build_inventory(
        hosts, groups(hosts), defaults=ConnectionDefaults(None, None, None), common_args=arguments
    )
    content["all"]["hosts"]["n0"]["ansible_ssh_common_args"] = arguments
    path.write_text(json.dumps(content))


async def measure(base: Path, node: Sshd, rounds: int) -> dict[str, object]:
    """Return the medians of CPU seconds and their ratios."""
    tree = base / "tree"
    tree.mkdir()
    (tree / "play.yml").write_text(PLAYBOOK)
    shell = SshShell(known_hosts=node.known_hosts)
    fleets = {count: fleet(count) for count in (FEW, MANY)}
    # One each: the runs of a refresh share one inventory.
    runners = {
        count: AnsibleRunner(
            base / f"runs{count}",
            shell,
            known_hosts=node.known_hosts,
            tree_cache=TreeCache(base / f"cache{count}"),
        )
        for count in fleets
    }
    spent: dict[tuple[str, int], list[float]] = {}
    for count, hosts in fleets.items():
        hosts["n0"] |= node.connection()
        write_bare_inventory(base / f"{count}.yml", hosts, node)
    for number in range(rounds + 1):
        for count, hosts in fleets.items():
            environment = {**os.environ, "ANSIBLE_SSH_CONTROL_PATH_DIR": str(base / f"cp{number}-{count}")}
            before = cpu_seconds()
            await asyncio.to_thread(run_bare_ansible, tree, base / f"{count}.yml", environment)
            spent.setdefault(("bare", count), []).append(cpu_seconds() - before)
            request = RunRequest(
                run_id=f"r{number}-{count}",
                node="n0",
                tree=tree,
                playbook="play.yml",
                inventory=hosts,
                groups=groups(hosts),
                generation=count,
            )
            before = cpu_seconds()
            await run_step(runners[count], request)
            await asyncio.sleep(SETTLE_S)
            spent.setdefault(("ours", count), []).append(cpu_seconds() - before)
    for runner in runners.values():
        await runner.close()
    await shell.close()
    # The first round fills caches: it is not counted.
    medians = {key: statistics.median(values[1:]) for key, values in spent.items()}
    return {
        "bench": "run_cpu",
        "rounds": rounds,
        **{f"{side}_{count}_s": round(value, 3) for (side, count), value in medians.items()},
        **{f"to_bare_{n}": round(medians["ours", n] / medians["bare", n], 3) for n in fleets},
        "many_to_few": round(medians["ours", MANY] / medians["ours", FEW], 3),
        "aim_to_bare": {str(count): aim for count, aim in AIM_TO_BARE.items()},
        "aim_many_to_few": AIM_MANY_TO_FEW,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    node = Sshd()
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as directory:
        node.start(Path(directory) / "sshd")
        try:
            found = asyncio.run(measure(Path(directory), node, rounds))
        finally:
            node.stop()
    print(
        f"CPU of a run to bare: {found[f'to_bare_{FEW}']} among {FEW} hosts, {found[f'to_bare_{MANY}']} among"
        f" {MANY}; among {MANY} to among {FEW}: {found['many_to_few']} (aim: at most {AIM_MANY_TO_FEW});"
        f" medians of {rounds} by turns"
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
