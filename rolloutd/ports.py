"""What the daemon asks of the world: one Protocol per kind of outside thing.

The daemon and the driver know these and never an adapter; adapters know these
and never the daemon.  Each port has an in-memory twin beside its adapters'
contract suite (tests/contracts), and the twin and every real adapter pass the
same suite.  All instants are epoch seconds, all durations seconds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from machines.events import Actor, Event, StepRecord
from machines.index import Snapshot
from machines.node import Kind, Observation
from machines.plan import Digest
from machines.rollout import Pause, Rollout, Target

JSON = Any
"""JSON as the standard library reads it."""


# -- time ---------------------------------------------------------------------


class Clock(Protocol):
    """The wall clock and the patience of the daemon."""

    def now(self) -> float:
        """Return the wall clock, epoch seconds."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""
        ...


class Alarm(Protocol):
    """Calls the daemon back at an instant; it pokes, it decides nothing."""

    def at(self, key: str, instant: float, poke: Callable[[], None]) -> None:
        """Call `poke` at `instant`; a later call with the same key replaces it."""
        ...

    def every(self, key: str, seconds: float, poke: Callable[[], None]) -> None:
        """Call `poke` every so many seconds."""
        ...

    def cancel(self, key: str) -> None:
        """Forget the key; unknown keys are fine."""
        ...

    def close(self) -> None:
        """Stop; nothing is called any more."""
        ...


# -- the store ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the audit: `text` is the canonical JSON that was hashed.

    Its keys: `actor {kind,name,uid}`, `at`, `cause`, `digest`, `event` (the
    name of the event's class), `fields` (the event's own), `node`, `rollout`,
    `seq`.  `digest`, `node` and `rollout` are null where there is none.
    """

    seq: int
    text: str
    hash: str


@dataclass(frozen=True, slots=True)
class ClosedRollout:
    """The header of a rollout that load() leaves out, for lists.

    `tally` counts its targets: done ones by outcome, the others by phase.
    """

    id: str
    name: str
    digest: Digest
    submitted_by: Actor
    submitted_at: float
    cancelled: Pause | None
    ended_at: float | None
    tally: Mapping[str, int]


class Store(Protocol):
    """What is remembered: rollouts, targets, steps, votes, holds and their audit.

    Every method raises StoreFailed when the database cannot be read or written.
    """

    async def load(self) -> Snapshot:
        """Return everything the core decides from.

        Rollouts that were deleted are left out, and those that have ended or were
        cancelled once none of their nodes is in flight, failed, isolated or
        ordered back: they are in closed_rollouts().  Nodes that the inventory
        no longer has are left out as well.
        """
        ...

    async def commit(
        self, events: Sequence[Event], *, actor: Actor, cause: str, at: float
    ) -> tuple[Entry, ...]:
        """Write the events and their audit entries in one transaction, or nothing.

        Returns the entries, at least one per event and in their order.  Raises
        Conflict when a row was not as an event says it is, StoreFailed when it
        could not be written or this daemon's tenure has ended.  A cancelled
        caller's events are written whole or not at all.
        """
        ...

    async def audit(
        self,
        *,
        after: int = 0,
        limit: int = 1000,
        rollout: str | None = None,
        node: str | None = None,
        event: str | None = None,
    ) -> Sequence[Entry]:
        """Return entries with a sequence number greater than `after`, oldest first.

        `event` is the name of an event's class.
        """
        ...

    async def connections(self) -> Mapping[str, Mapping[str, JSON]]:
        """Return how each node is reached, also those that the inventory no longer has."""
        ...

    async def content(self, rollout: str) -> tuple[Mapping[str, JSON], Mapping[str, str]]:
        """Return a rollout's plan in canonical form and what was pinned; raises NotFound."""
        ...

    async def rollout(self, rollout: str) -> Rollout:
        """Return one rollout, also a closed one; raises NotFound."""
        ...

    async def targets(self, rollout: str) -> Sequence[Target]:
        """Return the targets of one rollout, also of a closed one, in their order."""
        ...

    async def closed_rollouts(self, limit: int = 100) -> Sequence[ClosedRollout]:
        """Return the rollouts that load() leaves out and nobody deleted, latest first."""
        ...

    async def find_identical(self, change: str, selector_digest: str, policy: str) -> str | None:
        """Return the latest rollout of the same content that was neither cancelled nor deleted."""
        ...

    async def done_before(self, change: str) -> frozenset[str]:
        """Return the nodes that some rollout brought to this change, or found there."""
        ...

    async def steps(self, rollout: str, node: str, attempt: int | None = None) -> Sequence[StepRecord]:
        """Return the step records of a node, oldest first; of one attempt if named."""
        ...

    async def unclean(self, node: str) -> bool:
        """Say whether a run on the node is not known to have ended and was not cleared since.

        True when any rollout's RUN step there is intended, failed or unknown with
        no later CLEAR that is ok.
        """
        ...

    async def head(self) -> Entry | None:
        """Return the latest audit entry."""
        ...

    async def close(self) -> None:
        """Finish what was handed in, then close."""
        ...


