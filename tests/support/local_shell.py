"""A ports.Shell whose nodes are this machine: commands are local processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Host, ShellResult

BANNER = "echo 'Welcome, all is logged'; "
"""What a login shell's own files may do before each command."""


class LocalShell:
    """Runs commands here; `down` are the nodes that do not answer, `wrap` makes a command's arguments."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        self.wrap: Callable[[str], Sequence[str]] = lambda command: ["/bin/sh", "-c", command]

    async def run(self, host: Host, command: str, *, timeout_s: float, stdin: str = "") -> ShellResult:
        if host.name in self.down:
            raise NodeUnreachable(f"{host.name}: tcp connect refused")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self.wrap(BANNER + command), stdin=pipe, stdout=pipe, stderr=pipe
        )
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate(stdin.encode())
        return ShellResult(process.returncode or 0, out.decode(), err.decode())

    async def disconnect(self, node: str) -> None:
        pass

    async def close(self) -> None:
        pass
