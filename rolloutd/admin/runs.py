"""What runs cost on this machine, and what pipelining would save."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from machines.model.node import natural_sort_key
from rolloutd.admin.disk import CheckResult
from rolloutd.errors import HostKeyChanged, NodeUnreachable
from rolloutd.ports import WITHHELD, Host, Shell
from rolloutd.texts.formats import format_size, pluralize

TIMEOUT_S = 10.0

MAX_TRIED = 3
"""Nodes that are asked until one answers."""

SSH_COMMANDS_SAVED = 5
"""Commands over ssh of one task with `become` that pipelining makes unnecessary."""

NO_TERMINAL = "must have a tty"
"""What sudo prints if its configuration has `requiretty`."""

# -n: sudo must not ask for a password; without sudo there is nothing to test.
TEST_SUDO = "command -v sudo >/dev/null || exit 0; LC_ALL=C sudo -n true"


def describe_runs(runs: Mapping[str, Any]) -> CheckResult:
    """Describe the runs and the fork servers, as the daemon reports them."""
    active = f"{runs['active']} of at most {runs['parallel']} active, {runs['waiting']} waiting"
    started = f"{runs['forks']} started as forks and {runs['new_processes']} as new processes"
    servers = pluralize(runs["fork_servers"], "fork server")
    text = f"{active}; {started}; {servers}, {format_size(runs['fork_servers_bytes'])}"
    if reason := runs.get("plain_because"):  # a daemon of an older version does not say
        text += f"; none is forked: {reason}"
    return CheckResult("runs", True, text)


async def suggest_pipelining(
    shell: Shell, connections: Mapping[str, Mapping[str, Any]]
) -> CheckResult | None:
    """Test on a node whether sudo works without a terminal, and what a command there takes."""
    known = sorted((name for name in connections if WITHHELD not in connections[name]), key=natural_sort_key)
    for name in known[:MAX_TRIED]:
        host = Host(name, connection=connections[name])
        try:
            tested = await shell.run(host, TEST_SUDO, timeout_s=TIMEOUT_S)
            began = time.monotonic()
            await shell.run(host, "true", timeout_s=TIMEOUT_S)
        except (NodeUnreachable, HostKeyChanged, TimeoutError):
            continue
        command_s = time.monotonic() - began
        if NO_TERMINAL in tested.stderr:
            text = f"sudo on {name} requires a terminal (`requiretty`): leave ansible.pipelining as it is"
        else:
            saved_ms = SSH_COMMANDS_SAVED * command_s * 1000
            text = (
                f"sudo on {name} needs no terminal: `ansible.pipelining: on` would save about "
                f"{SSH_COMMANDS_SAVED} ssh commands, {saved_ms:.0f} ms there, for each task with become"
            )
        return CheckResult("pipelining", True, text)
    return None
