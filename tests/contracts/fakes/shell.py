"""The in-memory fake of the Shell: nodes whose commands have the answers that a test gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from enum import Enum

from rolloutd.errors import HostKeyChanged, NodeUnreachable
from rolloutd.ports import Host, ShellResult

OUTPUT_LIMIT = 64 * 1024


class Hang(Enum):
    """The answer of a command that does not end."""

    HANG = "hang"


HANG = Hang.HANG

Answer = ShellResult | Hang | Callable[[str, str], ShellResult]
"""What a command answers; a function gets the node and the input."""


class FakeShell:
    """ports.Shell; a command without an answer does not exist (127).

    `down` and `changed` are nodes that do not answer or have another host key;
    `calls` are all (node, command, stdin) that reached a node; `connections` are
    the nodes with an open connection.
    """

    def __init__(self, answers: Mapping[str, Answer] | None = None) -> None:
        self.answers: dict[str, Answer] = {"true": ShellResult(0, "", ""), **(answers or {})}
        self.node_answers: dict[tuple[str, str], Answer] = {}
        self.down: set[str] = set()
        self.changed_host_keys: set[str] = set()
        self.calls: list[tuple[str, str, str]] = []
        self.connections: set[str] = set()

    async def run(self, host: Host, command: str, *, timeout_s: float, stdin: str = "") -> ShellResult:
        """Answer as the test said."""
        if host.name in self.changed_host_keys:
            raise HostKeyChanged(f"{host.name}: the host key has changed")
        if host.name in self.down:
            self.connections.discard(host.name)
            raise NodeUnreachable(f"{host.name}: tcp connect refused")
        self.connections.add(host.name)
        self.calls.append((host.name, command, stdin))
        answer = self.node_answers.get((host.name, command), self.answers.get(command))
        if isinstance(answer, Hang):
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.Event().wait()
            except TimeoutError:
                raise TimeoutError(f"{host.name}: `{command}` did not end within {timeout_s:g}s") from None
        if answer is None:
            return ShellResult(127, "", f"sh: {command}: not found\n")
        assert not isinstance(answer, Hang)
        result = answer if isinstance(answer, ShellResult) else answer(host.name, stdin)
        return ShellResult(result.exit_status, _truncate(result.stdout), _truncate(result.stderr))

    async def disconnect(self, node: str) -> None:
        """Close the node's connection."""
        self.connections.discard(node)

    async def close(self) -> None:
        """Close all connections."""
        self.connections.clear()


def _truncate(text: str) -> str:
    size = len(text)
    return (
        text
        if size <= OUTPUT_LIMIT
        else f"{text[:OUTPUT_LIMIT]}\n[cut: the first {OUTPUT_LIMIT} of {size} bytes]"
    )
