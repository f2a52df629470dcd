"""Anchor `ssh`: a file on another machine, to which lines are appended."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rolloutd.adapters.ssh.check import stderr_suffix
from rolloutd.errors import AdapterFailed
from rolloutd.ports import AdapterContext, Host, ShellResult

TIMEOUT_S = 25.0

MAX_LINES = 500
"""Lines that are read: some 50 KB, which the shell's limit of output allows."""


class SshAnchor:
    """ports.Anchor over the daemon's ssh connections."""

    def __init__(self, context: AdapterContext) -> None:
        params = context.params
        self._shell = context.shell
        self._file = str(params["file"])
        self.name = f"anchor {params['host']}:{self._file}"
        named = {
            "ansible_host": params["host"],
            "ansible_port": params["port"],
            "ansible_user": params.get("user"),
            "ansible_ssh_private_key_file": params.get("key_file"),
        }
        # A name that no node has: connections are kept by node.
        connection = {name: value for name, value in named.items() if value is not None}
        self._host = Host(f"anchor:{params['host']}", connection=connection)

    async def append(self, line: str) -> None:
        """Append a line; raises AdapterFailed, NodeUnreachable and TimeoutError."""
        await self._run(f"cat >> {shlex.quote(self._file)}", line)

    async def read(self) -> Sequence[str]:
        """Return the last lines, none if there is no file; raises like append()."""
        file = shlex.quote(self._file)
        result = await self._run(f"test ! -e {file} || tail -n {MAX_LINES} {file}")
        return result.stdout.splitlines()

    async def _run(self, command: str, stdin: str = "") -> ShellResult:
        result = await self._shell.run(self._host, command, timeout_s=TIMEOUT_S, stdin=stdin)
        if result.exit_status != 0:
            raise AdapterFailed(
                f"{self.name}: `{command}` ended with {result.exit_status}{stderr_suffix(result)};"
                " check the file's rights"
            )
        return result
