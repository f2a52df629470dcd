"""Ports of steps on a node (isolators and checks), and their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from machines.model.step_record import Busy, Failed, Ok, StepResult, Unknown
from rolloutd.ports.nodes import Host
from rolloutd.ports.types import JSON, PinnedSource


@dataclass(frozen=True, slots=True)
class StepContext:
    """The arguments of a step on a node.

    `params` are rendered.  `prior` is the state that the isolator, or for a check the isolator of its kind,
    recorded before it acted.  `source` has the plan's playbooks.  `idempotency_key` is unique to (rollout,
    node, attempt, step) and the same after a restart.  `cordon_only` asks an isolator to keep new work away
    without evicting running work; inspect() reports the node as not isolated while some is left.
    `hold_reason` asks for a return that leaves the node out of service.  Of a check, `is_baseline`: it
    measures the node before the change; `baseline` is the value that it measured then.  `run_id` and
    `fencing_token` are those of a run that the step starts (ports.RunRequest); without an id, a daemon of an
    earlier version began it.
    """

    host: Host
    rollout: str
    attempt: int
    step: str
    idempotency_key: str
    params: Mapping[str, JSON]
    deadline: float
    source: PinnedSource | None = None
    prior: JSON = None
    variables: Mapping[str, JSON] = field(default_factory=dict)
    cordon_only: bool = False
    hold_reason: str = ""
    is_baseline: bool = False
    baseline: JSON = None
    fencing_token: str = ""
    run_id: str = ""

    def remaining_s(self, now: float, *, least: float = 1.0, most: float = math.inf) -> float:
        """Return the time until the deadline; `least` of it, because a step that has begun is tried once."""
        return min(most, max(least, self.deadline - now))


@dataclass(frozen=True, slots=True)
class IsolationStatus:
    """The result of an inspection: isolated or not (None: unknown), and the prior state."""

    is_isolated: bool | None
    prior: JSON = None
    text: str = ""


_on_wait: ContextVar[Callable[[str], None]] = ContextVar("on_wait", default=lambda _: None)


def report_wait(text: str) -> None:
    """Say what a step waits for within its call, such as an API that is too busy; empty when it continues."""
    _on_wait.get()(text)


@contextmanager
def reported_waits(on_wait: Callable[[str], None]) -> Iterator[None]:
    """Call `on_wait` for each wait of the body, also in tasks that it starts, and with "" at its end."""
    token = _on_wait.set(on_wait)
    try:
        yield
    finally:
        _on_wait.reset(token)
        on_wait("")


class Isolator(Protocol):
    """Takes a node out of service and restores it exactly; all methods are idempotent."""

    async def inspect(self, ctx: StepContext) -> IsolationStatus | Busy:
        """Return whether we isolate the node, and its prior state; Busy if it cannot be inspected now."""

    async def isolate(self, ctx: StepContext) -> StepResult: ...

    async def return_to_service(self, ctx: StepContext) -> StepResult:
        """Restore `ctx.prior`."""


@runtime_checkable
class SupportsDryRun(Protocol):
    """Optional port of an isolator that can check in advance whether a node can be isolated."""

    async def dry_run(self, ctx: StepContext) -> Ok | Busy:
        """Check without a change; raises NodeUnreachable if the result is unknown."""


@runtime_checkable
class SupportsBlockerWatch(Protocol):
    """Optional port of an isolator with dry runs that notices when a permanent blocker changes."""

    async def wait_until_unblocked(self, ctx: StepContext) -> None:
        """Return when no permanent blocker is left; raises RolloutdError if that cannot be observed."""


@runtime_checkable
class SupportsHoldRelease(Protocol):
    """Optional port of an isolator whose return_to_service() leaves a held node out of service.

    An observation of such a node has the isolator's kind as `left_isolated_by`.
    """

    async def release(self, host: Host) -> StepResult:
        """Return the node to service after its hold has ended; idempotent."""


class ProgressKind(StrEnum):
    """What happened to a node in flight."""

    ADMITTED = "admitted"
    BLOCKED = "blocked"
    ISOLATED = "isolated"
    ISOLATION_ABORTED = "isolation-aborted"
    MAINTAINED = "maintained"
    VERIFIED = "verified"
    FAILED = "failed"
    RETURNED = "returned"


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """One thing that happened to a node in a rollout, at an instant; `text` is a sentence for people.

    `isolated_for` are the rollouts that had the node isolated then, in the order in which they began.
    """

    kind: ProgressKind
    rollout: str
    attempt: int
    at: float
    text: str
    isolated_for: Sequence[str] = ()


@runtime_checkable
class SupportsProgressReports(Protocol):
    """Optional port of an isolator that shows in its own system what happens to a node."""

    async def report(self, host: Host, report: ProgressReport) -> None:
        """Show the report; an error is logged and changes nothing else."""


class Check(Protocol):
    """Checks a node without changing it; the driver repeats a check until its deadline."""

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        """Check the node once; Unknown if the node did not answer."""
