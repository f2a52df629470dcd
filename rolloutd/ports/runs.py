"""Port of playbook runs, which outlive the daemon."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from machines.model.limits import RunnerProblem
from machines.model.plan import PLAYBOOK_RUN
from machines.model.step_record import Failed, Ok, Unknown
from rolloutd.ports.artifacts import ArtifactStore
from rolloutd.ports.nodes import Host
from rolloutd.ports.types import JSON, PinnedSource

_START = "~"
"""Stands in a handle before the number of a start; no id contains it."""

MAX_PREVIOUS_BYTES = 65_536
"""Size of what a change records of the state that it replaces: references and values of one object."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One run on one host: of a playbook, or of a change of another kind.

    `run_id` is unique, a valid file name, and the same when the step is repeated after a restart; only the
    runner reads it.  `playbook` is a path in `source`; a change has `params` in its place, rendered for its
    host.  `previous` is what read_previous() returned before the change that this run undoes, empty for every
    other run.  `rollout` is empty for a run of a preview, `attempt`
    0 for a run outside of an attempt.  The run enforces `timeout_s` itself, from its own start.
    `fencing_token` is `epoch.number OWNER SECOND` and grows with every run: a host that has seen a greater
    one refuses the run, and each of its later commands.
    With `check_only` the run changes nothing: its `changed` events are what it would change, `unchecked` ones
    what it cannot say.
    """

    run_id: str
    host: Host
    source: PinnedSource
    playbook: str
    variables: Mapping[str, JSON] = field(default_factory=dict)
    timeout_s: float = 1800.0
    fencing_token: str = ""
    check_only: bool = False
    rollout: str = ""
    attempt: int = 0
    step: str = ""
    kind: str = PLAYBOOK_RUN
    params: Mapping[str, JSON] = field(default_factory=dict)
    previous: str = ""

    @property
    def node(self) -> str:
        return self.host.name


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run; `result` is None while it runs.

    `has_begun` is False for a run that was prepared and can never begin: start() begins it again.
    """

    result: Ok | Failed | Unknown | None
    percent: float = 0.0
    task: str = ""
    started_at: float | None = None
    has_begun: bool = True


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One line of a run: `offset` is where the next one starts."""

    offset: int
    at: float
    kind: str
    text: str
    fields: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunLoad:
    """How much of the runner's machine the runs of late needed.

    `cpu_share`: the share of its time in which a run, or what it started there, computed, while on average
    `active` runs were active.
    """

    cores: int
    cpu_share: float
    active: float


@dataclass(slots=True)
class RunnerStatus:
    """The runs under way of one runner.

    `parallel` limits the active ones; `waiting` says of each node with a waiting run since when it waits.
    `problem` is why it begins nothing, None while it is available.  `load` is None before a run has ended,
    and where it is not measured.
    """

    parallel: int = 1
    active: int = 0
    waiting: dict[str, float] = field(default_factory=dict)
    problem: RunnerProblem | None = None
    load: RunLoad | None = None


@dataclass(slots=True)
class TunedRunnerStatus(RunnerStatus):
    """The status of a runner that can start runs in several ways.

    `started` counts runs by how they were started, and `servers` are the processes that wait to start runs
    quickly; `plain_because` says why no run starts so, if none may.
    """

    started: Counter[str] = field(default_factory=Counter)
    servers: set[int] = field(default_factory=set)
    plain_because: str = ""


def total_parallel(statuses: Mapping[str, RunnerStatus]) -> int:
    """Return how many runs all runners execute at once."""
    return sum(each.parallel for each in statuses.values())


def load_of(statuses: Mapping[str, RunnerStatus]) -> RunLoad | None:
    """Return the load of the first runner that measures it: that of the daemon's machine."""
    return next((each.load for each in statuses.values() if each.load is not None), None)


class Runs(Protocol):
    """Runs of playbooks or changes; a run outlives the daemon and is found again by its handle."""

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
        """End the run and everything that it started.

        Raises AdapterFailed if something of it is or may be left on the host.
        """

    async def discard(self, handle: str) -> None:
        """Remove a run that is over, with its events; idempotent."""

    async def clean_up_stale_runs(
        self, host: Host, *, timeout_s: float, fencing_token: str = ""
    ) -> Ok | Failed | Unknown:
        """End what earlier runs left on the host, after a grace period.

        From then on the host refuses each command of a run with an older token, also of another machine.
        Ok only if everything that a run can leave was inspected and has ended.
        """


class Runner(Runs, Protocol):
    """Runs playbooks, or changes of one kind, in one place.

    A call raises RunnerUnavailable if the system that executes the runs does not answer, is full or refuses:
    the daemon waits and calls again.
    """

    @property
    def status(self) -> RunnerStatus:
        """The status, always the same object: it changes with the runs."""

    @property
    def place(self) -> str:
        """The system in which the runs are, such as a cluster and a namespace; it names no credentials.

        In another place the runs cannot be found: their handles name it.
        """

    async def check_available(self) -> None:
        """Return if a run could begin now; raises RunnerUnavailable."""


