"""What may come next for one node: the answers of reconcile.next_action, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from machines.events import StepRecord
from machines.plan import Stage, StepSpec
from machines.states import Outcome, Trigger


@dataclass(frozen=True, slots=True)
class Isolate:
    """Take the node out of service; `prior` is known from an earlier try, if `prior_known`.

    `gentle` keeps new work away and drives nothing off.
    """

    spec: StepSpec
    number: int
    prior_known: bool = False
    prior: Any = None
    gentle: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """Look whether client traffic runs on the node."""

    spec: StepSpec
    number: int


@dataclass(frozen=True, slots=True)
class Undo:
    """Restore what the isolator found; `last` when nothing else of ours is left on the node."""

    spec: StepSpec
    number: int
    prior: Any
    last: bool


@dataclass(frozen=True, slots=True)
class Clear:
    """See to it that no process of an older run is left on the node."""

    number: int


@dataclass(frozen=True, slots=True)
class Run:
    """Run (or find again) the playbook of a stage; `begun` says the intent is recorded."""

    stage: Stage
    number: int
    begun: bool


@dataclass(frozen=True, slots=True)
class Verify:
    """Judge the node by one check; recorded under `step`."""

    spec: StepSpec
    step: str
    number: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before this instant (epoch seconds)."""

    until: float
    step: str


@dataclass(frozen=True, slots=True)
class Move:
    """Take this edge; `step` and `text` say where and why a failure happened."""

    trigger: Trigger
    outcome: Outcome | None = None
    step: str = ""
    text: str = ""
    not_before: float = 0.0


@dataclass(frozen=True, slots=True)
class Halt:
    """End the run of this record: a person's order, or isolation lost; the node's failure follows."""

    record: StepRecord
    text: str


@dataclass(frozen=True, slots=True)
class Settle:
    """The person's order is carried out, or (`done` false) could not be."""

    done: bool
    text: str


@dataclass(frozen=True, slots=True)
class Idle:
    """This node needs nobody."""


Action = Isolate | Probe | Undo | Clear | Run | Verify | Wait | Move | Halt | Settle | Idle


def pause_after(record: StepRecord, pause_s: float, now: float) -> Wait | None:
    """Return the wait before a step is tried again; None when it is over, or if the clock was set back."""
    until = record.at + pause_s
    return Wait(until, record.step) if record.at <= now < until else None


def step_of(action: Action) -> str | None:
    """Return the step that people see while this is done; None for what takes no time."""
    match action:
        case Isolate() | Probe():
            return action.spec.name
        case Undo():
            return f"put back {action.spec.name}"
        case Clear():
            return "waiting for an older run to end"
        case Halt():
            return f"stopping {action.record.step}"
        case Run():
            return f"run.{action.stage.name}"
        case Verify() | Wait():
            return action.step
        case Move() | Settle() | Idle():
            return None
