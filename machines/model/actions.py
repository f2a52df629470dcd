"""Actions for one node: the possible answers of next_action()."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from machines.model.causes import Causes
from machines.model.plan import Capability, MaintainStage, StepDef
from machines.model.rollout import FailureCode
from machines.model.step_record import StepAction, StepRecord
from machines.states import Outcome, Trigger


@dataclass(frozen=True, slots=True)
class Isolate:
    """Take the node out of service.

    `prior` is the state that an earlier try found, if `is_prior_known`.  `cordon_only` keeps new work away
    and evicts nothing.
    """

    spec: StepDef
    number: int
    is_prior_known: bool = False
    prior: Any = None
    cordon_only: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """Find out whether traffic runs on the node."""

    spec: StepDef
    number: int


@dataclass(frozen=True, slots=True)
class Revert:
    """Restore the state that the isolator found; `is_last`: no other isolator is in effect.

    `causes`: why the isolation is aborted, if it is.
    """

    spec: StepDef
    number: int
    prior: Any
    is_last: bool
    causes: Causes = ()


STALE_RUN_TIMEOUT_S = 120.0
"""Time for an older run on a node to end, before its processes are ended."""

FAILED_RUN_TIMEOUT_S = 30.0
"""The same for a run that has failed: the failure that pauses the rollout waits for it."""


@dataclass(frozen=True, slots=True)
class CleanUpStaleRuns:
    """Make sure that no process of an older run is left on the node."""

    number: int
    timeout_s: float = STALE_RUN_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class RunPlaybook:
    """Run a stage; `is_started`: its intent is recorded, so look for the run first.

    `previous` is the recorded state that the run restores, empty unless it undoes a change.
    """

    stage: MaintainStage
    number: int
    is_started: bool
    previous: str = ""


@dataclass(frozen=True, slots=True)
class RunCheck:
    """Judge the node by one check; recorded under `step`.  `is_baseline`: measure it before the change."""

    spec: StepDef
    step: str
    number: int
    is_baseline: bool = False


@dataclass(frozen=True, slots=True)
class UseGuard:
    """Have the node's guard do this: arm itself, be disarmed, or restore the node.

    ARM: the node restores itself unless the daemon disarms it; a second one finds the first.  DISARM confirms
    the change, unless the node has restored itself.  RESTORE restores it now, or finds that it has.
    """

    spec: StepDef
    number: int
    action: StepAction


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing before this instant (epoch seconds)."""

    until: float
    step: str


@dataclass(frozen=True, slots=True)
class Transition:
    """Take an edge; `step`, `causes` and `code` say where, why and how a failure happened."""

    trigger: Trigger
    outcome: Outcome | None = None
    step: str = ""
    causes: Causes = ()
    not_before: float = 0.0
    code: FailureCode = FailureCode.FAILED


@dataclass(frozen=True, slots=True)
class StopRun:
    """Stop the run of this record; the node fails next."""

    record: StepRecord
    causes: Causes


@dataclass(frozen=True, slots=True)
class CompleteOrder:
    """Report the result of a person's order."""

    succeeded: bool
    causes: Causes


@dataclass(frozen=True, slots=True)
class NoAction:
    """The node needs no driver."""


Action = (
    Isolate
    | Probe
    | Revert
    | CleanUpStaleRuns
    | RunPlaybook
    | RunCheck
    | UseGuard
    | Wait
    | Transition
    | StopRun
    | CompleteOrder
    | NoAction
)


def starts_run(action: Action) -> bool:
    """Return whether an action is a run, so that it waits for one of the runner's slots."""
    match action:
        case RunPlaybook():
            return True
        case Isolate(spec=spec) | Revert(spec=spec) | RunCheck(spec=spec):
            return Capability.STARTS_RUN in spec.capabilities
        case _:
            return False


def retry_wait(record: StepRecord, delay_s: float, now: float, *, since: float | None = None) -> Wait | None:
    """Return the wait before a step is tried again; None when it is over, or if the clock was set back.

    The delay counts from `since`, by default from the end of the last try.
    """
    until = (record.at if since is None else since) + delay_s
    return Wait(until, record.step) if is_pausing(record.at, until, now) else None


def is_pausing(since: float, until: float, now: float) -> bool:
    """Return whether a pause between two tries continues; one that began in the future is over."""
    # It is from before the clock was set back, and could go on for as long as that.
    return since <= now < until
