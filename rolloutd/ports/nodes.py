"""Where nodes come from, how they are seen, and how a command reaches them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from machines.node import Kind, Observation
from rolloutd.ports.values import JSON

GROUPS = "group_names"
"""The key of a connection that holds the inventory's groups of the node, as Ansible calls them."""

PROVIDER_ID = "provider_id"
"""The key of a connection that holds the cloud's name of the node, by which sources agree on it."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one inventory source says of one node.

    `connection` holds the node's Ansible variables whole (ansible_host,
    ansible_port, ansible_user, ansible_ssh_private_key_file, ...), and the
    names of its groups under `GROUPS`.
    """

    name: str
    source: str
    kind: Kind = Kind.HOST
    labels: Mapping[str, str] = field(default_factory=dict)
    connection: Mapping[str, JSON] = field(default_factory=dict)


class Inventory(Protocol):
    """One source of nodes."""

    @property
    def source(self) -> str:
        """The name under which its findings are known."""
        ...

    async def refresh(self) -> Sequence[Found]:
        """Return all nodes the source knows; raises SourceFailed, never returns half."""
        ...


@runtime_checkable
class Examined(Protocol):
    """What a source offers beside its inventory, when it can say what it lacks."""

    @property
    def source(self) -> str:
        """The source's name."""
        ...

    async def lacks(self) -> Sequence[str]:
        """Return one sentence per thing that is missing, asked of the source this moment."""
        ...


@dataclass(frozen=True, slots=True)
class Host:
    """A node and how to reach it."""

    name: str
    kind: Kind = Kind.HOST
    labels: Mapping[str, str] = field(default_factory=dict)
    connection: Mapping[str, JSON] = field(default_factory=dict)


class Watch(Protocol):
    """Sees a source's nodes all the time, so that nobody needs to ask."""

    @property
    def source(self) -> str:
        """The name of the source, as its inventory has it."""
        ...

    async def run(self, seen: Callable[[Sequence[Observation]], None], changed: Callable[[], None]) -> None:
        """Observe until cancelled.

        `seen` is told of every change, and of all nodes again well within the
        time that observations are good for.  `changed` means that nodes
        appeared, vanished or changed their labels: ask the inventory again.
        """
        ...


class Observer(Protocol):
    """Says whether nodes are up."""

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        """Return one observation per host; a host that cannot be judged is UNKNOWN, never missing."""
        ...


@dataclass(frozen=True, slots=True)
class ShellResult:
    """How a command on a node ended; output is cut to the adapter's limit."""

    exit_status: int
    stdout: str
    stderr: str


class Shell(Protocol):
    """Runs commands on nodes over one pooled connection per node."""

    async def run(self, host: Host, command: str, *, timeout_s: float, stdin: str = "") -> ShellResult:
        """Run a shell command; raises NodeUnreachable or HostKeyChanged, TimeoutError."""
        ...

    async def forget(self, node: str) -> None:
        """Close the node's connection, if there is one."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