# -- nodes --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """What one inventory source says of one node.

    `connection` holds the node's Ansible variables whole (ansible_host,
    ansible_port, ansible_user, ansible_ssh_private_key_file, ...).
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


@dataclass(frozen=True, slots=True)
class Host:
    """A node and how to reach it."""

    name: str
    kind: Kind = Kind.HOST
    labels: Mapping[str, str] = field(default_factory=dict)
    connection: Mapping[str, JSON] = field(default_factory=dict)


class Watch(Protocol):
    """Sees a source's nodes all the time, so that nobody needs to ask."""

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


# -- steps --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepContext:
    """All that a step may know while it acts on a node.

    `params` are rendered; `prior` is what the isolator's look recorded before
    it did anything; `tree` is the pinned source; `key` is unique to
    (rollout, node, attempt, step) and the same after a restart.  `gentle` asks
    an isolator to keep new work away without driving running work off.  `held`
    says, at a put-back, who wants the node to stay out of service all the same.
    A check is given as `prior` what the isolator of its own kind recorded.
    """

    host: Host
    rollout: str
    attempt: int
    step: str
    key: str
    params: Mapping[str, JSON]
    deadline: float
    tree: Path | None = None
    prior: JSON = None
    variables: Mapping[str, JSON] = field(default_factory=dict)
    gentle: bool = False
    held: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """What an isolator found: is it already done (None: it cannot tell), and what was there before."""

    done: bool | None
    prior: JSON = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Busy:
    """Isolation cannot be had now; not a failure: put back, tried later."""

    text: str


@dataclass(frozen=True, slots=True)
class Ok:
    """The step did what it should."""

    text: str = ""
    output: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The step did not; `text` is a sentence for people, `output` the evidence."""

    text: str
    output: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nobody can say how the step ended (a lost answer, a lost process)."""

    text: str


StepResult = Ok | Failed | Busy | Unknown


class Isolator(Protocol):
    """Takes a node out of service and puts it back exactly as it was.

    All three are safe to repeat.  `undo` restores `ctx.prior`.
    """

    async def look(self, ctx: StepContext) -> Look | Busy:
        """Say whether the node is isolated by us, and what was there before; Busy: it cannot be asked now."""
        ...

    async def do(self, ctx: StepContext) -> StepResult:
        """Isolate the node."""
        ...

    async def undo(self, ctx: StepContext) -> StepResult:
        """Put the node back as `ctx.prior` says it was."""
        ...


class Check(Protocol):
    """Judges a node without changing it; called again until its deadline where it waits."""

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        """Judge the node once."""
        ...


# -- runs ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One playbook run on one node.

    `run` names the run for ever (safe as a file name); `inventory` is the whole
    static inventory, node name to host variables; `tree` is the working
    directory; `playbook` is relative to it.  The limit counts from the start of
    the run and is kept by the run itself.  `fence` is a token `epoch.number` that
    grows with every run: a node that has seen a greater one refuses the run; it
    is kept in `fence_dir` on the node, or in the user's home.
    """

    run: str
    node: str
    tree: Path
    playbook: str
    inventory: Mapping[str, Mapping[str, JSON]]
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
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


# -- sources of playbooks -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pinned:
    """A source that can no longer change: a commit or a content hash."""

    kind: str
    pin: str


class Sources(Protocol):
    """Keeps the trees that plans are run from."""

    async def pin_git(self, url: str, ref: str) -> Pinned:
        """Resolve the ref to a commit and keep its tree; raises SourceFailed."""
        ...

    async def keep_upload(self, archive: bytes) -> Pinned:
        """Keep an uploaded tar archive under its content hash; raises Refused for a bad one."""
        ...

    def tree(self, pinned: Pinned) -> Path:
        """Return the directory of a kept tree; raises NotFound."""
        ...


class TrafficProbe(Protocol):
    """Says whether client traffic runs on a node; unknown is busy."""

    async def look(self, ctx: StepContext) -> Ok | Busy:
        """Judge once."""
        ...


class Notifier(Protocol):
    """One way to reach people who do not look; it is not asked whether they read it."""

    @property
    def name(self) -> str:
        """What it is called in the log; never with a password in it."""
        ...

    async def send(self, title: str, text: str) -> None:
        """Send one message; raises NotifyFailed."""
        ...
