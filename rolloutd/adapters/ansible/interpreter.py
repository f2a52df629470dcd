"""Python interpreter of a node, from the inventory, the tree or discovery.

Ansible's own discovery costs one round trip per run, ours one per node until a run has changed it.
"""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from machines.model.rollout import FailureCode
from rolloutd.adapters.ansible.environment import TreeConfig
from rolloutd.concurrency import threads
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Failed, Host, Shell

DISCOVERY_TIMEOUT_S = 30.0
"""Limit of one short command; a slower node counts as unreachable."""

CANDIDATES = (*(f"python3.{minor}" for minor in range(13, 8, -1)), "python3", "/usr/bin/python3")
"""In ansible-core's order of preference; its modules need 3.8 or later."""

_DISCOVERY_SCRIPT = f"""
for name in {" ".join(CANDIDATES)}; do
    path=$(command -v "$name") || continue
    "$path" -c 'import sys; sys.exit(sys.version_info < (3, 8))' >/dev/null 2>&1 && echo "$path" && exit 0
done
exit 1
"""
# The script runs each candidate: version switchers install stubs that only print advice.

_SSH_CONNECTIONS = frozenset({"ssh", "smart", "ansible.builtin.ssh"})

_SCAN_LIMIT_BYTES = 1024 * 1024
"""The part of a variables file that is searched for the interpreter's name."""


class InterpreterCache:
    """The discovered interpreters by node and address."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._cache: dict[str, tuple[tuple[Any, ...], str]] = {}

    async def resolve(self, host: Host, tree: Path, playbook: Path) -> str | Failed | None:
        """Return the path of the node's Python, None if Ansible or the user determines it, or the failure."""
        variables = host.connection
        if (
            "ansible_python_interpreter" in variables
            or variables.get("ansible_connection", "ssh") not in _SSH_CONNECTIONS
        ):
            return None
        if await threads.RUNS.run(_tree_names_interpreter, tree, playbook, host.name):
            return None
        address = tuple(variables.get(name) for name in ("ansible_host", "ansible_port", "ansible_user"))
        known = self._cache.get(host.name)
        if known is not None and known[0] == address:
            return known[1]
        found = await self._discover(host)
        if isinstance(found, str):
            self._cache[host.name] = (address, found)
        return found

    def forget(self, node: str) -> None:
        """Discover again at the node's next run: what ran there may have replaced its Python."""
        self._cache.pop(node, None)

    async def _discover(self, host: Host) -> str | Failed:
        try:
            answer = await self._shell.run(
                host, "/bin/sh -s", timeout_s=DISCOVERY_TIMEOUT_S, stdin=_DISCOVERY_SCRIPT
            )
        except TimeoutError:
            problem = f"no answer in {DISCOVERY_TIMEOUT_S:g} s when asked for its Python"
            return Failed(f"{host.name} was unreachable: {problem}", code=FailureCode.UNREACHABLE)
        except NodeUnreachable as error:
            return Failed(f"{host.name} was unreachable: {error}", code=FailureCode.UNREACHABLE)
        found = answer.stdout.strip().rpartition("\n")[2]  # the login shell's own files may print more
        if answer.exit_status == 0 and found.startswith("/"):
            return found
        tried = ", ".join(CANDIDATES)
        return Failed(
            f"no Python was found on {host.name} (tried {tried}): install one, or name it as "
            "ansible_python_interpreter in the inventory",
            f"{answer.stdout}\n{answer.stderr}".strip(),
            FailureCode.NEVER_STARTED,
        )


def _tree_names_interpreter(tree: Path, playbook: Path, node: str) -> bool:
    """Return whether ansible.cfg, or variables files that may be the node's, name an interpreter."""
    configured = TreeConfig.load(tree).get("defaults", "interpreter_python")
    if configured is not None and not configured.startswith("auto"):
        return True
    # A fleet may have a file for each node, and each run reads them.
    own = glob.escape(node)
    patterns = ("group_vars/**/*", f"host_vars/{own}", f"host_vars/{own}.*", f"host_vars/{own}/**/*")
    return any(
        path.is_file() and _mentions_interpreter(path)
        for base in {tree, playbook.parent}
        for pattern in patterns
        for path in base.glob(pattern)
    )


def _mentions_interpreter(path: Path) -> bool:
    with path.open("rb") as file:
        return b"ansible_python_interpreter" in file.read(_SCAN_LIMIT_BYTES)
