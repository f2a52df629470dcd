"""Port of playbook runs, which outlive the daemon."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rolloutd.ports.nodes import Host
from rolloutd.ports.steps import Failed, Ok, Unknown
from rolloutd.ports.types import JSON


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One playbook run on one node.

    `run_id` is unique and a valid file name.  `inventory` is the whole static inventory, node name to host
    variables; all requests of a `generation` have the same `inventory` and `groups`.  `playbook` is relative
    to `tree`, the working directory.  The run enforces `timeout_s` itself, from its own start.
    `fencing_token` is `epoch.number OWNER SECOND` and grows with every run: a node that has seen a greater
    one refuses the run.  The node keeps it in `fence_dir` or in the user's home.  With `check_only` the run
    changes nothing: its `changed` events are what it would change, `unchecked` ones what it cannot say.
    """

    run_id: str
    node: str
    tree: Path
    playbook: str
    inventory: Mapping[str, Mapping[str, JSON]]
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    generation: int | None = None
    variables: Mapping[str, JSON] = field(default_factory=dict)
    timeout_s: float = 1800.0
    fencing_token: str = ""
    fence_dir: str = ""
    check_only: bool = False


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run; `result` is None while it runs."""

    result: Ok | Failed | Unknown | None
    percent: float = 0.0
    task: str = ""
    started_at: float | None = None


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One line of a run: `offset` is where the next one starts."""

    offset: int
    at: float
    kind: str
    text: str
    fields: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(slots=True)
class RunnerStatus:
    """The runs on this machine.

    `parallel` limits the active ones; `waiting` is since when which node's run waits.  `started` counts runs
    by how they were started, and `servers` are the processes that wait to start runs quickly.
    """

    parallel: int = 1
    active: int = 0
    waiting: dict[str, float] = field(default_factory=dict)
    started: Counter[str] = field(default_factory=Counter)
    servers: set[int] = field(default_factory=set)


class Runner(Protocol):
    """Runs playbooks; a run outlives the daemon and is found again by its handle."""

    @property
    def status(self) -> RunnerStatus:
        """The status, always the same object: it changes with the runs."""

    async def start(self, request: RunRequest) -> str:
        """Start the run and return its handle; a claimed run is not started again.

        After a crash a call with the same request finds the run by its claim.  Without a claim the old run
        can never begin, and the call starts it again under another handle.
        """

    async def get_state(self, handle: str) -> RunState:
        """Return the state of the run; raises NotFound for an unknown handle."""

    async def wait_for_change(self, handle: str) -> RunState:
        """Return the state once it has changed, or at once if the run is over."""

    def read_events(self, handle: str, offset: int = 0) -> AsyncIterator[RunEvent]:
        """Yield the run's present events from `offset` on."""

    async def cancel(self, handle: str) -> None:
        """End every process of the run, here and on the node, and close its connections.

        Raises AdapterFailed if processes are or may be left on the node.
        """

    async def discard(self, handle: str) -> None:
        """Remove a run that is over, with its events; idempotent."""

    async def keep_connections(self, nodes: Collection[str]) -> None:
        """Let the runs of each of these nodes share a connection; end those of all other nodes.

        The connections outlive the daemon with the runs, so a new daemon also ends what it does not need.
        """

    async def clean_up_stale_runs(
        self, host: Host, *, keep: str | None, timeout_s: float
    ) -> Ok | Failed | Unknown:
        """End the processes of older runs on the node, after a grace period.

        Ok only if everything that a run can leave was inspected and has ended.
        """
