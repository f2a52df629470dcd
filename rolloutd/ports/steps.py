"""What is done to a node in a step, and the few ways in which a step can end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from rolloutd.ports.nodes import Host
from rolloutd.ports.values import JSON


@dataclass(frozen=True, slots=True)
class StepContext:
    """All that a step may know while it acts on a node.

    `params` are rendered; `prior` is what the isolator's look recorded before
    it did anything; `tree` is the pinned source; `key` is unique to
    (rollout, node, attempt, step) and the same after a restart.  `gentle` asks
    an isolator to keep new work away without driving running work off; while
    some is left its look says that it is not done.  `held`
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


@runtime_checkable
class Rehearsal(Protocol):
    """What an isolator offers beside, when it can say beforehand whether a node could be isolated."""

    async def could(self, ctx: StepContext) -> Ok | Busy:
        """Say whether it could be now, changing nothing; raises NodeUnreachable when nobody can say."""
        ...


@runtime_checkable
class Keeping(Protocol):
    """What an isolator offers beside, when its `undo` leaves a node out of service for whoever holds it.

    Such a node is told of by an observation whose `kept` is the isolator's kind.
    """

    async def let_go(self, host: Host) -> StepResult:
        """Put a kept node back in service, now that nobody holds it; safe to repeat."""
        ...


class Check(Protocol):
    """Judges a node without changing it; called again until its deadline where it waits."""

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        """Judge the node once."""
        ...
