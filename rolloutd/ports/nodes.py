"""Ports of nodes: inventories, watches, observers and the shell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from machines.model.limits import Budget
from machines.model.node import NodeKind, Observation
from machines.model.selector import Selector
from rolloutd.ports.host_variables import ADDRESS_VARIABLES, plain_variables
from rolloutd.ports.types import JSON

PROVIDER_ID = "provider_id"
"""Key of a connection with the cloud's id of the node, by which sources recognise the same node."""

MACHINE_ID = "machine_id"
"""Key of a connection with the node's /etc/machine-id; it is pinned for the node's name."""

CLUSTER_ID = "cluster_id"
"""Key of a connection with the identity of a whole cluster; it is pinned for the node's name."""

HOST_KEY = "host_key"
"""Key of a connection with the node's public ssh host key; it is pinned for the node's name."""

STATUS = "status"
"""Label or variable with the state of the machine's life in its source; see OUT_OF_SERVICE."""

OUT_OF_SERVICE = frozenset({"planned", "offline", "paused"})
"""Values of STATUS, in lower case, of machines that must not be maintained."""

DEFAULT_STALE_AFTER_S = 3600.0
"""Age of a source's last answer from which no node of it starts."""

DEFAULT_MAX_REMOVED = Budget(count=None, percent=10)
"""How many of its nodes one answer of a source may remove."""

MAX_LABEL_LENGTH = 253
"""Characters of a label's value, as the settings have it."""

WITHHELD = "rolloutd_withheld"
"""Key of a stored connection that lacks the node's secrets, until its sources report them again."""

NO_CONFLICTS: Mapping[str, str] = {}
"""One for all: most nodes of a fleet have none."""


@dataclass(frozen=True, slots=True)
class DiscoveredNode:
    """One inventory source's record of a node.

    `connection` holds all of the node's Ansible variables (ansible_host, ...), and its groups under `GROUPS`:
    later ones take precedence.  `id` is the source's own, `SORT/VALUE`, which a rename does not change; a
    source without ids is known by `PROVIDER_ID`, `MACHINE_ID` or the name.  `conflicts`, which an adapter
    leaves empty, are what contradicts the source's answer before, by ConflictKind.
    """

    name: str
    source: str
    kind: NodeKind = NodeKind.HOST
    labels: Mapping[str, str] = field(default_factory=dict)
    connection: Mapping[str, JSON] = field(default_factory=dict)
    id: str = ""
    conflicts: Mapping[str, str] = field(default_factory=lambda: NO_CONFLICTS)


class Inventory(Protocol):
    """One source of nodes; its texts are no templates, unless it also has GivesTemplates.

    Several objects of one name are several nodes, each with its id.
    """

    @property
    def source(self) -> str: ...

    async def refresh(self) -> Sequence[DiscoveredNode]:
        """Return all nodes of the source; raises SourceFailed rather than return a part."""


@runtime_checkable
class LeavesNodesOut(Protocol):
    """Optional port of an inventory that cannot make a node of each of its records."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """Return a sentence for each record that the last answer lacks, by its name."""


@runtime_checkable
class GivesTemplates(Protocol):
    """Optional port of an inventory whose variables people wrote for Ansible: a run renders them here."""

    gives_templates: ClassVar[bool]


@dataclass(frozen=True, slots=True)
class SourceRules:
    """What the settings say of one source; `refresh_s` None is the interval of all sources.

    `max_removed`: how many of its nodes one answer may remove.  `expect`: the sources that must report its
    nodes too, each for the nodes that the selector matches.
    """

    refresh_s: float | None = None
    stale_after_s: float = DEFAULT_STALE_AFTER_S
    max_removed: Budget = DEFAULT_MAX_REMOVED
    expect: Mapping[str, Selector] = field(default_factory=dict)


@runtime_checkable
class SupportsPreflight(Protocol):
    """Optional port of an inventory source that can check its prerequisites."""

    @property
    def source(self) -> str: ...

    async def find_missing_prerequisites(self) -> Sequence[str]:
        """Query the source and return one sentence per missing prerequisite."""


@dataclass(frozen=True, slots=True)
class Host:
    """A node and how to reach it; `connection` has plain texts, also where Ansible must render none.

    `variables` are the same as Ansible must get them: what it must not render is marked.
    """

    name: str
    kind: NodeKind = NodeKind.HOST
    labels: Mapping[str, str] = field(default_factory=dict)
    connection: Mapping[str, JSON] = field(default_factory=dict)
    variables: Mapping[str, JSON] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "variables", self.connection)
        object.__setattr__(self, "connection", plain_variables(self.connection))

    @property
    def address(self) -> str:
        """The node's address by its Ansible variables, else its name."""
        variables = (self.connection.get(key) for key in ADDRESS_VARIABLES)
        return str(next((value for value in variables if value), self.name))


@dataclass(frozen=True, slots=True)
class ConnectionDefaults:
    """Defaults for values missing in the inventory; None leaves a value to ssh's own configuration."""

    known_hosts: Path | None = None
    user: str | None = None
    key_file: Path | None = None


OnObserved = Callable[[Sequence[Observation]], None]
OnNodesChanged = Callable[[], None]
OnTried = Callable[[str], None]
OnConfirmed = Callable[[], bool]


def ignore_tries(error: str) -> None:
    """Do nothing with the error of a try."""


class Watch(Protocol):
    """Reports the states of a source's nodes continuously."""

    @property
    def source(self) -> str: ...

    async def run(
        self, on_observed: OnObserved, on_nodes_changed: OnNodesChanged, on_tried: OnTried = ignore_tries
    ) -> None:
        """Observe until cancelled.

        `on_observed` receives every change, and all nodes again well before their observations expire.
        `on_nodes_changed` means that nodes or labels changed: refresh the inventory.
        `on_tried` receives the error of each try to reach the source that the watch repeats itself, and the
        empty string when it is reached.
        """


@runtime_checkable
class ConfirmsReports(Protocol):
    """Optional port of a watch that says in one call that all its last reports are still true."""

    def confirm_to(self, on_confirmed: OnConfirmed) -> None:
        """Call this from now on, well before observations expire, in place of a report of all nodes.

        When it returns False, all nodes must be reported again.
        """


class Observer(Protocol):
    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        """Return one observation per host; a host of unknown state is UNKNOWN, never missing.

        Raises RolloutdError when its API answers for none of the hosts.
        """


@dataclass(frozen=True, slots=True)
class ShellResult:
    """The result of a command on a node; output is cut at the adapter's limit."""

    exit_status: int
    stdout: str
    stderr: str


class Shell(Protocol):
    """Runs commands on nodes over one pooled connection per node."""

    async def run(self, host: Host, command: str, *, timeout_s: float, stdin: str = "") -> ShellResult:
        """Run a shell command; raises NodeUnreachable or HostKeyChanged, TimeoutError."""

    async def disconnect(self, node: str) -> None:
        """Close the node's connection, if there is one."""

    async def close(self) -> None: ...
