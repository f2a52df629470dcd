"""Playbook runs: started, followed, ended; they outlive whoever started them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rolloutd.ports.nodes import Host
from rolloutd.ports.steps import Failed, Ok, Unknown
from rolloutd.ports.values import JSON


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One playbook run on one node.

    `run` names the run for ever (safe as a file name); `inventory` is the whole
    static inventory, node name to host variables, and with `groups` the same for
    every request of one `generation`; `tree` is the working
    directory; `playbook` is relative to it.  The limit counts from the start of
    the run and is kept by the run itself.  `fence` is a token `epoch.number WHOSE SECOND` that
    grows with every run: a node that has seen a greater one refuses the run; it
    is kept in `fence_dir` on the node, or in the user's home.
    """

    run: str
    node: str
    tree: Path
    playbook: str
    inventory: Mapping[str, Mapping[str, JSON]]
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    generation: int | None = None
    variables: Mapping[str, JSON] = field(default_factory=dict)
    timeout_s: float = 1800.0
    fence: str = ""
    fence_dir: str = ""


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands: `result` is None while it runs."""

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


class Runner(Protocol):
    """Runs playbooks; a run outlives the daemon and is found again by its handle."""

    async def start(self, request: RunRequest) -> str:
        """Start the run and return its handle; a run that has a claim is not started again.

        After a crash it is called again with the same request: the run is found
        by its claim, or, where none was made, can never begin any more and is
        begun anew under another handle.
        """
        ...

    async def observe(self, handle: str) -> RunState:
        """Say where the run stands."""
        ...

    async def wait(self, handle: str) -> RunState:
        """Return once the run's state has changed (or soon after)."""
        ...

    def events(self, handle: str, offset: int = 0) -> AsyncIterator[RunEvent]:
        """Yield what the run has said from `offset` on, and end when there is no more for now."""
        ...

    async def cancel(self, handle: str) -> None:
        """End every process of the run, here and on the node, and close its connections."""
        ...

    async def clear(self, host: Host, *, keep: str | None, timeout_s: float) -> Ok | Failed:
        """See to it that no older run's process is left on the node: waited for, then ended."""
        ...
