"""Results of a step on a node, as its adapter gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from machines.model.rollout import FailureCode


@dataclass(frozen=True, slots=True)
class Busy:
    """The node cannot be isolated now; it returns to service and is retried later.

    `is_permanent`: what blocks it stays until a person changes it.  `count` is a traffic probe's number, of
    connections for example, if it has one.  `moved`: how much work this call has made leave the node, such as
    pods; of two isolations, the one that moved more is kept.
    """

    text: str
    is_permanent: bool = False
    count: int | None = None
    moved: int = 0


@dataclass(frozen=True, slots=True)
class Ok:
    """The step succeeded; `value` is what a check measured, for its comparison after the change."""

    text: str = ""
    output: str = ""
    value: Any = None  # JSON


@dataclass(frozen=True, slots=True)
class Failed:
    """The step failed; `text` is a sentence for people, `output` the evidence.

    `code` says whether the node is to blame: `failed`, or what else was the cause.
    """

    text: str
    output: str = ""
    code: FailureCode = FailureCode.FAILED


@dataclass(frozen=True, slots=True)
class Unknown:
    """The result of the step is unknown (a lost response, a lost process)."""

    text: str


StepResult = Ok | Failed | Busy | Unknown