@runtime_checkable
class HasParts(Protocol):
    """Optional port of a runner of several systems: one that does not answer stops only its own nodes."""

    async def find_part_problems(self) -> Mapping[str, str]:
        """Return why no run of a source of nodes could begin now, by source; the others answer."""


@runtime_checkable
class OnOneMachine(Protocol):
    """Optional port of a runner whose runs only the machine can follow on which they began."""

    def run_id_here(self, name: str) -> str:
        """Return the id of a run that begins on this machine, which its handles name too."""

    def is_elsewhere(self, handle: str) -> bool:
        """Return whether the handle, or the id, names another machine: the run cannot be found here."""


@runtime_checkable
class RecordsPrevious(Protocol):
    """Optional port of a change's runner: what the change replaces is recorded, and its rollback restores it.

    The registration of its kind has Capability.RECORDS_PREVIOUS.
    """

    async def read_previous(self, request: RunRequest) -> str:
        """Return what the run is about to replace, as JSON of at most MAX_PREVIOUS_BYTES, without secrets.

        It is recorded before the run begins.  Raises RunnerUnavailable as start() does.
        """


@runtime_checkable
class DigestsSecrets(Protocol):
    """Optional port of a change's runner whose values may name secrets."""

    async def digest_secret(self, host: Host, name: str, key: str) -> str:
        """Return the SHA-256 of a secret of the node, hexadecimal; raises AdapterFailed if it is missing."""


@runtime_checkable
class KeepsConnections(Protocol):
    """Optional port of a runner whose runs can share connections to their nodes."""

    async def keep_connections(self, nodes: Collection[str]) -> None:
        """Let the runs of each of these nodes share a connection; end those of all other nodes.

        The connections outlive the daemon with the runs, so a new daemon also ends what it does not need.
        """


@runtime_checkable
class StoresRuns(Protocol):
    """Optional port of a runner that keeps something of ended runs, until the retention removes it."""

    @property
    def artifacts(self) -> ArtifactStore:
        """The stored runs by their handles."""


@runtime_checkable
class LimitsSources(Protocol):
    """Optional port of a runner that cannot run the playbooks of every source."""

    def source_problem(self, source: PinnedSource) -> str:
        """Return why it cannot run the playbooks of this source, and what to do; empty if it can."""


@runtime_checkable
class ChecksItsSystem(Protocol):
    """Optional port of a runner that can check what it needs in the system of its runs."""

    async def find_missing_prerequisites(self) -> Sequence[str]:
        """Ask the system and return one sentence per missing prerequisite."""


class StaleRuns(Protocol):
    """What runs leave on nodes, over ssh from this machine: for each runner whose runs are Ansible's."""

    @property
    def marks(self) -> str:
        """What all runs' marks on nodes are made of, by which their processes are found there."""

    def run_marker(self, node: str, run_id: str) -> str:
        """Return the mark that all processes of a run bear on the node."""

    async def end_inherited(self, host: Host, fencing_token: str) -> None:
        """Before a run begins, end what another machine's run may still do there; raises AdapterFailed."""

    async def clean_up_stale_runs(
        self, host: Host, *, timeout_s: float, fencing_token: str = ""
    ) -> Ok | Failed | Unknown:
        """End what earlier runs left on the host, as Runs has it."""


class Runners(Runs, KeepsConnections, Protocol):
    """All runners as one.

    Playbooks go to the runner that the settings name for their node, changes to that of their kind.
    """

    @property
    def statuses(self) -> Mapping[str, RunnerStatus]:
        """The statuses of the runners by name."""

    def run_id_for(self, name: str, node: str, kind: str = PLAYBOOK_RUN) -> str:
        """Return the id of a node's run that is about to begin; it names the runner and the machine."""

    async def read_previous(self, request: RunRequest) -> str | None:
        """Return what the run is about to replace, None if its kind does not record that."""

    def is_elsewhere(self, handle: str) -> bool:
        """Return whether the handle, or the id, is of a runner or machine that this daemon does not have."""


def handle_of_start(run_id: str, number: int) -> str:
    """Return the handle of a run's start; a start that can never begin is repeated under the next number."""
    return run_id if number == 1 else f"{run_id}{_START}{number}"


def id_of(handle: str) -> str:
    return handle.partition(_START)[0]


async def wait_for_end(runs: Runs, handle: str) -> RunState:
    state = await runs.get_state(handle)
    while state.result is None:
        state = await runs.wait_for_change(handle)
    return state
