"""Which Python Ansible uses on a node: named by the inventory or the tree, else discovered once.

Ansible's own discovery costs every run a round trip; ours costs each node one
in the daemon's life.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Failed, Host, Shell

DISCOVERY_LIMIT_S = 30.0
"""One command on a node that answers; a node that needs longer is not reachable."""

CANDIDATES = (*(f"python3.{minor}" for minor in range(13, 8, -1)), "python3", "/usr/bin/python3")
"""In the order in which ansible-core prefers them; 3.8 is what its modules need at least."""

_SCRIPT = f"""
for name in {" ".join(CANDIDATES)}; do
    path=$(command -v "$name") || continue
    "$path" -c 'import sys; sys.exit(sys.version_info < (3, 8))' >/dev/null 2>&1 && echo "$path" && exit 0
done
exit 1
"""
# A name on PATH is not yet a Python: version switchers leave stubs that only print advice.

_SSH = frozenset({"ssh", "smart", "ansible.builtin.ssh"})

_MENTION_LIMIT_BYTES = 1024 * 1024
"""A variables file is read so far for the interpreter's name."""


class Interpreters:
    """The discovered interpreters, by node and address; kept for the daemon's life."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._known: dict[str, tuple[tuple[Any, ...], str]] = {}

    async def of(self, host: Host, tree: Path, playbook: Path) -> str | Failed | None:
        """Return the path of the node's Python, None where it is not ours to say, or why there is none."""
        variables = host.connection
        if (
            "ansible_python_interpreter" in variables
            or variables.get("ansible_connection", "ssh") not in _SSH
        ):
            return None
        if _names_interpreter(tree, playbook):
            return None
        address = tuple(variables.get(name) for name in ("ansible_host", "ansible_port", "ansible_user"))
        known = self._known.get(host.name)
        if known is not None and known[0] == address:
            return known[1]
        found = await self._discover(host)
        if isinstance(found, str):
            self._known[host.name] = (address, found)
        return found

    async def _discover(self, host: Host) -> str | Failed:
        try:
            answer = await self._shell.run(host, "/bin/sh -s", timeout_s=DISCOVERY_LIMIT_S, stdin=_SCRIPT)
        except TimeoutError:
            waited = f"no answer in {DISCOVERY_LIMIT_S:g} s when asked for its Python"
            return Failed(f"{host.name} was unreachable: {waited}")
        except NodeUnreachable as error:
            return Failed(f"{host.name} was unreachable: {error}")
        found = answer.stdout.strip()
        if answer.exit_status == 0 and found.startswith("/") and "\n" not in found:
            return found
        tried = ", ".join(CANDIDATES)
        return Failed(
            f"no Python was found on {host.name} (tried {tried}): install one, or name it as "
            "ansible_python_interpreter in the inventory",
            f"{answer.stdout}\n{answer.stderr}".strip(),
        )


def _names_interpreter(tree: Path, playbook: Path) -> bool:
    """Say whether variables that come with the playbook name an interpreter themselves."""
    for base in {tree, playbook.parent}:
        for folder in ("group_vars", "host_vars"):
            for path in (base / folder).rglob("*"):
                if path.is_file() and _mentions(path):
                    return True
    return False


def _mentions(path: Path) -> bool:
    with path.open("rb") as file:
        return b"ansible_python_interpreter" in file.read(_MENTION_LIMIT_BYTES)


def as_host(name: str, variables: Mapping[str, Any]) -> Host:
    """Return a node as the shell needs it, from its inventory variables."""
    return Host(name=name, connection=variables)
